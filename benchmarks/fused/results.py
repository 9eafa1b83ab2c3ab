"""From the records of the ranks to rows, tables, files and a plot."""

import datetime
import json
import math
import platform
import shlex
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from .. import device as gpu
from .. import report
from .cases import TOLERANCES, Case

BASE = "plain"
LEGEND = (
    "us: median of a call over all rounds, slowest rank; p10, p90: percentiles of the same; GFLOP/s: of one rank's product; times faster: "
    "than plain, the median over rounds of the ratio of the medians in that round (the least and the most: what the run can tell apart); "
    "error: largest difference from the product in float64 (float32 where that takes too long), over its largest entry. n/a: not run; the "
    "reasons are in the list below."
)


class Row(NamedTuple):
    """One variant of a case. missing: why it was not run, or None. rounds: seconds of the calls of each round, slowest rank."""

    case: Case
    ranks: int
    variant: str
    choice: str  # what pycomm.fused chooses for the case
    missing: str | None
    rounds: list
    error: float

    @property
    def seconds(self):
        return statistics.median(self.samples)

    @property
    def samples(self):
        return [seconds for turn in self.rounds for seconds in turn]

    def percentile(self, part):
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))]

    @property
    def wrong(self):
        return self.missing is None and not self.error <= TOLERANCES[self.case.dtype] * max(1, self.ranks // 2)


class Results(NamedTuple):
    rows: list
    notes: list
    stopped: str  # why not all cases were measured, or ""


def merge(cases, world_size, by_rank):
    """Rows, and what stopped the ranks or "". by_rank: what measure.measure_cases returned on each."""
    reached = min(len(found) for found, _ in by_rank)
    rows = []
    for number in range(reached):
        records = [found[number] for found, _ in by_rank]
        for name, first in records[0]["variants"].items():
            if "missing" in first:
                rows.append(Row(cases[number], world_size, name, records[0]["choice"], first["missing"], [], math.nan))
                continue
            theirs = [record["variants"][name] for record in records]
            rounds = [[max(times) for times in zip(*turns, strict=True)] for turns in zip(*(r["rounds"] for r in theirs), strict=True)]
            error = max(record["error"] for record in theirs)
            rows.append(Row(cases[number], world_size, name, records[0]["choice"], None, rounds, error))
    return rows, next((f"rank {rank}/{world_size}: {text}" for rank, (_, text) in enumerate(by_rank) if text), "")


def times_faster(row, other):
    """How many times faster row is than other: by round, since a slow minute hits both. (median, least, most) over the rounds."""
    pairs = zip(row.rounds, other.rounds, strict=True)
    ratios = [statistics.median(theirs) / statistics.median(ours) for ours, theirs in pairs]
    return statistics.median(ratios), min(ratios), max(ratios)


def speeds(row, rows):
    """{variant: times_faster} over the variants of the same case."""
    beside = [other for other in rows if other.case == row.case and other.missing is None]
    return {} if row.missing else {other.variant: times_faster(row, other) for other in beside}


def as_record(row, rows, factor):
    """factor: products in a call, 3 with the backward pass."""
    record = {**row.case._asdict(), "ranks": row.ranks, "variant": row.variant, "choice": row.choice, "missing": row.missing}
    if row.missing is None:
        record |= {"time_us": row.seconds * 1e6, "p10_us": row.percentile(0.1) * 1e6, "p90_us": row.percentile(0.9) * 1e6}
        record |= {"gflops": factor * row.case.flops / row.seconds / 1e9, "error": row.error, "wrong": row.wrong}
        speed = speeds(row, rows)
        record |= {"rounds_us": [statistics.median(turn) * 1e6 for turn in row.rounds]}
        record |= {"times_faster": {name: ratios[0] for name, ratios in speed.items()}, "times_faster_of_rounds": speed}
    return record


def records(results, options):
    return [as_record(row, results.rows, 3 if options.backward else 1) for row in results.rows]


TITLES = ["shape", "dtype", "epilogue", "variant", "us", "p10", "p90", "GFLOP/s", "times faster", "error"]


def cells(record):
    """A line under TITLES, of a record."""
    line = ["x".join(str(record[field]) for field in "mnk"), record["dtype"], record["epilogue"], record["variant"]]
    if record["missing"] is not None:
        return [*line, *["n/a"] * 6]
    times = [f"{record[field]:.4g}" for field in ("time_us", "p10_us", "p90_us")]
    speed = record["times_faster_of_rounds"].get(BASE)
    speed = "{:.2f} ({:.2f}-{:.2f})".format(*speed) if speed else "n/a"
    error = f"{record['error']:.0e}{' WRONG' if record['wrong'] else ''}"
    return [*line, *times, f"{record['gflops']:.4g}", speed, error]


def remarks(found):
    """What pycomm.fused chose for each case, then why a variant was not run."""
    lines = [f"{_title(record)}: {record['choice']}" for record in found if record["variant"] == "pycomm.fused"]
    reasons = dict.fromkeys(f"{record['op']}, {record['variant']}: {record['missing']}" for record in found if record["missing"])
    return [f"chosen for {line}" for line in lines] + [f"n/a: {line}" for line in reasons]


def _title(record):
    return f"{record['op']} {record['m']}x{record['n']}x{record['k']} {record['dtype']} {record['epilogue']}"


def context(options):
    return {
        "machine": report.machine() | (gpu.describe() if options.device == "cuda" else {}),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": shlex.join(["python", "-m", "pycomm.benchmarks", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": {name: getattr(options, name) for name in ("ranks", "device", "ranks_as", "backward", "graph", "rounds", "seconds")},
    }


def headline(op, options):
    ranks = 1 if op == "matmul" else options.ranks
    passes = "forward and backward" if options.backward else "forward"
    return f"{op}, {ranks} rank{'s' * (ranks > 1)}, {passes}; M x N x K of one rank's product"


def markdown_lines(results, options):
    """Everything as lines of Markdown, which a terminal shows as well."""
    about, found = context(options), records(results, options)
    lines = [report.machine_line(about), "", f"`{about['command']}`", "", f"torch {about['versions']['torch']}."]
    for op in dict.fromkeys(record["op"] for record in found):
        table = [cells(record) for record in found if record["op"] == op]
        lines += ["", f"## {headline(op, options)}", "", *report.markdown_table(TITLES, table)]
    lines += ["", LEGEND, "", *(f"- {line}" for line in [*results.notes, *remarks(found)])]
    return lines + ([f"- stopped: {' '.join(results.stopped.split())}"] if results.stopped else [])


def write_json(path, results, options):
    content = {**context(options), "kind": "fused", "notes": results.notes, "stopped": results.stopped}
    Path(path).write_text(json.dumps({**content, "rows": records(results, options)}, indent=1) + "\n")


def write_markdown(path, results, options):
    Path(path).write_text("\n".join(markdown_lines(results, options)) + "\n")


def write_plot(path, results, options):
    """Times faster than plain over the cases, a bar for each variant, a picture for each operation."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = [record for record in records(results, options) if record["missing"] is None]
    ops = list(dict.fromkeys(record["op"] for record in found))
    cases = {op: list(dict.fromkeys(_title(record) for record in found if record["op"] == op)) for op in ops}
    height = sum(0.8 + 0.75 * len(titles) for titles in cases.values())
    figure, axes = pyplot.subplots(
        len(ops), 1, figsize=(9, height), squeeze=False, layout="constrained", height_ratios=[1 + len(titles) for titles in cases.values()]
    )
    for axis, op in zip(axes.flat, ops, strict=True):
        names = [name for name in dict.fromkeys(record["variant"] for record in found if record["op"] == op) if name != BASE]
        for number, name in enumerate(names):
            chosen = [record for record in found if record["op"] == op and record["variant"] == name]
            places = [cases[op].index(_title(record)) + (number - (len(names) - 1) / 2) * 0.8 / len(names) for record in chosen]
            axis.barh(places, [record["times_faster"][BASE] for record in chosen], 0.8 / len(names), label=name)
        axis.set_yticks(range(len(cases[op])), [title.removeprefix(f"{op} ") for title in cases[op]])
        axis.invert_yaxis()
        axis.axvline(1.0, color="black", linestyle="--", linewidth=1)
        axis.set(title=headline(op, options), xlabel="times faster than plain")
        axis.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
