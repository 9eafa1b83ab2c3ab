"""From measurements to tables, files and a plot: each plan beside torch's own strategy that does the same."""

import datetime
import json
import math
import platform
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from pycomm.benchmarks import report
from pycomm.benchmarks.strategies import measure
from pycomm.benchmarks.strategies.variants import Spec
from pycomm.parallel import Plan

FASTER_THAN_GLOO = 1.3  # what pycomm.parallel is to be, at least
LEGEND = (
    "ms: median of a step, slowest rank; cpu ms: time on processors, all ranks together, waiting in a loop included; times faster: the "
    "median over rounds of the ratio in that round. peak, held: MB (1e6 bytes) of live tensors on the fullest rank, in a step and between "
    "two; process: growth of its resident set at the peak, with allocator, code and memory of the backend, registered memory counted on "
    "each rank that maps it. Losses: largest relative difference from one process."
)


class Result(NamedTuple):
    """One variant. memory: None where it was not measured. loss_error: largest relative difference from the losses of one process."""

    spec: Spec
    timed: measure.Timed
    memory: measure.Memory | None
    loss_error: float


class Results(NamedTuple):
    rows: list
    parameter_bytes: int  # of the whole model
    notes: list


def counterpart(plan):
    """The key in torch_variants.STRATEGIES of what torch has for a plan, or None; plan: of one axis."""
    axes = {axis for axis in ("dp", "tp", "pp", "ep", "ring", "ulysses") if getattr(plan, axis) > 1}
    if axes == {"dp"}:
        return ("ddp", "ddp-zero1", "fsdp2-zero2", "fsdp2")[plan.zero]
    if plan.zero:
        return None
    if axes == {"pp"}:
        return "pp-gpipe" if plan.schedule == "gpipe" else "pp-1f1b"
    return "tp" if axes == {"tp"} else None


def loss_error(losses, expected):
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def pairs(rows):
    """Records of each plan beside torch's strategy over each backend: time and memory of ours over theirs."""
    theirs = {(row.spec.strategy, row.spec.backend): row for row in rows if row.spec.family == "torch"}
    found = []
    for row in rows:
        if row.spec.family != "pycomm.parallel":
            continue
        key = counterpart(Plan.parse(row.spec.strategy))
        for (strategy, backend), other in theirs.items():
            if strategy == key:
                speed = measure.ratio(other.timed, row.timed)
                found.append(
                    {
                        "plan": row.spec.name,
                        "torch": other.spec.name,
                        "backend": backend,
                        "times_faster": speed,
                        "cpu_ratio": row.timed.cpu / other.timed.cpu,
                        "aim": FASTER_THAN_GLOO if backend == "gloo" else 1.0,
                        "peak_ratio": row.memory.peak / other.memory.peak if row.memory and other.memory else None,
                    }
                )
    return found


def as_record(row):
    record = {
        **row.spec._asdict(),
        "step_ms": row.timed.seconds * 1e3,
        "cpu_ms": row.timed.cpu * 1e3,
        "rounds_ms": [s * 1e3 for s in row.timed.by_round],
    }
    record["loss_error"] = row.loss_error
    record["losses"] = row.timed.losses
    for field in measure.Memory._fields:
        record[f"{field}_bytes"] = getattr(row.memory, field) if row.memory else None
    return record


def context(options):
    return {
        "machine": report.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": shlex.join(["python", "-m", "pycomm.benchmarks", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "ranks": options.ranks,
        "rounds": options.rounds,
        "steps": options.steps,
        "size": options.size._asdict(),
    }


def row_cells(results):
    titles = ["variant", "by", "ms", "cpu ms", "peak MB", "held MB", "process MB", "loss differs by"]
    lines = []
    for row in results.rows:
        sizes = [f"{nbytes / 1e6:.1f}" for nbytes in row.memory] if row.memory else ["n/a"] * 3
        lines.append(
            [
                row.spec.name,
                row.spec.family,
                f"{row.timed.seconds * 1e3:.1f}",
                f"{row.timed.cpu * 1e3:.1f}",
                *sizes,
                f"{row.loss_error:.0e}",
            ]
        )
    return titles, lines


def pair_cells(found):
    titles = ["plan", "torch", "times faster", "aim", "cpu / torch's cpu", "peak / torch's peak"]
    lines = []
    for pair in found:
        speed, peak = pair["times_faster"], pair["peak_ratio"]
        reached = "reached" if speed >= pair["aim"] else "missed"
        parts = [f"{value:.2f}" if value else "n/a" for value in (pair["cpu_ratio"], peak)]
        lines.append([pair["plan"], pair["torch"], f"{speed:.2f}", f"{pair['aim']:g} {reached}", *parts])
    return titles, lines


def headline(results, options):
    size = options.size
    return (
        f"{options.ranks} ranks, GPT of {results.parameter_bytes / 4e6:.1f} M parameters (fp32, dim {size.dim}, {size.layers} blocks, "
        f"vocabulary {size.vocab}), {size.rows} x {size.length} tokens per step, {size.microbatches} microbatches in pipelines, AdamW"
    )


def print_tables(results, options):
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    console.width = max(console.width, report.TABLE_WIDTH)
    console.print(escape(report.machine_line(context(options))), soft_wrap=True)
    console.print(report.rich_table(headline(results, options), *row_cells(results)))
    console.print(report.rich_table("pycomm.parallel beside torch", *pair_cells(pairs(results.rows))))
    for note in [*results.notes, LEGEND]:
        console.print(escape(note), soft_wrap=True)


def write_json(path, results, options):
    content = {**context(options), "notes": results.notes, "parameter_bytes": results.parameter_bytes}
    content |= {"rows": [as_record(row) for row in results.rows], "pairs": pairs(results.rows)}
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def write_markdown(path, results, options):
    about = context(options)
    parts = [
        report.machine_line(about),
        "",
        f"`{about['command']}`",
        "",
        f"torch {about['versions']['torch']}. {headline(results, options)}",
        "",
    ]
    parts += [*report.markdown_table(*row_cells(results)), "", "## pycomm.parallel beside torch", ""]
    parts += [*report.markdown_table(*pair_cells(pairs(results.rows))), "", *results.notes, LEGEND]
    Path(path).write_text("\n".join(parts) + "\n")


def write_plot(path, results, options):
    """Bars: times faster than torch over each backend, and peak memory over torch's; a line marks each aim."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = pairs(results.rows)
    plans = list(dict.fromkeys(pair["plan"] for pair in found))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12.8, 0.8 + 0.6 * max(4, len(plans))), sharey=True, layout="constrained")
    for number, (backend, colour) in enumerate((("pycomm", "tab:blue"), ("gloo", "tab:orange"))):
        chosen = [pair for pair in found if pair["backend"] == backend]
        places = [plans.index(pair["plan"]) + (number - 0.5) * 0.35 for pair in chosen]
        left.barh(places, [pair["times_faster"] for pair in chosen], 0.35, color=colour, label=f"torch over {backend}")
        left.axvline(FASTER_THAN_GLOO if backend == "gloo" else 1.0, color=colour, linestyle="--", linewidth=1)
        right.barh(places, [pair["peak_ratio"] or 0 for pair in chosen], 0.35, color=colour)
    right.axvline(1.0, color="black", linestyle="--", linewidth=1)
    left.set_yticks(range(len(plans)), plans)
    left.invert_yaxis()
    left.set_xlabel("times faster than torch (dashed: the aim)")
    right.set_xlabel("peak memory over torch's")
    left.legend()
    figure.suptitle(headline(results, options), fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
