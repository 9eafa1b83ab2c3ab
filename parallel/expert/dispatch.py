"""Tokens to the ranks that hold their experts, and back: Lepikhin et al. 2020 (GShard), without its limit of
capacity.

Each token (a row of x) is copied once for each of its top_k experts; a copy is called an assignment. Rank r
of the group holds a run of consecutive experts. Two ranks, experts 0 1 | 2, top_k = 1, the experts chosen by
the tokens a..d of rank 0 and e..g of rank 1:

                    rank 0                        rank 1
    tokens          a>2  b>0  c>1  d>0            e>0  f>2  g>0
    order           b0 d0 c1 | a2                 e0 g0 | f2            (1)
    all_to_all      b0 d0 c1 e0 g0                a2 f2                 (2)
    regroup         b0 d0 e0 g0 c1                a2 f2                 (3)
    experts, then all three steps back, and for each token the sum over its assignments, weighted, in the
    order of its choices.

(1) A stable sort by expert, so that consecutive rows go to one rank. (2) By source rank, each part sorted by
expert. (3) By expert, then source rank, then position: where the ranks hold consecutive slices of a batch,
this is the order of the single process.

Cost per forward, and the same per backward without the counts: 8 bytes per expert that others hold (counts),
and twice (dispatch, combine) dim * itemsize bytes per assignment to an expert of another rank. The sizes of
the parts must be known to the host: one synchronisation with the device per layer. Autograd's own gradient of
x[index] adds rows atomically on CUDA; here the rows are only permuted, in both directions, and summed in a
fixed order, so reruns give the same bits.

What can go wrong: a rank that leaves out the backward pass (its tokens were none, say) leaves the others
waiting in theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch.autograd.function import FunctionCtx

from pycomm.parallel.ground import comm, differentiable

__all__ = ["ReadCounts", "Routes", "combine", "dispatch", "make_routes", "read_counts"]

ReadCounts: TypeAlias = Callable[[torch.Tensor, int], list[int]]

if TYPE_CHECKING:

    class _OfSpread(FunctionCtx):
        saved_tensors: tuple[torch.Tensor]
        top_k: int

    class _OfPermute(FunctionCtx):
        saved_tensors: tuple[torch.Tensor]


class Routes(NamedTuple):
    """Where the assignments of a batch go. n assignments here (tokens * top_k, token-major), m received."""

    top_k: int
    order: torch.Tensor  # (n,) int64: sorted row -> assignment
    inverse: torch.Tensor  # (n,) int64: assignment -> sorted row
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    regroup: torch.Tensor  # (m,) int64: row by (expert, source, position) -> row as it arrived
    ungroup: torch.Tensor  # (m,) int64: its inverse
    per_expert: list[int]  # rows of each expert of this rank


def inverse_of(permutation: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(permutation).scatter_(
        0, permutation, torch.arange(permutation.numel(), device=permutation.device)
    )


def read_counts(counts: torch.Tensor, assignments: int) -> list[int]:
    """Numbers of rows, on the host. assignments: those of this rank's tokens, which the planner
    deals evenly where tensors have no values.
    """
    return counts.tolist()


def make_routes(
    chosen: torch.Tensor, held: Sequence[int], group: comm.Group, read: ReadCounts = read_counts
) -> tuple[Routes, torch.Tensor]:
    """Routes for chosen (tokens, top_k) int64, the experts of each token, where held[r] is how many experts
    rank r of the group has.

    Returns (routes, counts): counts (experts,) int64 are the assignments of this rank's tokens. Collective on
    the group.
    """
    flat = chosen.flatten()
    counts = flat.new_zeros(sum(held)).scatter_add_(0, flat, torch.ones_like(flat))
    own = held[group.rank]
    arrived = comm.all_to_all(counts, held, [own] * group.size, group)  # by source, then by own expert
    both = read(torch.cat([counts, arrived]), flat.numel())  # one synchronisation for both
    sent: list[int] = []
    received: list[int] = []
    at = 0
    for experts in held:
        sent.append(sum(both[at : at + experts]))
        at += experts
    for _ in range(group.size):
        received.append(sum(both[at : at + own]))
        at += own
    arrivals = both[sum(held) :]
    per_expert = [sum(arrivals[expert::own]) for expert in range(own)]
    order = torch.argsort(flat, stable=True)
    experts_of_parts = torch.arange(own, device=flat.device).repeat(group.size)
    regroup = torch.argsort(
        experts_of_parts.repeat_interleave(arrived, output_size=sum(received)), stable=True
    )
    return Routes(
        chosen.shape[1], order, inverse_of(order), sent, received, regroup, inverse_of(regroup), per_expert
    ), counts


class _Spread(torch.autograd.Function):
    """x (tokens, dim) -> its assignments, sorted: (tokens * top_k, dim)."""

    @staticmethod
    def forward(
        ctx: _OfSpread, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, top_k: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: _OfSpread, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        tokens = inverse.numel() // ctx.top_k
        parts = grad.index_select(0, inverse).view(tokens, ctx.top_k, grad.shape[1])
        total = parts[:, 0].clone()
        for choice in range(1, ctx.top_k):
            total += parts[:, choice]
        return total, None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _OfPermute, x: torch.Tensor, permutation: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, permutation)

    @staticmethod
    def backward(ctx: _OfPermute, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def dispatch(x: torch.Tensor, routes: Routes, group: comm.Group) -> torch.Tensor:
    """x (tokens, dim) -> the rows for this rank's experts (sum(routes.per_expert), dim), by expert, source
    rank, position. Collective.
    """
    rows = _Spread.apply(x, routes.order, routes.inverse, routes.top_k)
    rows = differentiable.all_to_all(rows, routes.sent, routes.received, group)
    return _Permute.apply(rows, routes.regroup, routes.ungroup)


def combine(rows: torch.Tensor, weights: torch.Tensor, routes: Routes, group: comm.Group) -> torch.Tensor:
    """The converse of dispatch: rows (as dispatch gave them, after the experts), weights (tokens, top_k) ->
    (tokens, dim), summed in the wider dtype of the two and returned in that of rows. Collective.
    """
    rows = _Permute.apply(rows, routes.ungroup, routes.regroup)
    rows = differentiable.all_to_all(rows, routes.received, routes.sent, group)
    rows = _Permute.apply(rows, routes.inverse, routes.order).view(*weights.shape, rows.shape[1])
    weights = weights.unsqueeze(-1)
    out = rows[:, 0] * weights[:, 0]
    for choice in range(1, routes.top_k):
        out = out + rows[:, choice] * weights[:, choice]
    return out.to(rows.dtype)
