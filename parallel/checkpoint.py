"""Checkpoints that any plan writes and any plan reads, bit-exactly, through torch.distributed.checkpoint.

What is saved is the original model: parameters under their first names and in their whole shapes, buffers, and the optimizer's state by
parameter. A rank writes the boxes (boxes.py) that it counts and reads the boxes that it holds, straight into its own memory; nothing is
gathered but the list of boxes.

    key in the checkpoint         what                                                        written by
    model/<parameter>             values at full precision (fp32 master copies)               whoever counts the element
    model/<buffer>                persistent buffers                                          one rank that uses it
    optim/<parameter>/<key>       state with the parameter's shape: cut like the parameter    the same
                                  other state (step; Adafactor's factors): whole              one of the holders
    about, extra                  optimizer class, hyperparameters, parameter groups; yours   one rank

Order: save writes to `<path>.saving` and, when every rank has written, renames it, so that a failed save leaves the old checkpoint alone.
load checks everything first: a load that raises ValueError or FileNotFoundError has changed nothing. Afterwards the values that the model
computes with are made anew from the master copies, as after an optimizer step (one all_gather per bucket under zero 1 and 2).

Cost: each element is written once. A box is read from the chunks that it overlaps, each of which is read whole; memory is one chunk more.

What can go wrong: the folder must be one that all ranks see. Not saved are the residuals of gradient compression and the place in the
random stream of dropout. Parameters frozen under precision="bf16" without zero=3 exist in bfloat16 only, and are saved so. Of buffers that
differ between ranks (BatchNorm's averages over each rank's rows) one rank's are saved. Files are pickled: load only what you trust.

Other ways: DeepSpeed's universal checkpoints (Lian et al. 2024), where a second program converts; FSDP's state dicts, where the
optimizer's state is first made to look like tensors of the model. Here the planners are given boxes, and neither is needed.
"""

import copy
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from pycomm.parallel.boxes import Boxes, Loading, Saving
from pycomm.parallel.build import engine_of
from pycomm.parallel.holdings import exchange, full_gradients, full_state_dict, holdings, persistent_buffers, together

__all__ = ["full_gradients", "full_state_dict", "load", "save"]

FORMAT = 1
METADATA = ".metadata"  # the file with which torch.distributed.checkpoint ends a checkpoint


def save(model, opt, path, *, extra=None):
    """Writes a checkpoint. Collective over all ranks.

    Args:
        model, opt: as parallelize() returned them; opt None: the model alone.
        path: of a folder, the same on every rank and seen by all. A checkpoint that is there is replaced once the new one is complete.
        extra: any object that can be pickled (schedulers' state, step number), equal on all ranks; load returns it.

    Raises, on every rank, ValueError when the path holds something else than a checkpoint or differs between ranks, RuntimeError when a
    rank could not write.
    """
    engine, path = engine_of(model, opt), Path(path)
    _check_path(engine, "save", path)
    scratch = path.with_name(path.name + ".saving")
    on_first = engine.mesh.world.rank == 0
    together(engine, lambda: _make_room(path, scratch) if on_first else None)
    state = together(engine, lambda: _to_save(engine, opt))
    state["about"], state["extra"] = _about(engine, opt), extra
    _transfer(engine, "save", scratch, lambda **how: dcp.save(state, storage_writer=dcp.FileSystemWriter(scratch), planner=Saving(), **how))
    together(engine, lambda: _put_in_place(path, scratch) if on_first else None)


@torch.no_grad()
def load(model, opt, path):
    """Reads a checkpoint, saved under any plan, into this rank's part of the model and the optimizer. Collective over all ranks.

    Args:
        model, opt: as parallelize() returned them; opt None: the model's values alone, the optimizer is left as it is.
        path: as given to save.

    Values are bit-equal to those saved where dtypes agree, and cast where that is exact. Returns the `extra` of save.
    Raises on every rank, with nothing changed, FileNotFoundError when there is no checkpoint and ValueError when names, shapes, parameter
    groups or the class of the optimizer differ or a cast would lose bits; RuntimeError when a rank could not read, after which the model's
    values are undefined.
    """
    engine, path = engine_of(model, opt), Path(path)
    _check_path(engine, "load", path)
    catalog = together(engine, lambda: _catalog(path))
    head = {"about": None, "extra": None}
    _read(engine, path, head)
    members, buffers = _whole_model(engine)
    _check_model(engine, path, catalog, head["about"], buffers)
    if opt is not None:
        _check_optimizer(opt, path, catalog, head["about"], members)
    state, fresh = together(engine, lambda: _to_load(engine, opt, path, catalog))
    _read(engine, path, state)
    if opt is not None:
        _set_optimizer(opt, fresh, state, head["about"])
    for shard in engine.shards:
        shard.publish()
    for shard in engine.shards:
        shard.wait()
    return head["extra"]


# -- files ---------------------------------------------------------------------------------------------------------------------------------


def _check_path(engine, what, path):
    paths = exchange(engine, str(path))
    if len(set(paths)) > 1:
        raise ValueError(f"[rank {engine.mesh.world.rank}] {what}: the ranks were given different paths: {', '.join(sorted(set(paths)))}")


def _make_room(path, scratch):
    if path.exists() and not (path.is_dir() and ((path / METADATA).is_file() or not any(path.iterdir()))):
        raise ValueError(f"save: {path} exists and is no checkpoint; remove it or choose another path")
    for folder in (scratch, path.with_name(path.name + ".old")):
        if folder.exists():
            shutil.rmtree(folder)


def _put_in_place(path, scratch):
    old = path.with_name(path.name + ".old")
    if path.exists():
        path.rename(old)
    scratch.rename(path)
    if old.exists():
        shutil.rmtree(old)


def _catalog(path):
    """{key: metadata} of the checkpoint."""
    if not (path / METADATA).is_file():
        old = path.with_name(path.name + ".old")
        more = f"; a save was interrupted, the checkpoint before it is {old}" if (old / METADATA).is_file() else ""
        raise FileNotFoundError(f"load: there is no checkpoint at {path} (no file {METADATA} in it){more}")
    try:
        catalog = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:
        raise ValueError(f"load: {path / METADATA} cannot be read: {error!r}") from error
    if "about" not in catalog or "extra" not in catalog:
        raise ValueError(f"load: {path} was not written by parallel.save; read it with torch.distributed.checkpoint")
    return catalog


def _transfer(engine, what, path, call):
    """Runs a function of torch.distributed.checkpoint, which is collective and tells every rank of a failure."""
    world = engine.mesh.world
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
            call(process_group=world.pg, no_dist=world.size == 1)
    except dcp.CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items()))
        raise RuntimeError(f"[rank {world.rank}] {what} failed at {path}: {reasons}") from error


def _read(engine, path, state):
    _transfer(engine, "load", path, lambda **how: dcp.load(state, storage_reader=dcp.FileSystemReader(path), planner=Loading(), **how))


# -- what is saved -------------------------------------------------------------------------------------------------------------------------


def _add(state, key, holding, values, counted):
    boxes = holding.boxes(values, counted)
    if boxes:
        state.setdefault(key, Boxes(holding.info.layout.full_shape, values.dtype)).boxes.extend(boxes)


def _to_save(engine, opt):
    state = {f"model/{name}": buffer for name, (buffer, used) in persistent_buffers(engine).items() if used}
    for holding in holdings(engine):
        name = holding.info.name
        _add(state, f"model/{name}", holding, holding.values, True)
        if opt is None or holding.part is None or not holding.info.counted:
            continue
        for key, value in opt.state.get(holding.part, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == holding.part.shape:
                _add(state, f"optim/{name}/{key}", holding, value.detach(), True)
            else:
                state[f"optim/{name}/{key}"] = value.detach() if isinstance(value, torch.Tensor) else value
    return state


def _whole_model(engine):
    """({parameter: index of its parameter group}, names of buffers) of the whole model."""
    members = {info.name: info.option for info in engine.infos if info.option is not None and info.param.requires_grad}
    told = exchange(engine, (members, list(persistent_buffers(engine))))
    return {name: number for rank in told for name, number in rank[0].items()}, {name for rank in told for name in rank[1]}


def _about(engine, opt):
    members, _ = _whole_model(engine)
    about = {"format": FORMAT, "plan": str(engine.plan), "optimizer": None}
    if opt is not None:
        groups = [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in opt.param_groups]
        about.update(optimizer=_class_of(opt), groups=groups, members=members)
    return about


def _class_of(opt):
    return f"{type(opt).__module__}.{type(opt).__qualname__}"


# -- what is loaded ------------------------------------------------------------------------------------------------------------------------


def _check_model(engine, path, catalog, about, buffers):
    """Checks that come out alike on every rank, so that all of them raise."""
    if about["format"] != FORMAT:
        raise ValueError(f"load: {path} has format {about['format']}, this is {FORMAT}: load it with the version that wrote it")
    names = [f"model/{name}" for name in [*engine.names, *sorted(buffers)]]
    missing = [key for key in names if key not in catalog]
    if missing:
        raise ValueError(f"load: {path} does not have {_some(missing)} of this model: build the model that was saved")
    more = sorted({key for key in catalog if key.startswith("model/")} - set(names))
    if more:
        raise ValueError(f"load: {path} has {_some(more)}, to which nothing in this model corresponds: build the model that was saved")
    for name in engine.names:
        saved, shape = tuple(catalog[f"model/{name}"].size), tuple(engine.shapes[name])
        if saved != shape:
            raise ValueError(
                f"load: {name!r} has shape {saved} in {path}, and {shape} here: build the model with the sizes that were saved"
            )


def _check_optimizer(opt, path, catalog, about, members):
    way_out = "; load(model, None, path) takes the model alone"
    if about["optimizer"] != _class_of(opt):
        saved = about["optimizer"] or "no optimizer"
        raise ValueError(f"load: {path} was saved with {saved}, but the optimizer here is {_class_of(opt)}{way_out}")
    if len(about["groups"]) != len(opt.param_groups):
        saved = len(about["groups"])
        raise ValueError(f"load: the optimizer of {path} has {saved} parameter groups, the one here {len(opt.param_groups)}{way_out}")
    different = sorted(name for name in {*members, *about["members"]} if members.get(name) != about["members"].get(name))
    if different:
        name = different[0]
        saved, here = about["members"].get(name, "none"), members.get(name, "none")
        raise ValueError(
            f"load: {len(different)} parameters are in other parameter groups than in {path}: {name!r} was in group {saved}, "
            f"here it is in {here}{way_out}"
        )
    strange = [key for key in catalog if key.startswith("optim/") and key[len("optim/") :].rpartition("/")[0] not in members]
    if strange:
        raise ValueError(f"load: {path} has {_some(strange)}, of parameters that the optimizer here does not train{way_out}")


def _to_load(engine, opt, path, catalog):
    """(what to read: key -> Boxes, tensor or None, {part: (name, {key: tensor to fill, or None for what is read whole})})"""
    state, fresh = {}, {}
    for name, (buffer, _) in persistent_buffers(engine).items():
        saved = catalog[f"model/{name}"]
        if tuple(saved.size) != tuple(buffer.shape):
            raise ValueError(f"load: buffer {name!r} has shape {tuple(saved.size)} in {path}, and {tuple(buffer.shape)} here")
        if not buffer.is_meta:
            _check_cast(path, name, saved.properties.dtype, buffer.dtype)
            state[f"model/{name}"] = buffer
    keys_of = {}
    for key in catalog:
        if key.startswith("optim/"):
            name, _, last = key[len("optim/") :].rpartition("/")
            keys_of.setdefault(name, []).append(last)
    groups = engine.opt.param_groups if opt is not None else []
    for holding in holdings(engine):
        info, saved = holding.info, catalog[f"model/{holding.info.name}"].properties.dtype
        if holding.part is not None or engine.plan.precision is None:
            _check_cast(path, info.name, saved, holding.values.dtype)
        _add(state, f"model/{info.name}", holding, holding.values, False)
        if opt is not None and holding.part is not None and info.option is not None:
            group = groups[info.option]
            places = {key: _place_for_state(state, holding, key, catalog, group) for key in keys_of.get(info.name, [])}
            fresh[holding.part] = info.name, places
    return state, fresh


def _place_for_state(state, holding, key, catalog, group):
    """Memory for one tensor of the optimizer's state that is cut like the parameter; None for others, which are read whole."""
    full_key, part = f"optim/{holding.info.name}/{key}", holding.part
    saved = catalog[full_key]
    if not hasattr(saved, "size"):
        state[full_key] = None
        return None
    dtype, device = saved.properties.dtype, part.device
    if dtype == catalog[f"model/{holding.info.name}"].properties.dtype:
        dtype = part.dtype
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        device = torch.device("cpu")  # where torch's optimizers keep it, so that reading it costs no synchronisation
    if tuple(saved.size) == tuple(holding.info.layout.full_shape):
        values = torch.empty_like(part.detach(), dtype=dtype, device=device)
        _add(state, full_key, holding, values, False)
        return values
    state.setdefault(full_key, torch.empty(saved.size, dtype=saved.properties.dtype, device=device))
    return None


def _check_cast(path, name, saved, here):
    if torch.promote_types(saved, here) != here:
        raise ValueError(
            f"load: {name!r} is {saved} in {path} and {here} here, which would lose bits: build the model in {saved}"
            + (', with Plan(precision="bf16") to compute in bfloat16' if here == torch.bfloat16 else "")
        )


def _set_optimizer(opt, fresh, state, about):
    for part, (name, places) in fresh.items():
        opt.state.pop(part, None)
        for key, values in places.items():
            opt.state[part][key] = copy.deepcopy(state[f"optim/{name}/{key}"]) if values is None else values
    for group, saved in zip(opt.param_groups, about["groups"], strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))  # in place: captured graphs hold it
            else:
                group[key] = value


def _some(names):
    return ", ".join(repr(name.partition("/")[2]) for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
