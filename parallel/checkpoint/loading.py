"""Reading a checkpoint into this rank's part of a model; the format: __init__.py.

Everything is checked first, in an order that is the same on every rank: a load that raises ValueError or
FileNotFoundError has changed nothing. Afterwards the values that the model computes with are made anew from
the master copies, as after an optimizer step (one all_gather per bucket under zero 1 and 2).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pycomm.parallel.checkpoint.agree import together
from pycomm.parallel.checkpoint.averages import add_to_load, check_saved, publish
from pycomm.parallel.checkpoint.files import Folder, catalog_of, check_path
from pycomm.parallel.checkpoint.holdings import holdings, persistent_buffers
from pycomm.parallel.checkpoint.state import FORMAT, add_boxes, class_of, whole_model
from pycomm.parallel.parts import parts_of

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from pycomm.parallel.checkpoint.boxes import State
    from pycomm.parallel.checkpoint.files import Catalog
    from pycomm.parallel.checkpoint.holdings import Holding
    from pycomm.parallel.checkpoint.state import About
    from pycomm.parallel.parts import Parallelized

__all__ = ["load", "load_from"]

# Of a parameter of the optimizer: its name, and {key of its state: tensor to fill, or None for what is read
# whole}.
Fresh: TypeAlias = "dict[nn.Parameter, tuple[str, dict[str, torch.Tensor | None]]]"


class Source(Protocol):
    """What is loaded from; its text is its name."""

    @property
    def catalog(self) -> Catalog: ...

    def read(self, state: State) -> None:
        """Fills the Boxes and tensors, and replaces the objects of `state`. Collective."""


@torch.no_grad()
def load(model: nn.Module, opt: Optimizer | None, path: str | os.PathLike[str]) -> Any:
    """Reads a checkpoint, saved under any plan, into this rank's part of the model and the optimizer.
    Collective over all ranks.

    Args:
        model, opt: as parallelize() returned them; opt None: the model's values alone, the optimizer is left
        as it is.
        path: as given to save.

    Values are bit-equal to those saved where dtypes agree, and cast where that is exact. Averages that the
    model has (parallel.ema) are read too; those that it has not are left out. Returns the `extra`
    of save.
    Raises on every rank, with nothing changed, FileNotFoundError when there is no checkpoint and ValueError
    when names, shapes, parameter groups or the class of the optimizer differ or a cast would lose bits;
    RuntimeError when a rank could not read, after which the model's values are undefined.
    """
    parts, path = parts_of(model, opt), Path(path)
    with parts.writes.inside("load"):
        parts.writes.check("load", parts.mesh.world.rank)
        parts.saves.wait()
        parts.averages.refuse_applied("load")
        check_path(parts, "load", path)
        catalog = together(parts, lambda: catalog_of(path))
        extra = load_from(parts, opt, Folder(path, catalog, parts.mesh.world))
        parts.saves.last = path
    return extra


@torch.no_grad()
def load_from(parts: Parallelized, opt: Optimizer | None, source: Source) -> Any:
    """The same from a source."""
    with parts.writes.inside("load"):
        return _load(parts, opt, source)


def _load(parts: Parallelized, opt: Optimizer | None, source: Source) -> Any:
    head: State = {"about": None, "extra": None}
    source.read(head)
    about = cast("About", head["about"])
    members, buffers = whole_model(parts)
    _check_model(parts, source, source.catalog, about, buffers)
    check_saved(parts, source, source.catalog, buffers)
    if opt is not None:
        frozen = _frozen_here(parts, about, members)
        _check_optimizer(opt, source, source.catalog, about, members | frozen)
        parts.trained.take_in(False, frozen)
    state, fresh = together(parts, lambda: _to_load(parts, opt, source, source.catalog))
    parts.window.discard()  # gradients of the values before
    source.read(state)
    if opt is not None:
        _set_optimizer(opt, fresh, state, about)
    publish(parts)
    parts.averages.note_loaded(about.get("averages", {}), str(source))
    return head["extra"]


def _check_model(
    parts: Parallelized, path: Source, catalog: Catalog, about: About, buffers: Collection[str]
) -> None:
    """Checks that come out alike on every rank, so that all of them raise."""
    if about["format"] != FORMAT:
        raise ValueError(
            f"load: {path} has format {about['format']}, this is {FORMAT}: load it with the version that "
            "wrote it"
        )
    names = [f"model/{name}" for name in [*parts.original.names, *sorted(buffers)]]
    missing = [key for key in names if key not in catalog]
    if missing:
        raise ValueError(
            f"load: {path} does not have {_some(missing)} of this model: build the model that was saved"
        )
    more = sorted({key for key in catalog if key.startswith("model/")} - set(names))
    if more:
        raise ValueError(
            f"load: {path} has {_some(more)}, to which nothing in this model corresponds: build the model "
            "that was saved"
        )
    for name in parts.original.names:
        saved, shape = tuple(_tensor_of(catalog, f"model/{name}").size), tuple(parts.original.shapes[name])
        if saved != shape:
            raise ValueError(
                f"load: {name!r} has shape {saved} in {path}, and {shape} here: build the model with the "
                "sizes that were saved"
            )


def _frozen_here(parts: Parallelized, about: About, members: Mapping[str, int]) -> dict[str, int]:
    """As members: parameters that were trained there, and have been frozen here since parallelize(). What the
    optimizer has of them is read all the same, for when they are trained again.
    """
    given = parts.original.option
    return {
        name: number
        for name, number in about.get("members", {}).items()  # none of a model saved alone
        if name not in members and given.get(name) == number
    }


def _check_optimizer(
    opt: Optimizer, path: Source, catalog: Catalog, about: About, members: Mapping[str, int]
) -> None:
    way_out = "; load(model, None, path) takes the model alone"
    if about["optimizer"] != class_of(opt):
        kind = about["optimizer"] or "no optimizer"
        raise ValueError(
            f"load: {path} was saved with {kind}, but the optimizer here is {class_of(opt)}{way_out}"
        )
    if len(about["groups"]) != len(opt.param_groups):
        count = len(about["groups"])
        raise ValueError(
            f"load: the optimizer of {path} has {count} parameter groups, the one here "
            f"{len(opt.param_groups)}{way_out}"
        )
    different = sorted(
        name for name in {*members, *about["members"]} if members.get(name) != about["members"].get(name)
    )
    if different:
        name = different[0]
        nowhere = "no group (frozen, or not given to the optimizer)"
        saved, here = (
            f"group {each[name]}" if name in each else nowhere for each in (about["members"], members)
        )
        raise ValueError(
            f"load: {len(different)} parameters are in other parameter groups than in {path}: {name!r} was "
            f"in {saved} when it was saved, and is in {here} now{way_out}"
        )
    strange = [
        key
        for key in catalog
        if key.startswith("optim/") and key[len("optim/") :].rpartition("/")[0] not in members
    ]
    if strange:
        raise ValueError(
            f"load: {path} has {_some(strange)}, of parameters that the optimizer here does not "
            f"train{way_out}"
        )


def _to_load(
    parts: Parallelized, opt: Optimizer | None, path: Source, catalog: Catalog
) -> tuple[State, Fresh]:
    """What to read, and what of it becomes the optimizer's state."""
    state: State = {}
    fresh: Fresh = {}
    for name, (buffer, _) in persistent_buffers(parts).items():
        saved = _tensor_of(catalog, f"model/{name}")
        if tuple(saved.size) != tuple(buffer.shape):
            raise ValueError(
                f"load: buffer {name!r} has shape {tuple(saved.size)} in {path}, and {tuple(buffer.shape)} "
                "here"
            )
        if not buffer.is_meta:
            _check_cast(path, name, saved.properties.dtype, buffer.dtype)
            state[f"model/{name}"] = buffer
    keys_of: dict[str, list[str]] = {}
    for key in catalog:
        if key.startswith("optim/"):
            name, _, last = key[len("optim/") :].rpartition("/")
            keys_of.setdefault(name, []).append(last)
    groups = opt.param_groups if opt is not None else []
    for holding in holdings(parts):
        info = holding.info
        dtype = _tensor_of(catalog, f"model/{holding.info.name}").properties.dtype
        if holding.part is not None or parts.plan.precision is None:
            _check_cast(path, info.name, dtype, holding.values.dtype)
        add_boxes(state, f"model/{info.name}", holding, holding.values, False)
        part = holding.part
        if opt is not None and part is not None and info.option is not None:
            group = groups[info.option]
            on_device = bool(group.get("capturable") or group.get("fused"))
            places = {
                key: _place_for_state(state, holding, part, key, catalog, on_device)
                for key in keys_of.get(info.name, [])
            }
            fresh[part] = info.name, places
    add_to_load(parts, state, lambda *cast: _check_cast(path, *cast), catalog)
    return state, fresh


def _place_for_state(
    state: State,
    holding: Holding,
    part: nn.Parameter,
    key: str,
    catalog: Catalog,
    on_device: bool,
) -> torch.Tensor | None:
    """Memory for one tensor of the optimizer's state that is cut like the parameter; None for others, which
    are read whole. on_device: where the optimizer keeps its count of steps.
    """
    full_key = f"optim/{holding.info.name}/{key}"
    saved = catalog[full_key]
    if not isinstance(saved, TensorStorageMetadata):
        state[full_key] = None
        return None
    dtype, device = saved.properties.dtype, part.device
    if dtype == _tensor_of(catalog, f"model/{holding.info.name}").properties.dtype:
        dtype = part.dtype
    if key == "step" and not on_device:
        device = torch.device(
            "cpu"
        )  # where torch's optimizers keep it, so that reading it costs no synchronisation
    if tuple(saved.size) == tuple(holding.info.layout.full_shape):
        values = torch.empty_like(part.detach(), dtype=dtype, device=device)
        add_boxes(state, full_key, holding, values, False)
        return values
    state.setdefault(full_key, torch.empty(saved.size, dtype=saved.properties.dtype, device=device))
    return None


def _tensor_of(catalog: Catalog, key: str) -> TensorStorageMetadata:
    return cast("TensorStorageMetadata", catalog[key])  # all under model/ are tensors


def _check_cast(path: Source, name: str, saved: torch.dtype, here: torch.dtype) -> None:
    if torch.promote_types(saved, here) != here:
        raise ValueError(
            f"load: {name!r} is {saved} in {path} and {here} here, which would lose bits: build the model in "
            f"{saved}"
            + (', with Plan(precision="bf16") to compute in bfloat16' if here == torch.bfloat16 else "")
        )


def _set_optimizer(opt: Optimizer, fresh: Fresh, state: State, about: About) -> None:
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


def _some(names: Sequence[str]) -> str:
    return ", ".join(repr(name.partition("/")[2]) for name in names[:5]) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )
