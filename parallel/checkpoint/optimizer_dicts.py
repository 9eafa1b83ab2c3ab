"""opt.state_dict() and opt.load_state_dict() under a plan: hooks on the optimizer, which never communicate.

After parallelize() the parameter groups hold what this rank owns: shards, parts, and nothing that is frozen.
A state dict of torch knows parameters by their places in the groups alone, so here they get the places of the
user's groups back:

    opt.param_groups            w0 w1 w3              (w2 is frozen)
    torch's numbers             0  1  2
    opt.state_dict()            0  1  3               as one process numbers w0 w1 w2 w3

    what this rank has               state_dict() gives    load_state_dict() takes
    whole parameters                 tensors               whole tensors: a file of one process
    Shard(d) of each over tp         DTensors              these, or whole tensors
    other parts, shards, stages      ValueError            whole tensors

What is loaded is cut to what this rank owns, which is exact under every plan: state with the shape of a
parameter belongs to its elements, and other state (the count of steps) to all of it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from pycomm.parallel.checkpoint.dicts import WAY_OUT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pycomm.parallel.checkpoint.dicts import Cuts
    from pycomm.parallel.data.bucket import ParamInfo
    from pycomm.parallel.parts import Parallelized

__all__ = ["group_names", "guard_optimizer_dicts", "refuse_frozen"]

Packed: TypeAlias = "dict[str, Any]"  # a state dict of an optimizer: torch types it so


class _Owned(NamedTuple):
    """What the optimizer has of a parameter: elements start to stop of the local one."""

    info: ParamInfo
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.info.numel


def guard_optimizer_dicts(opt: torch.optim.Optimizer, cuts: Cuts) -> None:
    """Its parameters in the order in which the user gave them (torch's get_optimizer_state_dict takes it for
    theirs), and hooks. A wrapper of an optimizer may have no hooks: its methods are replaced.
    """
    place = {name: number for number, name in enumerate(cuts.parts.original.option)}
    owned = _owned_of(cuts)
    for group in opt.param_groups:
        group["params"].sort(key=lambda param: place[owned[id(param)].info.name])
    saved, loads = functools.partial(_saved, cuts), functools.partial(_loads, cuts)
    if hasattr(opt, "_optimizer_state_dict_post_hooks"):
        opt.register_state_dict_post_hook(saved, prepend=True)
        opt.register_load_state_dict_pre_hook(loads)
    elif hasattr(opt, "state_dict") and hasattr(opt, "load_state_dict"):
        give, take = opt.state_dict, opt.load_state_dict
        vars(opt)["state_dict"] = lambda: saved(opt, give())
        vars(opt)["load_state_dict"] = lambda state: take(loads(opt, state))


def _owned_of(cuts: Cuts) -> dict[int, _Owned]:
    """By the id of what the optimizer has."""
    found = {id(info.param): _Owned(info, 0, info.numel) for info in cuts.parts.infos}
    for shards in cuts.parts.all_shards:
        for info, piece, param in shards.owned:
            found[id(param)] = _Owned(info, piece.start, piece.stop)
    return found


def group_names(parts: Parallelized, opt: torch.optim.Optimizer) -> list[list[str]]:
    """Names of the parameters of each group as the user gave them, frozen ones included."""
    groups: list[list[str]] = [[] for _ in opt.param_groups]
    for name, number in parts.original.option.items():
        groups[number].append(name)
    return groups


# --- saving ------------------------


def _saved(cuts: Cuts, opt: torch.optim.Optimizer, packed: Packed) -> Packed:
    """After opt.state_dict()."""
    _refuse_part(cuts, opt)
    owned = _owned_of(cuts)
    place = {name: number for number, name in enumerate(cuts.parts.original.option)}
    here = [owned[id(param)] for group in opt.param_groups for param in group["params"]]
    state: dict[object, object] = {}
    for key, values in packed["state"].items():
        if isinstance(key, int) and key < len(here):
            info = here[key].info
            state[place[info.name]] = {each: _part(cuts, info, each, values[each]) for each in values}
        else:
            state[key] = values
    groups, first = [], 0
    for group, names in zip(packed["param_groups"], group_names(cuts.parts, opt), strict=True):
        groups.append({**group, "params": list(range(first, first + len(names)))})
        first += len(names)
    return {**packed, "state": state, "param_groups": groups}


def _part(cuts: Cuts, info: ParamInfo, key: str, value: object) -> object:
    if not isinstance(value, torch.Tensor) or info.layout.dim is None:
        return value
    if tuple(value.shape) == info.shape:
        return cuts.dtensor(value, info, "opt.state_dict()")
    if value.numel() == 1:
        return value
    raise ValueError(
        f"opt.state_dict(): the state {key!r} of {info.name!r} has the shape {tuple(value.shape)}, and this "
        f"rank has {info.shape} of the parameter under Plan({cuts.parts.plan}): what of it is here is not "
        f"known. {WAY_OUT}"
    )


def _refuse_part(cuts: Cuts, opt: torch.optim.Optimizer) -> None:
    parts = cuts.parts
    lack = None
    if any(shards.bucket.is_sharded and shards.bucket.group.size > 1 for shards in parts.all_shards):
        lack = "one shard of the parameters"
    elif parts.plan.pp > 1:
        lack = "the parameters of this rank's stages"
    elif parts.plan.ep > 1:
        lack = "a part of the experts"
    if lack is not None:
        raise ValueError(
            f"opt.state_dict(): under Plan({parts.plan}) this {type(opt).__name__} has only {lack}, and the "
            "call does not communicate. Call on all ranks par.save(model, opt, path) for a checkpoint that "
            "par.load reads under any plan, or par.state_dict(model, opt) for DTensors"
        )


# --- loading -----------------------


def _loads(cuts: Cuts, opt: torch.optim.Optimizer, packed: Packed) -> Packed:
    """Before opt.load_state_dict()."""
    groups = group_names(cuts.parts, opt)
    saved = [group["params"] for group in packed["param_groups"]]
    if len(saved) != len(groups):
        raise ValueError(
            f"opt.load_state_dict(): loaded state dict has a different number of parameter groups, "
            f"{len(saved)} instead of {len(groups)}"
        )
    key_of: dict[str, object] = {}
    for number, (names, keys) in enumerate(zip(groups, saved, strict=True)):
        if len(names) != len(keys):
            raise ValueError(
                "opt.load_state_dict(): loaded state dict contains a parameter group that doesn't match the "
                f"size of optimizer's group: {len(keys)} parameters for {len(names)} in group {number}. "
                "Load what the optimizer of one process had saved, with all parameters"
            )
        key_of.update(zip(names, keys, strict=True))
    owned = _owned_of(cuts)
    for name, key in key_of.items():
        refuse_frozen(cuts.parts, name, packed["state"].get(key, {}), "opt.load_state_dict()")
    known = set(key_of.values())
    state = {key: values for key, values in packed["state"].items() if key not in known}
    new, count = [], 0
    for group, mine in zip(packed["param_groups"], opt.param_groups, strict=True):
        new.append({**group, "params": list(range(count, count + len(mine["params"])))})
        for number, param in enumerate(mine["params"], count):
            found = owned[id(param)]
            values = packed["state"].get(key_of[found.info.name])
            if values is not None:
                state[number] = {key: _cut(cuts, found, param, key, values[key]) for key in values}
        count += len(mine["params"])
    return {**packed, "state": state, "param_groups": new}


def refuse_frozen(parts: Parallelized, name: str, state: Mapping[str, Any], call: str) -> bool:
    """Whether a parameter is frozen, so that the optimizer does not have it. Raises ValueError where its
    state is of steps, as it would be lost. Adagrad makes state before a step.
    """
    is_trained = parts.trained.is_held(name)
    if not is_trained and state and state.get("step", 1) != 0:
        raise ValueError(
            f"{call}: the state has {name!r}, which is frozen here and has none. Unfreeze it before "
            "parallelize, or load the state of an optimizer under which it was frozen, too"
        )
    return not is_trained


def _cut(cuts: Cuts, owned: _Owned, param: torch.Tensor, key: str, value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    found = _part_of(cuts, owned, key, value, "opt.load_state_dict()")
    return value if found is None else found.reshape(param.shape)


def _part_of(cuts: Cuts, owned: _Owned, key: str, value: torch.Tensor, call: str) -> torch.Tensor | None:
    """Of state for a whole parameter, that for the elements that are owned, flat; None for state of another
    shape, which belongs to all of it. Raises ValueError for such state where the parameter is not whole.
    """
    info = owned.info
    if tuple(value.shape) == info.layout.full_shape:
        local = cuts.local(value, info, call)
        assert local is not None  # the shape is right
        return local.reshape(-1)[owned.start : owned.stop]
    if value.numel() == 1 or owned.is_whole and info.layout.dim is None:
        return None
    raise ValueError(
        f"{call}: the state {key!r} has the shape {tuple(value.shape)}, and the parameter {info.name!r} "
        f"{info.layout.full_shape}, of which this rank has a part under Plan({cuts.parts.plan}). Load the "
        "state that one process has, in whole tensors"
    )
