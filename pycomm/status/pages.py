"""The status pages of the processes of this user: csrc/transport/status_page.h has what lies where.

What is in a page may be half written, or no page of ours at all: rows that cannot be are passed over, and no
number in one decides how long this takes.

[Note: a process of its own] Closing a descriptor of a life file drops the record locks of the process that
closes it (csrc/memory/life.h). A rank that read pages would so end its own proof of life. So this is for a
process that is no rank, and says so where it is one.
"""

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Place", "Refused", "read_places"]

PAGE_BYTES = 4096
MOST_PAGES, MOST_RANKS = 1 << 14, 1 << 16  # of a life file, of a group: far more than there are
MAGIC = int.from_bytes(b"pstatus1", "little")
_HEAD = struct.Struct("<QiI")
_ROW = struct.Struct("<IiiIQQQI12H108s")
KINDS = "none all_reduce reduce broadcast all_gather reduce_scatter all_to_all gather scatter barrier".split()
KINDS += ["send", "recv", "alloc"]
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_USED = 2


class Refused(Exception):
    """A process of another user was asked for, or this is a rank."""


class Place(NamedTuple):
    """One rank in one group."""

    pid: int
    file: int  # inode of the life file: equal for the processes of a group
    group: str
    rank: int
    world_size: int
    operation: str | None  # that it is in
    sequence: int
    completed: int  # number of the last operation
    waiting_in: str | None
    waiting_s: float  # for so long
    missing: int  # how many ranks it waits for
    ranks: tuple[int, ...]  # the first of them


def read_places(pid: int | None = None, now_ns: int | None = None) -> list[Place]:
    """Of all processes of this user on this host, or of one process and those it shares groups with. Raises
    Refused.
    """
    if pid is not None and not _is_mine(pid):
        raise Refused(f"process {pid} is not yours: status is for processes of the same user only")
    files: dict[int, str] = {}  # inode -> a path under /proc
    wanted: set[int] = set()
    for entry in sorted(filter(str.isdigit, os.listdir("/proc")), key=int):
        for inode, path in _life_files(int(entry)):
            if int(entry) == os.getpid():
                raise Refused("this process is a rank: run `python -m pycomm.status` beside it")
            files.setdefault(inode, path)
            if pid in (None, int(entry)):
                wanted.add(inode)
    now_ns = time.monotonic_ns() if now_ns is None else now_ns
    return [place for inode in sorted(wanted) for place in _places(inode, files[inode], now_ns)]


def _is_mine(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except FileNotFoundError:
        raise Refused(f"there is no process {pid}") from None


def _life_files(pid: int) -> Iterator[tuple[int, str]]:
    """(inode, path) of the life files that a process of this user has open."""
    folder = f"/proc/{pid}/fd"
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return
        names = os.listdir(folder)
    except OSError:  # gone meanwhile, or guarded
        return
    for name in names:
        path = f"{folder}/{name}"
        try:
            if os.readlink(path).startswith("/memfd:pycomm-life"):
                yield os.stat(path).st_ino, path
        except OSError:
            continue


def _places(inode: int, path: str, now_ns: int) -> Iterator[Place]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        for byte in range(min(MOST_PAGES, os.fstat(fd).st_size // PAGE_BYTES)):
            holder = _holder(fd, byte)
            if holder:
                yield from _rows(os.pread(fd, PAGE_BYTES, byte * PAGE_BYTES), inode, holder, now_ns)
    finally:
        os.close(fd)


def _holder(fd: int, byte: int) -> int:
    """The process that has the lock on this byte, 0: none."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else pid


def _rows(page: bytes, inode: int, pid: int, now_ns: int) -> Iterator[Place]:
    if len(page) < PAGE_BYTES or _HEAD.unpack_from(page)[0] != MAGIC:
        return
    for start in range(_HEAD.size, PAGE_BYTES - _ROW.size + 1, _ROW.size):
        used, rank, size, waiting_in, operation, completed, since, missing, *rest = _ROW.unpack_from(
            page, start
        )
        if used != _USED or not 0 <= rank < size < MOST_RANKS:
            continue
        kind = operation & 0xFF
        yield Place(
            pid,
            inode,
            _printable(rest[-1].rstrip(b"\0").decode(errors="replace")),
            rank,
            size,
            KINDS[kind] if 0 < kind < len(KINDS) else None,
            operation >> 8,
            completed,
            KINDS[waiting_in] if 0 < waiting_in < len(KINDS) else None,
            max(0.0, (now_ns - since) / 1e9) if waiting_in else 0.0,
            missing,
            tuple(rest[: min(missing, 12)]),
        )


def _printable(name: str) -> str:
    """A name may have what a terminal takes for a command."""
    return "".join(c if c.isprintable() else "?" for c in name)
