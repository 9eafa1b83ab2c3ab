"""Which deaths of other ranks are certain.

A rank that is certainly dead cannot go on anywhere, so the others need no quorum to leave it out ([Note: two
sides] at the head of the package). If they take a living rank for a dead one, two groups go on. So a death is
certain in two cases only:

    1  The tie to the rank ended with a FIN, and no message came before.
    2  A rank that is in shrink() says that it has seen 1.

A tie is a TCP connection between two ranks of a group; each pair has one. It is made with the group, and
after the handshake nobody sends on it while both live. So a killed rank has no unread bytes, and Linux ends
its ties with a FIN (with unread bytes it would send a reset). Everything else is silence, and needs the
quorum:

    the tie is reset, or has an error     a firewall resets connections (REJECT), and so does a new boot
    the port of the point refuses         a firewall refuses, too
    another process answers at the port   another machine may have the address
    no answer                             the host or the link is lost, or the process is stopped

A living rank closes a tie only after a message, which is its answer to "look": the group is left, or was
shrunk, and by which ranks. TCP keeps the order, so a rank that reads the FIN has read the message. After a
cut that heals this is still true: the kernel repeats the message and the FIN, or gives up both.

    rank 0   shrink() "formed", message, FIN   cut ... heals   rank 1 reads both: AbortedError
    rank 0   killed, FIN                                       rank 1 reads only the FIN: 0 has not gone on

What can go wrong:

    - A rank is killed while it closes. The message came whole: it has left. In part: silence.
    - The message cannot be sent whole. The rank resets the tie: silence.
    - A forked child has copies of the ties, so a FIN would come at the child's end. os.fork() closes them in
      the child, and so does exec. A library that forks in C and calls no exec keeps them: silence.
    - The link is cut when the rank dies. The kernel repeats the FIN when the link heals.
    - A firewall resets a tie after the rank that listens has answered, and that one waits for nobody else:
      it goes on, and nobody answers the next try. The group is not made: an error at the limit.
    - A firewall forgets connections that are idle. The kernel asks each minute (keepalive, which brings no
      bytes to read). If a reset answers, the tie is lost: silence.
    - A program closes descriptors that it does not own (os.closerange). Its rank looks dead, and its group
      is broken anyway.
    - A proxy between the hosts ends TCP connections itself (some service meshes). It sends a FIN to both
      sides, and pycomm cannot tell. Such a proxy must not be there: docs/hosts.md.

Cost: a socket for each other rank, as long as the group. No thread: shrink() looks at the ties.

What lost:
    - A refused port as the sign: a firewall refuses, too.
    - Ties of leaders only: a rank whose leader is dead would know no death.
    - One tie per pair of processes, for all groups: a message would have to name its group, and a thread to
      read it at once, since unread bytes make a reset.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pycomm.survivors.door import WORD, Door, connect, hello_of, is_reply
from pycomm.survivors.slots import Answer, Word

if TYPE_CHECKING:
    from pycomm.survivors.points import Place

__all__ = ["Fate", "Ties"]

KIND = "tie"  # of visits at a door
AGAIN_S = 0.1  # between two tries to connect
KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 60, socket.TCP_KEEPCNT: 127}  # seconds; number
LONGEST = 1 << 20  # bytes of a message
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends a reset


class Fate(enum.Enum):
    """What has become of a rank whose tie has ended."""

    DIED = "died"
    LEFT = "left"
    LOST = "lost"  # of the tie; the rank may live


class Ties:
    """Of a rank to all others. listening: the socket of its point, at which lower ranks come."""

    def __init__(self, listening: socket.socket, ip: str, token: str, rank: int) -> None:
        self._door, self._ip, self._token, self._rank = Door(listening, token, rank, KIND), ip, token, rank
        # by rank
        self._sockets: dict[int, socket.socket] = {}
        self._read: dict[int, bytes] = {}
        self._fates: dict[int, Fate] = {}
        self._words: dict[int, list[Word]] = {}
        self._poll, self._lock = select.poll(), threading.Lock()
        _ALL.add(self)

    def make(self, places: Sequence[Place], pause: Callable[[], None]) -> None:
        """Collective: all ranks are tied. places: of their points. pause: called while others are awaited;
        may raise.
        """
        tries = {rank: _Try() for rank in range(self._rank + 1, len(places))}
        lower = set(range(self._rank))
        while tries or lower:
            let_in, _ = self._door.look()
            for connection, rank in let_in:
                if rank < self._rank:  # also once more, where its first try was lost
                    lower.discard(rank)
                    self._take(rank, connection)
                else:
                    connection.close()
            for rank, one in list(tries.items()):
                if (made := self._go_on(one, rank, places[rank])) is not None:
                    del tries[rank]
                    self._take(rank, made)
            if tries or lower:
                pause()
        self._door.close()

    def look(self) -> tuple[dict[int, Fate], list[list[Word]]]:
        """({rank: Fate} of the ties that have ended, the words that ranks have left behind)."""
        with self._lock:
            ranks = {one.fileno(): rank for rank, one in self._sockets.items()}
            for fd, _ in self._poll.poll(0):
                if fd in ranks:
                    self._read_of(ranks[fd])
            return dict(self._fates), list(self._words.values())

    def end(self, farewell: Answer) -> None:
        """This rank lives, and closes its ties: it has left the group, or goes on in another one."""
        line = json.dumps(farewell).encode() + b"\n"
        with self._lock:
            self._door.close()
            for rank in list(self._sockets):
                connection = self._drop(rank)
                try:
                    whole = connection.send(line) == len(line)
                except OSError:
                    whole = False
                if not whole:
                    with contextlib.suppress(OSError):
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                connection.close()

    def drop(self) -> None:
        """In a forked child: the parent's death must end the ties."""
        for connection in (*self._sockets.values(), *self._door.waiting):
            connection.close()
        self._sockets = {}

    # --- making them --------------------

    def _go_on(self, one: _Try, rank: int, place: Place) -> socket.socket | None:
        """The connection, once the other side has answered."""
        try:
            if one.socket is None:
                if time.monotonic() < one.next:
                    return None
                one.socket, status = connect(self._ip, place.ip, place.port)
                one.next, one.read = time.monotonic() + AGAIN_S, b""
                one.unsent = hello_of(self._token, rank, KIND, self._rank)
                if status:
                    raise OSError(status, "not connected")
            if one.unsent:
                one.unsent = one.unsent[one.socket.send(one.unsent) :]
            while len(one.read) < WORD:
                data = one.socket.recv(WORD - len(one.read))
                if not data:
                    raise ConnectionError("the other side has ended")
                one.read += data
            if not is_reply(one.read, self._token, rank, KIND):
                raise ConnectionError("somebody else answers there")
        except BlockingIOError:
            return None
        except OSError:
            if one.socket is not None:
                one.socket.close()
            one.socket = None
            return None
        return one.socket

    def _take(self, rank: int, connection: socket.socket) -> None:
        if rank in self._sockets:
            self._drop(rank).close()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sockets[rank], self._read[rank] = connection, b""
        self._poll.register(connection, select.POLLIN)

    # --- how they end --------------------

    def _read_of(self, rank: int) -> None:
        fate: Fate | None = None
        try:
            while fate is None:
                data = self._sockets[rank].recv(1 << 16)
                self._read[rank] += data
                if self._read[rank].endswith(b"\n"):
                    fate = Fate.LEFT
                elif not data:
                    fate = Fate.LOST if self._read[rank] else Fate.DIED
                elif len(self._read[rank]) > LONGEST:
                    fate = Fate.LOST
        except BlockingIOError:
            return
        except OSError:
            fate = Fate.LOST
        if fate == Fate.LEFT:
            try:
                self._words[rank] = json.loads(self._read[rank])["words"]
            except Exception:  # the rank's own words: pycomm of another version, or damage
                fate = Fate.LOST
        self._fates[rank] = fate
        self._drop(rank).close()

    def _drop(self, rank: int) -> socket.socket:
        connection = self._sockets.pop(rank)
        with contextlib.suppress(KeyError):
            self._poll.unregister(connection)
        return connection


class _Try:
    """To connect to a rank. socket: None, or one that does not have the answer yet."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.next, self.read, self.unsent = 0.0, b"", b""


_ALL: weakref.WeakSet[Ties] = weakref.WeakSet()


def _after_fork() -> None:
    for ties in list(_ALL):
        ties.drop()


os.register_at_fork(after_in_child=_after_fork)
