"""One step as a picture: ranks as rows; what each computes above, what it communicates below, and in that
what is waiting and what is moving; below that what runs on its device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pycomm.trace.files import DEVICE, MESSAGE
from pycomm.trace.steps import STEP, part_of, steps_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pycomm.trace.arrays import Times
    from pycomm.trace.joined import Row, Trace

__all__ = ["draw", "middle_step"]

COLORS = {
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "weight": "#54a24b",
    "bucket": "#eeca3b",
    "gather": "#b279a2",
    "update": "#9d755d",
}
OTHER, WAITING, MOVING, ON_DEVICE = "#bab0ac", "#e45756", "#f58518", "#d67195"


class Step(NamedTuple):
    begin: float
    end: float
    number: int | None  # None: of a trace that has no steps, all of it


class _Bars(NamedTuple):
    spans: list[tuple[float, float]]  # begin and length, ms
    color: str
    label: str
    top: float


def middle_step(trace: Trace) -> Step:
    """The step in the middle, over all ranks; all of a trace that has no steps."""
    steps = [found for row in trace.rows if (found := steps_of(trace, row))]
    if not steps:
        return Step(0.0, float(max(trace.duration, 1)), None)
    number = min(map(len, steps)) // 2
    return Step(min(each[number][0] for each in steps), max(each[number][1] for each in steps), number)


def draw(trace: Trace, path: Path) -> None:
    """Writes a PNG. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    begin, end, number = middle_step(trace)
    height = 1.2 + 0.7 * len(trace.rows)
    figure, axes = plt.subplots(figsize=(12, height), layout="constrained")
    used = {}
    for place, row in enumerate(trace.rows):
        for spans, color, label, top in _bars(trace, row, begin, end):
            axes.broken_barh(spans, (place + top, 0.4), facecolors=color, edgecolor="white", linewidth=0.3)
            used[label] = color
    axes.set_yticks(
        [place + 0.4 for place in range(len(trace.rows))], [f"rank {row.rank}" for row in trace.rows]
    )
    axes.invert_yaxis()
    axes.set_xlim(0, (end - begin) / 1e6)
    axes.set_xlabel("ms")
    axes.set_title("trace" if number is None else f"step {number}", fontsize=10)
    axes.legend(
        handles=[Patch(color=color, label=label) for label, color in used.items()],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        fontsize=8,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(trace: Trace, row: Row, begin: float, end: float) -> Iterator[_Bars]:
    """Of one rank."""

    def clip(begins: Times, ends: Times) -> list[tuple[float, float]]:
        chosen = (ends > begin) & (begins < end) & (ends >= begins)
        left, right = np.maximum(begins[chosen], begin), np.minimum(ends[chosen], end)
        return list(zip((left - begin) / 1e6, (right - left) / 1e6, strict=True))

    spans = row.spans[np.lexsort((-row.spans["end"], row.spans["begin"]))]
    names = np.array([part_of(trace, span).name for span in spans])
    for name in dict.fromkeys(names.tolist()):
        if name == STEP:
            continue
        mine = spans[names == name]
        bars = clip(mine["begin"].astype(float), mine["end"].astype(float))
        yield _Bars(bars, COLORS.get(name, OTHER), name, 0.0)
    on_host = ~np.isin(row.operations["type"], (MESSAGE, DEVICE))
    operations = row.operations[on_host & (row.operations["begun"] > 0)]
    ends = np.where(operations["ended"] > 0, operations["ended"], trace.duration).astype(float)
    arrived = np.where(operations["arrived"] > 0, operations["arrived"], operations["begun"]).astype(float)
    yield _Bars(clip(arrived, ends), MOVING, "moving", 0.42)
    yield _Bars(clip(operations["begun"].astype(float), arrived), WAITING, "waiting", 0.42)
    messages = row.operations[row.operations["type"] == MESSAGE]
    message_ends = np.where(messages["ended"] > 0, messages["ended"], trace.duration).astype(float)
    if len(messages):
        yield _Bars(clip(messages["issued"].astype(float), message_ends), "#ff9da6", "message", 0.42)
    ran = row.operations[row.operations["device_begin"] > 0]
    if len(ran):
        begins, ends = (ran[name].astype(float) for name in ("device_begin", "device_end"))
        yield _Bars(clip(begins, ends), ON_DEVICE, "on the device", 0.42)
