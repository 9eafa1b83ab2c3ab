"""The trace as one JSON file for Perfetto (ui.perfetto.dev, which keeps it in the browser), chrome://tracing.

A process per rank. Its tracks: the spans of each thread, and for each group its collectives and its messages;
messages overlap and take as many tracks as are under way at once. Inside an operation lie "waiting", until
the last rank has arrived, and "moving". Its arguments: bytes, algorithm, which rank came last, and by how
much each rank came after the first. Operations on a device are there twice: the host's side, from the call
until all is in the stream, and what runs on the device.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypedDict

import numpy as np

from pycomm import _C
from pycomm.trace.device_clock import name_of
from pycomm.trace.files import DEVICE, MESSAGE, NOBODY, OPERATION
from pycomm.trace.steps import part_of, say
from pycomm.trace.waits import phases

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pycomm.trace.arrays import Operation, Operations, Times
    from pycomm.trace.joined import Collective, Row, Trace

__all__ = ["events", "write"]

OUTCOMES = ("under way", "done", "failed")

Argument: TypeAlias = "str | int | float | dict[int, float] | None"


class Event(TypedDict, total=False):
    """One of Chrome's trace events. ts and dur: microseconds."""

    ph: str
    name: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: dict[str, Argument]


def write(trace: Trace, path: Path) -> None:
    with open(path, "w") as file:
        json.dump(
            {
                "traceEvents": list(events(trace)),
                "displayTimeUnit": "ns",
                "otherData": {"notes": trace.notes},
            },
            file,
        )


def events(trace: Trace) -> Iterator[Event]:
    arrivals = _Arrivals(trace)
    for number, row in enumerate(trace.rows):
        yield _meta("process_name", number, 0, name=row.label)
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": number,
            "tid": 0,
            "args": {"sort_index": number},
        }
        tracks = _Tracks(number)
        yield from _spans(trace, row, tracks)
        for group in np.unique(row.operations["group"]):
            mine = row.operations[row.operations["group"] == group]
            mine = np.sort(mine, order="issued")
            yield from _operations(trace, mine[mine["type"] != MESSAGE], arrivals, tracks)
            yield from _messages(trace, mine[mine["type"] == MESSAGE], tracks)
            yield from _on_device(trace, mine[mine["device_begin"] > 0], tracks)
        yield from tracks.names()


class _Tracks:
    """Numbers of a process's tracks, by name."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.numbers: dict[str, int] = {}

    def event(self, track: str, name: str, begin: float, end: float, **arguments: Argument) -> Event:
        tid = self.numbers.setdefault(track, len(self.numbers) + 1)
        event: Event = {
            "ph": "X",
            "name": name,
            "pid": self.pid,
            "tid": tid,
            "ts": begin / 1e3,
            "args": arguments,
        }
        return {**event, "dur": max(0.0, (end - begin) / 1e3)}

    def names(self) -> Iterator[Event]:
        for name, tid in self.numbers.items():
            yield _meta("thread_name", self.pid, tid, name=name)


def _meta(kind: str, pid: int, tid: int, **arguments: Argument) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def _spans(trace: Trace, row: Row, tracks: _Tracks) -> Iterator[Event]:
    for span in row.spans[np.lexsort((-row.spans["end"], row.spans["begin"]))]:
        name = say(part_of(trace, span))
        yield tracks.event(f"thread {span['thread']}", name, float(span["begin"]), float(span["end"]))


class _Known(NamedTuple):
    collective: Collective
    places: dict[int, int]  # number of an operation -> its place in the collective's arrays
    arrived: Times  # phases() of the collective


class _Arrivals:
    """When the ranks of each collective arrived."""

    def __init__(self, trace: Trace) -> None:
        self.of_group: dict[int, _Known] = {}
        for collective in trace.collectives:
            places = {sequence: at for at, sequence in enumerate(collective.sequence.tolist())}
            self.of_group[collective.group] = _Known(collective, places, phases(collective))

    def of(self, operation: Operation, row: Row) -> tuple[float, dict[int, float]]:
        """(when the last one came, {rank: microseconds after the first}), as far as it is known."""
        known = self.of_group.get(operation["group"])
        at = None if known is None else known.places.get(operation["sequence"])
        if known is None or at is None or operation["type"] != OPERATION:
            return float(operation["arrived"]), {}
        begun = known.collective.begun[at]
        after = {
            rank: round((t - np.nanmin(begun)) / 1e3, 3) for rank, t in enumerate(begun) if not np.isnan(t)
        }
        places = [n for n, other in enumerate(known.collective.rows) if other is row]
        joint = known.arrived[at, places[0]] if places else np.nan
        return (float(operation["arrived"]) if np.isnan(joint) else float(joint)), after


def _operations(
    trace: Trace, operations: Operations, arrivals: _Arrivals, tracks: _Tracks
) -> Iterator[Event]:
    row = trace.rows[tracks.pid]
    for operation in operations:
        side = ", host side" if operation["type"] == DEVICE else ""
        track = f"group {trace.axes[operation['group']]}{side}"
        begin = float(operation["begun"] or operation["issued"])
        end = float(operation["ended"] or trace.duration)
        arrived, after = arrivals.of(operation, row)
        kind = name_of(operation)
        last = int(operation["last"])
        yield tracks.event(
            track,
            kind,
            begin,
            end,
            sequence=int(operation["sequence"]),
            bytes=int(operation["nbytes"]),
            algorithm=_C.algorithms[operation["algorithm"]],
            outcome=OUTCOMES[operation["outcome"]],
            issued_us_before=round((begin - float(operation["issued"])) / 1e3, 3),
            last_rank=None if last == NOBODY else last,
            arrivals_us=after,
        )
        if begin <= arrived <= end and operation["ended"]:
            yield tracks.event(track, "waiting", begin, arrived)
            yield tracks.event(track, "moving", arrived, end)


class _Lanes:
    """Of what may overlap: as many as are under way at once."""

    def __init__(self) -> None:
        self.free: list[float] = []  # when each is free again

    def take(self, begin: float, end: float) -> int:
        lane = next((n for n, until in enumerate(self.free) if until <= begin), len(self.free))
        self.free[lane : lane + 1] = [end]
        return lane + 1


def _on_device(trace: Trace, operations: Operations, tracks: _Tracks) -> Iterator[Event]:
    lanes = _Lanes()
    for operation in np.sort(operations, order=["device_begin", "device_end"]):
        begin, end = float(operation["device_begin"]), float(operation["device_end"])
        lane = lanes.take(begin, end)
        track = f"group {trace.axes[operation['group']]}, on the device" + (f" {lane}" if lane > 1 else "")
        yield tracks.event(
            track,
            name_of(operation),
            begin,
            end,
            number=int(operation["sequence"]),
            bytes=int(operation["nbytes"]),
            issued_us_before=round((begin - float(operation["issued"])) / 1e3, 3),
        )


def _messages(trace: Trace, messages: Operations, tracks: _Tracks) -> Iterator[Event]:
    lanes = _Lanes()
    for message in messages:
        begin, end = float(message["issued"]), float(message["ended"] or trace.duration)
        yield tracks.event(
            f"group {trace.axes[message['group']]}, messages {lanes.take(begin, end)}",
            _C.kinds[message["kind"]],
            begin,
            end,
            peer=int(message["last"]) if message["last"] != NOBODY else None,
            bytes=int(message["nbytes"]),
            outcome=OUTCOMES[message["outcome"]],
        )
