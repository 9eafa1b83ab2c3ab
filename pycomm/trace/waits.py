"""Waiting against moving: a table per axis, operation and size.

waiting: from a rank's arrival at an operation to that of the last rank. moving: from then to its end there,
with what it waits for pieces of others meanwhile. Both are means over ranks and operations. algbw is as
nccl-tests has it: bytes of the whole buffer by the time of moving (docs/glossary.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pycomm import _C
from pycomm.trace.joined import ended, messages_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pycomm.trace.arrays import Mask, Times
    from pycomm.trace.joined import Collective, Trace

__all__ = ["Line", "aligned", "phases", "show", "table"]

SIZES = ("64 B", "1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB", "more")
LIMITS = (64, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20)


class Line(NamedTuple):
    axis: str
    operation: str
    size: str  # at most
    calls: int  # operations, each counted once
    nbytes: int  # of all of them
    waiting_ms: float  # in all, mean of the ranks; nan: a rank has no trace
    moving_ms: float
    queued_ms: float  # from issue to begin


def phases(collective: Collective) -> Times:
    """[operation, rank]: when the last rank had arrived, in nanoseconds; nan where one is not known."""
    known = ~np.isnan(collective.begun).any(axis=1)
    arrived = np.full(collective.begun.shape, np.nan)
    # aligned clocks may be off by some microseconds
    arrived[known] = np.fmin(collective.begun[known].max(axis=1)[:, None], collective.ended[known])
    arrived[known] = np.fmax(arrived[known], collective.begun[known])
    return arrived


def table(trace: Trace) -> list[Line]:
    """The most waited for first."""
    lines = [line for collective in trace.collectives for line in _of_collective(trace, collective)]
    lines += _of_messages(trace)
    return sorted(lines, key=lambda line: -np.nan_to_num(line.waiting_ms + line.moving_ms))


def _of_collective(trace: Trace, collective: Collective) -> Iterator[Line]:
    arrived = phases(collective)
    whole = ~np.isnan(arrived).any(axis=1) & ~np.isnan(collective.ended).any(axis=1)
    sizes = np.searchsorted(LIMITS, collective.nbytes)
    for kind in np.unique(collective.kind):
        for size in np.unique(sizes[collective.kind == kind]):
            chosen = (collective.kind == kind) & (sizes == size)
            timed = chosen & whole

            def total(matrix: Times, timed: Mask = timed) -> float:
                return float(matrix[timed].mean(axis=1).sum()) / 1e6 if timed.any() else float("nan")

            yield Line(
                trace.axes[collective.group],
                _C.kinds[kind],
                SIZES[size],
                int(chosen.sum()),
                int(collective.nbytes[chosen].sum()),
                total(arrived - collective.begun),
                total(collective.ended - arrived),
                total(collective.begun - collective.issued),
            )


def _of_messages(trace: Trace) -> list[Line]:
    """A message is its own on each side: the mean over ranks would mean little, so these are sums."""
    totals: dict[tuple[str, str, str], Line] = {}
    for row in trace.rows:
        messages = ended(messages_of(row))
        for message in messages:
            size = int(np.searchsorted(LIMITS, message["nbytes"]))
            key = (trace.axes[message["group"]], _C.kinds[message["kind"]], SIZES[size])
            begins = message["arrived"] or message["issued"]
            so_far = totals.get(key, Line(*key, 0, 0, 0.0, 0.0, 0.0))
            totals[key] = so_far._replace(
                calls=so_far.calls + 1,
                nbytes=so_far.nbytes + int(message["nbytes"]),
                waiting_ms=so_far.waiting_ms + (begins - message["issued"]) / 1e6,
                moving_ms=so_far.moving_ms + (message["ended"] - begins) / 1e6,
            )
    return list(totals.values())


def show(lines: Sequence[Line]) -> str:
    """The table as text."""
    head = ("axis", "operation", "up to", "count", "MB", "waiting ms", "moving ms", "waiting %", "GB/s")
    rows: list[tuple[str, ...]] = [head]
    for line in lines:
        time = float(np.nan_to_num(line.waiting_ms + line.moving_ms))
        rows.append(
            (
                line.axis,
                line.operation,
                line.size,
                str(line.calls),
                f"{line.nbytes / 1e6:.3f}",
                f"{line.waiting_ms:.3f}" if time else "-",
                f"{line.moving_ms:.3f}" if time else "-",
                f"{100 * line.waiting_ms / time:.0f}" if time else "-",
                f"{line.nbytes / line.moving_ms / 1e6:.2f}"
                if time and line.moving_ms and line.nbytes
                else "-",
            )
        )
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table as text: the first three columns to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if n < 3 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
