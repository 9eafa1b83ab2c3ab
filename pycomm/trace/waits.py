"""Waiting against moving: a table per axis, operation and size.

waiting: from a rank's arrival at an operation to that of the last rank. moving: from then to its end there,
with what it waits for pieces of others meanwhile. Both are means over ranks and operations. algbw is as
nccl-tests has it: bytes of the whole buffer by the time of moving (docs/glossary.md).
"""

from typing import NamedTuple

import numpy as np

from pycomm import _C
from pycomm.trace.joined import ended, messages_of

__all__ = ["Line", "aligned", "phases", "show", "table"]

SIZES = ("64 B", "1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB", "more")
LIMITS = (64, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20)


class Line(NamedTuple):
    axis: str
    operation: str
    size: str  # at most
    count: int  # operations, each counted once
    nbytes: int  # of all of them
    waiting_ms: float  # in all, mean of the ranks; nan: a rank has no trace
    moving_ms: float
    queued_ms: float  # from issue to begin


def phases(collective):
    """[operation, rank]: when the last rank had arrived, in nanoseconds; nan where one is not known."""
    known = ~np.isnan(collective.begun).any(axis=1)
    arrived = np.full(collective.begun.shape, np.nan)
    # aligned clocks may be off by some microseconds
    arrived[known] = np.fmin(collective.begun[known].max(axis=1)[:, None], collective.ended[known])
    arrived[known] = np.fmax(arrived[known], collective.begun[known])
    return arrived


def table(trace):
    """[Line], the most waited for first."""
    lines = [line for collective in trace.collectives for line in _of_collective(trace, collective)]
    lines += _of_messages(trace)
    return sorted(lines, key=lambda line: -np.nan_to_num(line.waiting_ms + line.moving_ms))


def _of_collective(trace, collective):
    arrived = phases(collective)
    whole = ~np.isnan(arrived).any(axis=1) & ~np.isnan(collective.ended).any(axis=1)
    sizes = np.searchsorted(LIMITS, collective.nbytes)
    for kind in np.unique(collective.kind):
        for size in np.unique(sizes[collective.kind == kind]):
            chosen = (collective.kind == kind) & (sizes == size)
            timed = chosen & whole

            def total(matrix, timed=timed):
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


def _of_messages(trace):
    """A message is its own on each side: the mean over ranks would mean little, so these are sums."""
    totals = {}
    for row in trace.rows:
        messages = ended(messages_of(row))
        for message in messages:
            size = int(np.searchsorted(LIMITS, message["nbytes"]))
            key = (trace.axes[message["group"]], _C.kinds[message["kind"]], SIZES[size])
            begins = message["arrived"] or message["issued"]
            count, nbytes, waiting, moving = totals.get(key, (0, 0, 0.0, 0.0))
            waiting += (begins - message["issued"]) / 1e6
            moving += (message["ended"] - begins) / 1e6
            totals[key] = count + 1, nbytes + int(message["nbytes"]), waiting, moving
    return [Line(*key, *values, 0.0) for key, values in totals.items()]


def show(lines):
    """The table as text."""
    head = ("axis", "operation", "up to", "count", "MB", "waiting ms", "moving ms", "waiting %", "GB/s")
    rows = [head]
    for line in lines:
        time = float(np.nan_to_num(line.waiting_ms + line.moving_ms))
        rows.append(
            (
                line.axis,
                line.operation,
                line.size,
                str(line.count),
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


def aligned(rows):
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
