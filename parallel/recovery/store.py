"""A store for torch's groups of a crew: in memory, and it raises when a member has died.

Groups are made through a store, and who dies before it has said anything there is waited for until the time
limit. This one is asked again and again by those who wait (Store.check), and looks each time at the lives of
the crew's processes, by descriptors that become readable when a process ends (pidfd).

What lost: TCPStore, whose clients try for minutes to reach the process of a rank that is dead.
"""

import os
import select

import torch.distributed as dist

from pycomm import PeerError

__all__ = ["CrewStore", "open_there"]


def open_there(pid, fd, flags):
    """A descriptor of what another process has open. Raises PeerError where that has ended."""
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", flags | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerError(f"process {pid} ended while this one took its place beside it") from error


class CrewStore(dist.Store):  # names of methods: signature of torch.distributed's
    """exchange: a collective, an object of every rank -> those of all. Collective over the crew."""

    def __init__(self, exchange, rank):
        super().__init__()
        self._fds, self._pids, self._values = [], [], None
        fd = os.memfd_create("pycomm crew", os.MFD_CLOEXEC) if rank == 0 else None
        told = exchange((os.getpid(), fd))
        if fd is None:
            fd = open_there(*told[0], os.O_RDWR)
        self._fds.append(fd)
        self._lives = select.poll()
        for pid, _ in told:
            self._watch(pid)
        self._values = dist.FileStore(f"/proc/self/fd/{fd}", -1)

    def _watch(self, pid):
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise PeerError(f"process {pid} ended while the others made a group") from error
        self._fds.append(fd)
        self._pids.append(pid)
        self._lives.register(fd, select.POLLIN)

    def check(self, keys):
        ended = self._lives.poll(0)
        if ended:
            pid = self._pids[self._fds.index(ended[0][0]) - 1]
            raise PeerError(f"process {pid}, a rank of the crew, died while the others made a group")
        return self._values.check(keys)

    def set(self, key, value):
        self._values.set(key, value)

    def get(self, key):
        return self._values.get(key)

    def add(self, key, value):
        return self._values.add(key, value)

    def wait(self, keys, timeout=None):
        self._values.wait(keys) if timeout is None else self._values.wait(keys, timeout)

    def deleteKey(self, key):  # noqa: N802
        return self._values.delete_key(key)

    delete_key = deleteKey

    def close(self):
        """Nothing can be asked any more."""
        self._values = None  # its end uses the descriptor, and a failure there would end the process
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def __del__(self):
        self.close()
