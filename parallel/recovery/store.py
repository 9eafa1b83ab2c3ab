"""Stores for torch's groups of a crew: they raise when a member has died. That of ranks of one host is in
their memory, that of several hosts in the process of rank 0 (HostsStore).

Groups are made through a store, and who dies before it has said anything there is waited for until the time
limit. This one is asked again and again by those who wait (Store.check), and looks each time at the lives of
the crew's processes, by descriptors that become readable when a process ends (pidfd).

Over hosts each question looks first whether the crew's group is whole: its ranks hear of a death within a
second, or of a silent host after PYCOMM_HOST_TIMEOUT.

What lost: TCPStore, whose clients try for minutes to reach the process of a rank that is dead.
"""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

import torch.distributed as dist

from pycomm import PeerError
from pycomm.groups import shared_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from pycomm import Communicator

__all__ = ["CrewStore", "HostsStore", "open_there"]


def open_there(pid: int, fd: int, flags: int) -> int:
    """A descriptor of what another process has open. Raises PeerError where that has ended."""
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", flags | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerError(f"process {pid} ended while this one took its place beside it") from error


class _Watched(dist.Store):  # names of methods: signature of torch.distributed's
    """A store over another."""

    _values: dist.Store  # until close()

    def _look(self) -> None:
        """Raises PeerError where a member has died. Each subclass has its own."""
        raise NotImplementedError

    def check(self, keys: list[str]) -> bool:
        self._look()
        return self._values.check(keys)

    def set(self, key: str, value: str) -> None:
        self._values.set(key, value)

    def get(self, key: str) -> bytes:
        return self._values.get(key)

    def add(self, key: str, value: int) -> int:
        return self._values.add(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._values.wait(keys) if timeout is None else self._values.wait(keys, timeout)

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return self._values.delete_key(key)

    delete_key = deleteKey

    def close(self) -> None:
        """Nothing can be asked any more."""
        self.__dict__.pop("_values", None)


class HostsStore(_Watched):
    """In the process of rank 0 of the crew. comm: the crew's."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        store = shared_store(comm)
        self._comm, self._values = comm, store
        self.host = store.host  # by which ranks find the address that leads to the others

    def _look(self) -> None:
        if self._comm.describe()["broken"]:
            raise PeerError("a rank of the crew was lost while the others made a group")


class CrewStore(_Watched):
    """exchange: a collective, an object of every rank -> those of all. Collective over the crew."""

    def __init__(
        self, exchange: Callable[[tuple[int, int | None]], list[tuple[int, int | None]]], rank: int
    ) -> None:
        super().__init__()
        self._fds: list[int] = []
        self._pids: list[int] = []
        fd = os.memfd_create("pycomm crew", os.MFD_CLOEXEC) if rank == 0 else None
        told = exchange((os.getpid(), fd))
        if fd is None:
            pid, there = told[0]
            assert there is not None  # rank 0 has made it
            fd = open_there(pid, there, os.O_RDWR)
        self._fds.append(fd)
        self._lives = select.poll()
        for pid, _ in told:
            self._watch(pid)
        self._values = dist.FileStore(f"/proc/self/fd/{fd}", -1)

    def _watch(self, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise PeerError(f"process {pid} ended while the others made a group") from error
        self._fds.append(fd)
        self._pids.append(pid)
        self._lives.register(fd, select.POLLIN)

    def _look(self) -> None:
        ended = self._lives.poll(0)
        if ended:
            pid = self._pids[self._fds.index(ended[0][0]) - 1]
            raise PeerError(f"process {pid}, a rank of the crew, died while the others made a group")

    def close(self) -> None:
        super().close()  # its end uses the descriptor, and a failure there would end the process
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def __del__(self) -> None:
        self.close()
