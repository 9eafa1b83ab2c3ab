"""A step of one rank of any plan without the other ranks: the runtime's own parallelize and step, in one
process.

What par.step sends is decided in many places (buckets, units, pieces of sequences and heads, ties, the
order of a pipeline), and a second description of them would be wrong somewhere. So the very code runs, for
rank r of n, on torch's "fake" process group, and what would come from other ranks is made up:

    all_reduce               every rank has what this one has: n times it, or it (max)
    all_gather, broadcast    the same
    reduce_scatter           n times this rank's part
    all_to_all, recv         zeros; whole numbers of an all_to_all as if all sent what this one sends itself
    check of positions       holds (checks/positions.py compares values)
    places of a pipeline     what the next stage asks for is found here as it would find it
                             (pipeline/handover.py)

Shapes, calls, bytes and memory do not depend on values, so they are those of a real run, call by call:
tests/planning/test_planned_traffic.py compares each plan of the equality matrix. The exception is a mixture
of experts, whose tokens go where their values send them: there the calls are exact, and the bytes of
all_to_all are those of these values. Losses and gradients mean nothing.

It takes the memory and the time of one rank's step. The model is copied first and is not changed. No
process group may be there yet; the default group of a process is the one that is faked, so this runs in a
forked child.
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from pycomm.parallel.api import step
from pycomm.parallel.building import parallelize
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.answers import Answers
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.pipeline import handover
from pycomm.testing import run_ranks

__all__ = ["RankRun", "dry_run"]


class RankRun(NamedTuple):
    """calls: comm.Call of each collective and message of the second step, in order (the first step also
    agrees on what is sent). peak: largest number of bytes alive in that step, of the model, the optimizer
    and all tensors; None where it was not asked for.
    """

    rank: int
    calls: tuple
    peak: int | None


def dry_run(model, opt, batch, plan, *, ranks=None, memory=False, limit=300.0, **options):
    """[RankRun] of these ranks, all if None.

    opt: a function (parameters -> optimizer). plan: Plan or its text. batch, options: as par.step takes them
    (loss_fn, microbatches, clip). limit: seconds for all of it. Raises what parallelize and step raise for
    the plan.
    """
    if dist.is_initialized():
        raise ValueError(
            "dry_run makes up the default process group, and there is one: call it before init_process_group"
        )
    plan = Plan.of(plan)
    ranks = range(plan.world_size) if ranks is None else ranks
    given = _Given(model, opt, batch, plan, memory, options)
    # What was freed of another rank's would count, so memory takes a process for each.
    groups = [(rank,) for rank in ranks] if memory else [tuple(ranks)]
    found = (run_ranks(1, _child, given, some, mode="processes", timeout=limit)[0] for some in groups)
    return [run for runs in found for run in runs]


class _Given(NamedTuple):
    """Arguments of dry_run."""

    model: torch.nn.Module
    opt: Callable
    batch: Any
    plan: Plan
    memory: bool
    options: dict


def _child(_, given, ranks):
    found = []
    with _made_up_peers():
        for rank in ranks:
            with _default_group(rank, given.plan.world_size):
                found.append(_one(rank, given))
    return found


def _one(rank, given):
    recorded = contextlib.nullcontext()
    if given.memory:
        recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with recorded as events:
        model = copy.deepcopy(given.model)
        model, optimizer = parallelize(model, given.opt(model.parameters()), given.plan)
        step(model, optimizer, given.batch, **given.options)
        with comm.count_traffic() as traffic, record_function("second step"):
            step(model, optimizer, given.batch, **given.options)
    peak = peak_of(events.profiler.kineto_results.events()) if given.memory else None
    return RankRun(rank, tuple(traffic.log), peak)


def peak_of(events):
    """The largest number of bytes alive inside of "second step", of what was made while torch's profiler
    recorded these events.
    """
    alive = 0
    window = next(event for event in events if event.name() == "second step")
    start, stop, peak = window.start_ns(), window.start_ns() + window.duration_ns(), 0
    changes = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    for event in changes:
        alive += event.nbytes()
        if start <= event.start_ns() <= stop:
            peak = max(peak, alive)
    return peak


@contextlib.contextmanager
def _default_group(rank, world_size):
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Peers:
    """In the place of torch.distributed in ground/comm.py: answers as the table at the top says."""

    def __getattr__(self, name):
        return getattr(dist, name)

    @staticmethod
    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if op == dist.ReduceOp.SUM:
            tensor.mul_(group.size())
        return comm.Done() if async_op else None

    @staticmethod
    def broadcast(tensor, group_src=None, group=None, async_op=False):
        return comm.Done() if async_op else None

    @staticmethod
    def gather(tensor, parts, group_dst=None, group=None):
        for part in parts or ():
            part.copy_(tensor)

    @staticmethod
    def all_to_all_single(output, tensor, output_sizes, input_sizes, group=None, async_op=False):
        output.zero_()
        mine = tensor.split(input_sizes)[group.rank()]
        if not tensor.is_floating_point() and len(set(output_sizes)) == 1:
            output.copy_(mine.repeat(group.size(), *[1] * (tensor.dim() - 1)))
        return comm.Done() if async_op else None

    @staticmethod
    def isend(tensor, group_dst=None, group=None, tag=0):
        return comm.Done()

    @staticmethod
    def irecv(tensor, group_src=None, group=None, tag=0):
        tensor.zero_()
        return comm.Done()


def _gathered(output, tensor, group=None, async_op=False):
    own = tensor.clone()
    output.view(group.size(), -1).copy_(own.view(1, -1).expand(group.size(), -1))
    return comm.Done() if async_op else None


def _scattered(output, tensor, group=None, async_op=False):
    own = tensor.reshape(group.size(), -1)[group.rank()] * group.size()
    output.view(-1).copy_(own)
    return comm.Done() if async_op else None


def _tell(self, inputs, find, group, device):
    """Agreement.tell without the other stages: what they would find is found here."""
    for key, given in inputs.items():
        for stage in range(1, len(self.placement)):
            before, here = self.placement[stage - 1], self.placement[stage]
            if (stage, key) in self.known or group.rank not in (before, here):
                continue
            self.known[stage, key] = tuple(find(stage, given))


@contextlib.contextmanager
def _made_up_peers():
    """For the time of a block; in a child process, so that nothing else sees it."""
    changes = [
        (comm, "dist", _Peers()),
        (comm, "all_gather_flat", _gathered),
        (comm, "reduce_scatter_flat", _scattered),
        (handover.Agreement, "tell", _tell),
        (Answers, "asks", False),  # what made up peers send has no values that could be compared
    ]
    plain = [(where, name, getattr(where, name)) for where, name, _ in changes]
    for where, name, value in changes:
        setattr(where, name, value)
    try:
        yield
    finally:
        for where, name, value in plain:
            setattr(where, name, value)
