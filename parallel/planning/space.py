"""What a search looks at: all plans of so many ranks that can be.

    axes           every way to write the ranks as tp x pp x dp (x ep with experts, ulysses and ring with long
                   sequences); tp inside a node and a divisor of the heads; pp at most the blocks
    microbatch     rows 1, 2, 4 ... of a data rank, a row for every data rank in each
    schedule       1f1b, interleaved (2 to 8 chunks), zb-h1, zbv
    memory         zero 0 to 3, recomputation or not; tp with megatron_sp (as many bytes, less memory, more
                   copies) or without, what is faster of those that fit

Left out at once: axes whose states alone, by ZeRO's closed form, are above the memory, and plans whose ideal
compute time with a full pipeline is above a time that is given.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from pycomm.parallel.ground.plan import AXES, Plan, Precision, Schedule, Zero
from pycomm.parallel.planning.asked import Fixed, unfit
from pycomm.parallel.planning.events import AT_ONCE
from pycomm.parallel.planning.job import PYCOMM, Job, Recompute, Software
from pycomm.parallel.planning.machine import Machine
from pycomm.parallel.planning.memory import states, worst_rank
from pycomm.parallel.planning.model import Model
from pycomm.parallel.planning.quantities import MeanBytes, MeanElements, Seconds
from pycomm.parallel.planning.time import step_time

__all__ = ["Request", "divisors", "fits", "ideal_time", "jobs_of", "microbatches_of", "plans_of", "shapes_of"]

LONG = 16384  # positions from which ring and ulysses are tried
CHUNKS = (2, 3, 4, 6, 8)


class Shape(NamedTuple):
    """Ranks of each axis."""

    tp: int
    pp: int
    dp: int
    ep: int
    ulysses: int
    ring: int


class Request(NamedTuple):
    """What is wanted. world: ranks; rows: sequences of a step. memory: bytes of a rank that may be used,
    None: the machine's. microbatch: most rows of one
    microbatch. check: called with each Plan, raises ValueError for one that the model or its optimizer
    refuse.
    """

    model: Model
    machine: Machine
    world: int
    rows: int
    memory: float | None = None
    fixed: Fixed = {}
    microbatch: int = 16
    software: Software = PYCOMM
    precision: Precision | None = "bf16"
    check: Callable[[Plan], None] = lambda plan: None

    @property
    def limit(self) -> MeanBytes:
        return self.machine.usable if self.memory is None else MeanBytes(self.memory)


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def shapes_of(request: Request) -> Iterator[Shape]:
    """Every way to deal the ranks that the fixed axes allow."""
    model, world, fixed = request.model, request.world, request.fixed
    node = min(request.machine.node, world)

    def sizes(axis: str, tried: list[int]) -> list[int]:
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
                        axes = {"tp": tp, "pp": pp, "ep": ep, "ulysses": ulysses, "ring": ring}
                        if world % rest or unfit(model, axes):
                            continue
                        dp = world // rest
                        if fixed.get("dp", dp) == dp and dp * ep <= request.rows:
                            yield Shape(tp, pp, dp, ep, ulysses, ring)


def _long(model: Model) -> bool:
    return model.sequence >= LONG


def ideal_time(request: Request) -> Seconds:
    """Of the products of a step at the best efficiency, on all ranks."""
    flops: float = request.model.flops(request.rows * request.model.sequence)
    if request.model.fused:
        attention = request.model.block_flops().attention * request.model.layers
        flops -= 3 * attention / 2 * request.rows * request.model.sequence
    return Seconds(flops / (request.world * request.machine.peak * request.machine.reached.product))


def _never() -> Seconds:
    return Seconds(math.inf)


def jobs_of(
    request: Request,
    shape: Shape,
    ideal: Seconds = AT_ONCE,
    worst: Callable[[], Seconds] = _never,
    lean: bool = False,
) -> Iterator[Job]:
    """Those of these axes that fit. ideal: of ideal_time; worst(): above it nothing is wanted.
    lean: only with the most microbatches, which hold the least.
    """
    tp, pp, dp, ep, *_ = shape
    waste = -(-request.rows // (dp * ep)) * dp * ep / request.rows
    if _least_states(request, tp * pp) > request.limit or ideal * waste > worst():
        return
    for microbatches in microbatches_of(request, dp * ep)[: 1 if lean else None]:
        for schedule, chunks in _schedules(request, pp, microbatches):
            full = microbatches / (microbatches + (pp - 1) / chunks) if "zb" not in schedule else 1.0
            if ideal * waste / full > worst():
                continue
            for recompute in _recomputations(request):
                jobs = [
                    Job(
                        request.model,
                        request.machine,
                        plan,
                        request.rows,
                        microbatches,
                        recompute,
                        request.software,
                    )
                    for plan in plans_of(request, shape, schedule, chunks, recompute)
                ]
                yield from _faster_forms(job for job in jobs if worst_rank(job).peak <= request.limit)


def _faster_forms(jobs: Iterable[Job]) -> Iterator[Job]:
    """Of jobs that differ in megatron_sp alone the faster one, by closed form; of equals the leaner."""
    best: dict[int, tuple[tuple[float, bool], Job]] = {}  # zero -> ((seconds, leaner), job)
    for job in jobs:
        seconds = step_time(job, exact=False).total if job.plan.tp > 1 else 0.0
        order = seconds, not job.plan.megatron_sp
        if job.plan.zero not in best or order < best[job.plan.zero][0]:
            best[job.plan.zero] = order, job
    yield from (job for _, job in best.values())


def fits(request: Request) -> bool:
    """Whether there is any plan."""
    return any(True for shape in shapes_of(request) for _ in jobs_of(request, shape, lean=True))


def _least_states(request: Request, cut: int) -> MeanBytes:
    """What no plan of tp x pp = `cut` goes below: all states shared by all ranks, none in the host."""
    software, offload = request.software, request.fixed.get("offload")
    kept = {
        "parameter": 0 if offload == "parameters" else request.model.item,
        "gradient": software.gradient,
        "optimizer": 0 if offload else software.state,
    }
    count = MeanElements(request.model.parameters / cut)
    return MeanBytes(sum(states(count, 3, request.world // cut, **kept)))


def microbatches_of(request: Request, data: int) -> list[int]:
    """Numbers of microbatches, most first: each has a row for every data rank, as par.step wants it, and no
    more than request.microbatch.
    """
    share = -(-request.rows // data)
    most = min(request.microbatch, share)
    tried = {*(2**i for i in range(12) if 2**i <= most), most}
    found = {min(-(-share // rows), request.rows // data) for rows in tried}
    fitting = (m for m in found if -(-request.rows // (data * m)) <= request.microbatch)
    return sorted(fitting, reverse=True)


def _schedules(request: Request, pp: int, microbatches: int) -> list[tuple[Schedule, int]]:
    """(name, chunks) of the schedules to try."""
    fixed, layers = request.fixed, request.model.layers
    name, chunks = fixed.get("schedule"), fixed.get("chunks")
    if pp == 1:
        return [(name or "1f1b", chunks or 1)]
    found: list[tuple[Schedule, int]]
    if chunks and name in (None, "interleaved"):
        found = [("interleaved", chunks)]
        if name is None and chunks == 2:
            found.append(("zbv", 2))
    elif name == "interleaved" and microbatches < pp:
        found = [(name, 2)]
    else:
        found = [("1f1b", 1), ("zb-h1", 1), ("zbv", 2), ("gpipe", 1), ("pipedream", 1)]
        if microbatches >= pp:
            found += [("interleaved", v) for v in CHUNKS if layers % (pp * v) == 0]
        wanted = (name,) if name else ("1f1b", "zb-h1", "zbv", "interleaved")
        found = [pair for pair in found if pair[0] in wanted and chunks in (None, pair[1])]
        if name == "interleaved":
            found = found or [(name, 2)]
    return [pair for pair in found if layers >= pp * pair[1]]


def _recomputations(request: Request) -> list[Recompute]:
    if "checkpoint" in request.fixed:
        return ["full" if request.fixed["checkpoint"] else "none"]
    return ["none", "full"]


def plans_of(
    request: Request,
    shape: Shape,
    schedule: Schedule,
    chunks: int | None,
    recompute: Recompute,
    refused: list[ValueError] | None = None,
) -> Iterator[Plan]:
    """Those of every zero that the fixed fields allow. refused: a list for what Plan says of the others."""
    fixed = request.fixed
    sharded = shape.dp * shape.ep * shape.ulysses * shape.ring > 1
    others = {key: value for key, value in fixed.items() if key not in (*AXES, "zero")}
    options: dict[str, Any] = {"precision": request.precision, "checkpoint": recompute == "full"}
    if shape.pp > 1:
        options |= {"schedule": schedule, "chunks": chunks if schedule == "interleaved" else None}
    every = sharded or "offload" in fixed or "zero_group" in fixed
    zeros: list[Zero] = [fixed["zero"]] if "zero" in fixed else ([0, 1, 2, 3] if every else [0])
    pieces = [True, False] if shape.tp > 1 and "megatron_sp" not in fixed else [False]
    for zero, megatron_sp in itertools.product(zeros, pieces):
        try:
            plan = Plan(**shape._asdict(), zero=zero, **{"megatron_sp": megatron_sp, **options, **others})
            request.check(plan)
        except ValueError as error:
            if refused is not None:
                refused.append(error)
        else:
            yield plan
