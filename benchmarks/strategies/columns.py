"""Each plan beside torch's own strategy that does the same: rows, the columns of the tables, the picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pycomm.benchmarks.common import report, turns
from pycomm.benchmarks.common.report import Content, Page, Pyplot, Table
from pycomm.benchmarks.strategies.measure import Memory, Timed
from pycomm.benchmarks.strategies.variants import Spec
from pycomm.parallel import Plan

if TYPE_CHECKING:
    import argparse

    from matplotlib.figure import Figure

FASTER_THAN_GLOO = 1.3  # what pycomm.parallel is to be, at least
LEGEND = (
    "ms: median of a step, slowest rank; cpu ms: time on processors, all ranks together, waiting in a loop "
    "included; times faster: the median over rounds of the ratio in that round. peak, held: MB (1e6 bytes) "
    "of live tensors on the fullest rank, in a step and between two; process: growth of its resident set at "
    "the peak, with allocator, code and memory of the backend, registered memory counted on each rank that "
    "maps it. Losses: largest relative difference from one process."
)
BESIDE_TORCH = "pycomm.parallel beside torch"


class Result(NamedTuple):
    """One variant. memory: None where it was not measured. loss_error: largest relative difference from the
    losses of one process.
    """

    spec: Spec
    timed: Timed
    memory: Memory | None
    loss_error: float


class Results(NamedTuple):
    rows: list[Result]
    parameter_bytes: int  # of the whole model
    notes: list[str]


def counterpart(plan: Plan) -> str | None:
    """The key in torch_variants.STRATEGIES of what torch has for a plan, or None; plan: of one axis."""
    axes = {axis for axis in ("dp", "tp", "pp", "ep", "ring", "ulysses") if getattr(plan, axis) > 1}
    if axes == {"dp"}:
        return ("ddp", "ddp-zero1", "fsdp2-zero2", "fsdp2")[plan.zero]
    if plan.zero:
        return None
    if axes == {"pp"}:
        return "pp-gpipe" if plan.schedule == "gpipe" else "pp-1f1b"
    return "tp" if axes == {"tp"} else None


def loss_error(losses: Sequence[float], expected: Sequence[float]) -> float:
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


# --- report --------------------


def pairs(rows: Sequence[Result]) -> list[Content]:
    """Records of each plan beside torch's strategy over each backend: time and memory of ours over theirs."""
    ours = [row for row in rows if row.spec.family == "pycomm.parallel"]
    theirs = [row for row in rows if row.spec.family == "torch"]
    return [
        _pair(row, other)
        for row in ours
        for other in theirs
        if other.spec.strategy == counterpart(Plan.parse(row.spec.strategy))
    ]


def _pair(row: Result, other: Result) -> Content:
    backend, mine, its = other.spec.backend, row.memory, other.memory
    return {
        "plan": row.spec.name,
        "torch": other.spec.name,
        "backend": backend,
        "times_faster": turns.times_faster(row.timed.rounds, other.timed.rounds)[0],
        "cpu_ratio": row.timed.cpu / other.timed.cpu,
        "aim": FASTER_THAN_GLOO if backend == "gloo" else 1.0,
        "peak_ratio": mine.peak / its.peak if mine and its else None,
    }


def as_record(row: Result) -> Content:
    rounds_ms = [seconds * 1e3 for seconds in turns.medians(row.timed.rounds)]
    record: Content = {
        **row.spec._asdict(),
        "step_ms": row.timed.seconds * 1e3,
        "cpu_ms": row.timed.cpu * 1e3,
    }
    record |= {"rounds_ms": rounds_ms, "loss_error": row.loss_error, "losses": row.timed.losses}
    return record | {f"{field}_bytes": getattr(row.memory, field, None) for field in Memory._fields}


def make_report(results: Results, options: argparse.Namespace) -> Content:
    return {
        **report.context("strategies"),
        **{name: getattr(options, name) for name in ("ranks", "rounds", "steps")},
        "size": options.size._asdict(),
        "notes": results.notes,
        "parameter_bytes": results.parameter_bytes,
        "rows": [as_record(row) for row in results.rows],
        "pairs": pairs(results.rows),
    }


def variants_table(rows: Sequence[Content], title: str | None = None) -> Table:
    titles = ["variant", "by", "ms", "cpu ms", "peak MB", "held MB", "process MB", "loss differs by"]
    lines = []
    for row in rows:
        nbytes = [row[f"{field}_bytes"] for field in Memory._fields]
        sizes = ["n/a" if each is None else f"{each / 1e6:.1f}" for each in nbytes]
        times = [f"{row['step_ms']:.1f}", f"{row['cpu_ms']:.1f}"]
        lines.append([row["name"], row["family"], *times, *sizes, f"{row['loss_error']:.0e}"])
    return Table(title, titles, lines)


def pairs_table(found: Sequence[Content]) -> Table:
    titles = ["plan", "torch", "times faster", "aim", "cpu / torch's cpu", "peak / torch's peak"]
    lines = []
    for pair in found:
        speed, reached = pair["times_faster"], "reached" if pair["times_faster"] >= pair["aim"] else "missed"
        parts = [f"{value:.2f}" if value else "n/a" for value in (pair["cpu_ratio"], pair["peak_ratio"])]
        lines.append([pair["plan"], pair["torch"], f"{speed:.2f}", f"{pair['aim']:g} {reached}", *parts])
    return Table(BESIDE_TORCH, titles, lines)


def headline(content: Content) -> str:
    size = content["size"]
    return (
        f"{content['ranks']} ranks, GPT of {content['parameter_bytes'] / 4e6:.1f} M parameters (fp32, dim "
        f"{size['dim']}, {size['layers']} blocks, vocabulary {size['vocab']}), {size['rows']} x "
        f"{size['length']} tokens per step, {size['microbatches']} microbatches in pipelines, AdamW"
    )


def page(content: Content) -> Page:
    intro = [f"torch {content['versions']['torch']}. {headline(content)}"]
    tables = [variants_table(content["rows"]), pairs_table(content["pairs"])]
    return Page(intro, tables, [*content["notes"], LEGEND])


def show(content: Content) -> None:
    """In the terminal."""
    first = variants_table(content["rows"], headline(content))
    shown: list[str | Table] = [report.machine_line(content), first, pairs_table(content["pairs"])]
    report.show([*shown, *content["notes"], LEGEND])


def draw(content: Content, pyplot: Pyplot) -> Figure:
    """Bars: times faster than torch over each backend, and peak memory over torch's; a line marks
    each aim.
    """
    found = content["pairs"]
    plans = list(dict.fromkeys(pair["plan"] for pair in found))
    size = (12.8, 0.8 + 0.6 * max(4, len(plans)))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    for number, (backend, colour) in enumerate((("pycomm", "tab:blue"), ("gloo", "tab:orange"))):
        mine = [pair for pair in found if pair["backend"] == backend]
        places = [plans.index(pair["plan"]) + (number - 0.5) * 0.35 for pair in mine]
        speeds = [pair["times_faster"] for pair in mine]
        left.barh(places, speeds, 0.35, color=colour, label=f"torch over {backend}")
        aim = FASTER_THAN_GLOO if backend == "gloo" else 1.0
        left.axvline(aim, color=colour, linestyle="--", linewidth=1)
        right.barh(places, [pair["peak_ratio"] or 0 for pair in mine], 0.35, color=colour)
    right.axvline(1.0, color="black", linestyle="--", linewidth=1)
    left.set_yticks(range(len(plans)), plans)
    left.invert_yaxis()
    left.set_xlabel("times faster than torch (dashed: the aim)")
    right.set_xlabel("peak memory over torch's")
    left.legend()
    figure.suptitle(headline(content), fontsize=9)
    return figure
