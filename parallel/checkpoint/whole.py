"""The whole model put together on every rank: its values and its gradients.

One all_reduce of zeros into which each rank has put what it counts. Every element is counted by exactly one
rank (Layout.counted, ParamInfo.counted, and of ranks that hold the same, the first), so the sum has one term.
It runs over bytes and not over numbers: bits come through, -0.0 and NaN included, for all dtypes in one
collective.

Cost: P bytes of memory on every rank, 2(n-1)/n P sent. For models that fit; save() gathers nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from pycomm.parallel.checkpoint.agree import exchange
from pycomm.parallel.checkpoint.holdings import Holding, holdings, persistent_buffers
from pycomm.parallel.ground import comm
from pycomm.parallel.parts import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from pycomm.parallel.checkpoint.boxes import Box
    from pycomm.parallel.parts import Parallelized

__all__ = ["full_gradients", "full_state_dict", "gather_parameters", "place_of", "put", "zeros_of"]

ALIGNMENT = 16  # bytes; a view of another dtype must start at a multiple of its element
K = TypeVar("K", bound=Hashable)


class _Told(NamedTuple):
    """What a rank has."""

    aliases: dict[str, str]  # further names of tied parameters
    buffers: dict[str, tuple[torch.dtype, tuple[int, ...]]]  # with dtype and shape
    dtypes: dict[str, torch.dtype]  # of parameters


class _Part(NamedTuple):
    """What of a parameter this rank puts in."""

    name: str
    dtype: torch.dtype
    boxes: list[Box]


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state_dict of the original model, on every rank. Collective over all ranks.

    Returns {name: tensor}: parameters at full precision (the fp32 master copies under precision="bf16"),
    persistent buffers, and tied parameters under each of their names, on the model's device:
    `plain_model.load_state_dict(...)` takes it. The tensors share one memory. Raises ValueError for a model
    that has not been through parallelize().
    """
    parts = parts_of(model)
    with parts.writes.inside("full_state_dict"):
        parts.writes.check("full_state_dict", parts.mesh.world.rank)
        return _whole_state(parts)


def _entries(parts: Parallelized) -> list[_Part]:
    return [
        _Part(h.info.name, h.values.dtype, h.boxes(h.values, True) if h.first else [])
        for h in holdings(parts)
    ]


@torch.no_grad()
def gather_parameters(
    parts: Parallelized, names: Sequence[str]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One buffer of bytes, and views into it: these parameters at full precision, whole, by first name.
    Collective over all ranks.
    """
    wanted = set(names)
    entries = [entry for entry in _entries(parts) if entry.name in wanted]
    told = exchange(parts, {name: dtype for name, dtype, _ in entries})
    dtypes = {name: dtype for rank in told for name, dtype in rank.items()}
    flat, views = zeros_of(
        [(name, dtypes[name], parts.original.shapes[name]) for name in names], parts.device
    )
    for name, _, boxes in entries:
        put(views[name], boxes)
    comm.all_reduce(flat, parts.mesh.world)
    return flat, views


def _whole_state(parts: Parallelized) -> dict[str, torch.Tensor]:
    entries = _entries(parts)
    buffers = persistent_buffers(parts)
    here = {name: (buffer.dtype, tuple(buffer.shape)) for name, (buffer, used) in buffers.items() if used}
    told = exchange(parts, _Told(_aliases(parts), here, {name: dtype for name, dtype, _ in entries}))
    dtypes = {name: dtype for rank in told for name, dtype in rank.dtypes.items()}
    kinds = [(name, dtypes[name], parts.original.shapes[name]) for name in parts.original.names]
    owner = {name: rank for rank in reversed(range(len(told))) for name in told[rank].buffers}
    kinds += [(name, *told[rank].buffers[name]) for name, rank in sorted(owner.items())]
    flat, views = zeros_of(kinds, parts.device)
    for name, _, boxes in entries:
        put(views[name], boxes)
    for name, (buffer, _) in buffers.items():
        if owner.get(name) == parts.mesh.world.rank:
            views[name].copy_(buffer)
    comm.all_reduce(flat, parts.mesh.world)
    for rank in told:
        views.update({alias: views[name] for alias, name in rank.aliases.items()})
    return views


@torch.no_grad()
def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of the original model, on every rank, as the last step left them. Collective over all ranks.

    Returns {name: tensor} of the parameters that are trained, in the dtype that gradients are summed in, a
    tied parameter under its first name. They are after clipping, but before it under precision="bf16" or
    offload, where the clip factor (and that of several calls, or of a scaler) is applied to a copy. Zeros
    before the first step. Raises ValueError for a model that has not been through parallelize(), and while
    gradients wait for a step.
    """
    parts, entries = parts_of(model), list[_Part]()
    if not parts.window.is_empty:
        raise ValueError(
            f"full_gradients: those of {parts.window.calls} calls with update=False wait for the step, which "
            "sums them over the ranks: ask after it"
        )
    for reducer in parts.reducers.values():
        for bucket in reducer.buckets:
            flat = bucket.gradient()
            entries += [_Part(info.name, flat.dtype, []) for info in bucket.infos]
            for piece in bucket.owned if bucket.is_first else []:
                info, values = bucket.infos[piece.index], bucket.elements(piece, flat)
                holding = Holding(info, piece.start, piece.stop, values, None, True)
                entries.append(_Part(info.name, flat.dtype, holding.boxes(values, True)))
    dtypes = {
        name: dtype
        for rank in exchange(parts, {name: dtype for name, dtype, _ in entries})
        for name, dtype in rank.items()
    }
    shapes = parts.original.shapes
    kinds = [(name, dtypes[name], shapes[name]) for name in parts.original.names if name in dtypes]
    flat, views = zeros_of(kinds, parts.device)
    for name, _, boxes in entries:
        put(views[name], boxes)
    comm.all_reduce(flat, parts.mesh.world)
    return views


def _aliases(parts: Parallelized) -> dict[str, str]:
    """{further name: name} of the tied parameters of this rank."""
    name_of = {id(info.param): info.name for info in parts.infos}
    named = parts.model.named_parameters(remove_duplicate=False)
    return {alias: name_of[id(p)] for alias, p in named if name_of.get(id(p), alias) != alias}


def zeros_of(
    kinds: Iterable[tuple[K, torch.dtype, Sequence[int]]], device: torch.device
) -> tuple[torch.Tensor, dict[K, torch.Tensor]]:
    """One buffer of bytes, and views into it of these (name, dtype, shape)."""
    places, total = [], 0
    for name, dtype, shape in kinds:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        places.append((name, dtype, shape, total, total + nbytes))
        total += -(-nbytes // ALIGNMENT) * ALIGNMENT
    flat = torch.zeros(total, dtype=torch.uint8, device=device)
    return flat, {
        name: flat[start:stop].view(dtype).view(shape) for name, dtype, shape, start, stop in places
    }


def put(full: torch.Tensor, boxes: Iterable[Box]) -> None:
    for box in boxes:
        place_of(full, box).copy_(box.values)


def place_of(full: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a full tensor where the box lies: a view."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        full = full.narrow(dim, offset, size)
    return full
