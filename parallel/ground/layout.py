"""Which part of a parameter of the original model a rank holds in tensor parallelism.

    weight of q_proj, 6 heads, tp = 4    heads   0    1    2    3    4    5
                                         rank    0 0 0 0   1 1 1 1   2    3     dim 0, ranges in rows
    k_proj, 2 kv heads, tp = 4           rank    0 and 1   2 and 3              held twice: the gradient is
                                                                                partial, rank 0 counts kv
                                                                                head 0, rank 2 kv head 1

ZeRO cuts further, by flat pieces of what a layout leaves; expert and pipeline parallelism leave out whole
parameters. The gradient norm, the checkpoint and the comparison with a single process are written against
layouts and know no strategy.
"""

from typing import NamedTuple, TypeAlias

import torch

__all__ = ["Layout", "Ranges", "whole"]

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # (start, stop) of each


class Layout(NamedTuple):
    """Part of one parameter.

    full_shape: shape in the original model.
    dim: the dimension that is cut; None: every rank holds all of it.
    ranges: along dim, in the order in which they lie in the local tensor.
    counted: those of `ranges` (or parts of them) that this rank stands for: over all ranks of tp each index
        is counted exactly once. With dim None, `((0, 1),)` on the rank that counts the parameter and `()` on
        the others.
    partial: the ranks of tp hold the same elements (dim None) with a different part of the gradient each,
    which must be summed over tp.
    overlap: some ranks hold the same ranges (kv heads fewer than ranks): their gradients must be summed where
    they overlap.
    """

    full_shape: tuple[int, ...]
    dim: int | None = None
    ranges: Ranges = ()
    counted: Ranges = ((0, 1),)
    partial: bool = False
    overlap: bool = False

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """The local part of a full tensor: a copy."""
        if self.dim is None:
            return full.clone()
        return torch.cat(
            [full.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim
        )

    def put(self, full: torch.Tensor, local: torch.Tensor) -> None:
        """Adds the local part into a full tensor, at its place."""
        if self.dim is None:
            full += local
            return
        offset = 0
        for start, stop in self.ranges:
            full.narrow(self.dim, start, stop - start).add_(local.narrow(self.dim, offset, stop - start))
            offset += stop - start

    def counted_mask(self, local: torch.Tensor) -> torch.Tensor | None:
        """1 for each element of `local` that this rank counts, else 0; None when it counts all of them."""
        if self.dim is None:
            return None if self.counted else torch.zeros_like(local)
        if self.counted == self.ranges:
            return None
        mask = local.new_zeros(self.full_shape)
        for start, stop in self.counted:
            mask.narrow(self.dim, start, stop - start).fill_(1)
        return self.take(mask)


def whole(tensor: torch.Tensor, group_rank: int = 0, partial: bool = False) -> Layout:
    """The layout of a parameter that every rank of tp holds; rank 0 counts it."""
    return Layout(tuple(tensor.shape), counted=((0, 1),) if group_rank == 0 else (), partial=partial)
