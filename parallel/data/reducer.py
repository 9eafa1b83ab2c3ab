"""When buckets are summed: as soon as backward has completed them, in an order that all ranks share.

    backward      ... block 3 ......... block 2 ......... block 1 ......... block 0
    bucket 0      ready | sum over ranks |
    bucket 1                       ready | sum over ranks |
    bucket 2                                                 ready | sum ... | waited for before the optimizer

A Reducer has the buckets of one pipeline stage, in the order in which backward is expected to complete them:
the reverse of registration. A bucket starts when all its gradients are there and all buckets of its group
before it have started, so that ranks start them in one order whatever they computed. A parameter that got no
gradient counts as zero, and its bucket starts at the end of the backward (Li et al. 2020). Buckets of other
groups do not wait for each other: ranks that sum dense parameters may hold different numbers of experts.

Buckets that are summed in every microbatch (zero/streamed.py) hold a buffer of their own until their sum is
done. Therefore at most IN_FLIGHT of them are under way: with the one that is being filled two exist, as many
as FSDP2 has.

With Plan(zero_group="host") the sums of a host go on to those of the others, of each bucket when the next one
starts, so that the link works while backward goes on:

    bucket 0      ready | sum inside |     sum across |
    bucket 1                     ready | sum inside |     sum across |

What can go wrong: a parameter used twice (autograd calls its hook once, after it has summed); a rank that
would skip a bucket (finish_microbatch starts all that are left); two stages of one rank that start theirs in
an order that other ranks do not have (the schedule is the same on all of them).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pycomm import trace
from pycomm.parallel.data.bucket import Bucket

if TYPE_CHECKING:
    import torch

__all__ = ["Reducer", "weak_hook"]

IN_FLIGHT = 1
TensorT = TypeVar("TensorT", bound="torch.Tensor")


def weak_hook(method: Callable[[TensorT], None]) -> Callable[[TensorT], None]:
    """A hook of a parameter that calls a bound method while its object lives.

    Autograd holds a parameter's hooks where the garbage collector does not look. A hook that held the object,
    which holds the parameter, would keep both for ever, with their registered memory.
    """
    find = weakref.WeakMethod(method)

    def hook(tensor: TensorT) -> None:
        found = find()
        if found is not None:
            found(tensor)

    return hook


class _Queue:
    """The buckets of one group, in the order in which every rank starts them."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.started = 0  # how many of them, in this microbatch
        self.crossed = 0  # of how many of these the sum over replicas has been started

    def next(self) -> Bucket | None:
        return self.buckets[self.started] if self.started < len(self.buckets) else None


class _Place(NamedTuple):
    """Where a parameter's gradient goes. Kept by the parameter's id: a tensor's hash is a call of Python."""

    bucket: Bucket
    queue: _Queue
    turn: int  # of the bucket in its queue


class Reducer:
    """The buckets of one stage and the hooks that fill them.

    begin_microbatch(sync) before each backward, finish_microbatch(sync) after it; sync: this is the last one
    of the step. With `eager` False (a backward in two parts, of which those of two microbatches may
    alternate) nothing starts before finish_microbatch.
    """

    def __init__(self, buckets: Sequence[Bucket], eager: bool = True) -> None:
        self.buckets = buckets
        self.eager = eager
        self.sync = False  # this microbatch is the last of the step
        # How many of the gradients of each are still to come; empty outside a backward.
        self.missing: dict[Bucket, int] = {}
        self.queues: dict[tuple[str, str], _Queue] = {}  # by the names of the groups that sum
        self.params: list[torch.nn.Parameter] = []
        self.places: dict[int, _Place] = {}  # by the id of a parameter
        for bucket in buckets:
            queue = self.queues.setdefault(bucket.infos[0].ranks, _Queue())
            place = _Place(bucket, queue, len(queue.buckets))
            queue.buckets.append(bucket)
            self.params += [info.param for info in bucket.infos]
            self.places.update((id(info.param), place) for info in bucket.infos)
        self.used: set[int] = set()  # ids of the parameters that got a gradient since zero_grad()
        ready = weak_hook(self.ready)
        self.hooks = [param.register_post_accumulate_grad_hook(ready) for param in self.params]

    def zero_grad(self) -> None:
        self.used.clear()
        for bucket in self.buckets:
            bucket.zero_grad()

    def begin_microbatch(self, sync: bool) -> None:
        self.sync = sync
        self._restart_queues()
        self.missing = {bucket: len(bucket.infos) for bucket in self.buckets}

    def accumulate(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """For gradients that autograd does not accumulate itself; followed by ready(param)."""
        self.places[id(param)].bucket.accumulate(param, grad)

    def ready(self, param: torch.nn.Parameter) -> None:
        """The gradient of this microbatch is complete."""
        key = id(param)
        self.used.add(key)
        bucket, queue, turn = self.places[key]
        follows_order = self.eager and self.missing
        if follows_order and turn < queue.started:
            name = bucket.infos[bucket.index[key]].name
            raise ValueError(
                f"[rank {bucket.group.rank}/{bucket.group.size}] {name} got a gradient after its bucket had "
                "been summed: it is used in two parts that are recomputed. Checkpoint with "
                "use_reentrant=False"
            )
        if param.grad is not None:
            bucket.collect(param)
        if follows_order:
            self.missing[bucket] -= 1
            if not self.missing[bucket]:
                while (following := queue.next()) is not None and self.missing[following] <= 0:
                    self._start(following, queue)

    def _start(self, bucket: Bucket, queue: _Queue) -> None:
        """bucket: the next one of the queue."""
        queue.started += 1
        if self.sync or bucket.sums_each_microbatch:
            with trace.span("bucket", bucket=self.buckets.index(bucket)):
                bucket.launch()
            under_way = [other for other in queue.buckets[: queue.started] if other.in_flight]
            for other in under_way[:-IN_FLIGHT]:
                other.wait()
            self._cross(queue, queue.started - 1)

    def _cross(self, queue: _Queue, count: int) -> None:
        """Starts the sums over replicas of the first `count` buckets. After the last microbatch only: what
        streamed buckets have summed until then goes across once.
        """
        if self.sync:
            for bucket in queue.buckets[queue.crossed : count]:
                bucket.launch_across()
            queue.crossed = max(queue.crossed, count)

    def finish_microbatch(self, sync: bool) -> None:
        self.sync = sync
        if not self.eager:
            self._restart_queues()
        for queue in self.queues.values():
            while (following := queue.next()) is not None:
                self._start(following, queue)
        self.missing = {}

    def _restart_queues(self) -> None:
        for queue in self.queues.values():
            queue.started = queue.crossed = 0

    def wait(self) -> None:
        for queue in self.queues.values():
            self._cross(queue, queue.started)
        for number, bucket in enumerate(self.buckets):
            with trace.span("bucket", bucket=number):
                bucket.wait()
