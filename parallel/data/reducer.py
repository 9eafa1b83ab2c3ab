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

[Note: kept apart] A parameter that begins to be trained between two steps is in no bucket yet, and in the
first step only the end tells whether all ranks train it (zero/trained.py). Until then its gradient is added
up in `apart`, and add() brings it into the new bucket. A parameter that is frozen stays in its bucket, which
does not wait for it.

What can go wrong: a parameter used twice (autograd calls its hook once, after it has summed); a rank that
would skip a bucket (finish_microbatch starts all that are left); two stages of one rank that start theirs in
an order that other ranks do not have (the schedule is the same on all of them).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pycomm import trace
from pycomm.parallel.data.bucket import Bucket

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

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
        self.buckets: list[Bucket] = []
        self.eager = eager
        self.sync = False  # this microbatch is the last of the step
        # How many of the gradients of each are still to come; empty outside a backward.
        self.missing: dict[Bucket, int] = {}
        self.queues: dict[tuple[str, str], _Queue] = {}  # by the names of the groups that sum
        self.params: list[torch.nn.Parameter] = []
        self.places: dict[int, _Place] = {}  # by the id of a parameter
        self.expected: dict[Bucket, int] = {}  # of how many parameters a backward brings gradients
        self.used: set[int] = set()  # ids of the parameters that got a gradient since zero_grad()
        # By id, see [Note: kept apart]; None: no gradient yet.
        self.apart: dict[int, torch.Tensor | None] = {}
        self.hooks: dict[int, RemovableHandle] = {}  # by the id of a parameter
        # Called before a gradient that comes while no microbatch is open, if there is one: run/own_loop.py.
        self.stray: Callable[[], None] | None = None
        self.add(buckets)

    def add(self, buckets: Iterable[Bucket]) -> None:
        """They come after those that are there. What was kept apart of their gradients moves into them."""
        for bucket in buckets:
            self.buckets.append(bucket)
            queue = self.queues.setdefault(bucket.infos[0].ranks, _Queue())
            place = _Place(bucket, queue, len(queue.buckets))
            queue.buckets.append(bucket)
            self.params += [info.param for info in bucket.infos]
            self.places.update((id(info.param), place) for info in bucket.infos)
            for info in bucket.infos:
                grad = self.apart.pop(id(info.param), None)
                if grad is not None:
                    bucket.accumulate(info.param, grad)
                    bucket.collect(info.param)
        self.note_trained()

    def expect(self, param: torch.nn.Parameter) -> None:
        """It is trained from now on, and in no bucket: see [Note: kept apart]."""
        self.apart.setdefault(id(param), None)
        self._hook(param)

    def note_trained(self) -> None:
        """Some of the parameters may be frozen now, others no longer."""
        self.expected = {
            bucket: sum(info.param.requires_grad for info in bucket.infos) for bucket in self.buckets
        }
        for param in self.params:
            self._hook(param)

    def _hook(self, param: torch.nn.Parameter) -> None:
        if id(param) not in self.hooks and param.requires_grad:  # else autograd takes none
            self.hooks[id(param)] = param.register_post_accumulate_grad_hook(weak_hook(self.ready))

    def has(self, param: torch.nn.Parameter) -> bool:
        """Whether its gradients come here."""
        return id(param) in self.places or id(param) in self.apart

    def catch_up(self, buckets: Iterable[Bucket], sync: bool) -> None:
        """Sums buckets that were added after the passes of a call; blocking. sync: as of these passes."""
        for bucket in buckets:
            if sync or bucket.sums_each_microbatch:
                bucket.launch()
                bucket.wait()
            if sync:
                bucket.launch_across()
                bucket.wait()

    def zero_grad(self) -> None:
        self.used.clear()
        self.apart = dict.fromkeys(self.apart)
        for bucket in self.buckets:
            bucket.zero_grad()

    def begin_microbatch(self, sync: bool) -> None:
        self.sync = sync
        self._restart_queues()
        self.missing = self.expected.copy()

    def accumulate(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """For gradients that autograd does not accumulate itself; followed by ready(param)."""
        if id(param) in self.apart:
            self._keep_apart(param, grad)
        else:
            self.places[id(param)].bucket.accumulate(param, grad)

    def _keep_apart(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        before = self.apart[id(param)]
        self.apart[id(param)] = grad if before is None else before.add_(grad)

    def ready(self, param: torch.nn.Parameter) -> None:
        """The gradient of this microbatch is complete."""
        if not self.missing and self.stray is not None:
            self.stray()
        key = id(param)
        self.used.add(key)
        if key not in self.places:
            if param.grad is not None:
                self._keep_apart(param, param.grad)
                param.grad = None
            return
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
