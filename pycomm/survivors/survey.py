"""What a rank in shrink() sees of all others: one connection to the point of each, on which it asks without
waiting. See [Note: what is seen of a rank].
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection

from pycomm.survivors.door import WORD, connect, hello_of, is_reply
from pycomm.survivors.points import ASK, Here, Point
from pycomm.survivors.slots import Answer, Question
from pycomm.survivors.ties import Fate

__all__ = ["Seen", "Survey"]

EVERY_S = 0.01  # between two looks at a rank
AGAIN_S = 0.2  # between two tries to connect
PATIENCE_S = 0.2  # with a stopped process
FULL = 1 << 20  # bytes of an answer, at most
_STOPPED = (b"T", b"t")
_NOT_RUNNING = (*_STOPPED, b"Z", b"X", b"")


class Seen(enum.Enum):
    """What is seen of a rank."""

    GONE = "gone"
    LEFT = "left"
    HERE = "here"
    ABSENT = "absent"
    STOPPED = "stopped"
    SILENT = "silent"
    UNKNOWN = "not heard yet"


class _Peer:
    """The point of another rank, as this one sees it."""

    def __init__(self, rank: int, begun: float) -> None:
        self.rank, self.gone, self.heard, self.ever_heard = rank, False, begun, False
        self.socket: socket.socket | None = None
        self.connected, self.next_try, self.next_look, self.unsent, self.read = False, 0.0, 0.0, b"", b""
        self.proved = False  # that it is this rank which answers
        self.here: Here | None = None
        self.left = False
        self.stopped_since: float | None = None
        self.asked: int | None = None  # number of the question

    @property
    def connection(self) -> socket.socket:
        if self.socket is None:
            raise ConnectionError("not connected")
        return self.socket


class Survey:
    """point: of this rank. patience: seconds after which a rank that says nothing is silent."""

    def __init__(self, point: Point, patience: float) -> None:
        self.point, self.patience, self.begun = point, patience, time.monotonic()
        others = [rank for rank in range(len(point.places)) if rank != point.rank]
        self.peers = {rank: _Peer(rank, self.begun) for rank in others}
        self.selector, self.lock = selectors.DefaultSelector(), threading.RLock()
        self.next_id = 0
        self.answers: dict[int, dict[int, Answer]] = {}  # by id of a question and rank
        self.last_look = 0.0

    def close(self) -> None:
        with self.lock:
            for peer in self.peers.values():
                self._drop(peer)
            self.selector.close()

    # --- what is seen --------------------

    def look(self, wait: float = EVERY_S) -> None:
        """Goes on for `wait` seconds: connects, asks, hears; what the others have decided is known here."""
        with self.lock:
            now = time.monotonic()
            if now - self.last_look > self.patience / 2 and self.last_look:  # this process was stopped
                for peer in self.peers.values():
                    peer.heard = now
            self.last_look = now
            self._look_at_ties()
            for peer in self.peers.values():
                self._go_on(peer, now)
            for key, events in self.selector.select(wait) if self.selector.get_map() else ():
                self._serve(key.data, events)
            self._look_at_processes()
        if not self.peers:
            time.sleep(wait)

    def seen(self) -> dict[int, Seen]:
        """Of all ranks; this one is here."""
        with self.lock:
            stopped: set[int] = set()
            certain: set[int] = set()
            for peer in self.peers.values():
                if peer.here is not None and not peer.gone:
                    stopped.update(peer.here.stopped)
                    certain.update(peer.here.certain)
            for rank in certain & self.peers.keys():
                self._lose(self.peers[rank])
            stopped.update(self.stopped())
            found = {rank: self._seen_of(peer, stopped) for rank, peer in self.peers.items()}
        return {**found, self.point.rank: Seen.HERE}

    def _seen_of(self, peer: _Peer, stopped: Collection[int]) -> Seen:
        if peer.gone:
            return Seen.GONE
        if peer.left:
            return Seen.LEFT
        if peer.rank in stopped:
            return Seen.STOPPED
        if time.monotonic() - peer.heard > self.patience and not self._runs_here(peer):
            return Seen.SILENT
        if not peer.ever_heard:
            return Seen.UNKNOWN
        here = peer.here is not None and peer.here.begin >= self.point.slots.after_failure()
        return Seen.HERE if here else Seen.ABSENT

    def silence(self, rank: int) -> float:
        """Seconds since a rank was heard."""
        return time.monotonic() - self.peers[rank].heard

    def here(self, rank: int) -> Here | None:
        """The Here of another rank as it was told last, or None."""
        return self.peers[rank].here

    def stopped(self) -> list[int]:
        """Ranks of this host whose processes have been stopped for a while."""
        now = time.monotonic()
        return [
            rank
            for rank, peer in self.peers.items()
            if peer.stopped_since is not None and now - peer.stopped_since >= PATIENCE_S
        ]

    def _look_at_ties(self) -> None:
        fates, found = self.point.ties.look()
        for rank, fate in fates.items():
            if fate == Fate.DIED:
                self._lose(self.peers[rank])
            elif fate == Fate.LEFT:
                self.peers[rank].left = True
        if found:
            with self.point.lock:
                for words in found:
                    self.point.slots.know(words)

    def _lose(self, peer: _Peer) -> None:
        peer.gone = True
        self._drop(peer)

    def _look_at_processes(self) -> None:
        """Notes which of this host are stopped."""
        now = time.monotonic()
        for peer in self.peers.values():
            pid = self._process_of(peer)
            if pid is None or peer.gone or not _is_stopped(pid):
                peer.stopped_since = None
            elif peer.stopped_since is None:
                peer.stopped_since = now

    def _runs_here(self, peer: _Peer) -> bool:
        """Whether it is a process of this host that runs, and has no processor to answer, perhaps."""
        pid = self._process_of(peer)
        return pid is not None and _state_of(pid) not in _NOT_RUNNING

    def _process_of(self, peer: _Peer) -> int | None:
        """Its number, which means something on one host where numbers are of one space."""
        point = self.point
        place, mine = point.places[peer.rank], point.places[point.rank]
        is_here = point.hosts[peer.rank] == point.hosts[point.rank] and place.space == mine.space != ""
        return place.pid if is_here else None

    # --- questions --------------------

    def ask(
        self, question: Question, enough: Callable[[dict[int, Answer]], bool], limit: float
    ) -> dict[int, Answer]:
        """Asks all ranks, this one too. Returns the answers by rank when enough(answers) holds, or after
        `limit` seconds.
        """
        with self.lock:
            self.next_id += 1
            number = self.next_id
            found = self.answers[number] = {self.point.rank: self.point.answer(question)}
            for peer in self.peers.values():
                if peer.connected and not peer.gone:
                    self._say(peer, {"id": number, **question})
        end = time.monotonic() + limit
        while not enough(found) and time.monotonic() < end:
            self.look()
        with self.lock:
            del self.answers[number]
        return found

    def tell(self, question: Question) -> None:
        """Asks all ranks and waits for nobody."""
        with self.lock:
            self.point.answer(question)
            for peer in self.peers.values():
                if peer.connected and not peer.gone:
                    self._say(peer, {"id": 0, **question})

    # --- connections --------------------

    def _go_on(self, peer: _Peer, now: float) -> None:
        if peer.gone:
            return
        if peer.socket is None:
            if now >= peer.next_try:
                self._connect(peer, now)
        elif peer.connected and now >= peer.next_look and peer.asked is None:
            self.next_id += 1
            peer.asked, peer.next_look = self.next_id, now + EVERY_S
            self._say(peer, {"id": peer.asked, "ask": "look"})

    def _connect(self, peer: _Peer, now: float) -> None:
        place = self.point.places[peer.rank]
        peer.next_try, peer.connected, peer.asked = now + AGAIN_S, False, None
        peer.read, peer.unsent, peer.proved = b"", b"", False
        peer.socket, status = connect(self.point.place.ip, place.ip, place.port)
        if status:
            self._drop(peer)
            return
        self.selector.register(peer.socket, selectors.EVENT_WRITE, peer)

    def _drop(self, peer: _Peer) -> None:
        if peer.socket is not None:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(peer.socket)
            peer.socket.close()
        peer.socket, peer.connected, peer.asked = None, False, None

    def _serve(self, peer: _Peer, events: int) -> None:
        if not peer.connected:
            if peer.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0:
                self._drop(peer)  # a port that refuses, too: see ties.py
                return
            peer.connected = True
            self.selector.modify(peer.connection, selectors.EVENT_READ, peer)
            peer.unsent = hello_of(self.point.token, peer.rank, ASK, self.point.rank)
            self.next_id += 1
            peer.asked = self.next_id
            self._say(peer, {"id": peer.asked, "ask": "look"})
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._send(peer)
            if events & selectors.EVENT_READ:
                self._hear(peer)
        except Exception:  # the end, or whatever somebody else has sent who answers there
            self._drop(peer)
            peer.next_try = time.monotonic() + (0 if peer.ever_heard else AGAIN_S)

    def _say(self, peer: _Peer, question: Question) -> None:
        peer.unsent += json.dumps(question).encode() + b"\n"
        try:
            self._send(peer)
        except OSError:
            self._drop(peer)

    def _send(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            while peer.unsent:
                peer.unsent = peer.unsent[peer.connection.send(peer.unsent) :]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self.selector.modify(peer.connection, wanted, peer)

    def _hear(self, peer: _Peer) -> None:
        data = peer.connection.recv(1 << 16)
        if not data or len(peer.read) > FULL:
            raise ConnectionError("the other side has ended")
        peer.read += data
        if not peer.proved and not self._is_proved(peer):
            return
        while b"\n" in peer.read:
            line, peer.read = peer.read.split(b"\n", 1)
            answer = json.loads(line)
            peer.heard, peer.ever_heard = time.monotonic(), True
            if answer["id"] in self.answers:
                self.answers[answer["id"]][peer.rank] = answer
            if "words" in answer:
                peer.asked = None
                peer.left = peer.left or answer["left"]
                peer.here = None if answer["here"] is None else Here(**answer["here"])
                with self.point.lock:
                    self.point.slots.know(answer["words"])

    def _is_proved(self, peer: _Peer) -> bool:
        right = is_reply(peer.read, self.point.token, peer.rank, ASK)
        if right is False:
            raise ConnectionError("somebody else answers there")
        if right:
            peer.proved, peer.read = True, peer.read[WORD:]
        return peer.proved


def _is_stopped(pid: int) -> bool:
    """By a signal or a debugger."""
    return _state_of(pid) in _STOPPED


def _state_of(pid: int) -> bytes:
    """As csrc/transport/survivors.cc reads it: a letter, or nothing where there is no such process."""
    with contextlib.suppress(OSError):
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            line = os.read(fd, 4096)
        finally:
            os.close(fd)
        return line[line.rindex(b")") + 2 :][:1]
    return b""
