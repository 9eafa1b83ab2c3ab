"""What one call computes, as numbers: the key of tables and tuned configurations, and the arithmetic of rows.

A tensor a of shape (d0, ..., dim, ..., K) is handled as a matrix of K columns. The dimension that is cut
among the ranks sorts its rows:

    a  (d0, d1, | dim, | d3, K)   ->   rows (outer = d0*d1, piece = dim, inner = d3)

so rank r's piece is `outer` blocks of sizes[r]*inner neighbouring rows, `block` rows apart in the whole. With
outer == 1, the usual case, a piece is one run of rows and the pieces joined in order of rank are the whole;
otherwise rows are moved once (split_rows, join_rows).
"""

import math
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch

__all__ = ["OPS", "ACTIVATIONS", "Activation", "Op", "Problem", "cut", "join_rows", "split_rows"]

Op: TypeAlias = Literal["matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
Activation: TypeAlias = Literal["relu", "silu", "gelu", "gelu_tanh", "swiglu"]
OPS: tuple[Op, ...] = get_args(Op)
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


class Problem(NamedTuple):
    """One call of one of OPS on this rank."""

    op: Op
    m: int  # rows of this rank's product; all_gather_matmul: of the gathered tensor
    n: int  # columns of the result; with swiglu b has twice as many
    k: int  # inner dimension on this rank
    dtype: torch.dtype
    world_size: int
    rank: int
    activation: Activation | None = None
    bias: bool = False
    outer: int = 1
    inner: int = 1
    sizes: tuple[int, ...] = ()  # length of every rank's piece; () where nothing is cut
    shards: tuple[
        int, ...
    ] = ()  # length, on every rank, of b's dimension that is cut among the ranks; (): all as here

    def shared(self) -> "Problem":
        """This problem in numbers that are equal on all ranks, so that all decide alike: the longest shard
        for their own, no rank.
        """
        if not self.shards:
            return self._replace(rank=0) if self.rank else self
        longest = max(self.shards)
        if self.op == "all_gather_matmul":
            return self._replace(rank=0, n=longest // self.panels)
        return self._replace(rank=0, k=longest)

    @property
    def panels(self) -> int:
        """Products of n columns that the result is made of: 2 with swiglu, gate and up projection."""
        return 2 if self.activation == "swiglu" else 1

    @property
    def columns(self) -> int:
        """Of b and of the preactivation."""
        return self.panels * self.n

    @property
    def flops(self) -> int:
        """Of this rank's product."""
        return 2 * self.m * self.n * self.k * self.panels

    @property
    def piece_rows(self) -> list[int]:
        """Rows of every rank's piece."""
        return [self.outer * size * self.inner for size in self.sizes]


def cut(length: int, parts: int) -> list[tuple[int, int]]:
    """The bounds (start, stop) of `parts` pieces of range(length), of which some may be empty."""
    bounds = [length * part // parts for part in range(parts + 1)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def split_rows(problem: Problem, whole: torch.Tensor) -> torch.Tensor:
    """The rows of a whole matrix sorted by rank: piece after piece. A view where outer == 1."""
    if problem.outer == 1:
        return whole
    columns = whole.shape[1]
    blocks = whole.reshape(problem.outer, sum(problem.sizes), problem.inner * columns)
    return torch.cat(
        [
            block.reshape(rows, columns)
            for block, rows in zip(blocks.split(problem.sizes, 1), problem.piece_rows, strict=True)
        ]
    )


def join_rows(problem: Problem, pieces: torch.Tensor) -> torch.Tensor:
    """The inverse of split_rows."""
    if problem.outer == 1:
        return pieces
    columns, parts = pieces.shape[1], pieces.split(problem.piece_rows)
    blocks = [
        part.reshape(problem.outer, size, problem.inner * columns)
        for part, size in zip(parts, problem.sizes, strict=True)
    ]
    return torch.cat(blocks, 1).view(math.prod((problem.outer, sum(problem.sizes), problem.inner)), columns)
