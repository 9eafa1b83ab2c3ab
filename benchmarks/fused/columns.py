"""From the records of the ranks to rows, and the columns of the table and the picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pycomm.benchmarks.common import report, turns
from pycomm.benchmarks.common.report import Content, Page, Pyplot, Table
from pycomm.benchmarks.common.turns import Rounds
from pycomm.benchmarks.fused.cases import TOLERANCES, Case

if TYPE_CHECKING:
    import argparse

    from matplotlib.figure import Figure

    from pycomm.benchmarks.fused.measure import CaseRecord, Measured

BASE = "plain"
LEGEND = (
    "us: median of a call over all rounds, slowest rank; p10, p90: percentiles of the same; GFLOP/s: of one "
    "rank's product; times faster: than plain, the median over rounds of the ratio of the medians in that "
    "round (the least and the most: what the run can tell apart); error: largest difference from the "
    "product in float64 (float32 where that takes too long), over its largest entry. n/a: not run; the "
    "reasons are in the list below."
)
COLUMNS = ["shape", "dtype", "epilogue", "variant", "us", "p10", "p90", "GFLOP/s", "times faster", "error"]


class Results(NamedTuple):
    rows: list[Content]  # of the report
    notes: list[str]
    stopped: str  # why not all cases were measured, or ""


def merge(
    cases: Sequence[Case], world_size: int, by_rank: Sequence[Measured], products: int = 1
) -> tuple[list[Content], str]:
    """Rows, and what stopped the ranks or "". products: in a call, 3 with the backward pass."""
    reached = min(len(found) for found, _ in by_rank)
    rows: list[Content] = []
    for number, case in enumerate(cases[:reached]):
        rows += _rows_of(case, world_size, [found[number] for found, _ in by_rank], products)
    stopped = [f"rank {rank}/{world_size}: {text}" for rank, (_, text) in enumerate(by_rank) if text]
    return rows, next(iter(stopped), "")


def _rows_of(case: Case, world_size: int, records: Sequence[CaseRecord], products: int) -> list[Content]:
    variants = records[0]["variants"]
    rounds = {
        name: turns.slowest([record["variants"][name]["rounds"] for record in records])
        for name, found in variants.items()
        if "missing" not in found
    }
    rows: list[Content] = []
    for name, found in variants.items():
        row: Content = {**case._asdict(), "ranks": world_size, "variant": name}
        row["choice"] = records[0]["choice"]
        row["missing"] = found.get("missing")
        if name in rounds:
            error = max(record["variants"][name]["error"] for record in records)
            row |= _figures(case, world_size, rounds[name], error, products)
            speed = {other: turns.times_faster(rounds[name], theirs) for other, theirs in rounds.items()}
            row["times_faster"] = {other: ratios[0] for other, ratios in speed.items()}
            row["times_faster_of_rounds"] = speed
        rows.append(row)
    return rows


def _figures(case: Case, world_size: int, rounds: Rounds, error: float, products: int) -> Content:
    samples = turns.samples_of(rounds)
    seconds = statistics.median(samples)
    return {
        "time_us": seconds * 1e6,
        "p10_us": turns.percentile(samples, 0.1) * 1e6,
        "p90_us": turns.percentile(samples, 0.9) * 1e6,
        "gflops": products * case.flops / seconds / 1e9,
        "error": error,
        "wrong": not error <= TOLERANCES[case.dtype] * max(1, world_size // 2),
        "rounds_us": [median * 1e6 for median in turns.medians(rounds)],
    }


def title_of(row: Content) -> str:
    return f"{row['op']} {row['m']}x{row['n']}x{row['k']} {row['dtype']} {row['epilogue']}"


def cells(row: Content) -> list[str]:
    """A line under COLUMNS."""
    line = ["x".join(str(row[field]) for field in "mnk"), row["dtype"], row["epilogue"], row["variant"]]
    if row["missing"] is not None:
        return [*line, *["n/a"] * 6]
    times = [f"{row[field]:.4g}" for field in ("time_us", "p10_us", "p90_us")]
    speed = row["times_faster_of_rounds"].get(BASE)
    speed = "{:.2f} ({:.2f}-{:.2f})".format(*speed) if speed else "n/a"
    return [*line, *times, f"{row['gflops']:.4g}", speed, f"{row['error']:.0e}{' WRONG' * row['wrong']}"]


def remarks(rows: Sequence[Content]) -> list[str]:
    """What pycomm.fused chose for each case, then why a variant was not run."""
    lines = [
        f"chosen for {title_of(row)}: {row['choice']}" for row in rows if row["variant"] == "pycomm.fused"
    ]
    reasons = [f"n/a: {row['op']}, {row['variant']}: {row['missing']}" for row in rows if row["missing"]]
    return lines + list(dict.fromkeys(reasons))


def headline(op: str, settings: Mapping[str, Any]) -> str:
    ranks = 1 if op == "matmul" else settings["ranks"]
    passes = "forward and backward" if settings["backward"] else "forward"
    return f"{op}, {ranks} rank{'s' * (ranks > 1)}, {passes}; M x N x K of one rank's product"


def make_report(results: Results, options: argparse.Namespace) -> Content:
    names = ("ranks", "device", "ranks_as", "backward", "graph", "rounds", "seconds")
    return {
        **report.context("fused", options.device),
        "settings": {name: getattr(options, name) for name in names},
        "notes": results.notes,
        "stopped": results.stopped,
        "rows": results.rows,
    }


def page(content: Content) -> Page:
    rows, settings = content["rows"], content["settings"]
    tables = [
        Table(headline(op, settings), COLUMNS, [cells(row) for row in rows if row["op"] == op])
        for op in dict.fromkeys(row["op"] for row in rows)
    ]
    lines = [*content["notes"], *remarks(rows)]
    lines += [f"stopped: {' '.join(content['stopped'].split())}"] if content["stopped"] else []
    intro = [f"torch {content['versions']['torch']}."]
    return Page(intro, tables, [LEGEND, "", *(f"- {line}" for line in lines)])


def draw(content: Content, pyplot: Pyplot) -> Figure:
    """Times faster than plain over the cases, a bar for each variant, a picture for each operation."""
    rows = [row for row in content["rows"] if row["missing"] is None]
    ops: dict[str, dict[str, int]] = {}
    for row in rows:
        ops.setdefault(row["op"], {}).setdefault(title_of(row), len(ops[row["op"]]))
    size = (9, sum(0.8 + 0.75 * len(titles) for titles in ops.values()))
    heights = [1 + len(titles) for titles in ops.values()]
    figure, axes = pyplot.subplots(
        len(ops), 1, figsize=size, squeeze=False, layout="constrained", height_ratios=heights
    )
    for axis, (op, titles) in zip(axes.flat, ops.items(), strict=True):
        mine = [row for row in rows if row["op"] == op and row["variant"] != BASE]
        names = list(dict.fromkeys(row["variant"] for row in mine))
        for number, name in enumerate(names):
            shown = [row for row in mine if row["variant"] == name]
            shift = (number - (len(names) - 1) / 2) * 0.8 / len(names)
            places = [titles[title_of(row)] + shift for row in shown]
            widths = [row["times_faster"][BASE] for row in shown]
            axis.barh(places, widths, 0.8 / len(names), label=name)
        axis.set_yticks(range(len(titles)), [title.removeprefix(f"{op} ") for title in titles])
        axis.invert_yaxis()
        axis.axvline(1.0, color="black", linestyle="--", linewidth=1)
        axis.set(title=headline(op, content["settings"]), xlabel="times faster than plain")
        axis.legend()
    return figure
