"""The part of an output of one process that a rank has of it under a plan.

    whole                  (B, T, h)         what one process computes
    rows                   (b, T, h)         dp, ep, microbatches
    positions              (B, t, h)         ring, ulysses, and over tp under megatron_sp
    columns                (B, T, h/n)       a layer that tensor parallelism has cut: the layout of its weight

How an output is cut is seen from its shape: of all parts that this rank may have, it is the one with the
shape of what was found. Where none has it (the inside of an attention with fewer heads) there is nothing to
compare; the module around it will show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm.parallel.ground import comm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pycomm.parallel.ground.layout import Layout
    from pycomm.parallel.sequence.sequence_split import SequenceSplit

__all__ = ["Rows", "part_like"]


class Rows(NamedTuple):
    """Rows of a chunk of the batch that a forward runs."""

    chunk: int  # number of the chunk: of the run of one process that had these rows
    total: int  # rows of that chunk
    start: int
    size: int


def part_like(
    whole: torch.Tensor, found: torch.Tensor, rows: Rows, split: SequenceSplit | None, layout: Layout | None
) -> torch.Tensor | None:
    """The part of `whole` that `found` stands for, or None.

    layout: of the weight of the module, where it has one.
    """
    for some in _of_rows(whole, rows):
        for piece in _of_positions(some, split):
            for part in _of_columns(piece, layout):
                if part.shape == found.shape:
                    return part
    return None


def _of_rows(whole: torch.Tensor, rows: Rows) -> Iterator[torch.Tensor]:
    """Tensors without rows are left out where this rank has not all of them: they may be of other rows."""
    if rows.size == rows.total:
        yield whole
        return
    for dim in range(min(2, whole.dim())):
        each, rest = divmod(whole.shape[dim], rows.total)  # several lines of a flattened tensor for each row
        if each and not rest and (dim == 0 or each == 1):
            yield whole.narrow(dim, rows.start * each, rows.size * each)


def _of_positions(whole: torch.Tensor, split: SequenceSplit | None) -> Iterator[torch.Tensor]:
    yield whole
    if split is None or not split.length:
        return
    for dim in (1, 2):
        if whole.dim() > dim and whole.shape[dim] == split.length:
            piece = split.cut(whole, dim)
            yield piece
            if split.megatron:
                yield comm.split_dim(piece, dim, split.sizes, split.tp)


def _of_columns(whole: torch.Tensor, layout: Layout | None) -> Iterator[torch.Tensor]:
    yield whole
    if layout is not None and layout.dim is not None and whole.dim():
        if layout.full_shape[layout.dim] == whole.shape[-1]:
            yield torch.cat([whole[..., start:stop] for start, stop in layout.ranges], -1)
