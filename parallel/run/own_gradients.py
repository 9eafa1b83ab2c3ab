"""The gradients of a user's own loop (own_loop.py), between its backwards and its opt.step().

    .grad after a backward    dp, zero=1       the mean, whole and equal on all ranks
                              zero 2 and 3     a stand-in: the mean lies in the ranks' chunks
                              tp, ep           a part, which refuses to be read (ground/elsewhere.py)

    shards of the optimizer, where these are not the model's parameters: a stand-in

What the user does to .grad holds: None drops a gradient, a change in place changes it, another tensor takes
its place. What reads a part, as clipping by its norm would, raises ValueError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from pycomm.parallel.data.bucket import BufferedBucket
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.elsewhere import Elsewhere, StandIn, guarded, plain, stand_in
from pycomm.parallel.ground.same_batch import differ, mark_of, powers
from pycomm.parallel.run.updates import clip_factor
from pycomm.parallel.zero.streamed import StreamedBucket

if TYPE_CHECKING:
    from pycomm.parallel.data.bucket import Bucket, ParamInfo
    from pycomm.parallel.parts import Parallelized

__all__ = ["OwnGradients"]


class OwnGradients:
    """Of one parallelized model."""

    def __init__(self, parts: Parallelized) -> None:
        self.parts, self.ranks = parts, parts.mesh.data.size
        self.mark = 0  # of tensors that the user has set .grad to
        self.is_guarded = parts.plan.tp * parts.plan.ep > 1

    def put_aside(self) -> None:
        """Before a backward."""
        self._take_in()
        for bucket in self._buckets():
            bucket.put_aside()

    def take_mean(self) -> None:
        """After one: over the data ranks."""
        for bucket in self._buckets():
            bucket.take_mean(self.ranks)
        self.show()

    def clear(self, set_to_none: bool) -> None:
        self.mark = 0
        if set_to_none:
            for reducer in self.parts.reducers.values():
                reducer.zero_grad()
        else:
            for bucket in self._buckets():
                bucket.clear()
        self.unshow()

    def _buckets(self) -> Iterator[Bucket]:
        for reducer in self.parts.reducers.values():
            yield from reducer.buckets

    def show(self) -> None:
        """Puts in .grad what the user may see there."""
        for bucket in self._buckets():
            streamed = isinstance(bucket, StreamedBucket)
            for info in bucket.infos if streamed or self.is_guarded else ():
                if streamed:
                    info.param.grad = stand_in(info.param)
                elif info.param.grad is not None:
                    info.param.grad = guarded(info.param.grad)
        for shards in self.parts.all_shards:
            for shard in shards.owned:
                if shard.param is not shard.info.param and shards.is_updated:
                    shard.param.grad = stand_in(shard.param)

    def unshow(self) -> None:
        """The opposite, for the optimizer. A stand-in stays, as it says that the gradient is wanted."""
        for bucket in self._buckets():
            for info in bucket.infos:
                if info.param.grad is not None and not isinstance(info.param.grad, StandIn):
                    info.param.grad = plain(info.param.grad)
        for shards in self.parts.all_shards:
            for shard in shards.owned:
                if isinstance(shard.param.grad, Elsewhere):
                    shard.param.grad = None

    def used(self) -> torch.Tensor:
        """1 for each parameter of the model that has a gradient from this rank, in the order of the names."""
        self._take_in()
        names = {
            info.name
            for reducer in self.parts.reducers.values()
            for bucket in reducer.buckets
            for info in bucket.infos
            if info.param.grad is not None and id(info.param) in reducer.used
        }
        flags = [name in names for name in self.parts.original.names]
        return torch.tensor(flags, dtype=torch.float64, device=self.parts.device)

    def _take_in(self) -> None:
        """What the user has set .grad to counts from now on. Raises ValueError where it cannot."""
        for reducer in self.parts.reducers.values():
            for bucket in reducer.buckets:
                held = {id(info.param) for info in bucket.infos if info.param.grad is not None}
                if isinstance(bucket, StreamedBucket):
                    _check_stand_ins(bucket.infos)
                    bucket.kept_sum()
                elif isinstance(bucket, BufferedBucket):
                    new = bucket.restore()
                    grads = [plain(info.param.grad) for info in new if info.param.grad is not None]
                    self.mark = (31 * self.mark + mark_of(grads)) % (1 << 20) if grads else self.mark
                    reducer.used |= {id(info.param) for info in new}
                elif held - reducer.used:
                    # Of experts, whose gradients other data ranks have a part of: no two ranks agree.
                    self.mark = self.mark if self.ranks == 1 else 1 + self.parts.mesh.world.rank
                    reducer.used |= held

    def numbers(self) -> torch.Tensor:
        """Of what was set since the last look(), to be summed over all ranks. used() comes before."""
        return torch.tensor(powers(self.mark), dtype=torch.float64, device=self.parts.device)

    def look(self, total: float, squares: float) -> None:
        """Raises ValueError, on every rank, where the ranks have set .grad to different tensors. The sums of
        numbers().
        """
        self.mark = 0
        world = self.parts.mesh.world
        if differ(total, squares, world.size):
            raise ValueError(
                f"[rank {world.rank}] some .grad was set to another tensor, and the ranks differ in it, as "
                "gradients of torch.autograd.grad do, which are each rank's own. Use loss.backward(), or "
                "average them over the ranks first; no parameter was changed"
            )

    def clip(self, max_norm: float) -> torch.Tensor:
        """Returns the norm before. Collective over all ranks."""
        self._take_in()
        squares = torch.zeros(1, dtype=torch.float64, device=self.parts.device)
        for bucket in self._buckets():
            squares += bucket.norm_squared()
        numbers = torch.cat([squares, self.numbers()])
        comm.all_reduce(numbers, self.parts.mesh.world)
        squared, *marks = numbers.tolist()
        self.look(*marks)
        norm = torch.tensor(squared, dtype=torch.float64, device=self.parts.device).sqrt()
        factor = clip_factor(norm, max_norm)
        if factor is not None:
            for bucket in self._buckets():
                bucket.scale(factor)
        return norm


def _check_stand_ins(infos: Sequence[ParamInfo]) -> None:
    for info in infos:
        if info.param.grad is not None and not isinstance(info.param.grad, StandIn):
            raise ValueError(
                f"opt.step: the .grad of {info.name!r} was set to another tensor, but under zero 2 and 3 the "
                "gradient lies in the ranks' chunks. Use loss.backward(), or a plan with zero=1"
            )
