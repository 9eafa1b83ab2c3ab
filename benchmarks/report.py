"""Shows Results: the table of nccl-tests, the comparison, and files (JSON, CSV, Markdown, plot) that say machine, versions and command."""

import csv
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
from pathlib import Path

from . import device
from .backends import is_ours
from .metrics import FORMS, Timing, format_nbytes

NOISY = 2.0  # rounds that differ by more than this are marked ~
TABLE_WIDTH = 150  # columns of the terminal; a narrower one wraps lines
BOUND_LEGEND = (
    "copy GB/s: of a copy inside the GPU as large as what all ranks hold together, bytes read and bytes written both counted. "
    "of bound, of floor: the time that such a copy takes for the bytes that pycomm's cheapest algorithm, or any algorithm at all, must "
    "read and write for all ranks (benchmarks/metrics.py), over the measured time."
)
KEYS = ("backend", "op", "ranks", "size", "count", "type", "redop", "root")


def machine():
    """What the figures depend on."""
    model = next((line.split(":", 1)[1].strip() for line in _read("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    memory = next((int(line.split()[1]) for line in _read("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**20, 1),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
    }


def context(results, options):
    """Everything but the rows."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy")}
    return {
        "machine": machine() | (device.describe() if options.device == "cuda" else {}),
        "versions": {"python": platform.python_version(), **packages, **results.versions},
        "command": shlex.join(["python", "-m", "pycomm.benchmarks", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": {
            "rounds": options.rounds,
            "seconds": options.seconds,
            "over_ranks": options.over_ranks,
            "sessions": options.sessions,
            "device": options.device,
            "ranks_per_gpu": options.ranks_per_gpu,
            "ranks_as": options.ranks_as,
            "registered": options.registered,
            "graph": options.graph,
        },
        "notes": results.notes,
    }


def as_record(row):
    """A row as a flat dict: KEYS, then out_of_place_* and in_place_* (None where the backend has no such form)."""
    case = row.case
    record = dict(zip(KEYS, (row.backend, case.op, row.ranks, row.nbytes, case.count, case.dtype, case.redop, case.root), strict=True))
    for form in FORMS:
        timing = getattr(row, form)
        record |= {f"{form}_{field}": getattr(timing, field) if timing else None for field in Timing._fields}
    if row.copy_gbps is not None:
        record["copy_gbps"] = row.copy_gbps
        for form in FORMS:
            record |= dict(zip((f"{form}_of_bound", f"{form}_of_floor"), row.fractions(form) or (None, None), strict=True))
    return record


def compare(rows):
    """For each case and each backend of ours: its time, the best peer, and the ratios. Times are of the faster form of each backend."""
    cases = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    lines = []
    for case, beside in cases.items():
        peers = {row.backend: row.best_us for row in beside if not is_ours(row.backend)}
        best = min(peers, key=peers.get, default=None)
        for row in beside:
            if is_ours(row.backend) and best:
                lines.append(
                    {
                        "op": case.op,
                        "size": row.nbytes,
                        "type": case.dtype,
                        "backend": row.backend,
                        "time_us": row.best_us,
                        "best_peer": best,
                        "best_peer_us": peers[best],
                        "of_best_peer": row.best_us / peers[best],
                        "faster_than_gloo": peers["gloo"] / row.best_us if "gloo" in peers else None,
                    }
                )
    return lines


def table_cells(rows):
    """Titles (a line break in one means: a second line where there is one), and the lines of text under them."""
    head = ["time us", "p99 us", "algbw", "busbw", "#wrong"]
    titles = ["size", "count", "type", "redop", "backend", *head, *(f"{title}\nin place" for title in head)]
    bounded = any(row.copy_gbps is not None for row in rows)
    if bounded:
        titles += ["copy GB/s", "of bound", "of floor", "of bound\nin place", "of floor\nin place"]
    lines = []
    for row in rows:
        cells = [format_nbytes(row.nbytes), str(row.case.count), row.case.dtype, row.case.redop, row.backend]
        for form in FORMS:
            timing = getattr(row, form)
            cells += _timing_cells(timing) if timing else ["n/a"] * len(head)
        if bounded:
            cells += _bound_cells(row)
        lines.append(cells)
    return titles, lines


def comparison_cells(lines):
    titles = ["op", "size", "backend", "time us", "best peer", "its time us", "time / best peer", "times faster than gloo"]
    cells = []
    for line in lines:
        gloo = line["faster_than_gloo"]
        cells.append(
            [
                line["op"],
                format_nbytes(line["size"]),
                line["backend"],
                f"{line['time_us']:.2f}",
                line["best_peer"],
                f"{line['best_peer_us']:.2f}",
                f"{line['of_best_peer']:.2f}",
                f"{gloo:.1f}" if gloo else "n/a",
            ]
        )
    return titles, cells


def print_tables(results, options, file=None):
    """The tables, for people."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(file=file, highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    about = context(results, options)
    console.print(escape(machine_line(about)), soft_wrap=True)
    for name, version in results.versions.items():
        console.print(escape(f"{name}: {version}"), soft_wrap=True)
    for op in dict.fromkeys(row.case.op for row in results.rows):
        rows = [row for row in results.rows if row.case.op == op]
        console.print(rich_table(f"{op}, {rows[0].ranks} ranks; GB/s, GB = 1e9; median and 99th percentile", *table_cells(rows)))
    lines = compare(results.rows)
    if lines:
        console.print(rich_table("compared: the faster form of each backend", *comparison_cells(lines)))
        for name in dict.fromkeys(line["backend"] for line in lines):
            ratios = [line["of_best_peer"] for line in lines if line["backend"] == name]
            console.print(f"{name}: geometric mean of time / best peer {statistics.geometric_mean(ratios):.2f}, worst {max(ratios):.2f}")
    for note in results.notes:
        console.print(escape(note), soft_wrap=True)
    if any(row.copy_gbps for row in results.rows):
        console.print(BOUND_LEGEND)
    noisy = any(timing and timing.spread > NOISY for row in results.rows for timing in (row.out_of_place, row.in_place))
    if noisy:
        console.print(f"~ the medians of the rounds differ by more than {NOISY:g} times")


def write_json(path, results, options):
    content = {**context(results, options), "rows": [as_record(row) for row in results.rows], "comparison": compare(results.rows)}
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def write_csv(path, results):
    with open(path, "w", newline="") as file:
        records = [as_record(row) for row in results.rows]
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def write_markdown(path, results, options):
    about = context(results, options)
    parts = [
        machine_line(about),
        "",
        f"`{about['command']}`",
        "",
        *(f"- {name}: {version}" for name, version in about["versions"].items()),
    ]
    for op in dict.fromkeys(row.case.op for row in results.rows):
        rows = [row for row in results.rows if row.case.op == op]
        parts += ["", f"## {op}, {rows[0].ranks} ranks", "", *markdown_table(*table_cells(rows))]
    if lines := compare(results.rows):
        parts += ["", "## Compared: the faster form of each backend", "", *markdown_table(*comparison_cells(lines))]
    if any(row.copy_gbps for row in results.rows):
        parts += ["", BOUND_LEGEND]
    parts += ["", f"`~`: the medians of the rounds differ by more than {NOISY:g} times. GB = 1e9.", *results.notes]
    Path(path).write_text("\n".join(parts) + "\n")


def write_plot(path, results):
    """busbw over size, one line per backend, one picture per operation; log-log."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    ops = [op for op in dict.fromkeys(row.case.op for row in results.rows) if op != "barrier"]
    columns = min(3, max(1, len(ops)))
    lines = max(1, -(-len(ops) // columns))
    figure, axes = pyplot.subplots(lines, columns, figsize=(6.4 * columns, 4.4 * lines), squeeze=False, layout="constrained")
    for axis in axes.flat[len(ops) :]:
        axis.axis("off")
    for axis, op in zip(axes.flat, ops, strict=False):
        rows = [row for row in results.rows if row.case.op == op]
        for name in results.versions:
            points = [(row.nbytes, max(t.busbw for t in (row.out_of_place, row.in_place) if t)) for row in rows if row.backend == name]
            style = {"linewidth": 2.2, "marker": "o", "markersize": 4} if is_ours(name) else {"linewidth": 1.2, "linestyle": "--"}
            axis.plot(*zip(*points, strict=True), label=name, **style) if points else None
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: f"{format_nbytes(int(nbytes))}B"))
        axis.set(title=f"{op}, {rows[0].ranks} ranks, {rows[0].case.dtype}", xlabel="size", ylabel="busbw, GB/s")
        axis.grid(True, which="major", alpha=0.3)
        axis.legend()
    figure.suptitle(f"{machine()['cpu']}, {machine()['cores']} cores", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def machine_line(about):
    cpu = about["machine"]
    size = f"{cpu['cores']} cores, {cpu['memory_gib']} GiB"
    if "gpu" in cpu:
        size += f", {cpu['gpus']} x {cpu['gpu']} ({cpu['gpu_memory_gib']} GiB, CUDA {cpu['cuda']})"
    return f"{cpu['cpu']}, {size}, Linux {cpu['kernel']}, load {cpu['load_average']:.1f}, {about['date']}"


def _timing_cells(timing):
    mark = "~" if timing.spread > NOISY else ""
    return [f"{timing.time_us:.2f}{mark}", f"{timing.p99_us:.2f}", f"{timing.algbw:.3g}", f"{timing.busbw:.3g}", str(timing.wrong)]


def _bound_cells(row):
    cells = [f"{row.copy_gbps:.0f}" if row.copy_gbps else "n/a"]
    for form in FORMS:
        fractions = row.fractions(form)
        cells += [f"{fraction:.2f}" for fraction in fractions] if fractions else ["n/a"] * 2
    return cells


def rich_table(title, titles, lines):
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in titles:
        table.add_column(name, justify="left" if name in ("type", "redop", "backend", "op", "best peer") else "right")
    for cells in lines:
        table.add_row(*cells)
    return table


def markdown_table(titles, lines):
    return [f"| {' | '.join(cells)} |" for cells in ([title.replace("\n", " ") for title in titles], ["---"] * len(titles), *lines)]


def _read(path):
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
