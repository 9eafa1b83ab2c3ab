"""Collectives inside a model: each with the collective that its gradient needs. Shoeybi et al. 2019 (f and
g), Korthikanti et al. 2022 (the sequence pair).

    function         forward                backward         used where
    copy_to          nothing                all_reduce       entry of a column-parallel sublayer
    reduce_from      all_reduce             nothing          exit of a row-parallel sublayer
    gather_from      all_gather along dim   own piece        every rank goes on with equal values and gradient
    scatter_to       own piece along dim    all_gather       the converse: the same values came in everywhere
    gather_sum       all_gather along dim   reduce_scatter   every rank uses the whole for work of its own
                                                             (Megatron SP entry)
    reduce_scatter   reduce_scatter         all_gather       its converse (Megatron SP exit)
    all_to_all       rows by rank           rows back        Ulysses, experts

In gather_from and gather_sum the forward is the same; they differ in what the ranks do with the result. Which
is meant cannot be seen from the tensor, and the wrong one gives gradients that are wrong by a factor, so each
has its name. tensor/products.py has them joined with the matrix product before or after them.

[Note: twice] The backward of each is the forward of another in this table, whose backward is again the
forward of the first. So where the gradient itself is differentiated (create_graph=True: forces of a
potential, a gradient penalty) a backward is written as that other function, which autograd records, and
derivatives of any order are right. The ordinary backward runs without grad mode and records nothing. A
function whose backward is not written so calls `once`: it raises, instead of giving a constant.

`sizes` is the list of lengths along `dim`, one per rank of the group, equal on all ranks; they may differ
from each other. All functions return their input for a group of one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar

import torch
from torch.autograd.function import FunctionCtx

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.comm import Group

__all__ = [
    "all_to_all",
    "copy_to",
    "gather_from",
    "gather_sum",
    "in_graph",
    "once",
    "reduce_from",
    "reduce_scatter",
    "scatter_to",
]


Along: TypeAlias = Callable[[torch.Tensor, int, Sequence[int], Group], torch.Tensor]  # dim, sizes
ValueT = TypeVar("ValueT")
CtxT = TypeVar("CtxT")
GradsP = ParamSpec("GradsP")


if TYPE_CHECKING:  # what a forward keeps for its backward

    class _OfGroup(FunctionCtx):
        group: Group

    class _OfDim(FunctionCtx):
        rest: tuple[int, list[int], Group, Along, Along]

    class _OfSizes(FunctionCtx):
        rest: tuple[list[int], list[int], Group]


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _OfGroup, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _OfGroup, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if torch.is_grad_enabled():  # [Note: twice], here and below
            return _ReduceFrom.apply(grad, ctx.group), None
        grad = grad.clone(
            memory_format=torch.contiguous_format
        )  # autograd may hold the same tensor for another branch
        comm.all_reduce(grad, ctx.group)
        return grad, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _OfGroup, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        x = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(x, group)
        return x

    @staticmethod
    def backward(ctx: _OfGroup, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _CopyTo.apply(grad, ctx.group) if torch.is_grad_enabled() else grad, None


def _with_own_memory(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A result that the model may write into: autograd forbids that for views made in a Function, and what is
    a part of x would be written to x.
    """
    if result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        return result.clone()
    return result.data if result._is_view() else result


class _Dim(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _OfDim,
        x: torch.Tensor,
        dim: int,
        sizes: list[int],
        group: Group,
        forward: Along,
        backward: Along,
    ) -> torch.Tensor:
        ctx.rest = dim, sizes, group, forward, backward
        return _with_own_memory(forward(x, dim, sizes, group).contiguous(), x)

    @staticmethod
    def backward(ctx: _OfDim, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dim, sizes, group, forward, backward = ctx.rest
        if torch.is_grad_enabled():
            grad = _Dim.apply(grad, dim, sizes, group, backward, forward)
        else:
            grad = backward(grad, dim, sizes, group).contiguous()
        return grad, None, None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _OfSizes, x: torch.Tensor, input_sizes: list[int], output_sizes: list[int], group: Group
    ) -> torch.Tensor:
        ctx.rest = input_sizes, output_sizes, group
        return comm.all_to_all(x, input_sizes, output_sizes, group)

    @staticmethod
    def backward(ctx: _OfSizes, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        input_sizes, output_sizes, group = ctx.rest
        move = _AllToAll.apply if torch.is_grad_enabled() else comm.all_to_all
        return move(grad, output_sizes, input_sizes, group), None, None, None


def once(
    what: str, instead: str
) -> Callable[[Callable[Concatenate[CtxT, GradsP], ValueT]], Callable[Concatenate[CtxT, GradsP], ValueT]]:
    """For the backward of a torch.autograd.Function that has no second derivative: a ValueError where one is
    asked for (create_graph=True), before any rank waits for another.

    what: has no second derivative. instead: what to do, the end of the sentence.
    """

    def mark(
        backward: Callable[Concatenate[CtxT, GradsP], ValueT],
    ) -> Callable[Concatenate[CtxT, GradsP], ValueT]:
        @functools.wraps(backward)
        def checked(ctx: CtxT, *grads: GradsP.args, **none: GradsP.kwargs) -> ValueT:
            if torch.is_grad_enabled():
                raise ValueError(
                    f"a gradient is to be differentiated again (create_graph=True), and {what} has no second "
                    f"derivative: {instead}"
                )
            return backward(ctx, *grads, **none)

        return checked

    return mark


def in_graph(value: ValueT) -> ValueT:
    """The tensor that a loss may be computed from, of one that stands for it as `cut` (tensor/cut_logits.py):
    where a hook for its gradient belongs. Anything else is itself.
    """
    return getattr(value, "cut", value) if isinstance(value, torch.Tensor) else value


def copy_to(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x if group.size == 1 else _CopyTo.apply(x, group)


def reduce_from(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x if group.size == 1 else _ReduceFrom.apply(x, group)


def _along(forward: Along, backward: Along) -> Along:
    def function(x: torch.Tensor, dim: int, sizes: Sequence[int], group: Group) -> torch.Tensor:
        if group.size == 1:
            return x
        return _Dim.apply(x, dim % x.dim(), list(sizes), group, forward, backward)

    return function


gather_from = _along(comm.all_gather_dim, comm.split_dim)
scatter_to = _along(comm.split_dim, comm.all_gather_dim)
gather_sum = _along(comm.all_gather_dim, comm.reduce_scatter_dim)
reduce_scatter = _along(comm.reduce_scatter_dim, comm.all_gather_dim)


def all_to_all(
    x: torch.Tensor, input_sizes: Sequence[int], output_sizes: Sequence[int], group: Group
) -> torch.Tensor:
    """Rows (dim 0): input_sizes[r] of x go to rank r, output_sizes[r] come from it."""
    return x if group.size == 1 else _AllToAll.apply(x, list(input_sizes), list(output_sizes), group)
