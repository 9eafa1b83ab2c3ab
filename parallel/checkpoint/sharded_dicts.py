"""par.state_dict(): the model, and the optimizer's state, as DTensors under every plan, for
torch.distributed.checkpoint, full_tensor() and torch.save.

A plan's own cuts (flat pieces of zero, parts of fused projections, stages) are no DTensors. So each tensor is
dealt anew, as FSDP2 does it, with Shard(0) over a mesh of all ranks:

    rank 0 counts      a a a . .        padded to 3 x 2 rows     rank 0   a a a . .      rank 0    a a a b b
    rank 1 counts      . . . b b        zeros, and what it                b b b b b                b b b b b
                       b b b b b        counts
    rank 2 counts      c c c c c        reduce_scatter      ->   rank 1   c c c c c      rank 1    c c c c c
                                                                 rank 2   (nothing)      rank 2    (nothing)

Every element is counted by one rank, so each sum has one term. It runs over bytes, as in whole.py: all bits
come through. 0-dim tensors are replicated; buffers, and state that has not its parameter's shape, are plain
tensors that are equal on all ranks.

Cost for a tensor of B bytes: B bytes of memory while it is dealt, (n-1)/n B sent; afterwards B/n per rank.

The optimizer's state has the form of torch's get_optimizer_state_dict: {"state": {name: {key: value}},
"param_groups": [{..., "params": names}]}. So files go both ways between plans and FSDP2.

The way back is sharded_loading.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import torch

from pycomm.parallel.checkpoint.agree import exchange, together
from pycomm.parallel.checkpoint.holdings import holdings, persistent_buffers
from pycomm.parallel.checkpoint.initial_state import initial_state
from pycomm.parallel.checkpoint.optimizer_dicts import group_names
from pycomm.parallel.checkpoint.whole import put, zeros_of
from pycomm.parallel.ground import comm
from pycomm.parallel.parts import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from pycomm.parallel.checkpoint.boxes import Box
    from pycomm.parallel.checkpoint.holdings import Holding
    from pycomm.parallel.parts import Parallelized

__all__ = ["ModelState", "OptimizerState", "state_dict"]

ModelState: TypeAlias = dict[str, torch.Tensor]
OptimizerState: TypeAlias = dict[str, Any]  # nested: torch types it so


@overload
def state_dict(model: nn.Module, opt: None = None) -> ModelState: ...
@overload
def state_dict(model: nn.Module, opt: Optimizer) -> tuple[ModelState, OptimizerState]: ...
@torch.no_grad()
def state_dict(
    model: nn.Module, opt: Optimizer | None = None
) -> ModelState | tuple[ModelState, OptimizerState]:
    """The state of the original model as DTensors, which torch.distributed.checkpoint writes and reads.
    Collective over all ranks.

    Args:
        model, opt: as parallelize() returned them; opt None: the model alone.

    Returns {name: tensor}, with an opt (that, the optimizer's state in the form of torch's
    get_optimizer_state_dict). Parameters are at full precision (the fp32 master copies under
    precision="bf16"), tied ones under each of their names, as DTensors with Shard(0) over all ranks; on one
    rank, plain tensors. All of them are copies. An optimizer that has not taken a step has the state that it
    begins with, so that there is something to read into.
    Raises ValueError for a model that has not been through parallelize(), and where the state with which an
    optimizer begins is not known.
    """
    parts = parts_of(model, opt)
    dealing = _Dealing(parts)
    values = {holding.info.name: holding.values.dtype for holding in dealing.holdings}
    buffers = persistent_buffers(parts)
    here = {name: (buffer.dtype, tuple(buffer.shape)) for name, (buffer, used) in buffers.items() if used}
    told = exchange(parts, (values, here))
    dtypes = {name: dtype for rank in told for name, dtype in rank[0].items()}
    dealt = {name: dealing.deal(name, dtypes[name], None) for name in parts.original.names}
    state = {name: dealt[first] for name, first in parts.original.first_name.items()}
    owner = {name: rank for rank in reversed(range(len(told))) for name in told[rank][1]}
    flat, views = zeros_of([(name, *told[rank][1][name]) for name, rank in owner.items()], parts.device)
    for name, (buffer, _) in buffers.items():
        if owner.get(name) == parts.mesh.world.rank:
            views[name].copy_(buffer)
    comm.all_reduce(flat, parts.mesh.world)
    state.update((name, views[name]) for name in buffers if name in views)
    return state if opt is None else (state, _state_of(parts, opt, dealing, dtypes))


class _Dealing:
    """How this rank's parts of all parameters become Shard(0)."""

    def __init__(self, parts: Parallelized) -> None:
        self.parts, self.holdings = parts, holdings(parts)
        self.of: dict[str, list[Holding]] = {}  # by name
        for holding in self.holdings:
            self.of.setdefault(holding.info.name, []).append(holding)
        self.mesh = _mesh_of(parts)

    def deal(self, name: str, dtype: torch.dtype, values: dict[int, torch.Tensor] | None) -> torch.Tensor:
        """values: by the id of what the optimizer has, state of its shape; None: the parameter itself."""
        boxes: list[Box] = []
        for holding in self.of.get(name, []):
            if holding.first and values is None:
                boxes += holding.boxes(holding.values, True)
            elif holding.first and values is not None and id(holding.part) in values:
                boxes += holding.boxes(values[id(holding.part)], True)
        return self._put_together(self.parts.original.shapes[name], dtype, boxes)

    def _put_together(self, shape: Sequence[int], dtype: torch.dtype, boxes: Iterable[Box]) -> torch.Tensor:
        world, device = self.parts.mesh.world, self.parts.device
        rows = shape[0] if shape else 1
        chunk = -(-rows // world.size)
        row = math.prod(shape[1:])
        flat = torch.zeros(world.size * chunk * row * dtype.itemsize, dtype=torch.uint8, device=device)
        put(flat.view(dtype)[: rows * row].view(tuple(shape)), boxes)
        if self.mesh is None:
            return flat.view(dtype).view(tuple(shape))
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if not shape:
            comm.all_reduce(flat, world)
            whole = flat.view(dtype)[:1].view(())
            return DTensor.from_local(whole, self.mesh, [Replicate()], run_check=False)
        mine = torch.empty(flat.numel() // world.size, dtype=torch.uint8, device=device)
        if flat.numel():
            comm.reduce_scatter(mine, flat, world)
        start = min(world.rank * chunk, rows)
        count = min(chunk, rows - start)
        return DTensor.from_local(
            mine.view(dtype)[: count * row].view(count, *shape[1:]),
            self.mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(tuple(shape), device="meta").stride(),
        )


def _mesh_of(parts: Parallelized) -> DeviceMesh | None:
    """Of all ranks; None for one. No communication."""
    group = comm.process_group(parts.mesh.world)
    if group is None:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, parts.device.type)


# --- the optimizer -----------------


class _Entry(NamedTuple):
    """One value of the optimizer's state of a parameter."""

    dtype: torch.dtype | None  # where it has the parameter's shape, and is dealt
    value: object  # else all of it
    start: float = 0.0  # what it is filled with, where it is dealt and no rank has it


def _state_of(
    parts: Parallelized, opt: Optimizer, dealing: _Dealing, dtypes: Mapping[str, torch.dtype]
) -> OptimizerState:
    """dtypes: of all parameters at full precision."""
    here: dict[str, dict[str, _Entry]] = {}
    for holding in dealing.holdings:
        part = holding.part
        if part is not None and holding.first and holding.info.counted and opt.state.get(part):
            entries = {key: _entry(part, value) for key, value in opt.state[part].items()}
            here.setdefault(holding.info.name, {}).update(entries)
    told: dict[str, dict[str, _Entry]] = {}
    for rank in reversed(exchange(parts, here)):
        for name, entries in rank.items():
            told.setdefault(name, {}).update(entries)
    names = group_names(parts, opt)
    if not told and not parts.last_step.updates:
        told = together(parts, lambda: _beginnings(parts, opt, names, dtypes))
    state: dict[str, dict[str, object]] = {}
    for name in parts.original.names:
        for key in sorted(told.get(name, {})):
            entry = told[name][key]
            state.setdefault(name, {})[key] = (
                entry.value if entry.dtype is None else _dealt_state(dealing, opt, name, key, entry)
            )
    groups: list[dict[str, object]] = []
    for group, each in zip(opt.param_groups, names, strict=True):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**{key: _apart(value) for key, value in options.items()}, "params": each})
    return {"state": state, "param_groups": groups}


def _apart(value: object) -> object:
    """A hyperparameter that is a tensor may be read into."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _entry(part: torch.Tensor, value: object) -> _Entry:
    if not isinstance(value, torch.Tensor):
        return _Entry(None, value)
    if value.shape == part.shape:
        return _Entry(value.dtype, None)
    return _Entry(None, value.detach().to("cpu", copy=True))


def _dealt_state(dealing: _Dealing, opt: Optimizer, name: str, key: str, entry: _Entry) -> torch.Tensor:
    assert entry.dtype is not None
    values = {}
    for holding in dealing.of.get(name, []):
        state = opt.state.get(holding.part, {}) if holding.part is not None else {}
        if key in state:
            values[id(holding.part)] = state[key].detach()
    dealt = dealing.deal(name, entry.dtype, values)
    return dealt.fill_(entry.start) if entry.start else dealt


def _beginnings(
    parts: Parallelized, opt: Optimizer, names: list[list[str]], dtypes: Mapping[str, torch.dtype]
) -> dict[str, dict[str, _Entry]]:
    """Of an optimizer that has no state on any rank. No communication."""
    found: dict[str, dict[str, _Entry]] = {}
    for group, each in zip(opt.param_groups, names, strict=True):
        for key, start in initial_state(opt, group).items():
            for name in each:
                if parts.trained.is_held(name):
                    whole = None if start.like else torch.tensor(start.value)
                    entry = _Entry(dtypes[name] if start.like else None, whole, start.value)
                    found.setdefault(name, {})[key] = entry
    return found
