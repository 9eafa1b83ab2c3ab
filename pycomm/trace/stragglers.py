"""Who is waited for, how long, and where.

An operation waits for its last rank. What the others lose by it is the time from each one's arrival to that
of the last, in the mean over the others. Added up over the operations that a rank came last in, this is what
the others waited for it. Where: the operations that cost most, by the innermost span in which the rank issued
them ("bucket 5"), and the span of which the rank's own time (steps.py) is longer than the median of the
others'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pycomm import _C
from pycomm.trace.steps import own_times, place_at, say, steps_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pycomm.trace.arrays import Times
    from pycomm.trace.joined import Collective, Row, Trace

__all__ = ["Straggler", "find", "sentence"]

LEAST_SHARE = 0.01  # of the time of the trace that is worth a sentence
LEAST_EXCESS = 0.1  # of what the others waited that is worth a place


class Straggler(NamedTuple):
    rank: int
    axis: str
    operation: str  # the one of which it cost most
    came_last: int  # in so many
    of: int
    waited_ns: float  # by the others, in the mean, for this rank, in all
    share: float  # of the time of the trace
    steps: int
    mostly: str | None  # the place where the costliest operations were issued
    slow_in: str | None  # the span of which it has more than the others
    excess_ns: float  # by so much, in all


def find(trace: Trace) -> list[Straggler]:
    """The worst first; those worth a sentence."""
    found = [straggler for collective in trace.collectives for straggler in _of_group(trace, collective)]
    return sorted(found, key=lambda straggler: -straggler.waited_ns)


def _of_group(trace: Trace, collective: Collective) -> Iterator[Straggler]:
    rows, size = [row for row in collective.rows if row is not None], len(collective.rows)
    known = ~np.isnan(collective.begun).any(axis=1)
    if size < 2 or len(rows) < size or not known.any():
        return
    begun, last = collective.begun[known], collective.last[known]
    lost = (begun.max(axis=1)[:, None] - begun).sum(axis=1) / (size - 1)
    for rank in range(size):
        mine = last == rank
        waited = float(lost[mine].sum())
        if waited < LEAST_SHARE * trace.duration:
            continue
        kinds = collective.kind[known]
        costs = {kind: float(lost[mine & (kinds == kind)].sum()) for kind in np.unique(kinds[mine])}
        kind = max(costs, key=costs.__getitem__)
        row = rows[rank]
        issued = collective.issued[known][:, rank]
        slow_in, excess = _excess(trace, rows, row)
        yield Straggler(
            row.rank,
            trace.axes[collective.group],
            _C.kinds[kind],
            int((mine & (kinds == kind)).sum()),
            int((kinds == kind).sum()),
            waited,
            waited / trace.duration,
            len(steps_of(trace, row)),
            _costliest(trace, row, issued[mine], lost[mine]),
            slow_in if excess > LEAST_EXCESS * waited else None,
            excess,
        )


def _costliest(trace: Trace, row: Row, issued: Times, lost: Times) -> str | None:
    costs: dict[str, float] = {}
    for moment, cost in zip(issued, lost, strict=True):
        place = place_at(trace, row, moment)
        if place is not None:
            costs[say(place)] = costs.get(say(place), 0.0) + cost
    return max(costs, key=costs.__getitem__) if costs else None


def _excess(trace: Trace, rows: Sequence[Row], row: Row) -> tuple[str | None, float]:
    """(the span in which the row has most more own time than the median of the others, how much)"""
    mine = own_times(trace, row)
    others = [own_times(trace, other) for other in rows if other is not row]
    more = {
        part: time - float(np.median([other[part] for other in others]))
        for part, time in mine.items()
        if all(part in other for other in others)
    }
    if not more:
        return None, 0.0
    part = max(more, key=more.__getitem__)
    return say(part), more[part]


def sentence(straggler: Straggler) -> str:
    per, unit = (straggler.steps, " per step") if straggler.steps else (1, "")
    waited = straggler.waited_ns / 1e6 / per
    text = (
        f"Rank {straggler.rank} came last in {100 * straggler.came_last / straggler.of:.0f}% of "
        f"{straggler.of} {straggler.operation}s of {straggler.axis}; the others waited {waited:.2f} ms{unit} "
        f"for it ({100 * straggler.share:.0f}% of the time)"
    )
    if straggler.mostly:
        text += f", most in {straggler.mostly}"
    if straggler.slow_in:
        excess = straggler.excess_ns / 1e6 / per
        text += f". It is slower than the others in {straggler.slow_in}: by {excess:.2f} ms{unit}"
    return text + "."
