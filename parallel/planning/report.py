"""What was found, for people: a table of plans, why the first is first, why famous plans lose, and what one
change of a plan would help most.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

from pycomm.parallel.ground.plan import Plan, Schedule, Zero
from pycomm.parallel.planning.job import Job, Recompute, recompute_of
from pycomm.parallel.planning.model import Model
from pycomm.parallel.planning.quantities import MeanBytes, Seconds
from pycomm.parallel.planning.search import Prediction, Request, divisors, predict
from pycomm.parallel.planning.space import microbatches_of
from pycomm.parallel.planning.time import GroupName, spans_of

__all__ = ["Explanation", "changes", "even_experts", "explain_job", "famous", "reason", "table"]

GIB = 2**30
Changes: TypeAlias = Iterator[tuple[str, Job]]  # (sentence, the changed job)
MovedAxis: TypeAlias = Literal["tp", "pp", "dp"]
INSIDE: tuple[GroupName, ...] = ("tp", "ep", "ulysses", "ring")


def size(nbytes: MeanBytes) -> str:
    """For people: GiB, or MiB below a tenth of one."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB / 10 else f"{nbytes / 2**20:.2f} MiB"


def seconds(time: Seconds) -> str:
    return f"{time:.3f} s" if time >= 0.1 else f"{1e3 * time:.3f} ms"


def short(plan: Plan) -> str:
    """A plan without what says itself: precision, and megatron_sp where there is no tp."""
    shown = dataclasses.replace(plan, precision=None, megatron_sp=plan.tp > 1 and plan.megatron_sp)
    return str(shown).replace("megatron_sp=True", "megatron_sp")


def table(found: Sequence[Prediction], limit: MeanBytes) -> list[str]:
    """Lines, one per Prediction."""
    rows = [("", "plan", "microbatches", "step", "tokens/s/rank", "MFU", "peak of a rank")]
    for number, each in enumerate(found, 1):
        peak = f"{size(each.memory.peak)} of {size(limit)} in {each.memory.where}"
        job = each.job
        rows.append(
            (
                str(number),
                short(each.plan),
                f"{job.microbatches} x {job.microbatch_rows}",
                seconds(each.seconds),
                f"{each.tokens:.0f}",
                f"{100 * each.mfu:.1f}%",
                peak,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def reason(found: Prediction) -> str:
    """One sentence: where the time and the memory go."""
    parts, total = found.time.parts(), found.seconds
    shares = [f"{name} {100 * value / total:.0f}%" for name, value in parts.items() if value > 0.005 * total]
    memory = [
        f"{name} {value / GIB:.1f}" for name, value in found.memory.parts().items() if value > 0.05 * GIB
    ]
    return f"time: {', '.join(shares)}; GiB: {', '.join(memory)}"


def even_experts(model: Model) -> list[str]:
    """What is assumed of a mixture, as a list of one line or none."""
    if model.experts is None:
        return []
    count, top_k, *_ = model.experts
    return [
        f"experts: tokens are taken to be dealt evenly, {top_k} rows of work for a token over {count} "
        "experts; a rank whose experts are chosen more often takes longer and holds more"
    ]


def _link(job: Job, axis: GroupName) -> str:
    where = spans_of(job.machine, job.plan).get(axis)
    if where is None:
        return ""
    return where.inner.name if where.outer is None else where.outer.name


def loses(found: Prediction, best: Prediction, limit: MeanBytes) -> str:
    """Why `found` is not the best: out of memory, or the part of its time that exceeds the best's by most."""
    if found.memory.peak > limit:
        name, most = max(found.memory.parts().items(), key=lambda part: part[1])
        return f"out of memory: {size(found.memory.peak)} of {size(limit)}, of which {name} {size(most)}"
    slower = 100 * (found.seconds / best.seconds - 1)
    if slower < 0.5:
        return "as fast as the best"
    mine, its = found.time.parts(), best.time.parts()
    name = max(mine, key=lambda part: mine[part] - its[part])
    text = f"{slower:.0f}% slower: {name} {seconds(mine[name])}, {seconds(its[name])} in the best"
    if name == "collectives in blocks":
        axis: GroupName = next((axis for axis in INSIDE if getattr(found.plan, axis) > 1), "data")
        text += f" ({axis} over {_link(found.job, axis)})"
    elif name in ("sums of gradients", "gathering values"):
        text += f" (over {_link(found.job, 'data')})"
    elif name == "compute" and found.job.recompute == "full" and best.job.recompute != "full":
        text += " (recomputation)"
    elif name == "compute":
        text += " (smaller products, or ranks with fewer rows)"
    return text


class Wanted(TypedDict, total=False):
    """Of a plan that people take first. tp, pp: how many ranks, by name; dp: the rest of them."""

    tp: Literal["node", "nodes"]
    pp: Literal["all", "fit"]
    dp: None
    zero: Zero
    checkpoint: bool
    schedule: Schedule


class Famous(NamedTuple):
    """why: it is not the best. prediction: None where these ranks, blocks and rows do not allow it."""

    name: str
    prediction: Prediction | None
    why: str


FAMOUS: dict[str, Wanted] = {
    "data parallel alone (DDP)": {"dp": None},
    "ZeRO-3 on all ranks (FSDP)": {"dp": None, "zero": 3},
    "ZeRO-3 with recomputation": {"dp": None, "zero": 3, "checkpoint": True},
    "tensor parallel in a node, ZeRO-1": {"tp": "node", "dp": None, "zero": 1},
    "tensor parallel over two nodes": {"tp": "nodes", "dp": None, "zero": 1},
    "pipeline alone, GPipe": {"pp": "all", "dp": None, "schedule": "gpipe"},
    "Megatron: tp in a node, 1F1B": {"tp": "node", "pp": "fit", "dp": None, "schedule": "1f1b"},
    "Megatron with recomputation": {"tp": "node", "pp": "fit", "dp": None, "checkpoint": True},
    "the same, interleaved": {
        "tp": "node",
        "pp": "fit",
        "dp": None,
        "checkpoint": True,
        "schedule": "interleaved",
    },
}


def famous(request: Request, best: Prediction) -> list[Famous]:
    """Of plans that people take first."""
    rows = []
    for name, wanted in FAMOUS.items():
        found = _best_of(request, wanted)
        if found is None:
            rows.append(Famous(name, None, "these ranks, blocks and rows do not allow it"))
        else:
            rows.append(Famous(name, found, loses(found, best, request.limit)))
    return rows


def _best_of(request: Request, wanted: Wanted) -> Prediction | None:
    """That of the best microbatch under the axes that are wanted; the leanest where none fits."""
    tried = []
    for plan in _plans(request, wanted):
        for microbatches in microbatches_of(request, plan.dp * plan.ep):
            if plan.schedule == "interleaved" and microbatches < plan.pp:
                continue
            recompute = recompute_of(plan)
            job = Job(
                request.model, request.machine, plan, request.rows, microbatches, recompute, request.software
            )
            tried.append(predict(job, exact=False))
    fitting = [each for each in tried if each.memory.peak <= request.limit]
    if fitting:
        return predict(min(fitting, key=lambda each: each.seconds).job)
    return min(tried, key=lambda each: each.memory.peak, default=None)


def _plans(request: Request, wanted: Wanted) -> Iterator[Plan]:
    model, world = request.model, request.world
    node = int(min(request.machine.node, world))
    sizes = {
        "node": [max(d for d in divisors(world) if d <= node and model.heads % d == 0)],
        "nodes": [d for d in divisors(world) if node < d <= 2 * node and model.heads % d == 0][-1:],
        "all": [max(d for d in divisors(world) if d <= model.layers)],
        "fit": [d for d in divisors(world) if 1 < d <= model.layers],
    }
    for tp in sizes[wanted["tp"]] if "tp" in wanted else [1]:
        for pp in sizes[wanted["pp"]] if "pp" in wanted else [1]:
            if world % (tp * pp) or (tp > 1 and wanted.get("tp") is None):
                continue
            dp = world // (tp * pp)
            if dp > request.rows:
                continue
            options: dict[str, Any] = {
                key: value for key, value in wanted.items() if key not in ("tp", "pp", "dp")
            }
            options["precision"] = request.precision
            if options.get("schedule") == "interleaved":
                chunks = [v for v in (4, 3, 2) if model.layers % (pp * v) == 0]
                if not chunks:
                    continue
                options["chunks"] = chunks[0]
            yield Plan(tp=tp, pp=pp, dp=dp, megatron_sp=tp > 1, **options)


class Explanation:
    """What explain() returns; str() is the text. prediction: of the plan; better: the one change that helps
    most, and a sentence of it.
    """

    def __init__(
        self, prediction: Prediction, better: tuple[Prediction, str] | None, limit: MeanBytes
    ) -> None:
        self.prediction, self.better, self.limit = prediction, better, limit

    def __str__(self) -> str:
        found = self.prediction
        lines = [f"{found.job.model.name} on {found.plan.world_size} ranks of {found.job.machine.name}"]
        lines += table([found], self.limit)
        lines.append(reason(found))
        lines += even_experts(found.job.model)
        if found.memory.peak > self.limit:
            lines.append(f"does not fit: {size(MeanBytes(found.memory.peak - self.limit))} too much")
        if self.better:
            lines.append(f"the one change that helps most: {self.better[1]}")
        else:
            lines.append("no single change of an option or of two axes is predicted to help")
        return "\n".join(lines)


class _Tried(NamedTuple):
    """order: (over the limit, by how much), by which the least is the best."""

    order: tuple[bool, float]
    found: Prediction
    sentence: str


def explain_job(job: Job, limit: MeanBytes | None = None) -> Explanation:
    limit = limit or job.machine.usable
    found = predict(job)
    fits = found.memory.peak <= limit
    best: _Tried | None = None
    for sentence, other in changes(job):
        each = predict(other)
        if each.memory.peak > limit and (fits or each.memory.peak >= found.memory.peak):
            continue
        over = each.memory.peak > limit
        order = (over, each.memory.peak if over else each.seconds)
        if best is None or order < best.order:
            best = _Tried(order, each, sentence)
    if best is None or (fits and best.found.seconds > 0.995 * found.seconds):
        return Explanation(found, None, limit)
    each = best.found
    before, after = size(found.memory.peak), size(each.memory.peak)
    gain = f"{seconds(found.seconds)} -> {seconds(each.seconds)}, {before} -> {after}"
    return Explanation(found, (each, f"{best.sentence} ({gain})"), limit)


def changes(job: Job) -> Changes:
    """One for every plan that differs in one option, in the microbatch, or in a factor 2 moved
    from one axis to another.
    """
    plan = job.plan

    def other(sentence: str, microbatches: int = job.microbatches, **change: Any) -> Changes:
        try:
            new = dataclasses.replace(plan, **change)
        except ValueError:
            return
        if new.virtual_stages > job.model.layers or new.dp * new.ep * microbatches > job.rows:
            return
        if new.schedule == "interleaved" and microbatches < new.pp:
            return
        recompute: Recompute = job.recompute
        if new.checkpoint or recompute == "full":
            recompute = recompute_of(new)
        yield sentence, job._replace(plan=new, microbatches=microbatches, recompute=recompute)

    share = job.rows // job.data_ranks
    for microbatches in {max(1, job.microbatches // 2), min(share, job.microbatches * 2)} - {
        job.microbatches
    }:
        yield from other(f"{microbatches} microbatches", microbatches)
    yield from other(f"checkpoint={not plan.checkpoint}", checkpoint=not plan.checkpoint)
    for zero in {0, 1, 2, 3} - {plan.zero}:
        yield from other(f"zero={zero}", zero=zero)
    if plan.tp > 1:
        yield from other(f"megatron_sp={not plan.megatron_sp}", megatron_sp=not plan.megatron_sp)
    if plan.pp > 1:
        for name, chunks in (
            ("1f1b", None),
            ("interleaved", 2),
            ("interleaved", 4),
            ("zb-h1", None),
            ("zbv", None),
        ):
            if (name, chunks) != (plan.schedule, plan.chunks):
                text = f"schedule={name}" + (f",chunks={chunks}" if chunks else "")
                yield from other(text, schedule=name, chunks=chunks)
    axes: tuple[MovedAxis, ...] = ("tp", "pp", "dp")
    for source in axes:
        for target in set(axes) - {source}:
            if getattr(plan, source) % 2 == 0 and (target != "tp" or job.model.heads % (2 * plan.tp) == 0):
                yield from _moved(job, other, source, target)


def _moved(job: Job, other: Callable[..., Changes], source: MovedAxis, target: MovedAxis) -> Changes:
    plan = job.plan
    sizes: dict[MovedAxis, int] = {source: getattr(plan, source) // 2, target: getattr(plan, target) * 2}
    dp = sizes.get("dp", plan.dp)
    share = -(-job.rows // (dp * plan.ep))
    change: dict[str, object] = dict(sizes.items())
    if sizes.get("pp", plan.pp) == 1:
        change.update(schedule="1f1b", chunks=None)
    if sizes.get("tp", plan.tp) == 1:
        change.update(megatron_sp=False)
    microbatches = max(1, min(-(-share // job.microbatch_rows), job.rows // (dp * plan.ep)))
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    yield from other(f"{text} with {microbatches} microbatches", microbatches, **change)
