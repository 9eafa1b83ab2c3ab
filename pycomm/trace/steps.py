"""Steps and the spans inside them: how long a rank was in each, without what lies inside and without waiting.

A span's own time is its length, less the spans inside it on the same thread, less the time in which its
rank's callers were blocked by communication. That is what a slow rank has more of than the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pycomm.trace.arrays import Span, Spans, Times
    from pycomm.trace.joined import Row, Trace

__all__ = ["STEP", "Part", "blocked", "own_times", "place_at", "say", "steps_of", "union"]

STEP = "step"


class Part(NamedTuple):
    """A span by what it is: the same in every step and on every rank."""

    name: str
    stage: int
    microbatch: int
    bucket: int


def say(part: Part) -> str:
    """ "forward (stage 0, microbatch 3)", "bucket 5"."""
    numbers = {label: n for label, n in zip(part._fields[1:], part[1:], strict=True) if n >= 0}
    own = f" {numbers.pop(part.name)}" if part.name in numbers else ""
    inside = ", ".join(f"{label} {n}" for label, n in numbers.items())
    return f"{part.name}{own} ({inside})" if inside else part.name + own


def part_of(trace: Trace, span: Span) -> Part:
    return Part(trace.names[span["name"]], int(span["stage"]), int(span["microbatch"]), int(span["bucket"]))


def steps_of(trace: Trace, row: Row) -> list[tuple[int, int]]:
    """The begin and the end of the row's steps."""
    if STEP not in trace.names:
        return []
    spans = row.spans[row.spans["name"] == trace.names.index(STEP)]
    return sorted(zip(spans["begin"].tolist(), spans["end"].tolist(), strict=True))


def union(intervals: ArrayLike) -> Times:
    """Disjoint and sorted, as an array (n, 2)."""
    pairs = np.asarray(intervals, dtype=float).reshape(-1, 2)
    joined: list[list[float]] = []
    for begin, end in pairs[np.argsort(pairs[:, 0], kind="stable")]:
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        elif end > begin:
            joined.append([begin, end])
    return np.array(joined).reshape(-1, 2)


def length_within(disjoint: Times, begin: float, end: float) -> float:
    """How much of disjoint intervals lies between begin and end."""
    if not len(disjoint):
        return 0.0
    return float(np.clip(np.minimum(disjoint[:, 1], end) - np.maximum(disjoint[:, 0], begin), 0, None).sum())


def blocked(row: Row) -> Times:
    """When callers of this rank waited for communication."""
    done = row.operations[(row.operations["waited"] > 0) & (row.operations["ended"] > 0)]
    return union(np.stack([done["waited"], done["ended"]], axis=1)) if len(done) else union([])


def own_times(trace: Trace, row: Row) -> dict[Part, float]:
    """Nanoseconds in all."""
    waits = blocked(row)
    totals: dict[Part, float] = {}
    for thread in np.unique(row.spans["thread"]):
        spans = np.sort(row.spans[row.spans["thread"] == thread], order=["begin", "end"])
        spans = spans[np.lexsort((-spans["end"], spans["begin"]))]
        children = _children(spans)
        for index, span in enumerate(spans):
            inside = union([(spans[c]["begin"], spans[c]["end"]) for c in children[index]])
            begin, end = span["begin"], span["end"]
            own = end - begin - length_within(union([*inside, *_within(waits, begin, end)]), begin, end)
            part = part_of(trace, span)
            totals[part] = totals.get(part, 0.0) + own
    return totals


def _within(waits: Times, begin: float, end: float) -> Times:
    if not len(waits):
        return waits
    return waits[(waits[:, 1] > begin) & (waits[:, 0] < end)]


def _children(spans: Spans) -> list[list[int]]:
    """For each span, outer before inner, the indices of those directly inside it."""
    children: list[list[int]] = [[] for _ in spans]
    open_ones: list[int] = []
    for index, span in enumerate(spans):
        while open_ones and spans[open_ones[-1]]["end"] <= span["begin"]:
            open_ones.pop()
        if open_ones:
            children[open_ones[-1]].append(index)
        open_ones.append(index)
    return children


def place_at(trace: Trace, row: Row, moment: float) -> Part | None:
    """The innermost span of a row at a moment."""
    spans = row.spans[(row.spans["begin"] <= moment) & (row.spans["end"] >= moment)]
    if not len(spans):
        return None
    return part_of(trace, spans[(spans["end"] - spans["begin"]).argmin()])
