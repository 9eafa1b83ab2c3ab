"""Reports. A report is one dict, `content`: what the figures depend on, and rows of figures.

    content = {"kind", "machine", "versions", "command", "date", "notes", ..., "rows": [{...}, ...]}

Everything that is shown is made of it: JSON, CSV, a page of Markdown, the tables in a terminal, a picture. So
a page or a picture can be made again from a JSON file. What is shown is up to the columns of each benchmark;
a column without any figure is not shown (with_figures).
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from pycomm.benchmarks.common import device

if TYPE_CHECKING:
    import argparse

    from matplotlib.figure import Figure

Content: TypeAlias = dict[str, Any]  # a report, or a row of it: what JSON holds
DrawFigure: TypeAlias = "Callable[[Content, Pyplot], Figure]"
TABLE_WIDTH = 150  # columns of the terminal; a narrower one wraps lines
LEFT = ("type", "redop", "backend", "op", "best peer")  # columns that are not aligned to the right
MISSING = "n/a"  # the cell of a figure that was not measured, in the tables of all benchmarks


class Table(NamedTuple):
    title: str | None
    columns: list[str]  # a line break in one: two lines in a terminal
    lines: list[list[str]]  # of cells


class Page(NamedTuple):
    """What a page of Markdown shows below machine and command, in this order."""

    intro: list[str]
    tables: list[Table]
    remarks: list[str]


class Pyplot(Protocol):
    """matplotlib.pyplot, as pictures use it."""

    def subplots(self, nrows: int = 1, ncols: int = 1, **options: Any) -> tuple[Figure, Any]: ...


class Columns(Protocol):
    """A module that shows the reports of one kind."""

    def page(self, content: Content) -> Page: ...

    def draw(self, content: Content, pyplot: Pyplot) -> Figure: ...


# --- what the figures depend on --------------------


def machine() -> dict[str, str | int | float | None]:
    cpu = next((line.split(":", 1)[1].strip() for line in _read("/proc/cpuinfo") if "model name" in line), "")
    memory = next((int(line.split()[1]) for line in _read("/proc/meminfo") if "MemTotal" in line), 0)
    return {
        "cpu": cpu or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**20, 1),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
    }


def context(
    kind: str,
    on: str = "cpu",
    packages: Iterable[str] = ("torch",),
    versions: Mapping[str, str] | None = None,
) -> Content:
    """Everything but settings and rows. on: "cpu" or "cuda"; versions: further ones, name -> text."""
    found = {name: importlib.metadata.version(name) for name in packages}
    return {
        "kind": kind,
        "machine": machine() | (device.describe() if on == "cuda" else {}),
        "versions": {"python": platform.python_version(), **found, **(versions or {})},
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def machine_line(content: Content) -> str:
    cpu = content["machine"]
    size = f"{cpu['cores']} cores, {cpu['memory_gib']} GiB"
    if "gpu" in cpu:
        size += f", {cpu['gpus']} x {cpu['gpu']} ({cpu['gpu_memory_gib']} GiB, CUDA {cpu['cuda']})"
    return f"{cpu['cpu']}, {size}, Linux {cpu['kernel']}, load {cpu['load_average']:.1f}, {content['date']}"


def _read(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


# --- files --------------------


def write(
    content: Content,
    given: argparse.Namespace | None,
    page: Callable[[Content], Page],
    draw_figure: DrawFigure,
) -> None:
    """The files that the command line names: json, csv, markdown, plot."""
    wanted = {kind: getattr(given, kind, None) for kind in ("json", "csv", "markdown", "plot")}
    if wanted["json"]:
        write_json(wanted["json"], content)
    if wanted["csv"]:
        with open(wanted["csv"], "w", newline="") as file:
            writer = csv.DictWriter(file, list(content["rows"][0]))
            writer.writeheader()
            writer.writerows(content["rows"])
    if wanted["markdown"]:
        Path(wanted["markdown"]).write_text("\n".join(markdown(content, page(content))) + "\n")
    if wanted["plot"]:
        draw(content, draw_figure, wanted["plot"])


def draw(content: Content, draw_figure: DrawFigure, path: str | Path) -> None:
    """A picture as a file."""
    import matplotlib  # not needed by those who only measure

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure = draw_figure(content, pyplot)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write_json(path: str | Path, content: Content) -> None:
    Path(path).write_text(as_json(content))


def as_json(content: Content) -> str:
    """JSON with a line for each row, so that two runs can be compared line by line."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n".join("  " + json.dumps(row) for row in value)
            lines.append(f" {json.dumps(key)}: [\n{rows}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def markdown(content: Content, page: Page) -> list[str]:
    """A page, as lines."""
    lines = [machine_line(content), "", f"`{content['command']}`", "", *page.intro]
    for table in page.tables:
        lines += ["", *([f"## {table.title}", ""] if table.title else []), *markdown_table(*table[1:])]
    return [*lines, "", *page.remarks]


def markdown_table(columns: list[str], lines: list[list[str]]) -> list[str]:
    columns, lines = with_figures(columns, lines)
    rows = [[title.replace("\n", " ") for title in columns], ["---"] * len(columns), *lines]
    return [f"| {' | '.join(cells)} |" for cells in rows]


def with_figures(columns: list[str], lines: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The columns, and their cells of each line, without those columns in which every cell is MISSING."""
    kept = [i for i in range(len(columns)) if not lines or any(cells[i] != MISSING for cells in lines)]
    return [columns[i] for i in kept], [[cells[i] for i in kept] for cells in lines]


# --- terminal --------------------


def show(lines: Sequence[str | Table]) -> None:
    """Prints lines of text and Tables."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Shown

    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    for line in lines:
        if isinstance(line, str):
            console.print(escape(line), soft_wrap=True)
            continue
        shown = Shown(title=line.title, title_justify="left", box=None, pad_edge=False)
        columns, rows = with_figures(line.columns, line.lines)
        for name in columns:
            shown.add_column(name, justify="left" if name in LEFT else "right")
        for cells in rows:
            shown.add_row(*cells)
        console.print(shown)
