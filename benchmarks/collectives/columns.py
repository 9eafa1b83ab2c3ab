"""The columns of nccl-tests, the comparison of backends, and the picture. Rows are those of
runner.as_record."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pycomm.benchmarks.collectives.backends import is_ours
from pycomm.benchmarks.collectives.cases import FORMS, Form, format_nbytes
from pycomm.benchmarks.common import report
from pycomm.benchmarks.common.report import Content, Page, Pyplot, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOISY = 2.0  # rounds that differ by more than this are marked ~
BOUND_LEGEND = (
    "copy GB/s: of a copy inside the GPU as large as what all ranks hold together, bytes read and bytes "
    "written both counted. of bound, of floor: the time that such a copy takes for the bytes that pycomm's "
    "cheapest algorithm, or any algorithm at all, must read and write for all ranks "
    "(benchmarks/collectives/bounds.py), over the measured time."
)
SPREAD_LEGEND = f"the medians of the rounds differ by more than {NOISY:g} times"
COMPARED = "the faster form of each backend"


def best(row: Content, field: str, choose: Callable[[Sequence[float]], float]) -> float | None:
    """A figure of the better form of a row: what comparisons use, since not every backend has both. None: the
    row has no such figure.
    """
    values = [row.get(f"{form}_{field}") for form in FORMS]
    found = [value for value in values if value is not None]
    return choose(found) if found else None


def best_time(row: Content) -> float:
    """In us, of the faster form; every row has one."""
    found = best(row, "time_us", min)
    assert found is not None
    return found


def compare(rows: Sequence[Content]) -> list[Content]:
    """For each case and each backend of ours: its time, the best peer, and the ratios."""
    cases, lines = dict[tuple[Any, ...], list[Content]](), list[Content]()
    for row in rows:
        key = tuple(row[name] for name in ("op", "size", "count", "type", "redop", "root"))
        cases.setdefault(key, []).append(row)
    for beside in cases.values():
        peers = {row["backend"]: best_time(row) for row in beside if not is_ours(row["backend"])}
        quickest = min(peers, key=lambda name: peers[name], default=None)
        for row in beside:
            if is_ours(row["backend"]) and quickest:
                ours = best_time(row)
                line: Content = {name: row[name] for name in ("op", "size", "type", "backend")}
                line |= {"time_us": ours, "best_peer": quickest, "best_peer_us": peers[quickest]}
                line |= {
                    "of_best_peer": ours / peers[quickest],
                    "faster_than_gloo": peers["gloo"] / ours if "gloo" in peers else None,
                }
                lines.append(line)
    return lines


# --- tables --------------------


def place(row: Content) -> str:
    """Where a row was measured."""
    groups = row.get("groups", 1)
    return f"{row['ranks']} ranks" if groups == 1 else f"{groups} groups of {row['ranks']} ranks at once"


def of_op(rows: Sequence[Content], title: str) -> Table:
    """The table of one operation. title has {op} and {place} to fill in."""
    head = ["time us", "p99 us", "algbw", "busbw", "#wrong"]
    titles = ["size", "count", "type", "redop", "backend", *head, *(f"{name}\nin place" for name in head)]
    if bounded := any("copy_gbps" in row for row in rows):
        titles += ["copy GB/s", "of bound", "of floor", "of bound\nin place", "of floor\nin place"]
    lines = []
    for row in rows:
        cells = [format_nbytes(row["size"]), str(row["count"]), row["type"], row["redop"], row["backend"]]
        for form in FORMS:
            cells += _timing_cells(row, form)
        lines.append(cells + (_bound_cells(row) if bounded else []))
    return Table(title.format(**rows[0], place=place(rows[0])), titles, lines)


def _timing_cells(row: Content, form: Form) -> list[str]:
    if row[f"{form}_time_us"] is None:
        return ["n/a"] * 5
    time_us, p99_us, algbw, busbw, wrong, spread = (
        row[f"{form}_{field}"] for field in ("time_us", "p99_us", "algbw", "busbw", "wrong", "spread")
    )
    mark = "~" if spread > NOISY else ""
    return [f"{time_us:.2f}{mark}", f"{p99_us:.2f}", f"{algbw:.3g}", f"{busbw:.3g}", str(wrong)]


def _bound_cells(row: Content) -> list[str]:
    cells = [f"{row['copy_gbps']:.0f}" if row.get("copy_gbps") else "n/a"]
    fractions = [row.get(f"{form}_{field}") for form in FORMS for field in ("of_bound", "of_floor")]
    return cells + ["n/a" if value is None else f"{value:.2f}" for value in fractions]


def comparison(lines: Sequence[Content], title: str) -> Table:
    titles = ["op", "size", "backend", "time us", "best peer", "its time us", "time / best peer"]
    cells: list[list[str]] = []
    for line in lines:
        gloo = line["faster_than_gloo"]
        cells.append([line["op"], format_nbytes(line["size"]), line["backend"], f"{line['time_us']:.2f}"])
        cells[-1] += [line["best_peer"], f"{line['best_peer_us']:.2f}", f"{line['of_best_peer']:.2f}"]
        cells[-1].append(f"{gloo:.1f}" if gloo else "n/a")
    return Table(title, [*titles, "times faster than gloo"], cells)


def by_op(rows: Sequence[Content], fields: Sequence[str] = ("op",)) -> list[list[Content]]:
    """[rows of one operation], in the order of the run; with "type" of one dtype, too."""
    keys = [tuple(row[field] for field in fields) for row in rows]
    return [[row for row, of in zip(rows, keys, strict=True) if of == key] for key in dict.fromkeys(keys)]


def page(content: Content) -> Page:
    rows, lines = content["rows"], content["comparison"]
    tables = [of_op(beside, "{op}, {place}") for beside in by_op(rows)]
    if lines:
        tables.append(comparison(lines, f"Compared: {COMPARED}"))
    legend = [BOUND_LEGEND, ""] if any(row.get("copy_gbps") for row in rows) else []
    versions = [f"- {name}: {version}" for name, version in content["versions"].items()]
    versions += [f"- {line}" for line in hosts_line(content)]
    return Page(versions, tables, [*legend, f"`~`: {SPREAD_LEGEND}. GB = 1e9.", *content["notes"]])


def hosts_line(content: Content) -> list[str]:
    """Where the ranks were, if not on one host."""
    settings = content["settings"]
    if not settings.get("hosts"):
        return []
    rate = f"links of {settings['rate']} each way" if settings["rate"] else "links without a limit"
    return [f"emulated hosts {settings['hosts']} on this machine, {rate}"]


def show(content: Content, backends: Mapping[str, str]) -> None:
    """In the terminal. backends: their versions by name."""
    rows, lines = content["rows"], content["comparison"]
    shown: list[str | Table] = [
        report.machine_line(content),
        *(f"{name}: {version}" for name, version in backends.items()),
    ]
    shown += hosts_line(content)
    title = "{op}, {place}; GB/s, GB = 1e9; median and 99th percentile"
    shown += [of_op(beside, title) for beside in by_op(rows)]
    if lines:
        shown.append(comparison(lines, f"compared: {COMPARED}"))
    for name in dict.fromkeys(line["backend"] for line in lines):
        ratios = [line["of_best_peer"] for line in lines if line["backend"] == name]
        mean = statistics.geometric_mean(ratios)
        shown.append(f"{name}: geometric mean of time / best peer {mean:.2f}, worst {max(ratios):.2f}")
    shown += content["notes"]
    if any(row.get("copy_gbps") for row in rows):
        shown.append(BOUND_LEGEND)
    if any((row[f"{form}_spread"] or 0) > NOISY for row in rows for form in FORMS):
        shown.append(f"~ {SPREAD_LEGEND}")
    report.show(shown)


# --- picture --------------------


def draw(content: Content, pyplot: Pyplot) -> Figure:
    """busbw over size, one line per backend, one picture per operation; log-log."""
    tables = [rows for rows in by_op(content["rows"], ("op", "type")) if rows[0]["op"] != "barrier"]
    columns = min(3, max(1, len(tables)))
    lines = max(1, -(-len(tables) // columns))
    size = (6.4 * columns, 4.4 * lines)
    figure, axes = pyplot.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(tables) :]:
        axis.axis("off")
    for axis, rows in zip(axes.flat, tables, strict=False):
        for name in dict.fromkeys(row["backend"] for row in rows):
            points = [(row["size"], best(row, "busbw", max)) for row in rows if row["backend"] == name]
            theirs = {"linewidth": 1.2, "linestyle": "--"}
            style = {"linewidth": 2.2, "marker": "o", "markersize": 4} if is_ours(name) else theirs
            axis.plot(*zip(*points, strict=True), label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(lambda nbytes, _: f"{format_nbytes(int(nbytes))}B")
        title = "{op}, {place}, {type}".format(**rows[0], place=place(rows[0]))
        axis.set(title=title, xlabel="size", ylabel="busbw, GB/s")
        axis.grid(True, which="major", alpha=0.3)
        axis.legend()
    figure.suptitle(f"{content['machine']['cpu']}, {content['machine']['cores']} cores", fontsize=9)
    return figure
