"""Pictures of a search: the pipeline of the best plan, the time of tp x pp, and time and memory over the
number of GPUs. Need matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pycomm.parallel.pipeline.timeline import Span, Timeline
from pycomm.parallel.planning.search import NoPlan, Prediction, Request, divisors, search

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["heat_map", "over_ranks", "pipeline", "plot_all"]

GIB = 2**30
BLUE, ORANGE = "#4c78a8", "#e4804a"


def plot_all(request: Request, best: Prediction, folder: Path) -> list[Path]:
    """Writes the pictures into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "tp_pp.png", folder / "ranks.png"]
    heat_map(request, paths[0])
    over_ranks(request, paths[1])
    if best.time.pipeline is not None:
        pipeline(best, folder / "pipeline.png")
        paths.append(folder / "pipeline.png")
    return paths


def pipeline(found: Prediction, path: Path) -> None:
    """Stages as rows, as pipeline/timeline.py draws them. Of a plan with pp."""
    ran = found.time.pipeline
    assert ran is not None
    spans = tuple(
        tuple(Span(action, *times) for action, times in zip(row, rows, strict=True))
        for row, rows in zip(ran.schedule.actions, ran.spans, strict=True)
    )
    work = max(ran.busy) * ran.schedule.microbatches / found.job.microbatches
    Timeline(ran.schedule, spans, work).plot(path)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def heat_map(request: Request, path: Path) -> None:
    """Seconds of the best plan for each tp and pp; empty where none fits."""
    node = int(min(request.machine.node, request.world))
    sizes = divisors(request.world)
    tps = [d for d in sizes if d <= node and request.model.heads % d == 0]
    pps = [d for d in sizes if d <= request.model.layers]
    values: list[list[float]] = []
    for tp in tps:
        values.append([])
        for pp in pps:
            fixed = {**request.fixed, "tp": tp, "pp": pp}
            try:
                values[-1].append(search(request._replace(fixed=fixed), 1)[0].seconds)
            except NoPlan:
                values[-1].append(float("nan"))
    figure, axes = _figure(1.0 + 0.75 * len(pps), 1.6 + 0.55 * len(tps))
    shown = axes.imshow(values, cmap="viridis_r", aspect="auto")
    known = [value for row in values for value in row if value == value]
    middle = (min(known) + max(known)) / 2 if known else 0
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            text = "-" if value != value else f"{value:.3g}"
            axes.text(
                x, y, text, ha="center", va="center", fontsize=8, color="white" if value > middle else "#222"
            )
    axes.set_xticks(range(len(pps)), map(str, pps))
    axes.set_yticks(range(len(tps)), map(str, tps))
    axes.set(xlabel="pp", ylabel="tp")
    axes.set_title(
        f"{request.model.name}, {request.world} ranks: seconds of a step",
        loc="left",
        fontsize=10,
        fontweight="bold",
    )
    figure.colorbar(shown, ax=axes, label="s")
    figure.savefig(path, dpi=150)


def over_ranks(request: Request, path: Path) -> None:
    """Time and memory of the best plan, from an eighth to eight times as many ranks, at the same batch."""
    counts = [request.world * 2**i // 8 for i in range(7) if request.world * 2**i % 8 == 0]
    found: list[tuple[int, Prediction]] = []
    for world in counts:
        try:
            found.append((world, search(request._replace(world=world), 1)[0]))
        except NoPlan:
            continue
    figure, axes = _figure(6.5, 3.8)
    worlds = [world for world, _ in found]
    axes.loglog(worlds, [each.seconds for _, each in found], "o-", color=BLUE, label="time of a step")
    first = found[0]
    axes.loglog(
        worlds,
        [first[1].seconds * first[0] / world for world in worlds],
        ":",
        color=BLUE,
        label="if it scaled",
    )
    axes.set(xlabel="ranks", ylabel="s")
    axes.set_xticks(worlds, map(str, worlds))
    axes.minorticks_off()
    other = axes.twinx()
    other.plot(
        worlds, [each.memory.peak / GIB for _, each in found], "s--", color=ORANGE, label="peak of a rank"
    )
    other.axhline(request.limit / GIB, color=ORANGE, linewidth=0.8)
    other.set(ylim=(0, 1.15 * request.limit / GIB), ylabel="GiB")
    lines = [*axes.get_lines(), other.get_lines()[0]]
    axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False, fontsize=8, loc="lower left")
    axes.set_title(f"{request.model.name}, {request.rows} rows", loc="left", fontsize=10, fontweight="bold")
    for each in (axes, other):
        each.spines[["top"]].set_visible(False)
    figure.savefig(path, dpi=150)
