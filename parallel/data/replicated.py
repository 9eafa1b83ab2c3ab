"""Replicated gradients (ZeRO 0, DistributedDataParallel): every rank holds all and gets the whole sum.

    2 ranks            rank 0                          rank 1
    values             a a a a b b b                   a a a a b b b      the same, in the model's parameters
    backward           g0 of its rows                  g1 of its rows     in the buffer; param.grad are views
    last microbatch    g0+g1  <---- all_reduce ---->   g0+g1              while backward goes on
    optimizer          updates all                     updates all        the same bits on every rank

Bytes sent per step and rank: 2(n-1)/n P. Memory: P for the buffer on every rank.

Instead of the all_reduce a bucket can be given another way to sum, which blocks: compression.py, or the naive
gather and broadcast of naive.py.

Where there is nothing to sum (one rank, nothing tied) a LocalBucket leaves the gradients where autograd puts
them, and needs no buffer.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from pycomm.parallel.data.bucket import Bucket, BufferedBucket, ParamInfo
from pycomm.parallel.data.compression import MakeCompression, make_compression
from pycomm.parallel.data.flat import Piece
from pycomm.parallel.data.naive import gather_and_broadcast
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.elsewhere import plain
from pycomm.parallel.ground.plan import CompressionName

__all__ = ["LocalBucket", "MakeSum", "ReplicatedBucket", "way_to_sum"]

# of a buffer, over a group, in place; the views are the gradients in it
Sum: TypeAlias = Callable[[torch.Tensor, comm.Group, Sequence[torch.Tensor]], None]
MakeSum: TypeAlias = Callable[[], Sum]  # for one bucket


def way_to_sum(
    compression: CompressionName | MakeCompression | None = None, naive: bool = False
) -> MakeSum | None:
    """The `make_sum` of ReplicatedBucket. compression: as make_compression takes it."""
    if compression:
        make = make_compression(compression)
        return lambda: make().reduce
    return (lambda: _sum_naively) if naive else None


def _sum_naively(flat: torch.Tensor, group: comm.Group, views: Sequence[torch.Tensor]) -> None:
    gather_and_broadcast(flat, group)


class ReplicatedBucket(BufferedBucket):
    """make_sum: makes this bucket's way to sum; None: all_reduce."""

    def __init__(
        self, infos: Sequence[ParamInfo], whole: bool = False, make_sum: MakeSum | None = None
    ) -> None:
        super().__init__(infos, whole)
        self.sum = make_sum() if make_sum else None

    def launch(self) -> None:
        self._clear_gaps()
        self._sum_overlaps(self.views)
        if self.sum is not None:
            self.sum(self.flat, self.group, self.views)
        else:
            self.work = comm.all_reduce(self.flat, self.group, async_op=True)

    def gradient(self) -> torch.Tensor:
        return self.flat

    def _norm_parts(self) -> list[tuple[Piece, torch.Tensor]]:
        """All ranks of the group hold everything, so parameters are dealt to them by number."""
        return [
            (piece, part)
            for piece, part in super()._norm_parts()
            if self.infos[piece.index].number % self.group.size == self.group.rank
        ]


class LocalBucket(Bucket):
    """Gradients that no other rank has a part of: nothing is summed."""

    def __init__(self, infos: Sequence[ParamInfo], whole: bool = False) -> None:
        super().__init__(infos, whole)
        self.kept: list[torch.Tensor | None] = [None] * len(infos)  # see put_aside()

    @staticmethod
    def fits(infos: Sequence[ParamInfo]) -> bool:
        return infos[0].group.size == 1 and not any(info.tied or info.overlap for info in infos)

    def zero_grad(self) -> None:
        for info in self.infos:
            info.param.grad = None

    def launch(self) -> None:
        pass

    def gradient(self) -> torch.Tensor:
        """A copy, with zeros for parameters that got no gradient."""
        grads = zip(self._grads(), self.infos, strict=True)
        whole = (torch.zeros_like(info.param) if grad is None else grad for grad, info in grads)
        return torch.cat([grad.reshape(-1) for grad in whole])

    def _grads(self) -> list[torch.Tensor | None]:
        return [None if info.param.grad is None else plain(info.param.grad) for info in self.infos]

    def scale(self, factor: torch.Tensor) -> None:
        grads = [grad for grad in self._grads() if grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor.to(self.device, self.dtype))

    def put_aside(self) -> None:
        self.kept = self._grads()
        self.zero_grad()

    def take_mean(self, ranks: int) -> None:
        for info, kept in zip(self.infos, self.kept, strict=True):
            grad = info.param.grad
            if grad is not None and ranks > 1:
                grad.div_(ranks)
            info.param.grad = kept if grad is None else grad if kept is None else kept.add_(grad)
        self.kept = [None] * len(self.infos)

    def clear(self) -> None:
        for grad in self._grads():
            if grad is not None:
                grad.zero_()

    def _norm_parts(self) -> list[tuple[Piece, torch.Tensor]]:
        grads = self._grads()
        parts = [(piece, grads[piece.index]) for piece in self.owned]
        return [(piece, grad) for piece, grad in parts if grad is not None]
