"""How long operations run on devices: a table per axis, operation and size.

running: from the begin of a rank's kernels in its stream to their end, the mean of the ranks, with what they
wait for peers inside. Of that before the last rank began: what a rank's kernels certainly wait, for no
collective is over before all have begun. Clocks of devices are known to some microseconds only
(device_clock.py), so it is left out where it is less than that per operation. Messages are sums over the
ranks, as in waits.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pycomm import _C
from pycomm.trace.clocks import WAITS_FOR_ALL
from pycomm.trace.device_clock import LAUNCH
from pycomm.trace.files import DEVICE
from pycomm.trace.waits import LIMITS, SIZES, phases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pycomm.trace.joined import Collective, Trace

__all__ = ["MEANING", "Line", "cells", "table"]

MEANING = (
    "On the devices: running from begin to end there, with what kernels wait for peers inside, mean of the "
    "ranks (messages: sums); of that before the last rank began."
)


class Line(NamedTuple):
    axis: str
    operation: str
    size: str  # at most
    calls: int  # operations whose times are known on all ranks, each counted once
    nbytes: int
    running_ms: float  # in all
    before_last_ms: float  # nan: less than the clocks can tell, or it means nothing


def table(trace: Trace) -> list[Line]:
    """The longest first."""
    error = trace.device_error_ns
    if error is None:
        return []
    lines = [line for collective in trace.on_device for line in _of_collective(trace, collective, error)]
    return sorted(lines + _of_messages(trace), key=lambda line: -line.running_ms)


def _of_collective(trace: Trace, collective: Collective, error_ns: int) -> Iterator[Line]:
    known = ~np.isnan(collective.begun).any(axis=1) & ~np.isnan(collective.ended).any(axis=1)
    arrived, sizes = phases(collective), np.searchsorted(LIMITS, collective.nbytes)
    for kind in np.unique(collective.kind[known]):
        for size in np.unique(sizes[known & (collective.kind == kind)]):
            chosen = known & (collective.kind == kind) & (sizes == size)
            count = int(chosen.sum())
            running = float((collective.ended - collective.begun)[chosen].mean(axis=1).sum())
            before = float((arrived - collective.begun)[chosen].mean(axis=1).sum())
            told = kind in (LAUNCH, *WAITS_FOR_ALL) and before > count * error_ns
            yield Line(
                trace.axes[collective.group],
                "fused product" if kind == LAUNCH else _C.kinds[kind],
                SIZES[size] if kind != LAUNCH else "",
                count,
                int(collective.nbytes[chosen].sum()),
                running / 1e6,
                before / 1e6 if told else float("nan"),
            )


def _of_messages(trace: Trace) -> list[Line]:
    totals: dict[tuple[str, str, str], Line] = {}
    for row in trace.rows:
        ran = row.operations[(row.operations["type"] == DEVICE) & (row.operations["device_begin"] > 0)]
        for message in ran[np.isin(ran["kind"], [_C.kinds.index(kind) for kind in ("send", "recv")])]:
            size = SIZES[int(np.searchsorted(LIMITS, message["nbytes"]))]
            key = trace.axes[message["group"]], _C.kinds[message["kind"]], size
            so_far = totals.get(key, Line(*key, 0, 0, 0.0, float("nan")))
            totals[key] = so_far._replace(
                calls=so_far.calls + 1,
                nbytes=so_far.nbytes + int(message["nbytes"]),
                running_ms=so_far.running_ms + (message["device_end"] - message["device_begin"]) / 1e6,
            )
    return list(totals.values())


def cells(trace: Trace) -> list[tuple[str, ...]]:
    """The table as rows of text, the head first."""
    head = ("axis", "operation", "up to", "count", "MB", "running ms", "before last ms", "GB/s")
    rows: list[tuple[str, ...]] = [head]
    for line in table(trace):
        moved = line.nbytes > 0 and line.running_ms > 0
        rows.append(
            (
                line.axis,
                line.operation,
                line.size,
                str(line.calls),
                f"{line.nbytes / 1e6:.3f}" if line.nbytes else "-",
                f"{line.running_ms:.3f}",
                "-" if np.isnan(line.before_last_ms) else f"{line.before_last_ms:.3f}",
                f"{line.nbytes / line.running_ms / 1e6:.2f}" if moved else "-",
            )
        )
    return rows
