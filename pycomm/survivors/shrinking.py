"""Makes a group of the ranks that are left: they agree (agreement.py), and meet in a store, as the ranks of
any group do: that in the point of the proposer (store.py). Who waits there looks at the lives of the others.

The store stays as long as the proposer's process. If that is lost the next shrink() has another.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pycomm import _C
from pycomm.errors import AbortedError, PeerError
from pycomm.survivors.agreement import Agreement, Verdict
from pycomm.survivors.points import Point
from pycomm.survivors.store import PointStore

if TYPE_CHECKING:
    from pycomm.hosts import Makers

__all__ = ["shrink"]

LOOK_S = 0.02  # between two looks at the others
LISTEN_S = 1.0  # after a failure that may be the loss of another rank


class Shrunk(NamedTuple):
    """The new communicator, and its ranks in the old one."""

    comm: _C.Communicator
    ranks: list[int]


def shrink(
    point: Point,
    comm: _C.Communicator,
    exclude: Sequence[int],
    exactly: bool,
    timeout: float,
    makers: Callable[[], Makers],
) -> Shrunk:
    """As Communicator.shrink(), of a group that spans hosts. comm: the old one, which is closed. makers:
    pycomm.hosts.makers.
    """
    _check(point, comm, exclude)
    with Agreement(point, exclude, exactly, timeout) as agreement:
        while True:
            verdict = agreement.agree()
            made: _C.Communicator | None = None
            store = PointStore(point, verdict.store, _Watcher(agreement.watch))
            try:
                made = _join(point, comm, verdict, store, agreement, makers)
            except Exception as error:  # that of another rank, or this one's own
                if not _is_of_others(error, agreement):
                    agreement.give_up(str(error))
            except BaseException as error:  # Ctrl-C: the others need not wait
                with contextlib.suppress(Exception):
                    agreement.give_up(type(error).__name__)
                raise
            if agreement.form(made is not None) and made is not None:
                break
            if made is not None:
                made.close()
    point.end_ties()  # before anything happens in the new group: those left out read this, whatever comes
    store.watcher = None
    made.set_timeout(comm.timeout)
    comm.close()
    return Shrunk(made, verdict.members)


def _check(point: Point, comm: _C.Communicator, exclude: Sequence[int]) -> None:
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


def _join(
    point: Point,
    comm: _C.Communicator,
    verdict: Verdict,
    store: PointStore,
    agreement: Agreement,
    makers: Callable[[], Makers],
) -> _C.Communicator:
    name = f"{comm.describe()['name']}/shrunk{verdict.round}"
    options = comm.successor_options(name, agreement.seconds_left())
    rank, size = verdict.members.index(point.rank), len(verdict.members)
    return _C.connect(store, rank, size, options, None, makers())


def _is_of_others(error: Exception, agreement: Agreement) -> bool:
    """Whether another member is lost, so that the round will be over."""
    end = time.monotonic() + LISTEN_S
    while time.monotonic() < end:
        try:
            agreement.watch()
        except PeerError:
            return True
        time.sleep(LOOK_S)
    return isinstance(error, PeerError) and error.peer is not None


class _Watcher:
    """Looks at the others from time to time, of those threads that wait one."""

    def __init__(self, look: Callable[[], None]) -> None:
        self.look, self.next, self.lock = look, 0.0, threading.Lock()

    def __call__(self) -> None:
        if time.monotonic() < self.next or not self.lock.acquire(blocking=False):
            return
        try:
            self.look()
            self.next = time.monotonic() + LOOK_S
        finally:
            self.lock.release()
