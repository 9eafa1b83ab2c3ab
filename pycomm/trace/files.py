"""The files of a trace as arrays: what csrc/trace/record.h says is in them, and what they have lost.

A file may be read while its process writes it, or after that was killed. It may also be no file of ours, or
have been damaged since. So nothing in it is believed unseen: records and lines that cannot be are left out
and counted, a file that is none of ours is refused, and no number in it decides how much memory is taken.
"""

from __future__ import annotations

import io
import json
import os
import stat
import struct
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from pycomm import _C
from pycomm.trace.device_clock import NOBODY, to_host

if TYPE_CHECKING:
    from pycomm.trace.arrays import Mask, Operations, Spans, Words

__all__ = ["MESSAGE", "NOBODY", "OPERATION", "DEVICE", "SPANS", "File", "Group", "GroupKey", "read_files"]

MAGIC = int.from_bytes(b"pctrace1", "little")
HEADER_BYTES, TEXT_BYTES, STAMP_BITS = 4096, 256 << 10, 24
_HEADER = struct.Struct("<5Q64s3Q")
_TICKETS_AT = 128
_RECORD_BYTES, _AT_ONCE, _MOST_RECORDS = 64, 1 << 20, 1 << 28  # 64 MiB, 16 GiB
_LATEST = 1 << 60  # nanoseconds, 36 years: later than any clock that counts from the start of a machine
_MOST_RANKS, _MOST_GROUPS = 1 << 16, 1 << 16  # numbers of 16 bits
OPERATION, MESSAGE, SPAN, DEVICE = 1, 2, 3, 4
OPEN, DONE, FAILED = 0, 1, 2

# Times are nanoseconds of the file's own clock; 0: not known. device_*: when it ran on a device.
OPERATIONS = np.dtype(
    [(name, "i8") for name in ("issued", "begun", "arrived", "ended", "waited", "nbytes", "sequence")]
    + [(name, "i8") for name in ("device_begin", "device_end")]
    + [(name, "i4") for name in ("last", "group", "kind", "algorithm", "type", "outcome")]
)
SPANS = np.dtype(
    [(name, "i8") for name in ("begin", "end", "thread")]
    + [(name, "i4") for name in ("name", "stage", "microbatch", "bucket")]
)


class GroupKey(NamedTuple):
    """Equal on the ranks of one group. After a death the others may make one of the same name."""

    name: str
    host: str
    world_size: int
    members: int
    life: int


class Group(NamedTuple):
    """A group as one rank has it."""

    name: str
    rank: int
    world_size: int
    host: str  # of the part of a group that spans hosts; "": all of it
    members: int  # of its processes, equal on all of its ranks; 0: not known
    life: int  # how many of this name, rank and these members the process had before

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.name, self.host, self.world_size, self.members, self.life)


class File(NamedTuple):
    path: str
    host: str
    pid: int
    monotonic_ns: int  # and the time of day at that moment
    realtime_ns: int
    closed_ns: int  # 0: the process goes on, or it died
    groups: dict[int, Group]  # by number
    names: dict[int, str]  # number of a span's name -> name
    axes: dict[str, str]  # name of a group -> its axis
    operations: Operations
    spans: Spans
    overwritten: int  # records that later ones have replaced
    torn: int  # records that were being written, or were damaged since
    lost_lines: int
    bad_lines: int  # that say nothing
    device_error_ns: int | None  # that half of the times on a device may be off; None: there are none


def read_files(folder: str | Path) -> list[File]:
    """All files of a folder. Raises ValueError where there is none, or one is none of ours."""
    paths = sorted(Path(folder).glob("*.pytrace"))
    if not paths:
        raise ValueError(
            f"{folder} has no trace. PYCOMM_TRACE={folder} in the environment of the ranks, or "
            'comm.trace("folder"), writes one (*.pytrace).'
        )
    return [_read(path) for path in paths]


def _read(path: Path) -> File:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for a writer
    with os.fdopen(fd, "rb") if _is_file(fd) else io.BytesIO() as file:
        head = file.read(HEADER_BYTES + TEXT_BYTES)
        if len(head) < HEADER_BYTES + TEXT_BYTES or int.from_bytes(head[:8], "little") != MAGIC:
            raise ValueError(f"{path} is no trace of this version of pycomm")
        _, capacity, pid, monotonic, realtime, host, text_bytes, lost, closed = _HEADER.unpack_from(head)
        tickets = int.from_bytes(head[_TICKETS_AT : _TICKETS_AT + 8], "little")
        there, over = divmod(os.fstat(fd).st_size - len(head), _RECORD_BYTES)
        if capacity != there or over or not capacity:
            raise ValueError(f"{path} has been cut: {there} of {capacity} records are there")
        if capacity > _MOST_RECORDS:
            raise ValueError(f"{path} is for {capacity} records; {_MOST_RECORDS} are the most that are read")
        lines = _lines(head[HEADER_BYTES : HEADER_BYTES + min(text_bytes, TEXT_BYTES)])
        whole = _whole(file, min(tickets, capacity), capacity)
    whole = whole[np.argsort(whole[:, 0])]
    kinds = (whole[:, 7] >> np.uint64(56)) & np.uint64(15)
    operations, spans = _operations(whole[kinds != SPAN]), _spans(whole[kinds == SPAN])
    operations, spans = operations[_can_be(operations)], spans[_can_be_spans(spans)]
    on_device = operations["type"] == DEVICE
    operations[on_device], device_error = to_host(operations[on_device])
    return File(
        str(path),
        host.rstrip(b"\0").decode(errors="replace"),
        pid,
        min(monotonic, _LATEST),
        min(realtime, 4 * _LATEST),
        closed,
        lines.groups,
        lines.names,
        lines.axes,
        operations,
        spans,
        max(0, tickets - capacity),
        min(tickets, capacity) - len(operations) - len(spans),
        lost,
        lines.bad,
        device_error,
    )


def _is_file(fd: int) -> bool:
    """A folder, a pipe or a device is closed."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return True
    os.close(fd)
    return False


def _whole(file: BinaryIO, count: int, capacity: int) -> Words:
    """The words of the whole ones among the first records; the rest takes no memory."""
    found = [np.zeros((0, 8), np.uint64)]
    for first in range(0, count, _AT_ONCE):
        data = file.read(min(_AT_ONCE, count - first) * _RECORD_BYTES)
        if len(data) < _RECORD_BYTES:  # somebody cuts it
            break
        words = np.frombuffer(data, "<u8", len(data) // _RECORD_BYTES * 8).reshape(-1, 8)
        found.append(words[_is_whole(words, first, capacity)])
    return np.concatenate(found)


def _is_whole(words: Words, first: int, capacity: int) -> Mask:
    """By stamp and checksum: [Note: records without a lock]. first: place of the first one."""
    total = np.zeros(len(words), np.uint64)
    with np.errstate(over="ignore"):
        for column in range(1, 8):
            total = (total ^ words[:, column]) * np.uint64(0x9E3779B97F4A7C15)
    places = np.arange(first, first + len(words), dtype=np.uint64)
    tickets = (words[:, 0] >> np.uint64(STAMP_BITS)) - np.uint64(1)
    return (
        (words[:, 0] != 0)
        & (tickets % np.uint64(capacity) == places)
        & (words[:, 0] & np.uint64((1 << STAMP_BITS) - 1) == total >> np.uint64(64 - STAMP_BITS))
    )


def _bits(word: Words, first: int, count: int) -> Words:
    return (word >> np.uint64(first)) & np.uint64((1 << count) - 1)


def _operations(words: Words) -> Operations:
    found = np.zeros(len(words), OPERATIONS)
    for column, name in enumerate(("issued", "begun", "arrived", "ended", "waited"), 1):
        found[name] = words[:, column]
    found["nbytes"], found["last"] = _bits(words[:, 6], 0, 48), _bits(words[:, 6], 48, 16)
    fields = [("sequence", 32), ("group", 16), ("kind", 4), ("algorithm", 4), ("type", 4), ("outcome", 4)]
    first = 0
    for name, count in fields:
        found[name] = _bits(words[:, 7], first, count)
        first += count
    return found


def _spans(words: Words) -> Spans:
    found = np.zeros(len(words), SPANS)
    for column, name in enumerate(("begin", "end", "thread"), 1):
        found[name] = words[:, column]
    for column, name in enumerate(("stage", "microbatch", "bucket"), 4):
        found[name] = words[:, column].astype("i8") - 1
    found["name"] = _bits(words[:, 7], 0, 32)
    return found


def _can_be(operations: Operations) -> Mask:
    """Which of them a process can have written."""
    times = np.stack([operations[name] for name in ("issued", "begun", "arrived", "ended", "waited")])
    return (
        np.isin(operations["type"], (OPERATION, MESSAGE, DEVICE))
        & (operations["kind"] < len(_C.kinds))
        & (operations["algorithm"] < len(_C.algorithms))
        & (operations["outcome"] <= FAILED)
        & (operations["issued"] > 0)
        & (times >= 0).all(axis=0)
        & (times < _LATEST).all(axis=0)
        & ((operations["ended"] == 0) | (operations["ended"] >= operations["issued"]))
        & ((operations["type"] != DEVICE) | _can_be_on_device(operations))
    )


def _can_be_on_device(operations: Operations) -> Mask:
    unknown = (operations["arrived"] == 0) & (operations["waited"] == 0)
    known = (operations["arrived"] > 0) & (operations["begun"] >= operations["issued"])
    return unknown | (known & (operations["arrived"] <= operations["waited"]))


def _can_be_spans(spans: Spans) -> Mask:
    return (spans["begin"] > 0) & (spans["begin"] <= spans["end"]) & (spans["end"] < _LATEST)


class _Lines(NamedTuple):
    """Of the text of a file; File has the same fields."""

    groups: dict[int, Group]
    names: dict[int, str]
    axes: dict[str, str]
    bad: int


def _lines(text: bytes) -> _Lines:
    groups: dict[int, Group] = {}
    names: dict[int, str] = {}
    axes: dict[str, str] = {}
    lives: Counter[Group] = Counter()
    bad = 0
    for line in text.split(b"\n")[:-1]:
        try:
            entry = json.loads(line.decode(errors="replace"))
            if "group" in entry:
                group = _group(entry)
                groups[_number(entry["group"], _MOST_GROUPS)] = group._replace(life=lives[group])
                lives[group] += 1
            elif "span" in entry:
                names[_number(entry["span"], 1 << 32)] = _text(entry["name"])
            else:
                axes[_text(entry["of"])] = _text(entry["axis"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            bad += 1
    return _Lines(groups, names, axes, bad)


def _group(entry: dict[str, object]) -> Group:
    size = _number(entry["world_size"], _MOST_RANKS)
    ranks = _MOST_RANKS if entry["host"] else size  # a part of a group has numbers of the whole
    rank, members = _number(entry["rank"], ranks), _number(entry.get("members", 0), 1 << 64)
    return Group(_text(entry["name"]), rank, size, _text(entry["host"]), members, 0)


def _number(value: object, above: int) -> int:
    if type(value) is not int or not 0 <= value < above:
        raise ValueError(f"{value!r} is no number from 0 to {above - 1}")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is no text")
    return value
