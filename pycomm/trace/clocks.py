"""One clock for all hosts of a trace.

Processes of one host share a clock. Those of two differ by an offset that nothing has measured, but which the
operations bound: an all_reduce cannot end on one host before it has begun on the other. So for ranks a and b
of one such operation, on hosts A and B whose clocks show their times,

    begun(b) + offset(B)  <=  ended(a) + offset(A)       and the same with a and b exchanged

Each operation gives an interval for offset(B) - offset(A), as wide as the operation took; the offset lies
in all of them. The middle of what is left is taken, and half of its width is how far it may be off. Hosts
without an operation in common are set by their time of day, as exact as NTP has it. Where clocks drift, the
intervals of a long trace contradict each other; then the middle of what is missing is taken, and half of that
is the error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from pycomm import _C

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pycomm.trace.arrays import Operations
    from pycomm.trace.files import File, Group, GroupKey

__all__ = ["WAITS_FOR_ALL", "Offset", "align"]

# Each rank of these has something of every other when it ends.
WAITS_FOR_ALL = tuple(
    _C.kinds.index(kind) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
)


class Offset(NamedTuple):
    ns: int  # to add to times of this host
    error_ns: int | None  # at most; None: by the time of day
    by: Literal["reference", "operations", "time of day"]


def align(files: Sequence[File]) -> dict[str, Offset]:
    """By host; the first file's host keeps its clock."""
    first = files[0]
    offsets = {first.host: Offset(0, 0, "reference")}
    for host in {file.host for file in files} - {first.host}:
        here = [file for file in files if file.host == host]
        there = [file for file in files if file.host == first.host]
        offsets[host] = _between(there, here)
    return offsets


def _between(reference: Sequence[File], others: Sequence[File]) -> Offset:
    bounds = _bounds(reference, others)
    if bounds is None:
        a, b = reference[0], others[0]
        by_day = (b.realtime_ns - b.monotonic_ns) - (a.realtime_ns - a.monotonic_ns)
        return Offset(by_day, None, "time of day")
    low, high = bounds
    return Offset((low + high) // 2, abs(high - low) // 2, "operations")


def _bounds(reference: Sequence[File], others: Sequence[File]) -> tuple[int, int] | None:
    """The interval for what is to be added to the others' times."""
    lows, highs = [], []
    for begun_a, ended_a, begun_b, ended_b in _common(reference, others):
        highs.append(ended_a - begun_b)  # begun_b + offset <= ended_a
        lows.append(begun_a - ended_b)  # begun_a <= ended_b + offset
    return (int(max(lows)), int(min(highs))) if lows else None


def _common(reference: Sequence[File], others: Sequence[File]) -> Iterator[tuple[int, int, int, int]]:
    """begun, ended, begun, ended: of one operation on a rank of the one host and one of the other."""
    theirs: dict[GroupKey, list[dict[int, tuple[int, int]]]] = {}
    for file in others:
        for group, operations in _by_group(file):
            theirs.setdefault(group.key, []).append(_ends(operations))
    for file in reference:
        for group, operations in _by_group(file):
            mine = _ends(operations)
            for other in theirs.get(group.key, ()):
                for sequence in mine.keys() & other.keys():
                    yield (*mine[sequence], *other[sequence])


def _by_group(file: File) -> Iterator[tuple[Group, Operations]]:
    for number, group in file.groups.items():
        if not group.host:
            yield group, file.operations[file.operations["group"] == number]


def _ends(operations: Operations) -> dict[int, tuple[int, int]]:
    ended = operations[(operations["ended"] > 0) & np.isin(operations["kind"], WAITS_FOR_ALL)]
    columns = (ended[name].tolist() for name in ("sequence", "begun", "ended"))
    return {sequence: (begun, end) for sequence, begun, end in zip(*columns, strict=True)}
