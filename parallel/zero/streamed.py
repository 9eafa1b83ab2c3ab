"""ZeRO 2 and 3: gradients exist for a few buckets at a time, and in ZeRO 3 so do values.

    gradients, 2 ranks   rank 0                           rank 1
    backward             [g0     |g0     ]                [g1     |g1     ]   a buffer, made for the first one
    bucket complete      [g0+g1  ]       reduce_scatter           [g0+g1  ]   a new chunk; the buffer dies
    next microbatch      the same, and the new chunk is added to the first
    optimizer            updates a                                updates b

    values of ZeRO 3     rank 0                           rank 1
    between passes       [a a a a]                                [b b b b]   parameters are empty tensors
    a unit is used       [a a a a|b b b b]   all_gather   [a a a a|b b b b]
    after its use        [a a a a]                                [b b b b]

At no time do all gradients exist; data/reducer.py says how many buckets are under way. Bytes sent per
microbatch and rank: (n-1)/n P of gradients. The values of ZeRO 2 are those of flat.py, gathered once per
step; those of ZeRO 3 are gathered twice per microbatch, when units.py says so.

Whole values of ZeRO 3 live in one storage that is emptied and filled again in place, since views that
autograd has saved share it. Meanwhile parameters are given an empty tensor, so that a use at the wrong time
is an error of shapes and not of memory.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from pycomm.parallel.data.bucket import Bucket, ParamInfo, SumUnderWay
from pycomm.parallel.ground import comm
from pycomm.parallel.zero.shards import Originals, Shards

__all__ = ["StreamedBucket", "StreamedShards"]


class StreamedBucket(Bucket):
    """Gradients move into the buffer as soon as they are there, and the buffer dies with its sum."""

    is_sharded = True
    sums_each_microbatch = True

    def __init__(self, infos: Sequence[ParamInfo], whole: bool = False) -> None:
        super().__init__(infos, whole)
        # this rank's chunk of the sum over all microbatches so far; None: no gradient yet
        self.sum: torch.Tensor | None = None
        self.work: comm.Work | None = None  # the sum over the replicas under way

    def zero_grad(self) -> None:
        self.wait()  # only a step that raised leaves anything under way
        self.sum = self.flat = self.views = None
        for info in self.infos:
            info.param.grad = None

    def collect(self, param: torch.nn.Parameter) -> None:
        if param.grad is not None:
            self.accumulate(param, param.grad)
        param.grad = None

    def accumulate(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        views = self.views if self.views is not None else self._buffer()[1]
        views[self.index[id(param)]].add_(grad)

    def _buffer(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """It and its views; made where there is none."""
        if self.flat is None or self.views is None:
            self.flat = torch.zeros(self.spec.numel, dtype=self.dtype, device=self.device)
            self.views = self.spec.views(self.flat)
        return self.flat, self.views

    def launch(self) -> None:
        flat, views = self._buffer()  # also where this rank has no gradient: the others may have one
        self._sum_overlaps(views)
        chunk = flat.new_empty(self.spec.chunk)
        work = comm.reduce_scatter(chunk, flat, self.group, async_op=True)
        self.in_flight.append(SumUnderWay(work, chunk, flat))
        self.flat = self.views = None

    def launch_across(self) -> None:
        if self.replicas.size > 1:
            self.wait()
            self.work = comm.all_reduce(self.gradient(), self.replicas, async_op=True)

    def wait(self) -> None:
        for work, chunk, _ in self.in_flight:
            work.wait()
            self.sum = chunk if self.sum is None else self.sum.add_(chunk)
        self.in_flight.clear()
        if self.work is not None:
            self.work.wait()
            self.work = None

    def put_aside(self) -> None:
        self.aside, self.sum = self.kept_sum(), None
        for info in self.infos:
            info.param.grad = None

    def kept_sum(self) -> torch.Tensor | None:
        """The sum, without the parameters whose .grad, a stand-in, has been set to None."""
        for piece in self.owned if self.sum is not None else ():
            if self.infos[piece.index].param.grad is None:
                self.elements(piece, self.gradient()).zero_()
        return self.sum

    def take_mean(self, ranks: int) -> None:
        self.gradient().div_(ranks)
        if self.aside is not None:
            self.gradient().add_(self.aside)
            self.aside = None

    def gradient(self) -> torch.Tensor:
        if self.sum is None:
            self.sum = torch.zeros(self.spec.chunk, dtype=self.dtype, device=self.device)
        return self.sum


class StreamedShards(Shards):
    """Values of which this rank keeps its own chunk, and which exist whole between start_gather() and
    free().
    """

    values_here: torch.Tensor

    def _keep_values(self, originals: Originals, on_host: bool) -> torch.Tensor:
        bucket = self.bucket
        self.work: comm.Work | None = None  # the all_gather under way
        self.source: torch.Tensor | None = None  # what it reads: lives until finish_gather()
        self.versions: list[int] | None = None  # of the parameters, while they are whole
        full = torch.empty(bucket.spec.numel, dtype=bucket.dtype, device=bucket.device)
        home = torch.device("cpu") if on_host else bucket.device
        if self._is_known(originals):
            here = bucket.own(self._fill(full.zero_(), originals)).to(home, copy=True)
        else:  # no page of the whole is touched
            here = self._zeros(bucket.dtype, home, originals)
        self.values = full  # the whole values while they exist; its storage is empty in between
        self.views = bucket.spec.views(full)
        self.nbytes = full.untyped_storage().nbytes()
        self.nothing = torch.empty(0, dtype=bucket.dtype, device=bucket.device)
        self.free()
        return here

    def publish(self) -> None:
        self._copy_master()

    def start_gather(self) -> None:
        self.values.untyped_storage().resize_(self.nbytes)
        self.source = self.values_here.to(self.values.device, non_blocking=True)
        self.work = comm.all_gather(self.values, self.source, self.bucket.group, async_op=True)

    def finish_gather(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work = self.source = None
        for info, view in zip(self.bucket.infos, self.views, strict=True):
            info.param.data = view
        self.versions = [info.param._version for info in self.bucket.infos]

    @contextlib.contextmanager
    def stand_ins(self) -> Iterator[None]:
        """While they do not exist: the parameters are zeros that take no memory, for a forward that is run
        for shapes.
        """
        for info in self.bucket.infos:
            info.param.data = self.nothing.new_zeros(()).expand(info.shape)
        try:
            yield
        finally:
            for info in self.bucket.infos:
                info.param.data = self.nothing

    def free(self) -> None:
        """Raises ValueError where a forward has written to them, which would be lost."""
        infos = self.bucket.infos
        versions = self.versions or [info.param._version for info in infos]
        pairs = zip(infos, versions, strict=True)
        written = [info.name for info, version in pairs if info.param._version != version]
        self.versions = None
        for info in infos:
            info.param.data = self.nothing
        self.values.untyped_storage().resize_(0)
        if written:
            raise ValueError(
                f"zero=3: the forward writes to the parameter {written[0]!r}, of which each rank keeps its "
                "shard alone: what is written would be lost. Compute with another tensor (a clamped copy), "
                "or use a plan without zero=3"
            )
