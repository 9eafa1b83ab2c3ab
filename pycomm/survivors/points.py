"""The point of a rank in a group that spans hosts, and the thread that answers for all points of a process.

A question is a line of JSON, and so is its answer; the first line of a connection has the word of the point:

    {"word": ..., "id": 1, "ask": "look"}                    -> {"id": 1, "words": [...], "here": ..., ...}
    {"id": 2, "ask": "propose", "slot": 1, "ballot": [1, 0]} -> {"id": 2, "promised": null}
    {"id": 3, "ask": "take", ..., "value": word}             -> {"id": 3, "taken": true}
    {"id": 4, "ask": "know", "words": [...]}                 -> {"id": 4}
    {"id": 5, "ask": "store", "do": "add", ...}              -> {"id": 5, "value": 1}          store.py

[Note: how long a point lives] Until its group is closed, which the extension tells by a bell (an eventfd):
from then on the port refuses, and the others take the rank for gone. A point whose group has been shrunk
stays until the process ends, a socket for each such group: a rank that was left out, because it was stopped,
must find somebody who says so, else it would go on alone.
"""

import contextlib
import errno
import hashlib
import json
import os
import selectors
import socket
import threading
import time
from typing import NamedTuple

from pycomm.survivors.slots import Slots

__all__ = ["Here", "Place", "Point", "word_of"]

LONGEST = 1 << 20  # bytes of a line
BACKLOG = 1024
FULL_S = 0.02  # until the next look, where the process has no descriptor left
OTHER = b'{"other": true}\n'  # to whom asks for a group that is not this one


class Place(NamedTuple):
    """Where a rank's point is; pid and space (of process numbers) for ranks of its host."""

    ip: str
    port: int
    pid: int
    space: str


class Here(NamedTuple):
    """A rank in shrink()."""

    exclude: list
    exactly: bool
    begin: int = -1  # so many words were decided before this call, -1: it does not know yet
    made: int = -1  # slot of the last verdict whose group this rank has made
    stopped: list = ()  # ranks of its host


class Point:
    """This rank's. Opened before the places of the others are known.

    Attributes:
        token, rank; hosts: the number of each rank's host; labels: of hosts; places: of all ranks.
        store: the one by which the group was made. here: a Here while this rank is in shrink(), else None.
        bell: what rings when the group is closed; is_left: whether it is. Both for the extension.
    """

    def __init__(self, ip, version, token, rank):
        self.token, self.rank, self.is_left = token, rank, lambda: False
        self.lock, self.slots, self.here, self.values = threading.Lock(), Slots(), None, {}
        self.hosts = self.labels = self.places = self.store = self._shrinker = None
        self.socket = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self.socket.bind((ip, 0))
            self.socket.listen(BACKLOG)
        except OSError as error:
            self.socket.close()
            raise RuntimeError(f"Cannot listen on {ip}: {error}.") from None
        self.socket.setblocking(False)
        self.place = Place(ip, self.socket.getsockname()[1], os.getpid(), _process_space())
        self.agent = None

    @property
    def bell(self):
        return self.agent.bell

    def serve(self, hosts, labels, places, store, shrinker):
        """All are known: this point answers from now on. shrinker: as shrink(), with the point before."""
        self.hosts, self.labels, self.places = list(hosts), list(labels), list(places)
        self.store, self._shrinker = store, shrinker
        self.agent = agent()
        self.agent.add(self)

    def close(self):
        if self.agent is not None:
            self.agent.remove(self)
        self.socket.close()

    def shrink(self, comm, exclude, exactly, timeout):
        """For the extension: Communicator.shrink() of the group of this point."""
        return self._shrinker(self, comm, exclude, exactly, timeout)

    def name(self, rank):
        return f"rank {rank} ({self.labels[self.hosts[rank]]})"

    def names(self, ranks):
        """ "rank 1 (node-a)", "ranks 4, 5 (node-b)", "ranks 1 (node-a), 5 (node-b)" """
        by_host = {}
        for rank in ranks:
            by_host.setdefault(self.hosts[rank], []).append(str(rank))
        listed = ", ".join(f"{', '.join(some)} ({self.labels[host]})" for host, some in by_host.items())
        return f"rank{'s' * (len(ranks) > 1)} {listed}"

    def answer(self, question):
        """From any thread. question: what was asked, without "word"."""
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

    def ended(self):
        """Whether nobody can need its answers: see [Note: how long a point lives]."""
        with self.lock:
            return self.is_left() and not (self.slots.words and self.slots.words[-1] == "formed")


def word_of(token, rank):
    """What whoever asks a point must know."""
    return hashlib.sha256(f"pycomm survivors {token} {rank}".encode()).hexdigest()[:32]


def _process_space():
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.readline().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _serve_store(values, question):
    """The answer of a point. values: {key: a string, or a number that was counted}. With its lock held."""
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
    """A connection to a point."""

    def __init__(self, connection, point):
        self.socket, self.point, self.known, self.read, self.unsent = connection, point, False, b"", b""

    def serve(self):
        """Reads, answers and writes what there is, without waiting. False: the connection is over."""
        try:
            goes_on = self._read()
            while b"\n" in self.read:
                line, self.read = self.read.split(b"\n", 1)
                if not self._answer(json.loads(line)):
                    goes_on = False
                    break
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # garbage
            goes_on = False
        try:
            self._write()
        except OSError:
            return False
        return goes_on

    def _read(self):
        """False: the other side says no more."""
        with contextlib.suppress(BlockingIOError):
            while data := self.socket.recv(1 << 16):
                self.read += data
                if len(self.read) > LONGEST:
                    raise ValueError("too long a line")
            return False
        return True

    def _answer(self, question):
        if not self.known:
            self.known = question.get("word") == word_of(self.point.token, self.point.rank)
        if not self.known:
            self.unsent += OTHER
            return False
        answer = {"id": question["id"], **self.point.answer(question)}
        self.unsent += json.dumps(answer).encode() + b"\n"
        return True

    def _write(self):
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]


class Agent:
    """The thread. It ends when no point is left."""

    def __init__(self):
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.lock, self.selector = threading.Lock(), selectors.DefaultSelector()
        self.points, self.asking, self.thread = [], {}, None
        self.selector.register(self.bell, selectors.EVENT_READ, None)

    def add(self, point):
        with self.lock:
            self.points.append(point)
            self.selector.register(point.socket, selectors.EVENT_READ, point)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="pycomm survivors", daemon=True)
                self.thread.start()
        self.ring()

    def remove(self, point):
        with self.lock:
            self._forget(point)
        self.ring()

    def ring(self):
        os.eventfd_write(self.bell, 1)

    def _run(self):
        while True:
            ready = self.selector.select()
            with self.lock:
                for key, events in ready:
                    self._serve(key, events)
                for point in [point for point in self.points if point.ended()]:
                    self._forget(point)
                if not self.points:
                    self.thread = None
                    return

    def _serve(self, key, events):
        if key.fileobj == self.bell:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.bell)
        elif isinstance(key.data, Point):
            self._accept(key.data)
        elif key.data.socket in self.asking:
            one = key.data
            if not one.serve():
                self._end(one)
                return
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if one.unsent else 0)
            if wanted != key.events:
                self.selector.modify(one.socket, wanted, one)

    def _accept(self, point):
        try:
            connection, _ = point.socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # it is still there at the next look
                time.sleep(FULL_S)
            return
        connection.setblocking(False)
        one = self.asking[connection] = _Asking(connection, point)
        self.selector.register(connection, selectors.EVENT_READ, one)

    def _end(self, one):
        self.selector.unregister(one.socket)
        del self.asking[one.socket]
        one.socket.close()

    def _forget(self, point):
        if point in self.points:
            self.points.remove(point)
            self.selector.unregister(point.socket)
            point.socket.close()
            for one in [one for one in self.asking.values() if one.point is point]:
                self._end(one)

    def drop(self):
        """In a forked child: without it the ports would stay open when the parent has ended."""
        for one in (*self.points, *self.asking.values()):
            one.socket.close()
        self.selector.close()
        os.close(self.bell)


_AGENTS = []  # the one of this process, once a group needs it


def agent():
    if not _AGENTS:
        _AGENTS.append(Agent())
    return _AGENTS[0]


def _after_fork():
    while _AGENTS:
        _AGENTS.pop().drop()


os.register_at_fork(after_in_child=_after_fork)
