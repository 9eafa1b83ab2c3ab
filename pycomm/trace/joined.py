"""The files of all ranks as one trace: a row per rank, one clock, and each operation as all its ranks saw it.

When a rank arrived at an operation is in that rank's own file: the moment in which it showed its part to the
others. Joined by group and number, these are the arrivals of all peers on every rank, and cost the runtime
nothing. Where a rank has no file, its peers' records still say who came last (csrc/trace/record.h, `last`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from pycomm import _C
from pycomm.trace.clocks import align
from pycomm.trace.device_clock import LAUNCH
from pycomm.trace.files import DEVICE, DONE, MESSAGE, NOBODY, OPEN, OPERATION, read_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pycomm.trace.arrays import Integers, Mask, Operations, Spans, Times
    from pycomm.trace.clocks import Offset
    from pycomm.trace.files import File, Group, GroupKey

__all__ = ["Collective", "Row", "Trace", "load"]

NO_NAME = "a span without a name"  # there was no room for it
MOST_CELLS = 1 << 27  # operations times ranks of a group: 1 GiB per time


class Row(NamedTuple):
    """One rank. Times are nanoseconds since the trace began, on the clock of all."""

    rank: int
    label: str
    world_size: int
    operations: Operations  # `group` is an index of Trace.groups
    spans: Spans  # `name` is an index of Trace.names


class Collective(NamedTuple):
    """The collectives of one group: [operation, rank of the group]; nan: not known."""

    group: int  # an index of Trace.groups
    rows: list[Row | None]  # of each rank of the group
    sequence: Integers
    kind: Integers
    nbytes: Integers
    issued: Times
    begun: Times
    ended: Times
    last: Integers  # [operation]: the rank that came last; -1: not known


class Trace(NamedTuple):
    rows: list[Row]
    groups: list[Group]  # each as some rank has it
    axes: list[str]  # of each of groups: "dp", or its name
    names: list[str]  # of spans
    collectives: list[Collective]
    on_device: list[Collective]  # begun and ended on devices; those of launches have their own
    device_error_ns: int | None  # that half of the times on a device may be off; None: there are none
    duration: int  # nanoseconds
    notes: list[str]  # sentences: what is lost, what went wrong, how exact the clocks are


# Which operations of a rank are chosen, and {time: the field that has it}.
Chosen: TypeAlias = "tuple[Mask, dict[str, str]]"
# Of the key of a group and a rank in it.
Places: TypeAlias = "dict[tuple[GroupKey, int], Row]"


def load(folder: str | Path) -> Trace:
    """Raises ValueError: no trace, one of another version, traces of two runs."""
    files = read_files(folder)
    _refuse_two_runs(folder, files)
    offsets = align(files)
    _refuse_too_many(folder, files)
    # less one: 0 says that a time is not known
    start = min((_first(file) + offsets[file.host].ns for file in files if _first(file)), default=1) - 1
    keys: dict[GroupKey, int] = {}
    groups: list[Group] = []
    names: dict[str, int] = {}
    axes: dict[str, str] = {}
    for file in files:
        axes |= file.axes
        for group in file.groups.values():
            if group.key not in keys:
                keys[group.key] = len(groups)
                groups.append(group)
        for name in (*file.names.values(), NO_NAME):
            names.setdefault(name, len(names))
    rows: list[Row] = []
    places: Places = {}
    for file in files:
        for row, members in _rows_of(file, offsets[file.host].ns - start, keys, names):
            rows.append(row)
            places |= {(group.key, group.rank): row for group in members}
    rows.sort(key=lambda row: (row.rank, row.label))
    errors = [file.device_error_ns for file in files if file.device_error_ns is not None]
    error = max(errors, default=None)
    ends = [
        row.operations[field].max()
        for row in rows
        for field in ("issued", "ended", "device_end")
        if len(row.operations)
    ]
    ends += [row.spans["end"].max() for row in rows if len(row.spans)]
    return Trace(
        rows,
        groups,
        [axes.get(group.name, group.name) + (f" in {group.host}" if group.host else "") for group in groups],
        list(names),
        _collectives(keys, groups, places, _on_cpu),
        _collectives(keys, groups, places, _on_device) + _collectives(keys, groups, places, _launches),
        error,
        int(max(ends, default=0)),
        [*_losses(files, rows), *_device_note(error), *_clock_notes(offsets)],
    )


def _refuse_two_runs(folder: str | Path, files: Sequence[File]) -> None:
    """Groups of one run have processes in common, those too that were made anew after a death."""
    run_of = _runs(files)
    members: dict[tuple[GroupKey, int], int] = {}
    ranks: dict[tuple[str, str, int], int] = {}
    for index, file in enumerate(files):
        for group in file.groups.values():
            one = members.setdefault((group.key, group.rank), index)
            other = ranks.setdefault((group.name, group.host, group.rank), index)
            for found, apart in ((one, True), (other, run_of[other] != run_of[index])):
                first = files[found]
                if apart and (first.pid, first.host) != (file.pid, file.host):
                    raise ValueError(
                        f"{folder} has traces of two runs: rank {group.rank} of group {group.name!r} is "
                        f"process {first.pid} and process {file.pid}. Give each run a folder of its own."
                    )


def _runs(files: Sequence[File]) -> list[int]:
    """Of each file a number, equal for those that groups connect."""
    parent = list(range(len(files)))

    def root(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    first: dict[GroupKey | tuple[str, int], int] = {}
    for index, file in enumerate(files):
        process = (file.host, file.pid)  # of several traces one after the other
        own: list[GroupKey | tuple[str, int]] = [process, *(group.key for group in file.groups.values())]
        for key in own:
            parent[root(index)] = root(first.setdefault(key, index))
    return [root(index) for index in range(len(files))]


def _refuse_too_many(folder: str | Path, files: Sequence[File]) -> None:
    for file in files:
        for number, group in file.groups.items():
            count = int((file.operations["group"] == number).sum())
            if count * group.world_size > MOST_CELLS:
                raise ValueError(
                    f"{folder} has {count} operations of {group.world_size} ranks of group {group.name!r} in "
                    f"{file.path}: too many to be joined. PYCOMM_TRACE_BYTES makes the traces shorter."
                )


def _first(file: File) -> int:
    times = [file.operations["issued"].min()] if len(file.operations) else []
    times += [file.spans["begin"].min()] if len(file.spans) else []
    return int(min(times, default=0))


def _rows_of(
    file: File, shift: int, keys: dict[GroupKey, int], names: dict[str, int]
) -> Iterator[tuple[Row, list[Group]]]:
    """(Row, Groups whose operations it has) of the rank, or ranks as threads, of a file."""
    operations, spans = file.operations.copy(), file.spans.copy()
    for field in ("issued", "begun", "arrived", "ended", "waited", "device_begin", "device_end"):
        operations[field] = np.where(operations[field] > 0, operations[field] + shift, 0)
    for field in ("begin", "end"):
        spans[field] += shift
    told, which = np.unique(spans["name"].astype("u4"), return_inverse=True)
    if len(spans):
        known = [names[file.names.get(number, NO_NAME)] for number in told.tolist()]
        spans["name"] = np.array(known)[which]
    members: dict[int, list[int]] = {}  # rank -> numbers of its groups
    world = max(file.groups.values(), key=lambda g: (not g.host, g.world_size), default=None)
    threads = len({group.key for group in file.groups.values()}) < len(file.groups)  # one group, two ranks
    for index, group in file.groups.items():
        rank = group.rank if threads or world is None else world.rank
        members.setdefault(rank, []).append(index)
    of_trace = np.zeros(max(file.groups, default=0) + 1, int)  # number of a group here -> in the trace
    for index, group in file.groups.items():
        of_trace[index] = keys[group.key]
    for rank, indices in sorted(members.items()) or [(0, [])]:
        mine = operations[np.isin(operations["group"], indices)]
        mine["group"] = of_trace[mine["group"]]
        place = f"{file.host.partition('#')[0]}, process {file.pid}"
        label = f"rank {rank} ({place}{', a thread' if threads else ''})"
        # which of its threads a span is of is not known
        own = spans if not threads or rank == min(members) else spans[:0]
        size = world.world_size if world else 1
        yield Row(rank, label, size, mine, own), [file.groups[index] for index in indices]


def _collectives(
    keys: dict[GroupKey, int],
    groups: Sequence[Group],
    places: Places,
    those: Callable[[Operations], Chosen],
) -> list[Collective]:
    found = (_collective(index, key, groups, places, those) for key, index in keys.items())
    return [collective for collective in found if collective is not None]


def _on_cpu(operations: Operations) -> Chosen:
    return operations["type"] == OPERATION, {name: name for name in ("issued", "begun", "ended")}


def _on_device(operations: Operations) -> Chosen:
    kinds = [_C.kinds.index(kind) for kind in ("send", "recv")]
    chosen = (operations["type"] == DEVICE) & ~np.isin(operations["kind"], [LAUNCH, *kinds])
    return chosen, {"issued": "issued", "begun": "device_begin", "ended": "device_end"}


def _launches(operations: Operations) -> Chosen:
    _, fields = _on_device(operations)
    return (operations["type"] == DEVICE) & (operations["kind"] == LAUNCH), fields


def _collective(
    index: int,
    key: GroupKey,
    groups: Sequence[Group],
    places: Places,
    those: Callable[[Operations], Chosen],
) -> Collective | None:
    size = groups[index].world_size
    ranks = sorted(rank for (other, rank) in places if other == key)
    rows: list[Row | None]
    if groups[index].host:  # a part counts its ranks by their numbers in the whole
        rows = [places[key, rank] for rank in ranks]
    else:
        rows = [places.get((key, rank)) for rank in range(size)]
    per_rank = [_of_group(row, index, those) if row is not None else None for row in rows]
    known = [operations for operations in per_rank if operations is not None and len(operations)]
    if not known:
        return None
    sequence = np.unique(np.concatenate([operations["sequence"] for operations in known]))
    shape = (len(sequence), len(rows))
    times = {field: np.full(shape, np.nan) for field in ("issued", "begun", "ended")}
    kind, nbytes = np.zeros(len(sequence), int), np.zeros(len(sequence), int)
    last = np.full(len(sequence), -1)
    for rank, operations in enumerate(per_rank):
        if operations is None or not len(operations):
            continue
        at = np.searchsorted(sequence, operations["sequence"])
        for name, field in those(operations)[1].items():
            times[name][at, rank] = np.where(operations[field] > 0, operations[field], np.nan)
        kind[at], nbytes[at] = operations["kind"], operations["nbytes"]
        last[at] = np.where(operations["last"] != NOBODY, operations["last"], last[at])
    complete = ~np.isnan(times["begun"]).any(axis=1)
    last[complete] = times["begun"][complete].argmax(axis=1)
    return Collective(
        index, rows, sequence, kind, nbytes, times["issued"], times["begun"], times["ended"], last
    )


def _of_group(row: Row, index: int, those: Callable[[Operations], Chosen]) -> Operations:
    operations = row.operations[row.operations["group"] == index]
    return operations[those(operations)[0]]


# --- notes --------------------


def _losses(files: Sequence[File], rows: Sequence[Row]) -> Iterator[str]:
    for file in files:
        who = f"process {file.pid} on {file.host.partition('#')[0]}"
        if file.overwritten:
            yield (
                f"{who}: {file.overwritten} older records were replaced by newer ones, its ring is full. "
                "PYCOMM_TRACE_BYTES makes it longer."
            )
        if file.torn:
            yield f"{who}: {file.torn} records were being written, or are damaged, and are left out."
        if file.lost_lines:
            yield f"{who}: {file.lost_lines} names of groups or spans had no room."
        if file.bad_lines:
            yield f"{who}: {file.bad_lines} lines with names of groups or spans are damaged."
        if not file.closed_ns:
            yield from _unfinished(who, file)
        yield from _untimed(who, file)
    ranks, size = {row.rank for row in rows}, max(row.world_size for row in rows)
    missing = sorted(set(range(size)) - ranks)
    if missing:
        numbers = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        yield f"No trace of {len(missing)} of {size} ranks: {numbers}. They had no room, or no right."


def _unfinished(who: str, file: File) -> Iterator[str]:
    yield f"{who} has not ended its trace: it still runs, or it was killed."
    waiting = file.operations[(file.operations["outcome"] == OPEN) & (file.operations["type"] == OPERATION)]
    for operation in waiting[:3]:
        group = file.groups.get(operation["group"])
        since = (max(_last(file), operation["issued"]) - operation["issued"]) / 1e9
        yield (
            f"{who} was in {_C.kinds[operation['kind']]} #{operation['sequence']} of group "
            f"{group.name if group else '?'!r}, issued {since:.3f} s before its last record."
        )


def _untimed(who: str, file: File) -> Iterator[str]:
    on_device = file.operations[file.operations["type"] == DEVICE]
    missing = int((on_device["device_begin"] == 0).sum())
    if missing:
        yield (
            f"{who}: when {missing} of {len(on_device)} operations ran on the device is not known: they are "
            "in a CUDA graph, had not ended when the trace did, or were too many at once."
        )


def _last(file: File) -> int:
    """The last moment in it."""
    times = [file.operations[field].max() for field in ("issued", "ended")] if len(file.operations) else [0]
    return max([*times, *([file.spans["end"].max()] if len(file.spans) else [])])


def _device_note(error: int | None) -> Iterator[str]:
    if error is not None:
        yield f"Times on devices: known to {error / 1e3:.1f} us in the median, by their hosts' clocks."


def _clock_notes(offsets: dict[str, Offset]) -> Iterator[str]:
    for host, offset in offsets.items():
        if offset.by == "reference":
            continue
        exact = (
            "as exact as their time of day"
            if offset.error_ns is None
            else f"within {offset.error_ns / 1e3:.1f} us"
        )
        yield f"Clock of {host.partition('#')[0]}: set by {offset.by}, {exact}."


def messages_of(row: Row) -> Operations:
    return row.operations[row.operations["type"] == MESSAGE]


def ended(operations: Operations) -> Operations:
    return operations[(operations["outcome"] == DONE) & (operations["ended"] > 0)]
