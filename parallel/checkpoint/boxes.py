"""Rectangular pieces of tensors: what of a parameter of the original model a rank holds, as
torch.distributed.checkpoint wants it.

ZeRO cuts a flattened local parameter anywhere, tensor parallelism cuts the original one along a dimension;
both together:

    local tensor (4, 5),       full tensor (4, 10): tp cut dim 1 in columns 0-4
    elements 3 to 17           and 5-9, and this rank has the second part
      . . . A A                  . . . . .  . . . A A
      B B B B B                  . . . . .  B B B B B
      B B B B B                  . . . . .  B B B B B
      C C . . .                  . . . . .  C C . . .

A flat range of a row-major tensor of d dimensions is at most 2d - 1 boxes: the rest of the first row, whole
rows, the start of the last one, and the same again inside the first and the last. Each is a run of memory, so
a box of values is a view. The ranges of a layout cut it further. Cost: arithmetic on a few integers per
piece; no value is copied.

What can go wrong: a view of a piece that is not contiguous, which torch refuses; only whole parameters may
have other strides.

[Note: planners] The default planners of torch.distributed.checkpoint make items from any object that has
__create_write_items__ and __create_chunk_list__, but look values up in tensors only; Saving and Loading add
that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from pycomm.parallel.ground.layout import Layout

__all__ = ["Box", "Boxes", "Loading", "Saving", "State", "boxes_of", "cover"]

Ints: TypeAlias = tuple[int, ...]
Range: TypeAlias = tuple[int, int]  # begin, end


def cover(shape: Ints, start: int, stop: int) -> list[tuple[Ints, Ints]]:
    """[(offsets, sizes)] of the boxes that make up elements start to stop of a row-major tensor, in the order
    of their elements.
    """
    if not shape:
        return [((), ())] if start < stop else []
    row = math.prod(shape[1:])
    if start >= stop or row == 0:
        return []
    low, high = -(-start // row), stop // row  # whole rows
    if low > high:
        return [
            ((high, *offsets), (1, *sizes))
            for offsets, sizes in cover(shape[1:], start - high * row, stop - high * row)
        ]
    found = []
    if low * row > start:
        found += [((low - 1, *o), (1, *s)) for o, s in cover(shape[1:], start - (low - 1) * row, row)]
    if low < high:
        found.append(((low, *(0 for _ in shape[1:])), (high - low, *shape[1:])))
    if high * row < stop:
        found += [((high, *o), (1, *s)) for o, s in cover(shape[1:], 0, stop - high * row)]
    return found


class Box(NamedTuple):
    """A part of a full tensor. values: a view, of shape `sizes`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: torch.Tensor


def boxes_of(
    layout: Layout,
    local_shape: Sequence[int],
    start: int,
    stop: int,
    values: torch.Tensor,
    counted: bool = False,
) -> list[Box]:
    """The Boxes, in the full tensor, of elements start to stop of a flattened local tensor.

    layout: Layout of the local tensor, of shape `local_shape`. values: these elements; of shape `local_shape`
    when they are all of it, with any strides, else contiguous. counted: only what this rank counts, see
    Layout. A full tensor without elements is one empty box.
    """
    if counted and layout.dim is None and not layout.counted and not layout.partial:
        return []
    if math.prod(layout.full_shape) == 0:
        return [
            Box((0,) * len(layout.full_shape), tuple(layout.full_shape), values.new_empty(layout.full_shape))
        ]
    pieces: list[Box] = []  # of the local tensor
    if (start, stop) == (0, math.prod(local_shape)):
        if stop:
            pieces.append(Box((0,) * len(local_shape), tuple(local_shape), values.view(local_shape)))
    else:
        done = 0
        for offsets, sizes in cover(tuple(local_shape), start, stop):
            count = math.prod(sizes)
            pieces.append(Box(offsets, sizes, values.view(-1)[done : done + count].view(sizes)))
            done += count
    if layout.dim is None:
        return pieces
    return [
        box
        for piece in pieces
        for box in _through_ranges(layout.dim, layout.ranges, piece, layout.counted if counted else None)
    ]


def _through_ranges(
    dim: int, ranges: Sequence[Range], piece: Box, counted: Sequence[Range] | None
) -> list[Box]:
    """The boxes of the full tensor for one box of the local one. counted: ranges along dim to keep, None:
    all.
    """
    offsets, sizes, values = piece
    found, place = [], 0
    for first, end in ranges:
        shift = first - place  # from an index of the local tensor to one of the full tensor
        low, high = max(offsets[dim] + shift, first), min(offsets[dim] + sizes[dim] + shift, end)
        place += end - first
        for keep_first, keep_end in [(low, high)] if counted is None else counted:
            begin, stop = max(low, keep_first), min(high, keep_end)
            if begin < stop:
                part = values.narrow(dim, begin - shift - offsets[dim], stop - begin)
                found.append(Box((*offsets[:dim], begin, *offsets[dim + 1 :]), tuple(part.shape), part))
    return found


class Boxes:
    """The boxes of one tensor of the checkpoint that this rank writes or reads, as
    torch.distributed.checkpoint's planners ask for them.
    """

    def __init__(self, full_shape: Sequence[int], dtype: torch.dtype) -> None:
        self.full_shape, self.dtype = torch.Size(full_shape), dtype
        self.boxes: list[Box] = []

    def __create_write_items__(self, fqn: str, _: Boxes) -> list[WriteItem]:
        data = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=data, size=self.full_shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        # When reading, index.index is the place in the chunk list, and two boxes may begin alike (a tied
        # weight that is here twice). When writing they cannot, and index.index counts the chunks of all
        # ranks.
        offsets = tuple(index.offset or ())
        if (
            index.index is not None
            and index.index < len(self.boxes)
            and self.boxes[index.index].offsets == offsets
        ):
            return self.boxes[index.index].values
        return next(box.values for box in self.boxes if box.offsets == offsets)


State: TypeAlias = dict[str, object]  # key in a checkpoint -> Boxes, a tensor, or an object to pickle


class Saving(dcp.DefaultSavePlanner):
    """For a flat dict of Boxes, tensors and objects to pickle. What several ranks hold alike is written by
    one of them.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> object:
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, Boxes) else value


class Loading(dcp.DefaultLoadPlanner):
    """Its converse. Boxes and tensors are filled in place, objects replaced."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: State, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = (
            state_dict,
            metadata,
            is_coordinator,
        )  # the default drops unknown objects

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, Boxes) else value
