"""The files of a trace as arrays: what csrc/trace/record.h says is in them, and what they have lost.

A file may be read while its process writes it, or after that was killed.
"""

import json
import struct
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pycomm import _C

__all__ = ["MESSAGE", "OPERATION", "DEVICE", "SPANS", "File", "Group", "read_files"]

MAGIC = int.from_bytes(b"pctrace1", "little")
HEADER_BYTES, TEXT_BYTES, STAMP_BITS = 4096, 256 << 10, 24
_HEADER = struct.Struct("<5Q64s3Q")
_TICKETS_AT = 128
OPERATION, MESSAGE, SPAN, DEVICE = 1, 2, 3, 4
OPEN, DONE, FAILED = 0, 1, 2
NOBODY = 0xFFFF

# Times are nanoseconds of the file's own clock; 0: not known.
OPERATIONS = np.dtype(
    [(name, "i8") for name in ("issued", "begun", "arrived", "ended", "waited", "nbytes", "sequence")]
    + [(name, "i4") for name in ("last", "group", "kind", "algorithm", "type", "outcome")]
)
SPANS = np.dtype(
    [(name, "i8") for name in ("begin", "end", "thread")]
    + [(name, "i4") for name in ("name", "stage", "microbatch", "bucket")]
)


class Group(NamedTuple):
    """A group as one rank has it."""

    name: str
    rank: int
    world_size: int
    host: str  # of the part of a group that spans hosts; "": all of it
    life: int  # how many of this name and rank the process had before

    @property
    def key(self):
        return (self.name, self.host, self.life)


class File(NamedTuple):
    path: str
    host: str
    pid: int
    monotonic_ns: int  # and the time of day at that moment
    realtime_ns: int
    closed_ns: int  # 0: the process goes on, or it died
    groups: dict  # number -> Group
    names: dict  # number of a span's name -> name
    axes: dict  # name of a group -> its axis
    operations: np.ndarray
    spans: np.ndarray
    overwritten: int  # records that later ones have replaced
    torn: int  # records that were being written
    lost_lines: int


def read_files(folder):
    """All files of a folder. Raises ValueError where there is none, or one is none of ours."""
    paths = sorted(Path(folder).glob("*.pytrace"))
    if not paths:
        raise ValueError(
            f"{folder} has no trace. PYCOMM_TRACE={folder} in the environment of the ranks, or "
            'comm.trace("folder"), writes one (*.pytrace).'
        )
    return [_read(path) for path in paths]


def _read(path):
    data = path.read_bytes()
    if len(data) < HEADER_BYTES + TEXT_BYTES or int.from_bytes(data[:8], "little") != MAGIC:
        raise ValueError(f"{path} is no trace of this version of pycomm")
    _, capacity, pid, monotonic, realtime, host, text_bytes, lost, closed = _HEADER.unpack_from(data)
    tickets = int.from_bytes(data[_TICKETS_AT : _TICKETS_AT + 8], "little")
    ring = np.frombuffer(data, "<u8", offset=HEADER_BYTES + TEXT_BYTES)
    if ring.size != capacity * 8:
        raise ValueError(f"{path} has been cut: {ring.size // 8} of {capacity} records are there")
    words = ring.reshape(capacity, 8)[: min(tickets, capacity)]
    whole = words[_is_whole(words, capacity)]
    whole = whole[np.argsort(whole[:, 0])]
    kinds = (whole[:, 7] >> np.uint64(56)) & np.uint64(15)
    groups, names, axes = _lines(data[HEADER_BYTES : HEADER_BYTES + min(text_bytes, TEXT_BYTES)])
    return File(
        str(path),
        host.rstrip(b"\0").decode(errors="replace"),
        pid,
        monotonic,
        realtime,
        closed,
        groups,
        names,
        axes,
        _operations(whole[kinds != SPAN]),
        _spans(whole[kinds == SPAN]),
        max(0, tickets - capacity),
        len(words) - len(whole),
        lost,
    )


def _is_whole(words, capacity):
    """By stamp and checksum: [Note: records without a lock]."""
    total = np.zeros(len(words), np.uint64)
    with np.errstate(over="ignore"):
        for column in range(1, 8):
            total = (total ^ words[:, column]) * np.uint64(0x9E3779B97F4A7C15)
    places = np.arange(len(words), dtype=np.uint64)
    tickets = (words[:, 0] >> np.uint64(STAMP_BITS)) - np.uint64(1)
    return (
        (words[:, 0] != 0)
        & (tickets % np.uint64(capacity) == places)
        & (words[:, 0] & np.uint64((1 << STAMP_BITS) - 1) == total >> np.uint64(64 - STAMP_BITS))
    )


def _bits(word, first, count):
    return (word >> np.uint64(first)) & np.uint64((1 << count) - 1)


def _operations(words):
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


def _spans(words):
    found = np.zeros(len(words), SPANS)
    for column, name in enumerate(("begin", "end", "thread"), 1):
        found[name] = words[:, column]
    for column, name in enumerate(("stage", "microbatch", "bucket"), 4):
        found[name] = words[:, column].astype("i8") - 1
    found["name"] = _bits(words[:, 7], 0, 32)
    return found


def _lines(text):
    groups, names, axes, lives = {}, {}, {}, Counter()
    for line in text.decode(errors="replace").splitlines():
        entry = json.loads(line)
        if "group" in entry:
            who = entry["name"], entry["rank"], entry["world_size"], entry["host"]
            groups[entry["group"]] = Group(*who, lives[who])
            lives[who] += 1
        elif "span" in entry:
            names[entry["span"]] = entry["name"]
        else:
            axes[entry["of"]] = entry["axis"]
    return groups, names, axes


def kind_name(kind):
    return _C.kinds[kind]
