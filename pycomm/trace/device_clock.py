"""When operations ran on a device, by the clock of its host.

A record has its begin and end by the device's clock (csrc/cuda/device_clock.h), and two moments by the
host's: when it was issued, before its begin, and when the host had seen its end. So for the offset that is to
be added to the device's times

    offset at begin >= issued - begin          offset at end <= seen - end

    seen - end |    .  .    .         .        .: an operation; the host looks up to 5 ms late
               |  .      .      .  .
               |  ____________________ ____    the offset: no later than any of them allows
               | .  '   .      '    .          ': issued - begin, low where the device is behind the host
               +---------------------------- end

Of each second the operation counts whose end was seen soonest; in between the offset is on a straight line,
so that operations keep their order and their length; lower where it would be above the bound of another one.
A second in which none was seen soon is put right by its
neighbours, since the clocks do not drift apart faster than DRIFT. The upper bounds count, as they are close
whatever the device does. The lower ones say how far off that may be.

Source of the idea: delays of packets as bounds of a skew (Moon, Skelly and Towsley, INFOCOM 1999), with one
line per second in place of one for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pycomm import _C

if TYPE_CHECKING:
    from pycomm.trace.arrays import Integers, Operation, Operations, Times

__all__ = ["LAUNCH", "NOBODY", "name_of", "to_host"]

NOBODY = 0xFFFF
SECOND = 1_000_000_000
ROUNDS = 20  # of making a line lower where it is above a bound
DRIFT = 2e-4  # two crystals, 50 parts in a million each, and a host's clock that is being set
LAUNCH = 0  # the kind of a launch of a fused product: none


def name_of(operation: Operation) -> str:
    return "fused product" if operation["kind"] == LAUNCH else _C.kinds[operation["kind"]]


def to_host(operations: Operations) -> tuple[Operations, int | None]:
    """(operations on a device with device_begin and device_end by the host's clock, nanoseconds that half of
    these may be off at most; None: nothing is known)

    operations: as csrc/trace/record.h has them in its fields begun, arrived, waited and last.
    """
    seen, begin, end, clock = (operations[name].copy() for name in ("begun", "arrived", "waited", "last"))
    operations["begun"], operations["last"] = operations["issued"], NOBODY
    operations["arrived"] = operations["waited"] = 0
    errors = []
    for number in np.unique(clock[begin > 0]):
        mine = (clock == number) & (begin > 0)
        issued = operations["issued"][mine]
        at_begin, at_end, error = _offsets(begin[mine], end[mine], issued, seen[mine])
        begins = np.clip(begin[mine] + at_begin, issued, seen[mine])
        operations["device_begin"][mine] = begins
        operations["device_end"][mine] = np.clip(end[mine] + at_end, begins, seen[mine])
        errors.append(error)
    return operations, max(errors, default=None)


class _Offsets(NamedTuple):
    at_begin: Integers
    at_end: Integers
    error: int  # how far off they may be


def _offsets(begins: Integers, ends: Integers, issued: Integers, seen: Integers) -> _Offsets:
    """Of the operations of one clock."""
    start = int(begins.min())
    begin, end = (begins - start).astype(float), (ends - start).astype(float)
    upper = _line(end, (seen - start) - end, begin.min(), end.max())
    lower = _line(begin, begin - (issued - start), begin.min(), end.max())
    at_begin, at_end = (np.rint(np.interp(at, *upper)).astype("i8") for at in (begin, end))
    between = np.interp(end, *upper) + np.interp(end, *lower)
    return _Offsets(at_begin, at_end, max(0, int(np.median(between))))


def _line(at: Times, bound: Times, first: float, last: float) -> tuple[Times, Times]:
    """(times, values) of a line from first to last that no bound is below, but near those of each second."""
    chosen = _least_of_seconds(at, bound)
    for _ in range(ROUNDS):
        line = _through(at[chosen], bound[chosen], first, last)
        above = np.interp(at, *line) - bound
        (wrong,) = np.nonzero(above > 1)
        if not len(wrong):
            break
        chosen = np.union1d(chosen, wrong[_least_of_seconds(at[wrong], -above[wrong])])
    return line


def _least_of_seconds(at: Times, values: Times) -> Integers:
    """The indices of the least value of each second, in the order of time."""
    order = np.lexsort((values, at // SECOND))
    return order[np.unique((at // SECOND)[order], return_index=True)[1]]


def _through(at: Times, bound: Times, first: float, last: float) -> tuple[Times, Times]:
    """The line, not steeper than DRIFT, through bounds; beyond them as steep as it is from end to end."""
    order = np.argsort(at, kind="stable")
    at, rise = at[order], DRIFT * at[order]
    bound = np.minimum.accumulate(bound[order] - rise) + rise
    bound = np.minimum.accumulate((bound + rise)[::-1])[::-1] - rise
    slope = (bound[-1] - bound[0]) / (at[-1] - at[0]) if at[-1] > at[0] else 0.0
    around = bound[0] + slope * (first - 1 - at[0]), bound[-1] + slope * (last + 1 - at[-1])
    return np.array([first - 1, *at, last + 1]), np.array([around[0], *bound, around[1]])
