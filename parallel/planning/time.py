"""Seconds of one training step.

    | passes of the pipeline, by events              | rest of the gradients' sums | optimizer | new values |
      F and B + W of every virtual stage (compute.py)  what backward did not hide

A virtual stage's passes are those of its blocks; the first has the embedding, the last the head and the
loss. Collectives of tp, ring, ulysses and ep are waited for inside of blocks. Sums of gradients are hidden
behind the backward of the last microbatch (of every microbatch in ZeRO 2 and 3), as data/reducer.py starts
them; what is left is the last bucket, or what takes longer than that backward. ZeRO-3 gathers a unit while
the one before it computes, so a block takes the longer of both. All of that by the machine's `overlap`: where
it is less than 1, as on a CPU whose cores compute and move the bytes, less is hidden, and a message takes the
rest of its time from both ranks.

[Note: constants] Six numbers per machine are not from data sheets: `reached` in machines/*.toml. Those of
a100-selene were set by hand on two sources and no other: table 4 of Korthikanti et al. 2022 (one layer of
the 22B model: five pairs of times), and the first row of table 1 of SC21 (1.7B). All other rows of SC21
table 1, and all of Korthikanti table 5, are predictions. Links have the bandwidth that NCCL's documents
give for this hardware.
"""

import functools
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.planning import collectives
from pycomm.parallel.planning.collectives import Span
from pycomm.parallel.planning.compute import Cut, InnerAxis, block_time, head_time, moved_time
from pycomm.parallel.planning.events import Pipeline, StageTime, run_pipeline
from pycomm.parallel.planning.job import Job
from pycomm.parallel.planning.machine import Machine
from pycomm.parallel.planning.memory import owned_parameters
from pycomm.parallel.planning.quantities import MeanBytes, MeanElements, MeanTokens, Seconds

__all__ = ["StepTime", "closed_form", "spans_of", "stage_times", "step_time"]

# data: the ranks over which dense gradients are summed; expert: those of experts
GroupName: TypeAlias = Literal["tp", "ulysses", "ring", "ep", "dp", "pp", "data", "expert"]
GroupSpans: TypeAlias = Mapping[GroupName, Span]
AXES: tuple[GroupName, ...] = ("tp", "ulysses", "ring", "ep", "dp", "pp")  # inner to outer
INSIDE: tuple[InnerAxis, ...] = ("tp", "ulysses", "ring", "ep")


class StepTime(NamedTuple):
    """passes: until the last pass of the slowest rank; of these `bubble` are idle on the busiest
    rank and `inside` are collectives of tp, ring, ulysses and ep. gradients: sums that backward did not
    hide.
    """

    passes: Seconds
    bubble: Seconds
    inside: Seconds
    gradients: Seconds
    optimizer: Seconds
    values: Seconds
    pipeline: Pipeline | None

    @property
    def total(self) -> Seconds:
        return Seconds(self.passes + self.gradients + self.optimizer + self.values)

    def parts(self) -> dict[str, Seconds]:
        computing = Seconds(self.passes - self.bubble - self.inside)
        return {
            "compute": computing,
            "collectives in blocks": self.inside,
            "bubble": self.bubble,
            "sums of gradients": self.gradients,
            "optimizer": self.optimizer,
            "gathering values": self.values,
        }


class Rest(NamedTuple):
    """What a rank of the pipeline does after its passes."""

    gradients: Seconds
    optimizer: Seconds
    values: Seconds


@functools.lru_cache(maxsize=16384)
def spans_of(machine: Machine, plan: Plan) -> GroupSpans:
    """Those with ranks."""
    found: dict[GroupName, Span] = {}
    stride = 1
    for axis in AXES:
        size = getattr(plan, axis)
        if size > 1:
            found[axis] = collectives.span(machine, size, stride)
        stride *= size
    data = plan.dp * plan.ep * plan.ring * plan.ulysses
    if data > 1:
        found["data"] = collectives.span(machine, data, plan.tp)
    if data // plan.ep > 1:
        inner = plan.ring * plan.ulysses
        stride = plan.tp if plan.ep == 1 or inner > 1 else plan.tp * plan.ep
        found["expert"] = collectives.span(machine, data // plan.ep, stride)
    return found


def _cut(job: Job) -> Cut:
    plan, software = job.plan, job.software
    return Cut(
        rows=job.microbatch_rows,
        tp=plan.tp,
        parts=job.parts,
        sequence_parallel=plan.megatron_sp,
        tp_hidden=software.hides_tp,
        fused_sums=software.fused_sums,
        gradient=software.gradient,
        experts=plan.ep,
        copies=software.copies,
    )


def _inside(spans: GroupSpans) -> tuple[tuple[InnerAxis, Span], ...]:
    return tuple((axis, spans[axis]) for axis in INSIDE if axis in spans)


def _block(job: Job, spans: GroupSpans) -> tuple[StageTime, Seconds]:
    """(one block with what recomputation adds, the collectives in it)."""
    cut, inside = _cut(job), _inside(spans)
    time = block_time(job.machine, job.model, cut, inside)
    again = {"none": 0.0, "selective": time.core, "full": time.forward}[job.recompute]
    alone = block_time(job.machine, job.model, cut)
    talk = time.forward + time.input + time.weight - alone.forward - alone.input - alone.weight
    talk += time.forward - alone.forward if job.recompute == "full" else 0.0
    passes = StageTime(time.forward, Seconds(time.input + again), time.weight)
    return _with_units(job, spans, passes, Seconds(max(talk, 0.0)))  # of rounding


def _with_units(job: Job, spans: GroupSpans, passes: StageTime, talk: Seconds) -> tuple[StageTime, Seconds]:
    """ZeRO-3 gathers the values of a block in forward and backward, and sums its gradients; ZeRO-2 the
    latter.
    """
    model, plan = job.model, job.plan
    if plan.zero < 2 or "data" not in spans:
        return passes, talk
    whole, cut, _ = model.block_parameters()
    dense, expert = MeanElements(whole + cut / plan.tp), model.expert_parameters(plan.tp, plan.ep)
    sums = _halves(spans, dense, expert, job.software.summed)
    gather = _halves(spans, dense, expert, model.item) if plan.zero == 3 else Seconds(0.0)
    both = job.machine.reached.both
    forward = both(passes.forward, gather)
    backward = Seconds(passes.input + passes.weight)
    longer = both(backward, Seconds(gather + sums))
    waited = forward - passes.forward + longer - backward
    share = passes.weight / backward
    times = StageTime(forward, Seconds(longer * (1 - share)), Seconds(longer * share))
    return times, Seconds(talk + waited)


def _halves(spans: GroupSpans, dense: MeanElements, experts: MeanElements, item: int) -> Seconds:
    """A gather, or a reduce_scatter, of these parameters. item: bytes of each."""
    time = collectives.all_gather(spans["data"], MeanBytes(dense * item))
    if not experts or "expert" not in spans:
        return time
    return Seconds(time + collectives.all_gather(spans["expert"], MeanBytes(experts * item)))


def stage_times(job: Job) -> tuple[tuple[StageTime, ...], Seconds]:
    """(every virtual stage, the collectives in one block)"""
    return _stage_times(job._replace(rows=job.microbatch_rows * job.data_ranks * job.microbatches))


@functools.lru_cache(maxsize=4096)
def _stage_times(job: Job) -> tuple[tuple[StageTime, ...], Seconds]:
    spans = spans_of(job.machine, job.plan)
    block, talk = _block(job, spans)
    tokens = job.microbatch_rows * job.model.sequence / job.parts
    bounds, times = job.bounds(), list[StageTime]()
    alone = 1.0 if job.software.waits else 1 - job.machine.reached.overlap
    waits = alone * _message(job, spans) if job.plan.pp > 1 else 0.0
    for number, (first, end) in enumerate(bounds):
        forward, inputs, weights = ((end - first) * part for part in block)
        if number == 0:
            lookup = moved_time(job.machine, MeanBytes(3 * job.model.item * tokens * job.model.hidden))
            forward, weights = forward + lookup, weights + lookup
        if number == len(bounds) - 1:
            f, i, w = head_time(job.machine, job.model, _cut(job))
            forward, inputs, weights = forward + f, inputs + i, weights + w
        times.append(StageTime(Seconds(forward + waits), Seconds(inputs + waits), Seconds(weights)))
    return tuple(times), talk


def _message(job: Job, spans: GroupSpans) -> Seconds:
    if "pp" not in spans:
        return Seconds(0.0)
    plan = job.plan
    tokens = MeanTokens(job.microbatch_rows * job.model.sequence / job.parts)
    nbytes = MeanBytes(job.model.item * tokens * job.model.hidden)
    if not (plan.megatron_sp or job.software.cuts_messages):
        return collectives.message(spans["pp"], nbytes)
    time = collectives.message(spans["pp"], MeanBytes(nbytes / plan.tp))
    if not plan.megatron_sp and "tp" in spans:
        return Seconds(time + collectives.all_gather(spans["tp"], nbytes))
    return time


def _rest(job: Job, spans: GroupSpans, rank: int, backward: Seconds) -> Rest:
    """backward: of the last microbatch."""
    plan, software, machine = job.plan, job.software, job.machine
    dense, experts = owned_parameters(job, rank)
    sums = values = 0.0
    share = 1
    if "data" in spans:
        share = spans["data"].ranks if plan.zero else 1
        sums = collectives.all_reduce(spans["data"], MeanBytes(dense * software.summed))
        if experts and "expert" in spans:
            sums += collectives.all_reduce(spans["expert"], MeanBytes(experts * software.summed))
        if plan.zero:
            sums = _halves(spans, dense, experts, software.summed)
            values = _halves(spans, dense, experts, job.model.item) if plan.zero < 3 else 0.0
        if plan.zero >= 2:  # summed in every pass; the last bucket is left
            sums = min(sums, sums / max(job.model.layers / plan.pp, 1))
        elif software.hides_dp:
            bucket = plan.bucket_mb * 1e6 / max(dense * software.summed, 1)
            last = sums * min(bucket, 1.0)
            sums = last + machine.reached.both(backward, Seconds(sums - last)) - backward
    mine = (dense + experts * (plan.ep if plan.zero else 1)) / share
    optimizer: float = moved_time(machine, MeanBytes(mine * software.update))
    if plan.offload:
        optimizer += mine * (software.gradient + job.model.item) / machine.host
    return Rest(Seconds(sums), Seconds(optimizer), Seconds(values))


def step_time(job: Job, exact: bool = True) -> StepTime:
    """exact: the pipeline by events; else by closed_form, which a search ranks by."""
    spans = spans_of(job.machine, job.plan)
    times, talk = stage_times(job)
    plan, m = job.plan, job.microbatches
    blocks = job.model.layers / plan.pp
    pipeline = None
    if plan.pp == 1:
        passes, bubble = m * times[0].total, 0.0
    elif exact:
        pipeline = run_pipeline(plan.schedule, plan.pp, m, plan.chunks_per_rank, times, _message(job, spans))
        passes, bubble = pipeline.makespan, pipeline.bubble * pipeline.makespan
    else:
        passes = closed_form(plan, m, times, _message(job, spans))
        bubble = passes - m * max(_per_rank(plan, times))
    rests = []
    for rank in sorted({0, plan.pp - 1}):
        mine = times[rank :: plan.pp] if plan.schedule != "zbv" else (times[rank], times[-1 - rank])
        rests.append(_rest(job, spans, rank, Seconds(sum(t.input + t.weight for t in mine))))
    sums, optimizer, values = (max(part) for part in zip(*rests, strict=True))
    norm = (
        collectives.all_reduce(collectives.span(job.machine, plan.world_size, 1), MeanBytes(8))
        if plan.world_size > 1
        else 0
    )
    return StepTime(
        Seconds(passes),
        Seconds(bubble),
        Seconds(m * blocks * talk),
        Seconds(sums + (norm + _tie(job, spans))),
        optimizer,
        values,
        pipeline,
    )


def _tie(job: Job, spans: GroupSpans) -> Seconds:
    """In which the first and the last stage exchange their gradients of a table that is the head too
    (pipeline/ties.py); under zero a part of it each. Of zbv the two are on one rank.
    """
    plan, model = job.plan, job.model
    if "pp" not in spans or not model.tied or plan.schedule == "zbv":
        return Seconds(0.0)
    shared = spans["data"].ranks if plan.zero and "data" in spans else 1
    nbytes = model.vocab * model.hidden / plan.tp * job.software.summed / shared
    return collectives.message(spans["pp"], MeanBytes(nbytes))


def _per_rank(plan: Plan, times: tuple[StageTime, ...]) -> list[float]:
    if plan.pp == 1:
        return [times[0].total]
    if plan.schedule == "zbv":
        return [times[r].total + times[-1 - r].total for r in range(plan.pp)]
    return [sum(t.total for t in times[rank :: plan.pp]) for rank in range(plan.pp)]


def closed_form(plan: Plan, microbatches: int, times: tuple[StageTime, ...], message: Seconds) -> Seconds:
    """Of the passes, by the bubbles of the table in pipeline/schedules.py at these times: for a
    search, which then asks the events about its best. Messages of the first microbatch's way there and back
    are added.
    """
    per_rank = _per_rank(plan, times)
    work, p = microbatches * max(per_rank), plan.pp
    mean = sum(per_rank) / p
    split = [sum(part) / p for part in zip(*times, strict=True)]  # F, B, W of a rank
    if plan.schedule in ("1f1b", "gpipe", "pipedream"):
        idle = (p - 1) * mean
    elif plan.schedule == "interleaved":
        idle = (p - 1) * mean / plan.chunks_per_rank
    elif plan.schedule == "zb-h1":
        idle = (p - 1) * max(split[0] + split[1] - split[2], 0.0)
    else:
        idle = max(2 * p - 1 - microbatches, 0) * mean / 2 * 0.5
    turns = math.ceil(microbatches / p)
    return Seconds(work + idle + 2 * message * (plan.virtual_stages - 1) + (turns - 1) * 2 * message)
