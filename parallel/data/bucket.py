"""Gradients of several parameters as one flat buffer, summed over the ranks that hold the same parameters, while backward goes on.

    backward      ... block 3 ......... block 2 ......... block 1 ......... block 0
    bucket 0      ready | sum over ranks |
    bucket 1                       ready | sum over ranks |
    bucket 2                                                         ready | sum ... | waited for before the optimizer

A Reducer has the buckets of one pipeline stage, in the order in which backward is expected to complete them: the reverse of registration.
A bucket starts when all its gradients are there and all buckets of its group before it have started, so that ranks start them in one
order whatever they computed; what never got a gradient is zero and starts at the end (Li et al. 2020). Buckets of other groups do not
count: ranks that sum dense parameters may hold different numbers of experts, and would wait for each other.

    zero   gradients lie in                       when               what             bytes sent per rank (P = bytes of gradients)
    0      one buffer, param.grad are its views   last microbatch    all_reduce       2(n-1)/n P
    1      the same                               last microbatch    reduce_scatter   (n-1)/n P (and as much to gather parameters)
    2, 3   a buffer for the time of one backward  every microbatch   reduce_scatter   (n-1)/n P per microbatch

With zero 2 and 3 a gradient is moved into the buffer as soon as it is there, and the buffer dies with its reduce_scatter: at no time do all
gradients exist, and at most IN_FLIGHT buckets are on the way.

What can go wrong: a hook fires for a gradient that is not complete (a parameter used twice gets one call of the hook, after autograd has
summed); a rank skips a bucket (never: finish_microbatch starts all that are left); two stages of one rank start theirs in an order that
other ranks do not have (the schedule is the same on all of them).
"""

import dataclasses
from collections.abc import Callable

import torch

from pycomm.parallel import comm
from pycomm.parallel.data.flat import FlatSpec
from pycomm.parallel.data.naive import gather_and_broadcast
from pycomm.parallel.layout import Layout

__all__ = ["Bucket", "ParamInfo", "ReduceOptions", "Reducer", "cut_into_buckets"]

IN_FLIGHT = 1  # behind the one that is being filled: two buckets exist, as many as FSDP2 has


@dataclasses.dataclass(eq=False)
class ParamInfo:
    """One parameter of this rank.

    name: as in the original model. layout: what of it is here. group: ranks over which its gradient is summed. overlap: the tp group when
    the layout says overlap. option: index of its parameter group in the optimizer, None when the optimizer does not have it. number: place
    among the names of the model. counted: False for a second copy of a tied parameter on another pipeline stage, which the
    gradient norm and the checkpoint leave out.
    """

    name: str
    param: torch.nn.Parameter
    layout: Layout
    group: comm.Group
    overlap: comm.Group | None = None
    option: int | None = None
    number: int = 0
    tied: bool = False
    counted: bool = True

    def __post_init__(self):
        self.shape = tuple(self.param.shape)  # of the local parameter; param itself is empty while ZeRO-3 has freed it
        self.numel = self.param.numel()

    def key(self):
        """What the parameters of one bucket have in common."""
        return self.param.dtype, self.param.device, self.group.name, self.option, self.name if self.tied else None, self.param.requires_grad


@dataclasses.dataclass(frozen=True)
class ReduceOptions:
    """zero: stage. whole: no parameter is cut between ranks. naive, compress: other ways to sum (zero 0).

    loose: where there is nothing to sum, gradients stay as autograd makes them, without a buffer.
    """

    zero: int = 0
    loose: bool = False
    whole: bool = False
    naive: bool = False
    compress: Callable | None = None


def cut_into_buckets(infos, limit, least=1):
    """Lists of infos that share a key, of at most `limit` bytes each (one parameter may be larger), in the order of `infos`.

    least: of what one group sums, there are to be at least about so many. (Counted by group, since only that is the same on all its ranks:
    ranks of ep may hold different numbers of experts.)
    """
    totals = {}
    for info in infos:
        totals[info.group.name] = totals.get(info.group.name, 0) + info.numel * info.param.element_size()
    done, open_ones = [], {}
    for info in infos:
        key, nbytes = info.key(), info.numel * info.param.element_size()
        current = open_ones.get(key)
        if current is None or current[1] + nbytes > min(limit, totals[info.group.name] / least):
            current = open_ones[key] = [[], 0]
            done.append(current[0])
        current[0].append(info)
        current[1] += nbytes
    return done


class Bucket:
    """`infos`: parameters with one key. See the head of the file."""

    def __init__(self, infos, options):
        self.infos, self.options = infos, options
        self.group = infos[0].group
        self.dtype, self.device = infos[0].param.dtype, infos[0].param.device
        self.spec = FlatSpec([info.shape for info in infos], self.group.size, options.whole)
        self.compressor = options.compress() if options.compress else None
        self.index = {info.param: i for i, info in enumerate(infos)}
        self.flat = self.views = self.shard = self.work = None
        self.in_flight = []
        needs_buffer = self.group.size > 1 or self.compressor or any(info.tied or info.overlap for info in infos)
        self.loose = options.loose and options.zero == 0 and not needs_buffer
        if options.zero < 2 and not self.loose:
            self.flat = comm.empty(self.spec.numel, self.dtype, self.group, self.device)
            self.views = self.spec.views(self.flat)

    @property
    def owned(self):
        """Pieces of which this rank's optimizer keeps the state."""
        return self.spec.pieces(self.group.rank if self.options.zero else None)

    def mine(self, flat):
        """This rank's chunk of a flat buffer of this bucket."""
        return flat[self.group.rank * self.spec.chunk : (self.group.rank + 1) * self.spec.chunk]

    def zero_grad(self):
        self.wait()  # nothing is on the way but after a step that raised
        if self.options.zero < 2 and not self.loose:
            self.flat.zero_()
            for info, view in zip(self.infos, self.views, strict=True):
                info.param.grad = view
        else:
            self.shard = self.flat = self.views = None
            for info in self.infos:
                info.param.grad = None

    def receive(self, param, grad):
        """zero 2 and 3: takes a gradient over (adds it, when the parameter has one from this backward already)."""
        if self.flat is None:
            self.flat = torch.zeros(self.spec.numel, dtype=self.dtype, device=self.device)
            self.views = self.spec.views(self.flat)
        self.views[self.index[param]].add_(grad)

    def adopt(self, param):
        """zero 0 and 1: a gradient that someone has set anew goes back into the buffer."""
        view = self.views[self.index[param]]
        if param.grad is not view and param.grad.data_ptr() != view.data_ptr():
            view.copy_(param.grad)
            param.grad = view

    def launch(self):
        """Starts the sum over the group."""
        if self.loose:
            return
        if self.flat is None:
            self.flat = torch.zeros(self.spec.numel, dtype=self.dtype, device=self.device)
            self.views = self.spec.views(self.flat)
        self._sum_overlaps()
        if self.options.zero == 0:
            if self.compressor:
                self.compressor.reduce(self.flat, self.group, self.views)
            elif self.options.naive:
                gather_and_broadcast(self.flat, self.group)
            else:
                self.work = comm.all_reduce(self.flat, self.group, async_op=True)
        elif self.options.zero == 1:
            self.work = comm.reduce_scatter(self.mine(self.flat), self.flat, self.group, async_op=True)
        else:
            out = self.flat.new_empty(self.spec.chunk)
            self.in_flight.append((comm.reduce_scatter(out, self.flat, self.group, async_op=True), out, self.flat))
            self.flat = self.views = None

    def _sum_overlaps(self):
        for info, view in zip(self.infos, self.views, strict=True):
            if info.overlap is not None:
                full = view.new_zeros(info.layout.full_shape)
                info.layout.put(full, view)
                comm.all_reduce(full, info.overlap)
                view.copy_(info.layout.take(full))

    def wait(self):
        """Afterwards gradient() is the sum."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        for work, out, _ in self.in_flight:
            work.wait()
            self.shard = out if self.shard is None else self.shard.add_(out)
        self.in_flight.clear()

    def gradient(self):
        """The summed gradients this rank is to work on: the whole buffer (zero 0) or its chunk, flat. A copy, of a loose bucket."""
        if self.loose:
            grads = [torch.zeros_like(info.param) if info.param.grad is None else info.param.grad for info in self.infos]
            return torch.cat([grad.reshape(-1) for grad in grads])
        if self.options.zero == 0:
            return self.flat
        if self.options.zero == 1:
            return self.mine(self.flat)
        if self.shard is None:
            self.shard = torch.zeros(self.spec.chunk, dtype=self.dtype, device=self.device)
        return self.shard

    def norm_squared(self):
        """Sum of squares, as a 0-dim float64 tensor, of what this rank counts: each element of the model is counted by one rank.

        The norm of a piece is taken in fp32 (fp64 for fp64) and squared in fp64, where that is exact, so that the sum hardly depends on how
        parameters lie in buckets. With zero 0, where all ranks of the group hold everything, parameters are dealt to them by number.
        """
        values = []
        for piece in self.spec.pieces(self.group.rank if self.options.zero else None):
            info = self.infos[piece.index]
            if self.loose:
                part, mine = info.param.grad, info.param.grad is not None
            elif self.options.zero == 0:
                part = self.flat[piece.offset : piece.offset + info.numel]
                mine = info.number % self.group.size == self.group.rank
            else:
                start = piece.offset - self.group.rank * self.spec.chunk
                part, mine = self.gradient()[start : start + piece.stop - piece.start], True
            if mine and self.counts(info) and part.numel():
                mask = self.mask(info)
                values.append(part if mask is None else part.reshape(-1) * mask.view(-1)[piece.start : piece.stop])
        if not values:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        kind = torch.float32 if self.dtype in (torch.bfloat16, torch.float16) else self.dtype
        return torch.stack(torch._foreach_norm(values, 2, dtype=kind)).double().square().sum()

    def counts(self, info):
        """Whether this rank counts any of what it holds of a parameter."""
        if not info.counted:
            return False
        # Of a partial gradient the group has the ranks of tp in it, and its chunks count each element once.
        return info.layout.dim is not None or info.layout.partial or bool(info.layout.counted)

    def mask(self, info):
        """Ones where this rank counts an element of the local parameter, zeros elsewhere; None where it counts all."""
        if info.layout.dim is None:
            return None
        return info.layout.counted_mask(torch.ones(info.shape, dtype=self.dtype, device=self.device))


class Reducer:
    """The buckets of one stage and their hooks.

    begin_microbatch(sync) before each backward, finish_microbatch(sync) after it; sync: this is the last one of the step. With `eager`
    False (a backward in two parts, of which those of two microbatches may alternate) nothing starts before finish_microbatch.
    """

    def __init__(self, buckets, eager=True):
        self.buckets, self.eager = buckets, eager
        self.missing, self.sync = [], False
        self.queues, self.started = {}, {}  # group -> its buckets in order, and how many of them have started
        for bucket in buckets:
            self.queues.setdefault(bucket.group.name, []).append(bucket)
        self.used = set()  # parameters that got a gradient since zero_grad()
        self.place = {info.param: bucket for bucket in buckets for info in bucket.infos}
        self.hooks = [param.register_post_accumulate_grad_hook(self.ready) for param in self.place]

    def zero_grad(self):
        self.used.clear()
        for bucket in self.buckets:
            bucket.zero_grad()

    def begin_microbatch(self, sync):
        self.sync = sync
        self.started = dict.fromkeys(self.queues, 0)
        self.missing = {id(bucket): len(bucket.infos) for bucket in self.buckets}

    def accumulate(self, param, grad):
        """For gradients that autograd does not accumulate itself; followed by ready(param)."""
        bucket = self.place[param]
        if bucket.options.zero >= 2:
            bucket.receive(param, grad)
        elif param.grad is None:
            param.grad = grad
        else:
            param.grad.add_(grad)

    def ready(self, param):
        """The gradient of this microbatch is complete."""
        self.used.add(param)
        bucket = self.place[param]
        queue = self.queues[bucket.group.name]
        if self.eager and self.missing and any(bucket is other for other in queue[: self.started[bucket.group.name]]):
            name = bucket.infos[bucket.index[param]].name
            raise ValueError(
                f"[rank {bucket.group.rank}/{bucket.group.size}] {name} got a gradient after its bucket had been summed: it is used in "
                "two parts that are recomputed. Checkpoint with use_reentrant=False"
            )
        if bucket.options.zero >= 2:
            if param.grad is not None:
                bucket.receive(param, param.grad)
                param.grad = None
        elif param.grad is not None and not bucket.loose:
            bucket.adopt(param)
        if not self.eager or not self.missing:
            return
        self.missing[id(bucket)] -= 1
        while self.started[bucket.group.name] < len(queue) and self.missing[id(queue[self.started[bucket.group.name]])] <= 0:
            self._start_next(bucket.group.name)

    def _start_next(self, group):
        queue = self.queues[group]
        bucket = queue[self.started[group]]
        self.started[group] += 1
        if self.sync or bucket.options.zero >= 2:
            bucket.launch()
            on_the_way = [other for other in queue[: self.started[group]] if other.in_flight]
            for other in on_the_way[:-IN_FLIGHT]:
                other.wait()

    def finish_microbatch(self, sync):
        self.sync = sync
        if not self.eager:
            self.started = dict.fromkeys(self.queues, 0)
        for group, queue in self.queues.items():
            while self.started[group] < len(queue):
                self._start_next(group)
        self.missing = []

    def wait(self):
        for bucket in self.buckets:
            bucket.wait()

    def remove(self):
        for hook in self.hooks:
            hook.remove()
