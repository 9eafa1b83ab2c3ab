"""Makes a group of the ranks that are left: they agree (agreement.py), and meet in a store that one of them
has opened, as the ranks of any group do.

    proposer     opens a TCPStore, proposes "members 0 2 3, store 10.0.0.6:40123"
    members      create the group there; who waits looks at the lives of the others meanwhile (_WatchedStore)

The store stays as long as the group, in the process of the proposer. If that is lost the next shrink() opens
another.
"""

import contextlib
import os
import threading
import time

import torch.distributed as dist

from pycomm import _C
from pycomm.errors import AbortedError, PeerError
from pycomm.stores import open_store, store_at
from pycomm.survivors.agreement import Agreement

__all__ = ["shrink"]

LOOK_S = 0.02  # between two looks at the others
LISTEN_S = 1.0  # after a failure that may be the loss of another rank


def shrink(point, comm, exclude, exactly, timeout, makers):
    """(the new _C.Communicator, its ranks in the old one). As Communicator.shrink(), of a group that spans
    hosts. comm: the old one, which is closed. makers: pycomm.hosts.makers.
    """
    _check(point, comm, exclude)
    opened = _Opened(point.place.ip)
    with Agreement(point, exclude, exactly, timeout, opened.address) as agreement:
        while True:
            verdict = agreement.agree()
            made = store = None
            try:
                store = _WatchedStore(opened.store_at(verdict.store), verdict.store[0], agreement.watch)
                made = _join(point, comm, verdict, store, agreement, makers)
            except Exception as error:  # that of another rank, or this one's own
                if not _is_of_others(error, agreement):
                    agreement.give_up(str(error))
            except BaseException as error:  # Ctrl-C: the others need not wait
                with contextlib.suppress(Exception):
                    agreement.give_up(type(error).__name__)
                raise
            if agreement.form(made is not None):
                break
            if made is not None:
                made.close()
    store.watcher = None
    made.set_timeout(comm.timeout)
    comm.close()
    return made, verdict.members


def _check(point, comm, exclude):
    size = len(point.places)
    where = f"[rank {point.rank}/{size}] shrink: "
    for i, rank in enumerate(sorted(exclude)):
        text = f"{where}exclude names rank {rank}"
        if not 0 <= rank < size:
            raise ValueError(f"{text}, which is not in [0, world_size)")
        if rank == point.rank:
            raise ValueError(f"{text}, which is this one; it must not call")
        if i and sorted(exclude)[i - 1] == rank:
            raise ValueError(f"{text} twice")
    if os.getpid() != point.place.pid:
        raise ValueError(
            f"{where}this communicator was created before a fork; only the parent process may use it"
        )
    if point.is_left():
        raise AbortedError(
            f"{where}the communicator is closed", rank=point.rank, world_size=size, op="shrink"
        )
    if not exclude and not comm.describe()["broken"]:
        raise ValueError(
            f"{where}the group works and no rank is to be left out. Call it after a PeerError or "
            "CommTimeoutError, or pass `exclude`"
        )


def _join(point, comm, verdict, store, agreement, makers):
    name = f"{comm.describe()['name']}/shrunk{verdict.round}"
    options = comm.successor_options(name, agreement.seconds_left())
    rank, size = verdict.members.index(point.rank), len(verdict.members)
    return _C.connect(store, rank, size, options, None, makers())


def _is_of_others(error, agreement):
    """Whether another member is lost, so that the round will be over."""
    end = time.monotonic() + LISTEN_S
    while time.monotonic() < end:
        try:
            agreement.watch()
        except PeerError:
            return True
        time.sleep(LOOK_S)
    return isinstance(error, PeerError) and error.peer is not None


class _Opened:
    """The stores of one call: this process's own, opened where it proposes, and those of others."""

    def __init__(self, ip):
        self.ip, self.own = ip, None

    def address(self):
        if self.own is None:
            self.own = open_store(self.ip)
        return self.ip, self.own.port

    def store_at(self, address):
        if self.own is not None and address == self.address():
            return self.own
        return store_at(*address)


class _WatchedStore(dist.Store):  # names of methods: signature of torch.distributed's
    """A store that raises, to whoever waits in it, when a rank of the new group is lost.

    host: where it is. watcher: called from time to time, raises; None: nobody is watched any more.
    """

    def __init__(self, inner, host, watcher):
        super().__init__()
        self.inner, self.host, self.watcher = inner, host, watcher
        self._next_look, self._lock = 0.0, threading.Lock()

    def _look(self):
        watcher, now = self.watcher, time.monotonic()
        if watcher is None or now < self._next_look or not self._lock.acquire(blocking=False):
            return
        try:
            watcher()
            self._next_look = time.monotonic() + LOOK_S
        finally:
            self._lock.release()

    def check(self, keys):
        self._look()
        return self.inner.check(keys)

    def set(self, key, value):
        self.inner.set(key, value)

    def get(self, key):
        return self.inner.get(key)

    def add(self, key, value):
        self._look()
        return self.inner.add(key, value)

    def wait(self, keys, timeout=None):
        self.inner.wait(keys) if timeout is None else self.inner.wait(keys, timeout)

    def num_keys(self):
        return self.inner.num_keys()

    def deleteKey(self, key):  # noqa: N802
        return self.inner.delete_key(key)

    delete_key = deleteKey
