"""One HTML page that needs no network: plotly and the data are inside. A timeline to zoom, what each rank
cost the others, and sizes against bandwidth.

Of a long trace the timeline shows the steps around the middle, MOST_BARS bars at most: a browser draws these
in a second. chrome.py has all of it.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pycomm import _C
from pycomm.trace import devices, overlap, stragglers, waits
from pycomm.trace.device_clock import name_of
from pycomm.trace.files import DEVICE, DONE, MESSAGE, NOBODY
from pycomm.trace.picture import COLORS, MOVING, ON_DEVICE, OTHER, WAITING
from pycomm.trace.steps import STEP, part_of, say, steps_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import plotly.graph_objects as go

    from pycomm.trace.arrays import Operation
    from pycomm.trace.joined import Row, Trace

__all__ = ["write"]

MOST_BARS = 20000
HOST_SIDE = "#d8b5a5"

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>pycomm trace</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; }}
h1 {{ font-size: 1.5em; }} h2 {{ font-size: 1.15em; margin-top: 2em; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
td, th {{ padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right; }}
td:nth-child(-n+3), th:nth-child(-n+3) {{ text-align: left; }}
li {{ margin: .3em 0; }}
</style>
<script>{library}</script></head><body>
<h1>{title}</h1>
<h2>Timeline</h2><p>{shown}</p>{timeline}
<h2>Stragglers</h2><ul id="stragglers">{sentences}</ul>{costs}
<h2>Waiting against moving</h2>{table}
{devices}
<h2>Sizes against bandwidth</h2>{bandwidth}
<h2>Overlap of communication and computation</h2><ul>{overlaps}</ul>
{notes}
</body></html>
"""


class _Bar(NamedTuple):
    name: str
    color: str
    begin: float
    end: float
    text: str


def write(trace: Trace, path: Path) -> None:
    """Raises ImportError without plotly."""
    from plotly.offline import get_plotlyjs

    begin, end = _window(trace)
    found = stragglers.find(trace)
    parts = {
        "library": get_plotlyjs(),
        "title": f"{len(trace.rows)} ranks, {trace.duration / 1e9:.3f} s",
        "shown": f"{(end - begin) / 1e6:.1f} of {trace.duration / 1e6:.1f} ms, from {begin / 1e6:.1f} ms on. "
        "Drag to zoom, double click to go back.",
        "timeline": _draw(_timeline(trace, begin, end), "timeline"),
        "sentences": _items(map(stragglers.sentence, found) if found else ["No rank was waited for long."]),
        "costs": _draw(_costs(found), "costs") if found else "",
        "table": _table(waits.table(trace)),
        "devices": _devices(trace),
        "bandwidth": _draw(_bandwidth(trace), "bandwidth"),
        "overlaps": _items(_overlaps(trace)),
        "notes": f"<h2>Notes</h2><ul>{_items(trace.notes)}</ul>" if trace.notes else "",
    }
    with open(path, "w") as file:
        file.write(_PAGE.format(**parts))


def _draw(figure: go.Figure, name: str) -> str:
    import plotly.io

    return plotly.io.to_html(figure, full_html=False, include_plotlyjs=False, div_id=name)


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)


def _overlaps(trace: Trace) -> Iterator[str]:
    for row in trace.rows:
        found = overlap.of_row(row)
        share = "no communication" if found.percent is None else f"{found.percent:.0f}%"
        yield f"rank {row.rank}: {share} of {found.communication_ms:.3f} ms"


def _window(trace: Trace) -> tuple[float, float]:
    """(begin, end) of what the timeline shows."""
    bars = sum(2 * len(row.operations) + len(row.spans) for row in trace.rows)
    if bars <= MOST_BARS:
        return 0.0, float(max(trace.duration, 1))
    width, middle = trace.duration * MOST_BARS / bars, trace.duration / 2
    steps = steps_of(trace, trace.rows[0])
    if steps:
        middle = steps[len(steps) // 2][0] + width / 2
    return max(0.0, middle - width / 2), min(float(trace.duration), middle + width / 2)


def _timeline(trace: Trace, begin: float, end: float) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    labels: list[str] = []
    shown: set[str] = set()
    for row in reversed(trace.rows):  # plotly counts upwards
        lanes = {"communication": _communication(trace, row), "computation": _computation(trace, row)}
        if (row.operations["device_begin"] > 0).any():
            lanes = {"on the device": _on_device(trace, row), **lanes}
        for lane, bars in lanes.items():
            labels.append(f"rank {row.rank} {lane}")
            by_name: dict[tuple[str, str], list[_Bar]] = {}
            for bar in bars:
                if bar.end > begin and bar.begin < end:
                    by_name.setdefault((bar.name, bar.color), []).append(bar)
            for (name, color), chosen in by_name.items():
                figure.add_bar(
                    orientation="h",
                    y=[labels[-1]] * len(chosen),
                    base=[bar.begin / 1e6 for bar in chosen],
                    x=[(bar.end - bar.begin) / 1e6 for bar in chosen],
                    hovertext=[bar.text for bar in chosen],
                    hoverinfo="text",
                    marker={"color": color, "line": {"width": 0}},
                    name=name,
                    legendgroup=name,
                    showlegend=name not in shown,
                )
                shown.add(name)
    figure.update_layout(
        barmode="overlay",
        height=120 + 44 * len(labels),
        template="plotly_white",
        margin={"l": 10, "r": 10, "t": 36, "b": 40},  # the tools lie above the plot
        xaxis={"title": "ms", "range": [begin / 1e6, end / 1e6]},
        yaxis={"categoryorder": "array", "categoryarray": labels, "automargin": True, "fixedrange": True},
    )
    return figure


def _computation(trace: Trace, row: Row) -> Iterator[_Bar]:
    """Outer before inner."""
    for span in row.spans[np.lexsort((-row.spans["end"], row.spans["begin"]))]:
        part = part_of(trace, span)
        if part.name == STEP:
            continue
        length = (span["end"] - span["begin"]) / 1e6
        color = COLORS.get(part.name.partition(" ")[0], OTHER)
        text = f"{say(part)}: {length:.3f} ms"
        yield _Bar(part.name, color, float(span["begin"]), float(span["end"]), text)


def _communication(trace: Trace, row: Row) -> Iterator[_Bar]:
    for operation in row.operations[row.operations["begun"] > 0]:
        begin, end = float(operation["begun"]), float(operation["ended"] or trace.duration)
        if operation["type"] == DEVICE:
            text = f"{_of(trace, operation)}: {(end - begin) / 1e6:.3f} ms until all was in the stream"
            yield _Bar("host's side", HOST_SIDE, begin, end, html.escape(text))
            continue
        arrived = min(max(float(operation["arrived"]), begin), end)
        kind = _C.kinds[operation["kind"]]
        text = (
            f"{kind} #{operation['sequence']} of {trace.axes[operation['group']]}, "
            f"{operation['nbytes']} bytes, "
            f"{(arrived - begin) / 1e6:.3f} ms waiting, {(end - arrived) / 1e6:.3f} ms moving"
        )
        if operation["last"] != NOBODY:
            word = "with" if operation["type"] == MESSAGE else "last came"
            text += f", {word} rank {operation['last']}"
        if operation["outcome"] != DONE:
            text += ", not completed"
        yield _Bar("waiting", WAITING, begin, arrived, html.escape(text))
        yield _Bar("moving", MOVING, arrived, end, html.escape(text))


def _of(trace: Trace, operation: Operation) -> str:
    where = trace.axes[operation["group"]]
    return f"{name_of(operation)} #{operation['sequence']} of {where}, {operation['nbytes']} bytes"


def _on_device(trace: Trace, row: Row) -> Iterator[_Bar]:
    for operation in row.operations[row.operations["device_begin"] > 0]:
        begin, end = float(operation["device_begin"]), float(operation["device_end"])
        text = (
            f"{_of(trace, operation)}: {(end - begin) / 1e6:.3f} ms on the device, begun there "
            f"{(begin - float(operation['issued'])) / 1e6:.3f} ms after its call"
        )
        yield _Bar("on the device", ON_DEVICE, begin, end, html.escape(text))


def _costs(found: Sequence[stragglers.Straggler]) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    for axis in dict.fromkeys(straggler.axis for straggler in found):
        mine = [straggler for straggler in found if straggler.axis == axis]
        figure.add_bar(
            x=[f"rank {straggler.rank}" for straggler in mine],
            y=[straggler.waited_ns / 1e6 for straggler in mine],
            name=axis,
            width=0.3,
        )
    figure.update_layout(
        template="plotly_white", height=300, showlegend=True, yaxis_title="ms that the others waited for it"
    )
    return figure


def _table(lines: Sequence[waits.Line]) -> str:
    head = "axis operation size count MB waiting&nbsp;ms moving&nbsp;ms".split()
    rows = [
        (
            html.escape(line.axis),
            line.operation,
            f"up to {line.size}",
            line.calls,
            f"{line.nbytes / 1e6:.3f}",
            f"{line.waiting_ms:.3f}",
            f"{line.moving_ms:.3f}",
        )
        for line in lines
    ]
    cells = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{name}</th>" for name in head) + f"</tr>{cells}</table>"


def _devices(trace: Trace) -> str:
    if trace.device_error_ns is None:
        return ""
    head, *rows = ([html.escape(cell) for cell in row] for row in devices.cells(trace))
    cells = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<h2>On the devices</h2><p>{devices.MEANING}</p><table><tr>"
        + "".join(f"<th>{name}</th>" for name in head)
        + f"</tr>{cells}</table>"
    )


def _bandwidth(trace: Trace) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    points: dict[str, list[tuple[int, float]]] = {}
    for row in trace.rows:
        operations = row.operations[
            (row.operations["outcome"] == DONE)
            & (row.operations["nbytes"] > 0)
            & (row.operations["begun"] > 0)
            & ((row.operations["type"] != DEVICE) | (row.operations["device_begin"] > 0))
        ]
        for operation in operations[:: max(1, len(operations) * len(trace.rows) // MOST_BARS)]:
            begins, ends = float(operation["arrived"] or operation["begun"]), float(operation["ended"])
            if on_device := operation["type"] == DEVICE:
                begins, ends = float(operation["device_begin"]), float(operation["device_end"])
            moving = ends - begins
            if moving > 0:
                name = f"{_C.kinds[operation['kind']]} of {trace.axes[operation['group']]}"
                name += ", on the device" * bool(on_device)
                points.setdefault(name, []).append((operation["nbytes"], operation["nbytes"] / moving))
    for name, chosen in sorted(points.items()):
        x, y = zip(*chosen, strict=True)
        figure.add_scatter(
            x=list(map(int, x)), y=y, mode="markers", name=name, marker={"size": 5, "opacity": 0.5}
        )
    figure.update_layout(
        template="plotly_white",
        height=420,
        showlegend=True,
        xaxis={"title": "bytes", "type": "log", "dtick": 1},
        yaxis={"title": "GB/s while moving", "type": "log", "dtick": 1},
    )
    return figure
