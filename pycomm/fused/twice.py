"""Gradients that are to be differentiated again (create_graph=True), as forces and gradient penalties are.

    matmul, matmul_all_reduce       the gradient as torch's own products, which autograd records
    the two that move rows, and     refused: their backward passes overlap products and collectives, of which
    all with an activation          autograd would see nothing and take the gradient for a constant

The gradient of matmul_all_reduce's result is equal on all ranks, and each multiplies it with its own part of
b. So the second derivative sums what the ranks have for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    from pycomm.fused.problem import Problem
    from pycomm.fused.ranks import Ranks

    class _OfRanks(FunctionCtx):
        ranks: Ranks


__all__ = ["gradients", "refuse"]


class _ToEach(torch.autograd.Function):
    """What all ranks have, for work of each rank's own."""

    @staticmethod
    def forward(ctx: _OfRanks, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _OfRanks, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Sum.apply(grad, ctx.ranks), None


class _Sum(torch.autograd.Function):
    """The converse: the sum of what each rank has, on all."""

    @staticmethod
    def forward(ctx: _OfRanks, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        x = x.clone(memory_format=torch.contiguous_format)
        ranks.all_reduce(x, async_op=False)
        return x

    @staticmethod
    def backward(ctx: _OfRanks, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _ToEach.apply(grad, ctx.ranks), None


def gradients(
    problem: Problem, ranks: Ranks, a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a, b and the bias, for matmul and matmul_all_reduce."""
    if problem.activation is not None:
        refuse(problem, ranks)
    each = _ToEach.apply(grad, ranks) if problem.op == "matmul_all_reduce" and ranks.size > 1 else grad
    return each @ b.t(), a.t() @ each, grad.sum(0)


def refuse(problem: Problem, ranks: Ranks) -> None:
    """Raises where a gradient is made that is to be differentiated again."""
    if not torch.is_grad_enabled():
        return
    options = "" if problem.activation is None else f"(activation={problem.activation!r})"
    raise ValueError(
        f"{ranks} pycomm.fused.{problem.op}{options}: its gradient is to be differentiated again "
        "(create_graph=True), and it has no second derivative. Write it as a product of torch, a collective "
        "and an activation, each with its gradient; in pycomm.parallel, use a plan without megatron_sp"
    )
