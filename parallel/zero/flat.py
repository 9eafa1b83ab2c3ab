"""ZeRO 1: the optimizer's state is sharded, gradients and values are whole on every rank.

    2 ranks            rank 0                             rank 1
    values             [a a a a|b b b b]                  [a a a a|b b b b]   one registered buffer; the
                                                                              parameters are its views
    master, moments    [A A A A]                                  [B B B B]   of the rank's own chunk
    backward           [g0     |g0     ]                  [g1     |g1     ]   one buffer; param.grad are views
    last microbatch    [g0+g1  |.......]  reduce_scatter  [.......|g0+g1  ]   in place, during backward
    optimizer          updates a                                  updates b
    after it           [a a a a|b b b b]    all_gather    [a a a a|b b b b]

Bytes sent per step and rank: (n-1)/n P for the gradients and as much for the values, together what the
all_reduce of replicated gradients sends. ZeRO 2 takes the values from here and the gradients from
streamed.py.
"""

import torch

from pycomm.parallel.data.bucket import BufferedBucket
from pycomm.parallel.ground import comm
from pycomm.parallel.zero.shards import Originals, Shards

__all__ = ["FlatBucket", "FlatShards"]


class FlatBucket(BufferedBucket):
    """Whole gradients in a buffer, of whose sum each rank gets its own chunk."""

    is_sharded = True

    def launch(self) -> None:
        self._clear_gaps()
        self._sum_overlaps(self.views)
        self.work = comm.reduce_scatter(self.own(self.flat), self.flat, self.group, async_op=True)

    def launch_across(self) -> None:
        if self.replicas.size > 1:
            self.wait()
            self.work = comm.all_reduce(self.gradient(), self.replicas, async_op=True)

    def gradient(self) -> torch.Tensor:
        return self.own(self.flat)

    def take_mean(self, ranks: int) -> None:
        """The whole gradient is in param.grad, where the user's own loop may read it."""
        comm.all_gather(self.flat, self.gradient(), self.group)
        super().take_mean(ranks)


class FlatShards(Shards):
    """Values in one flat buffer, which is gathered after every step of the optimizer."""

    values_here: torch.Tensor

    def _keep_values(self, originals: Originals, on_host: bool) -> torch.Tensor:
        bucket = self.bucket
        self.work: comm.Work | None = None  # the all_gather under way
        self.values = self._fill(
            comm.empty(bucket.spec.numel, bucket.dtype, bucket.group, bucket.device), originals
        )
        for info, view in zip(bucket.infos, bucket.spec.views(self.values), strict=True):
            info.param.data = view
        return bucket.own(self.values)

    def publish(self) -> None:
        self._copy_master()
        self.work = comm.all_gather(self.values, self.values_here, self.bucket.group, async_op=True)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None
