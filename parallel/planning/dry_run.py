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

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from pycomm.parallel.api import step
from pycomm.parallel.building import parallelize
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.answers import Answers
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.pipeline import handover
from pycomm.quantities import Bytes
from pycomm.testing import run_ranks

if TYPE_CHECKING:
    from pycomm.parallel.given import Batch

__all__ = ["RankRun", "dry_run"]

MakeOptimizer: TypeAlias = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


class RankRun(NamedTuple):
    """calls: the collectives and messages of the second step, in order (the first step also
    agrees on what is sent). peak: largest number of bytes alive in that step, of the model, the optimizer
    and all tensors; None where it was not asked for.
    """

    rank: int
    calls: tuple[comm.Call, ...]
    peak: Bytes | None


def dry_run(
    model: torch.nn.Module,
    opt: MakeOptimizer,
    batch: Batch,
    plan: Plan | str,
    *,
    ranks: Iterable[int] | None = None,
    memory: bool = False,
    limit: float = 300.0,
    **options: Any,
) -> list[RankRun]:
    """Of these ranks, all if None.

    plan: str is its text. batch, options: as par.step takes them
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
    groups: list[tuple[int, ...]] = [(rank,) for rank in ranks] if memory else [tuple(ranks)]
    found = (run_ranks(1, _child, given, some, mode="processes", timeout=limit)[0] for some in groups)
    return [run for runs in found for run in runs]


class _Given(NamedTuple):
    """Arguments of dry_run."""

    model: torch.nn.Module
    opt: MakeOptimizer
    batch: Batch
    plan: Plan
    memory: bool
    options: dict[str, Any]


def _child(_: object, given: _Given, ranks: Sequence[int]) -> list[RankRun]:
    found: list[RankRun] = []
    with _made_up_peers():
        for rank in ranks:
            with _default_group(rank, given.plan.world_size):
                found.append(_one(rank, given))
    return found


def _one(rank: int, given: _Given) -> RankRun:
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True) if given.memory else None
    with recorder or contextlib.nullcontext():
        model = copy.deepcopy(given.model)
        model, optimizer = parallelize(model, given.opt(model.parameters()), given.plan)
        step(model, optimizer, given.batch, **given.options)
        with comm.count_traffic() as traffic, record_function("second step"):
            step(model, optimizer, given.batch, **given.options)
    return RankRun(rank, tuple(traffic.log), None if recorder is None else peak_of(events_of(recorder)))


class _Event(Protocol):
    """Of torch's profiler."""

    def name(self) -> str: ...

    def start_ns(self) -> int: ...

    def duration_ns(self) -> int: ...

    def nbytes(self) -> int: ...


def events_of(recorder: profile) -> Sequence[_Event]:
    assert recorder.profiler is not None and recorder.profiler.kineto_results is not None  # it has run
    # torch's own type of an event leaves nbytes out
    return cast("Sequence[_Event]", recorder.profiler.kineto_results.events())


def peak_of(events: Sequence[_Event]) -> Bytes:
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
    return Bytes(peak)


@contextlib.contextmanager
def _default_group(rank: int, world_size: int) -> Iterator[None]:
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

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_reduce(
        tensor: torch.Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        *,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> comm.Done | None:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(group.size())
        return comm.Done() if async_op else None

    @staticmethod
    def broadcast(
        tensor: torch.Tensor,
        group_src: int | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> comm.Done | None:
        return comm.Done() if async_op else None

    @staticmethod
    def gather(
        tensor: torch.Tensor,
        parts: Sequence[torch.Tensor] | None,
        group_dst: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        for part in parts or ():
            part.copy_(tensor)

    @staticmethod
    def all_to_all_single(
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        *,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> comm.Done | None:
        output.zero_()
        mine = tensor.split(input_sizes)[group.rank()]
        if not tensor.is_floating_point() and len(set(output_sizes)) == 1:
            output.copy_(mine.repeat(group.size(), *[1] * (tensor.dim() - 1)))
        return comm.Done() if async_op else None

    @staticmethod
    def isend(
        tensor: torch.Tensor,
        group_dst: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
    ) -> comm.Done:
        return comm.Done()

    @staticmethod
    def irecv(
        tensor: torch.Tensor,
        group_src: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
    ) -> comm.Done:
        tensor.zero_()
        return comm.Done()


def _gathered(
    output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> comm.Done | None:
    own = tensor.clone()
    output.view(group.size(), -1).copy_(own.view(1, -1).expand(group.size(), -1))
    return comm.Done() if async_op else None


def _scattered(
    output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> comm.Done | None:
    own = tensor.reshape(group.size(), -1)[group.rank()] * group.size()
    output.view(-1).copy_(own)
    return comm.Done() if async_op else None


def _tell(
    self: handover.Agreement,
    inputs: Mapping[object, object],
    find: Callable[[int, Any], Iterable[int]],
    group: comm.Group,
    device: torch.device,
) -> None:
    """Agreement.tell without the other stages: what they would find is found here."""
    for key, given in inputs.items():
        for stage in range(1, len(self.placement)):
            before, here = self.placement[stage - 1], self.placement[stage]
            if (stage, key) in self.known or group.rank not in (before, here):
                continue
            self.known[stage, key] = tuple(find(stage, given))


class _Change(NamedTuple):
    """For a while `where` has `value` under this name."""

    where: object
    name: str
    value: object


@contextlib.contextmanager
def _made_up_peers() -> Iterator[None]:
    """For the time of a block; in a child process, so that nothing else sees it."""
    changes: list[_Change] = [
        _Change(comm, "dist", _Peers()),
        _Change(comm, "all_gather_flat", _gathered),
        _Change(comm, "reduce_scatter_flat", _scattered),
        _Change(handover.Agreement, "tell", _tell),
        _Change(Answers, "asks", False),  # what made up peers send has no values that could be compared
    ]
    plain = [_Change(where, name, getattr(where, name)) for where, name, _ in changes]
    for where, name, value in changes:
        setattr(where, name, value)
    try:
        yield
    finally:
        for where, name, value in plain:
            setattr(where, name, value)
