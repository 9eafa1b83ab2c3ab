"""The memory that a rank's snapshots lie in, and which outlives its process.

    one memfd per rank, without a name          slot 0 and slot 1, each:
      page 0     token of 16 bytes                header    number, where the catalog is, checksum
      1 << 40    slot 0                           values    tensors, one after the other
      2 << 40    slot 1                           catalog   pickled: what lies where

The places are far apart, and what is not written takes no memory. Every rank of the host holds a descriptor
of the memory of every other one, so it is there as long as one of them lives, and leaves nothing when none
does:

    rank 0 (killed)       rank 1                rank 2
      memory 0 <--------- descriptor            descriptor
      descriptor          memory 1 <----------- descriptor         one descriptor per rank, no page more
      descriptor          descriptor            memory 2

[Note: whole snapshots] A rank writes snapshot n into the slot that has not the last whole one:

    header says "none"  ->  values, catalog  ->  header says n

so that whoever dies in between leaves the one before. The ranks meet before each of them writes n: then all
have the one before n whole (its header is written). So at any moment there is a number that is whole on all
ranks, the last or the one before it, whoever dies where; common() finds it.

What can go wrong: no memory. It is written with pwrite, which then fails with an error, where a store into
mapped memory would end the process.

What lost: a copy at the neighbour (Gemini, Wang et al. 2023), which doubles the memory and the writing; on
one host the neighbour needs no copy, since the memory is not the process's. Over hosts it is the way
(neighbours.py). Mapped memory of a fixed size: the optimizer's state exists only after the first step, and a
mapping that grows moves.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import secrets
import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm.parallel.recovery.store import open_there

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pycomm.parallel.recovery.snapshot import Item, Own, Piece

__all__ = ["Address", "CopyMemory", "Memory", "OwnMemory", "common"]

TOKEN = 16
SLOTS, FIRST, ALIGNMENT = 2, 1 << 40, 64
HEADER = struct.Struct("=qqqI")  # number, catalog's place and bytes, checksum of these
VALUES = 4096  # where the values of a slot begin
LARGEST = 1 << 30  # bytes of one call of the system


class Address(NamedTuple):
    """Where another process of this host finds the memory, while this one holds it."""

    pid: int
    fd: int
    token: bytes


class Extent(NamedTuple):
    """Of a snapshot."""

    slot: int
    span: tuple[int, int]  # where its values begin, where its catalog ends
    header: tuple[int, int, int]  # number, catalog's place and bytes


class Memory:
    """A rank's snapshots, to be read. fd: of the memory, which this object closes."""

    def __init__(self, fd: int, token: bytes) -> None:
        self.fd, self.token = fd, token

    @classmethod
    def open(cls, address: Address) -> Memory:
        """Raises PeerError where its process has ended, OSError where it cannot be opened or is another."""
        fd = open_there(address.pid, address.fd, os.O_RDONLY)
        if os.pread(fd, TOKEN, 0) != address.token:
            os.close(fd)
            raise OSError(f"process {address.pid} has other memory there")
        return cls(fd, address.token)

    @property
    def address(self) -> Address:
        return Address(os.getpid(), self.fd, self.token)

    def numbers(self) -> dict[int, int]:
        """{number: slot} of the snapshots that are whole."""
        found: dict[int, int] = {}
        for slot in range(SLOTS):
            data = os.pread(self.fd, HEADER.size, _start(slot))
            if len(data) == HEADER.size:
                number, place, nbytes, check = HEADER.unpack(data)
                if number >= 0 and check == _checksum(number, place, nbytes):
                    found[number] = slot
        return found

    def catalog(self, number: int) -> tuple[Own, list[tuple[tuple[Piece, int], int]]]:
        """What was given to OwnMemory.write() as `about` with this number, and as its items (key, place)."""
        slot = self.numbers()[number]
        _, place, nbytes, _ = HEADER.unpack(os.pread(self.fd, HEADER.size, _start(slot)))
        return pickle.loads(self.bytes_at(place, nbytes))

    def extent(self, number: int) -> Extent:
        slot = self.numbers()[number]
        _, place, nbytes, _ = HEADER.unpack(os.pread(self.fd, HEADER.size, _start(slot)))
        return Extent(slot, (_start(slot) + VALUES, place + nbytes), (number, place, nbytes))

    def bytes_at(self, place: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        _transfer(os.preadv, self.fd, memoryview(data), place)
        return bytes(data)

    def tensor_at(self, place: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The values that were written there, in memory of their own."""
        values = torch.empty(sizes, dtype=dtype)
        if values.numel():
            _transfer(os.preadv, self.fd, _bytes_of(values), place)
        return values

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class OwnMemory(Memory):
    """This rank's, to be written."""

    def __init__(self) -> None:
        token = secrets.token_bytes(TOKEN)
        super().__init__(os.memfd_create("pycomm snapshots", os.MFD_CLOEXEC), token)
        os.pwrite(self.fd, token, 0)

    def write(self, number: int, about: Own, items: Iterable[Item]) -> None:
        """One snapshot. See [Note: whole snapshots]."""
        whole = self.numbers()
        slot = 1 - whole[max(whole)] if whole else 0
        start = _start(slot)
        os.pwrite(self.fd, HEADER.pack(-1, 0, 0, 0), start)
        place, written = start + VALUES, []
        for key, value in items:
            nbytes = self._put(value, place)
            written.append((key, place))
            place += -(-nbytes // ALIGNMENT) * ALIGNMENT
        catalog = pickle.dumps((about, written))
        _transfer(os.pwritev, self.fd, memoryview(catalog), place)
        header = (number, place, len(catalog))
        os.pwrite(self.fd, HEADER.pack(*header, _checksum(*header)), start)

    def _put(self, value: torch.Tensor | bytes, place: int) -> int:
        if isinstance(value, torch.Tensor):
            value = value.to("cpu").contiguous()
            data = _bytes_of(value) if value.numel() else memoryview(b"")
        else:
            data = memoryview(value)
        _transfer(os.pwritev, self.fd, data, place)
        return data.nbytes


class CopyMemory(Memory):
    """The same bytes as another's memory, whose token it has: written by who holds the copy."""

    def __init__(self, token: bytes) -> None:
        super().__init__(os.memfd_create("pycomm snapshots", os.MFD_CLOEXEC), token)
        os.pwrite(self.fd, token, 0)

    def begin(self, slot: int) -> None:
        os.pwrite(self.fd, HEADER.pack(-1, 0, 0, 0), _start(slot))

    def put(self, place: int, values: torch.Tensor) -> None:
        _transfer(os.pwritev, self.fd, _bytes_of(values), place)

    def finish(self, slot: int, header: Sequence[int]) -> None:
        """header: as Memory.extent has it."""
        os.pwrite(self.fd, HEADER.pack(*header, _checksum(*header)), _start(slot))


def common(memories: Iterable[Memory]) -> int | None:
    """The last number that is whole in all of them, or None."""
    numbers = [set(memory.numbers()) for memory in memories]
    return max(set.intersection(*numbers), default=None) if numbers else None


def _start(slot: int) -> int:
    return FIRST * (slot + 1)


def _checksum(*numbers: int) -> int:
    return zlib.crc32(struct.pack("=qqq", *numbers))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def _transfer(
    call: Callable[[int, list[memoryview], int], int], fd: int, data: memoryview, place: int
) -> None:
    """All of `data`, by preadv or pwritev."""
    while data.nbytes:
        done = call(fd, [data[:LARGEST]], place)
        if done == 0:
            raise OSError("a snapshot ends before what it says that it has")
        data, place = data[done:], place + done
