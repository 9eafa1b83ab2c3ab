"""The point of a rank in a group that spans hosts, and the thread that answers for all points of a process.

Who connects proves first that it belongs to the group (door.py). Then a question is a line of JSON, and so is
its answer:

    {"id": 1, "ask": "look"}                                 -> {"id": 1, "words": [...], "here": ..., ...}
    {"id": 2, "ask": "propose", "slot": 1, "ballot": [1, 0]} -> {"id": 2, "promised": null}
    {"id": 3, "ask": "take", ..., "value": word}             -> {"id": 3, "taken": true}
    {"id": 4, "ask": "know", "words": [...]}                 -> {"id": 4}
    {"id": 5, "ask": "store", "do": "add", ...}              -> {"id": 5, "value": 1}          store.py

A line that cannot be answered ends its connection; the thread goes on.

[Note: how long a point lives] Until its group is closed, which the extension tells by a bell (an eventfd):
the ties of the rank then say so to the others (ties.py). A point whose group has been shrunk stays until the
process ends, a socket for each such group: a rank that was left out, because it was stopped, must find
somebody who says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pycomm.ports import listen
from pycomm.survivors.door import Door
from pycomm.survivors.slots import Answer, Question, Slots
from pycomm.survivors.ties import Ties

if TYPE_CHECKING:
    import torch.distributed as dist

    from pycomm import _C
    from pycomm.survivors.shrinking import Shrunk

__all__ = ["ASK", "Here", "Place", "Point"]

# (point, communicator, exclude, exactly, timeout)
Shrinker: TypeAlias = "Callable[[Point, _C.Communicator, Sequence[int], bool, float], Shrunk]"

ASK = "ask"  # the kind of visits at a point's door
LONGEST = 1 << 20  # bytes of a line
LOOK_S = 1.0  # between two looks at connections that have not sent their word


class Place(NamedTuple):
    """Where a rank's point is; pid and space (of process numbers) for ranks of its host."""

    ip: str
    port: int
    pid: int
    space: str


class Here(NamedTuple):
    """A rank in shrink()."""

    exclude: list[int]
    exactly: bool
    begin: int = -1  # so many words were decided before this call, -1: it does not know yet
    made: int = -1  # slot of the last verdict whose group this rank has made
    stopped: Sequence[int] = ()  # ranks of its host
    certain: Sequence[int] = ()  # ranks that are gone or have left


class Point:
    """This rank's. Opened before the places of the others are known.

    Attributes:
        token, rank; ties: to the others; hosts: the number of each rank's host; labels: of hosts; places: of
        all ranks.
        store: the one by which the group was made. here: a Here while this rank is in shrink(), else None.
        bell: what rings when the group is closed; is_left: whether it is. Both for the extension.
    """

    def __init__(self, ip: str, token: str, rank: int) -> None:
        self.token, self.rank = token, rank
        self.is_left: Callable[[], bool] = lambda: False
        self.lock, self.slots = threading.Lock(), Slots()
        self.here: Here | None = None
        self.values: dict[str, str] = {}
        self.hosts: list[int] = []
        self.labels: list[str] = []
        self.places: list[Place] = []
        self.store: dist.Store | None = None
        self._shrinker: Shrinker | None = None
        self.socket = listen(ip)
        self.door, self.ties = Door(self.socket, token, rank, ASK), Ties(self.socket, ip, token, rank)
        self.place = Place(ip, self.socket.getsockname()[1], os.getpid(), _process_space())
        self.agent: Agent | None = None

    @property
    def bell(self) -> int:
        assert self.agent is not None  # it serves
        return self.agent.bell

    def serve(
        self,
        hosts: Sequence[int],
        labels: Sequence[str],
        places: Sequence[Place],
        store: dist.Store,
        shrinker: Shrinker | None,
    ) -> None:
        """All are known: this point answers from now on. shrinker: as shrink(), with the point before."""
        self.hosts, self.labels, self.places = list(hosts), list(labels), list(places)
        self.store, self._shrinker = store, shrinker
        self.agent = agent()
        self.agent.add(self)

    def close(self) -> None:
        if self.agent is not None:
            self.agent.remove(self)
        self.end_ties()
        self.door.close()
        self.socket.close()

    def end_ties(self) -> None:
        """The others learn that this rank lives, and what it knows of the group's end."""
        with self.lock:
            words = self.slots.words
        self.ties.end({"words": words, "left": True})

    def shrink(self, comm: _C.Communicator, exclude: Sequence[int], exactly: bool, timeout: float) -> Shrunk:
        """For the extension: Communicator.shrink() of the group of this point."""
        assert self._shrinker is not None  # it serves
        return self._shrinker(self, comm, exclude, exactly, timeout)

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.labels[self.hosts[rank]]})"

    def names(self, ranks: Sequence[int]) -> str:
        """ "rank 1 (node-a)", "ranks 4, 5 (node-b)", "ranks 1 (node-a), 5 (node-b)" """
        by_host: dict[int, list[str]] = {}
        for rank in ranks:
            by_host.setdefault(self.hosts[rank], []).append(str(rank))
        listed = ", ".join(f"{', '.join(some)} ({self.labels[host]})" for host, some in by_host.items())
        return f"rank{'s' * (len(ranks) > 1)} {listed}"

    def answer(self, question: Question) -> Answer:
        """From any thread."""
        ask = question["ask"]
        with self.lock:
            if ask == "look":
                here = None if self.here is None else self.here._asdict()
                return {"words": self.slots.words, "here": here, "left": self.is_left()}
            if ask == "propose":
                return self.slots.propose(question["slot"], tuple(question["ballot"]))
            if ask == "take":
                return self.slots.take(question["slot"], tuple(question["ballot"]), question["value"])
            if ask == "know":
                self.slots.know(question["words"])
                return {}
            if ask == "store":
                return {"value": _serve_store(self.values, question)}
        raise ValueError(f"a question that no point knows: {ask!r}")

    def ended(self) -> bool:
        """Whether nobody can need its answers: see [Note: how long a point lives]."""
        with self.lock:
            return self.is_left() and not (self.slots.words and self.slots.words[-1] == "formed")


def _process_space() -> str:
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.readline().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _serve_store(values: dict[str, str], question: Question) -> Any:
    """The answer of a point, with its lock held."""
    do, key, value = question["do"], question["key"], question["value"]
    if do == "set":
        values[key] = value
    elif do == "get":
        return str(values[key])
    elif do == "add":
        values[key] = str(int(values.get(key, 0)) + value)
        return int(values[key])
    elif do == "check":
        return all(one in values for one in key)
    elif do == "number":
        return len(values)
    elif do == "delete":
        return values.pop(key, None) is not None
    return None


class _Asking:
    """A connection of a rank of the group to a point."""

    def __init__(self, connection: socket.socket, point: Point) -> None:
        self.socket, self.point, self.read, self.unsent = connection, point, b"", b""

    def serve(self) -> bool:
        """Reads, answers and writes what there is, without waiting. False: the connection is over."""
        try:
            goes_on = self._read()
            while b"\n" in self.read:
                line, self.read = self.read.split(b"\n", 1)
                question = json.loads(line)
                answer = {"id": question["id"], **self.point.answer(question)}
                self.unsent += json.dumps(answer).encode() + b"\n"
        except Exception:  # whatever was sent: it ends this connection and nothing else
            goes_on = False
        try:
            self._write()
        except OSError:
            return False
        return goes_on

    def _read(self) -> bool:
        """False: the other side says no more."""
        with contextlib.suppress(BlockingIOError):
            while data := self.socket.recv(1 << 16):
                self.read += data
                if len(self.read) > LONGEST:
                    raise ValueError("too long a line")
            return False
        return True

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]


class Agent:
    """The thread. It ends when no point is left."""

    def __init__(self) -> None:
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.lock, self.selector = threading.Lock(), selectors.DefaultSelector()
        self.points: list[Point] = []
        self.asking: dict[socket.socket, _Asking] = {}
        self.guests: set[socket.socket] = set()
        self.thread: threading.Thread | None = None
        self.selector.register(self.bell, selectors.EVENT_READ, None)

    def add(self, point: Point) -> None:
        with self.lock:
            self.points.append(point)
            self.selector.register(point.socket, selectors.EVENT_READ, point)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="pycomm survivors", daemon=True)
                self.thread.start()
        self.ring()

    def remove(self, point: Point) -> None:
        with self.lock:
            self._forget(point)
        self.ring()

    def ring(self) -> None:
        os.eventfd_write(self.bell, 1)

    def _run(self) -> None:
        while True:
            waiting = any(point.door.waiting for point in self.points)
            ready = self.selector.select(LOOK_S if waiting else None)
            with self.lock:
                called = {key.data for key, _ in ready if isinstance(key.data, Point)}
                for key, events in ready:
                    self._serve(key, events)
                for point in self.points:
                    if point in called or point.door.waiting:
                        try:
                            self._answer_door(point)
                        except (
                            Exception
                        ):  # without memory, for example: it ends those that wait, not the thread
                            self._end_guests(point)
                for point in [point for point in self.points if point.ended()]:
                    self._forget(point)
                if not self.points:
                    self.thread = None
                    return

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj == self.bell:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.bell)
        elif isinstance(key.data, _Asking) and key.data.socket in self.asking:
            one = key.data
            if not one.serve():
                self._end(one)
                return
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if one.unsent else 0)
            if wanted != key.events:
                self.selector.modify(one.socket, wanted, one)

    def _answer_door(self, point: Point) -> None:
        let_in, ended = point.door.look()
        for connection in ended:
            self._unregister(connection)
        for connection in point.door.waiting:
            if connection not in self.guests:
                self.guests.add(connection)
                self.selector.register(connection, selectors.EVENT_READ, None)
        for connection, _ in let_in:
            self._unregister(connection)
            one = self.asking[connection] = _Asking(connection, point)
            self.selector.register(connection, selectors.EVENT_READ, one)

    def _unregister(self, connection: socket.socket) -> None:
        if connection in self.guests:
            self.guests.remove(connection)
            self.selector.unregister(connection)

    def _end_guests(self, point: Point) -> None:
        for connection in point.door.waiting:
            self._unregister(connection)
        point.door.close()

    def _end(self, one: _Asking) -> None:
        self.selector.unregister(one.socket)
        del self.asking[one.socket]
        one.socket.close()

    def _forget(self, point: Point) -> None:
        if point in self.points:
            self.points.remove(point)
            self.selector.unregister(point.socket)
            point.end_ties()
            self._end_guests(point)
            point.socket.close()
            for one in [one for one in self.asking.values() if one.point is point]:
                self._end(one)

    def drop(self) -> None:
        """In a forked child: without it the ports would stay open when the parent has ended."""
        for connection in (*(point.socket for point in self.points), *self.asking, *self.guests):
            connection.close()
        self.selector.close()
        os.close(self.bell)


_AGENTS: list[Agent] = []  # the one of this process, once a group needs it


def agent() -> Agent:
    if not _AGENTS:
        _AGENTS.append(Agent())
    return _AGENTS[0]


def _after_fork() -> None:
    while _AGENTS:
        _AGENTS.pop().drop()


os.register_at_fork(after_in_child=_after_fork)
