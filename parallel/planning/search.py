"""The search: all plans of so many ranks that can be, the best by time among those that fit into memory.

    axes           every way to write the ranks as tp x pp x dp (x ep with experts, ulysses and ring with long
                   sequences); tp inside a node and a divisor of the heads; pp at most the blocks
    microbatch     rows 1, 2, 4 ... of a data rank
    schedule       1f1b, interleaved (2 to 8 chunks), zb-h1, zbv
    memory         zero 0 to 3, recomputation or not; megatron_sp with every tp: as many bytes, less memory

Pruned: a plan whose states alone, by ZeRO's closed form, are above the memory; a plan whose ideal compute
time with a full pipeline is above the time of the WIDE best so far; zero=2 and 3 where a smaller number
fits with the same rest, unless they are the ones that fit (they send more and hold less). The rest is
ranked by time.closed_form, and the best WIDE of that are timed by events. On one core 1,024 ranks take
about a second, 100,000 some seconds.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pycomm.parallel.ground.plan import AXES, Plan
from pycomm.parallel.planning.job import PYCOMM, Job, Software
from pycomm.parallel.planning.machine import Machine
from pycomm.parallel.planning.memory import Memory, states, worst_rank
from pycomm.parallel.planning.model import Model
from pycomm.parallel.planning.time import StepTime, step_time

__all__ = ["NoPlan", "Prediction", "Request", "predict", "search"]

WIDE = 40  # plans that are timed by events
LONG = 16384  # positions from which ring and ulysses are tried
CHUNKS = (2, 3, 4, 6, 8)


class NoPlan(ValueError):
    """No plan is possible; the text says which constraint is in the way, and what would relieve it."""


class Request(NamedTuple):
    """What is wanted. world: ranks; rows: sequences of a step. memory: bytes of a rank that may be used,
    None: the machine's. fixed: {field of Plan: value} that the plan must have. microbatch: most rows of one
    microbatch.
    """

    model: Model
    machine: Machine
    world: int
    rows: int
    memory: float | None = None
    fixed: Mapping = {}
    microbatch: int = 16
    software: Software = PYCOMM
    precision: str | None = "bf16"

    @property
    def limit(self):
        return self.memory or self.machine.usable


class Prediction(NamedTuple):
    """What a plan is predicted to do. memory: of the rank with the largest peak."""

    job: Job
    time: StepTime
    memory: Memory

    @property
    def plan(self):
        return self.job.plan

    @property
    def seconds(self):
        return self.time.total

    @property
    def mfu(self):
        """Model FLOPs utilisation: without recomputation, of the machine's peak."""
        job = self.job
        flops = job.model.flops(job.rows * job.model.sequence)
        return flops / (job.plan.world_size * job.machine.peak * self.seconds)

    @property
    def tokens(self):
        """Per second and rank."""
        return self.job.rows * self.job.model.sequence / self.seconds / self.job.plan.world_size


def predict(job, exact=True):
    """Prediction of one Job."""
    return Prediction(job, step_time(job, exact), worst_rank(job))


def divisors(number):
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def search(request, count=10, progress: Callable | None = None):
    """The best `count` Predictions, best first. progress(done, of_all): called meanwhile. Raises NoPlan."""
    shapes = list(_shapes(request))
    if not shapes:
        raise NoPlan(_why_no_shape(request))
    best, ideal = _Best(), _ideal(request)
    for number, shape in enumerate(shapes):
        for job in _jobs(request, shape, best, ideal):
            best.add(step_time(job, exact=False).total, job)
        if progress:
            progress(number + 1, len(shapes))
    if not best.jobs:
        raise NoPlan(_why_no_memory(request, shapes))
    timed = sorted((predict(job) for job in best.sorted()), key=lambda found: found.seconds)
    return timed[:count]


class _Best:
    """The WIDE jobs with the least time so far."""

    def __init__(self):
        self.jobs, self.order = [], itertools.count()

    def add(self, seconds, job):
        item = (-seconds, next(self.order), job)
        if len(self.jobs) < WIDE:
            heapq.heappush(self.jobs, item)
        else:
            heapq.heappushpop(self.jobs, item)

    @property
    def worst(self):
        return -self.jobs[0][0] if len(self.jobs) == WIDE else math.inf

    def sorted(self):
        return [job for _, _, job in sorted(self.jobs, key=lambda item: -item[0])]


def _shapes(request):
    """(tp, pp, dp, ep, ulysses, ring) of every way to deal the ranks that the fixed axes allow."""
    model, world, fixed = request.model, request.world, request.fixed
    node = min(request.machine.node, world)

    def sizes(axis, tried):
        return [fixed[axis]] if axis in fixed else tried

    inner = [d for d in divisors(world) if d <= node and node % d == 0 and model.heads % d == 0]
    for tp in sizes("tp", inner):
        for pp in sizes("pp", [d for d in divisors(world) if d <= model.layers]):
            for ep in sizes("ep", divisors(model.experts.count) if model.experts else [1]):
                heads = [d for d in divisors(model.heads // tp or 1) if d <= node] if _long(model) else [1]
                for ulysses in sizes("ulysses", heads):
                    rings = [2**i for i in range(9)] if _long(model) else [1]
                    for ring in sizes("ring", rings):
                        rest = tp * pp * ep * ulysses * ring
                        if world % rest or pp > model.layers:
                            continue
                        dp = world // rest
                        if fixed.get("dp", dp) == dp and dp * ep <= request.rows:
                            yield tp, pp, dp, ep, ulysses, ring


def _long(model):
    return model.sequence >= LONG


def _ideal(request):
    """Seconds of the products of a step at the best efficiency, on all ranks."""
    flops = request.model.flops(request.rows * request.model.sequence)
    if request.model.fused:
        attention = request.model.block_flops()[1] * request.model.layers
        flops -= 3 * attention / 2 * request.rows * request.model.sequence
    return flops / (request.world * request.machine.peak * request.machine.reached.product)


def _jobs(request, shape, best, ideal):
    """Jobs of these axes that fit."""
    tp, pp, dp, ep, ulysses, ring = shape
    share = -(-request.rows // (dp * ep))
    waste = share * dp * ep / request.rows
    axes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "ulysses": ulysses, "ring": ring}
    lower = sum(states(request.model.parameters / (tp * pp), 3, request.world // (tp * pp)))
    if lower > request.limit or ideal * waste > best.worst:
        return
    for rows in _microbatches(request, share):
        microbatches = -(-share // rows)
        for schedule, chunks in _schedules(request, pp, microbatches):
            full = microbatches / (microbatches + (pp - 1) / chunks) if "zb" not in schedule else 1.0
            if ideal * waste / full > best.worst:
                continue
            for recompute in _recomputations(request):
                yield from _by_zero(request, axes, microbatches, schedule, chunks, recompute)


def _microbatches(request, share):
    most = min(request.microbatch, share)
    return sorted({*(2**i for i in range(12) if 2**i <= most), most})


def _schedules(request, pp, microbatches):
    fixed, layers = request.fixed, request.model.layers
    if pp == 1:
        return [(fixed.get("schedule", "1f1b"), 1)]
    found = [("1f1b", 1), ("zb-h1", 1)]
    found += [("zbv", 2)] if layers >= 2 * pp else []
    if microbatches >= pp:
        found += [("interleaved", v) for v in CHUNKS if layers % (pp * v) == 0]
    if "schedule" in fixed:
        name = fixed["schedule"]
        found = [pair for pair in found if pair[0] == name] or [
            (name, 2 if name in ("interleaved", "zbv") else 1)
        ]
        found = [pair for pair in found if layers >= pp * pair[1]]
    if fixed.get("chunks"):
        found = [pair for pair in found if pair[1] == fixed["chunks"]]
    return found


def _recomputations(request):
    if "checkpoint" in request.fixed:
        return ["full" if request.fixed["checkpoint"] else "none"]
    return ["none", "full"]


def _by_zero(request, axes, microbatches, schedule, chunks, recompute):
    """The smallest zero that fits, and the next."""
    fixed = request.fixed
    sharded = axes["dp"] * axes["ep"] * axes["ulysses"] * axes["ring"] > 1
    stages = [fixed["zero"]] if "zero" in fixed else ([0, 1, 2, 3] if sharded else [0])
    others = {
        key: value
        for key, value in fixed.items()
        if key not in (*AXES, "schedule", "chunks", "zero", "checkpoint")
    }
    fitting = 0
    for zero in stages:
        plan = Plan(
            **axes,
            zero=zero,
            schedule=schedule if axes["pp"] > 1 else "1f1b",
            chunks=chunks if schedule == "interleaved" and axes["pp"] > 1 else None,
            checkpoint=recompute == "full",
            **{"megatron_sp": axes["tp"] > 1, "precision": request.precision, **others},
        )
        job = Job(
            request.model, request.machine, plan, request.rows, microbatches, recompute, request.software
        )
        if worst_rank(job).peak <= request.limit:
            yield job
            fitting += 1
            if fitting == 2:
                return


def _why_no_shape(request):
    model, world, fixed = request.model, request.world, request.fixed
    where = f"{model.name} on {world} ranks with batches of {request.rows} rows"
    for axis in AXES:
        if axis in fixed and world % fixed[axis]:
            near = min(divisors(world), key=lambda d: abs(d - fixed[axis]))
            return f"{where}: {axis}={fixed[axis]} does not divide {world} ranks; {axis}={near} does"
    if fixed.get("pp", 1) > model.layers:
        return f"{where}: pp={fixed['pp']} stages for {model.layers} blocks; pp can be {model.layers} at most"
    product = math.prod(fixed.get(axis, 1) for axis in AXES)
    if world % product or product > world:
        return f"{where}: the fixed axes take {product} ranks, which does not divide {world}"
    free = request._replace(rows=10**9)
    least = min((dp * ep for _, _, dp, ep, _, _ in _shapes(free)), default=None)
    if least is not None:
        return (
            f"{where}: the fewest data ranks that these axes leave are {least}, each of which needs a "
            "row: take "
            f"batches of {least} rows, or more ranks for tp, pp, ring or ulysses"
        )
    return f"{where}: no axes fit together with {', '.join(f'{k}={v}' for k, v in fixed.items())}"


def _why_no_memory(request, shapes):
    """Which memory the leanest plan needs, and what would make the request possible."""
    leanest = None
    for shape in shapes:
        for job in _jobs(request._replace(memory=math.inf, microbatch=1), shape, _Best(), 0.0):
            memory = worst_rank(_lean(job, request))
            if leanest is None or memory.peak < leanest[0].peak:
                leanest = memory, _lean(job, request)
    memory, job = leanest
    gib = 2**30
    parts = ", ".join(f"{name} {size / gib:.1f}" for name, size in memory.parts().items())
    text = (
        f"{request.model.name} on {request.world} ranks: no plan fits into {request.limit / gib:.1f} GiB "
        "per rank. "
        f"The leanest, Plan({job.plan}) with {job.microbatches} microbatches, needs "
        f"{memory.peak / gib:.1f} GiB "
        f"({parts}). What would do: {memory.peak / gib:.1f} GiB per rank"
    )
    more = _more_ranks(request)
    text += f"; or {more} ranks" if more else ""
    for key in request.fixed:
        rest = {name: value for name, value in request.fixed.items() if name != key}
        if _fits(request._replace(fixed=rest)):
            text += f"; or leave {key}={request.fixed[key]} open"
    return text


def _lean(job, request):
    """The same axes with everything that saves memory and is not fixed."""
    change = {}
    if "zero" not in request.fixed:
        change["zero"] = 3
    if "checkpoint" not in request.fixed:
        change["checkpoint"] = True
    plan = job.plan.__class__(
        **{**{f: getattr(job.plan, f) for f in job.plan.__dataclass_fields__}, **change}
    )
    return job._replace(plan=plan, recompute="full" if plan.checkpoint else "none")


def _fits(request):
    for shape in _shapes(request):
        for _ in _jobs(request._replace(microbatch=1), shape, _Best(), 0.0):
            return True
    return False


def _more_ranks(request):
    """The first of 2, 4, ... 1024 times as many ranks that fits, with as many times the rows; None if none
    does.
    """
    for factor in (2**i for i in range(1, 11)):
        if _fits(request._replace(world=request.world * factor, rows=request.rows * factor)):
            return request.world * factor
    return None
