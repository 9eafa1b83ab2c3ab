"""par.load_state_dict(): a state of any plan (sharded_dicts.py), of FSDP2 or of one process, into the model
and the optimizer.

Names, shapes and groups are checked on all ranks together before anything changes. Then one tensor after the
other is made whole (a DTensor of any placement by its full_tensor(), in the same order on all ranks), and
each rank takes what it holds. At the end the values with which the model computes are made from the master
copies, as after an optimizer step.

Cost: the memory of one whole tensor at a time, and an all_gather for each DTensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from pycomm.parallel.checkpoint.agree import exchange, together
from pycomm.parallel.checkpoint.dicts import dtensor_or_none, set_values
from pycomm.parallel.checkpoint.holdings import holdings, persistent_buffers
from pycomm.parallel.checkpoint.optimizer_dicts import group_names, refuse_frozen
from pycomm.parallel.checkpoint.whole import place_of
from pycomm.parallel.parts import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from pycomm.parallel.checkpoint.holdings import Holding
    from pycomm.parallel.parts import Parallelized

    State = Mapping[str, torch.Tensor]

__all__ = ["IncompatibleKeys", "load_state_dict"]


class IncompatibleKeys(NamedTuple):
    """As torch's load_state_dict returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class _Places(NamedTuple):
    """Where the values are, in the order in which they are read."""

    parameters: dict[str, str]  # first name of a parameter -> its key in the state
    buffers: list[str]
    state: dict[str, Mapping[str, Any]]  # first name -> state of the optimizer
    groups: Sequence[Mapping[str, Any]]
    incompatible: IncompatibleKeys


@torch.no_grad()
def load_state_dict(
    model: nn.Module,
    state: State | tuple[State, Mapping[str, Any]],
    opt: Optimizer | None = None,
    *,
    strict: bool = True,
) -> IncompatibleKeys:
    """Loads a state of the whole model, and of the optimizer. Collective over all ranks.

    Args:
        model, opt: as parallelize() returned them.
        state: of the model; with an opt (that, the optimizer's), as state_dict(model, opt) returns them.
        Values are DTensors of any placement, or whole tensors that are equal on all ranks: from any plan,
        from FSDP2 (torch's get_model_state_dict and get_optimizer_state_dict), or from one process
        (model.state_dict() and opt.state_dict()).
        strict: False leaves what is missing as it is, and ignores what the model does not have.

    Values are cast to the dtypes here, as torch's load_state_dict does. Returns (missing_keys,
    unexpected_keys).
    Raises ValueError on every rank, with nothing changed, for names, shapes or parameter groups that do not
    fit, and for states that differ between ranks.
    """
    parts = parts_of(model, opt)
    values, opt_state = cast("tuple[State, Any]", state if isinstance(state, tuple) else (state, None))
    if (opt is None) != (opt_state is None):
        raise ValueError(
            "load_state_dict: give (model state, optimizer state) and the optimizer, or the model state "
            f"alone; got {'no' if opt_state is None else 'an'} optimizer state and "
            f"{'no' if opt is None else 'an'} optimizer"
        )
    buffers = persistent_buffers(parts)
    names = {name for rank in exchange(parts, list(buffers)) for name in rank}
    places = together(parts, lambda: _places(parts, values, opt_state, opt, sorted(names), strict))
    _check_equal(parts, values, places)
    of: dict[str, list[Holding]] = {}
    for holding in holdings(parts):
        of.setdefault(holding.info.name, []).append(holding)
    for name, key in places.parameters.items():
        full = _whole(values[key])
        for holding in of.get(name, []):
            for box in holding.boxes(holding.values, False):
                set_values(box.values, place_of(full, box), holding.info.param.dtype)
    for name in places.buffers:
        full = _whole(values[name])
        if name in buffers and not buffers[name][0].is_meta:
            buffers[name][0].copy_(full)
    if opt is not None:
        _set_optimizer(opt, places, of)
    for shards in parts.all_shards:
        shards.publish()
    for shards in parts.all_shards:
        shards.wait()
    return places.incompatible


def _whole(value: torch.Tensor) -> torch.Tensor:
    dtensor = dtensor_or_none(value)
    return value if dtensor is None else dtensor.full_tensor()


# --- checks, without communication ------


def _places(
    parts: Parallelized,
    values: State,
    opt_state: Mapping[str, Any] | None,
    opt: Optimizer | None,
    buffers: list[str],
    strict: bool,
) -> _Places:
    first_name, shapes = parts.original.first_name, parts.original.shapes
    keys = {first_name[key]: key for key in first_name if key in values}
    found = {name: keys[name] for name in parts.original.names if name in keys}
    there = [name for name in buffers if name in values]
    missing = [name for name in parts.original.names if name not in found]
    missing += [name for name in buffers if name not in values]
    known = {*first_name, *buffers}
    more = [key for key in values if key not in known and not key.endswith("_extra_state")]
    if strict and (missing or more):
        raise ValueError(
            f"load_state_dict: the state lacks {_some(missing)} of this model, and has {_some(more)} that "
            "the model does not have. Load the state of the same model, or pass strict=False to load the rest"
        )
    wanted = {key: shapes[name] for name, key in found.items()}
    wanted |= {n: tuple(b.shape) for n, (b, _) in persistent_buffers(parts).items() if n in values}
    for key, shape in wanted.items():
        _check_tensor(key, values[key], shape)
    state, groups = _optimizer_places(parts, opt_state, opt) if opt is not None and opt_state else ({}, ())
    return _Places(found, there, state, groups, IncompatibleKeys(missing, more))


def _check_tensor(key: str, value: object, shape: tuple[int, ...] | None) -> None:
    """shape: that it must have, None: any."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"load_state_dict: {key!r} is a {type(value).__name__}, not a tensor")
    if shape is not None and tuple(value.shape) != shape:
        raise ValueError(
            f"load_state_dict: {key!r} has shape {tuple(value.shape)} in the state, and {shape} in this "
            "model. Load the state of a model with the same sizes"
        )
    dtensor = dtensor_or_none(value)
    if dtensor is not None and dtensor.device_mesh.get_coordinate() is None:
        raise ValueError(
            f"load_state_dict: {key!r} is a DTensor over {dtensor.device_mesh}, which does not contain this "
            "rank. Load DTensors over all ranks, or whole tensors"
        )


def _optimizer_places(
    parts: Parallelized, opt_state: Mapping[str, Any], opt: Optimizer
) -> tuple[dict[str, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """(state by first name, groups)."""
    if not {"state", "param_groups"} <= opt_state.keys():
        raise ValueError(
            "load_state_dict: the optimizer's state has the keys "
            f"{_some(list(opt_state))}, but needs 'state' and 'param_groups'. Save it without "
            "flatten_optimizer_state_dict"
        )
    names, groups = group_names(parts, opt), opt_state["param_groups"]
    if len(names) != len(groups):
        raise ValueError(
            f"load_state_dict: the optimizer's state has {len(groups)} parameter groups, the optimizer here "
            f"{len(names)}. Give the optimizer the groups that were saved"
        )
    key_of: dict[str, object] = {}
    for number, (mine, group) in enumerate(zip(names, groups, strict=True)):
        saved = [parts.original.first_name.get(key, key) for key in group["params"]]
        by_name = any(isinstance(key, str) for key in saved)
        if set(saved) != set(mine) if by_name else len(saved) != len(mine):
            raise ValueError(
                f"load_state_dict: group {number} of the optimizer's state has {len(saved)} parameters "
                f"({_some(saved)}), here {len(mine)} ({_some(mine)}). Give the optimizer the groups that "
                "were saved"
            )
        key_of.update(zip(saved if by_name else mine, group["params"], strict=True))
    state = {}
    for name in parts.original.names:
        values = opt_state["state"].get(key_of[name]) if name in key_of else None
        if values and not refuse_frozen(parts, name, values, "load_state_dict"):
            state[name] = values
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    _check_tensor(f"{name}/{key}", value, None)
    return state, groups


def _some(names: Iterable[object]) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "") or "nothing"


def _check_equal(parts: Parallelized, values: State, places: _Places) -> None:
    """Ranks with other names or kinds of tensors would wait for each other."""
    mine = [(key, _kind(values[key])) for key in [*places.parameters.values(), *places.buffers]]
    mine += [
        (f"{name}/{key}", _kind(state[key])) for name, state in places.state.items() for key in sorted(state)
    ]
    for rank, other in enumerate(exchange(parts, mine)):
        if other != mine:
            different = sorted({key for key, _ in set(mine) ^ set(other)})
            raise ValueError(
                f"load_state_dict: rank {parts.mesh.world.rank} and rank {rank} were given different states: "
                f"{_some(different)}. Load the same one on all ranks"
            )


def _kind(value: object) -> tuple[str, tuple[int, ...]]:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__, ()
    return "tensor" if dtensor_or_none(value) is None else "DTensor", tuple(value.shape)


# --- the optimizer -----------------


def _set_optimizer(opt: Optimizer, places: _Places, of: Mapping[str, Sequence[Holding]]) -> None:
    for holding in (holding for each in of.values() for holding in each):
        if holding.part is not None:
            opt.state.pop(holding.part, None)
    for name, values in places.state.items():
        for key in sorted(values):
            value = values[key]
            full = _whole(value) if isinstance(value, torch.Tensor) else value
            for holding in of.get(name, []):
                if holding.part is not None and holding.info.option is not None:
                    group = opt.param_groups[holding.info.option]
                    opt.state[holding.part][key] = _state_for(holding, holding.part, key, full, group)
    for group, saved in zip(opt.param_groups, places.groups, strict=True):
        for key, value in saved.items():
            if key in ("params", "param_names"):
                continue
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))  # in place: captured graphs hold it
            else:
                group[key] = value


def _state_for(
    holding: Holding, part: torch.Tensor, key: str, full: object, group: Mapping[str, Any]
) -> object:
    """A copy: of a tensor with the parameter's shape what belongs to `part`, else all of it."""
    if not isinstance(full, torch.Tensor):
        return full
    if tuple(full.shape) == holding.info.layout.full_shape:
        dtype = part.dtype if full.is_floating_point() and part.is_floating_point() else full.dtype
        values = torch.empty_like(part, dtype=dtype, requires_grad=False)
        for box in holding.boxes(values, False):
            box.values.copy_(place_of(full, box))
        return values
    if key == "step":  # where torch's optimizers keep it
        return full.to(part.device if group.get("capturable") or group.get("fused") else "cpu", copy=True)
    return full.to(part.device, copy=True)
