"""Which indices of a dimension that is cut a rank holds: of a parameter, and of an activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.layout import Layout
from pycomm.parallel.tensor.heads import spans

if TYPE_CHECKING:
    from pycomm.parallel.ground.comm import Group

__all__ = ["Pieces", "Slices", "cut", "even_slices", "part_slices"]


Take = Callable[[torch.Tensor, Layout], nn.Parameter]  # gives the local part of a parameter


class Pieces(NamedTuple):
    """The ranks' pieces of an activation: sizes[r] long along `dim` on rank r."""

    dim: int
    sizes: list[int]


class Slices(NamedTuple):
    """The indices of the cut dimension that a rank holds; fields as in Layout."""

    ranges: tuple[tuple[int, int], ...]
    counted: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]  # how many every rank holds
    overlap: bool = False

    def layout(self, tensor: torch.Tensor, dim: int) -> Layout:
        return Layout(tuple(tensor.shape), dim, self.ranges, self.counted, overlap=self.overlap)


def even_slices(length: int, group: Group) -> Slices:
    lengths = comm.even_sizes(length, group.size)
    span = spans(lengths)[group.rank]
    return Slices((span,), (span,), tuple(lengths))


def part_slices(slices: Slices, width: int, full: int) -> Slices:
    """Slices of a layer whose rows are `full` // `width` blocks that are cut alike, as `slices` say."""
    blocks = full // width
    ranges = tuple(
        (b * width + start, b * width + stop) for b in range(blocks) for start, stop in slices.ranges
    )
    return Slices(ranges, ranges, tuple(blocks * length for length in slices.lengths))


def cut(parameter: torch.Tensor, layout: Layout) -> nn.Parameter:
    """The local part of a parameter, as a parameter of its own; the parameter itself when it is not cut."""
    if layout.dim is None:
        return cast(nn.Parameter, parameter)
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"tensor parallelism: a parameter of shape {layout.full_shape} has a gradient hook, which would "
            "be given a part of its gradient. Name its layer in rules as 'replicate', or take the hook away"
        )
    return nn.Parameter(layout.take(parameter.detach()), requires_grad=parameter.requires_grad)
