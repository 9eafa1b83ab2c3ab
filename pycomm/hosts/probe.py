"""Whether the ranks can reach each other, tried with plain TCP before Gloo is, which names nobody.

Every rank listens on its address. The leader of each host connects to all ranks of the other hosts and reads
a word that only the right rank can send: packets to an address that two machines have go astray. It sends a
word first, without which the rank does not answer (pycomm/survivors/door.py).

    leaders   connect ... send a word, read the word ... all reached: count/reached + 1
    all       answer who connects, until every leader is done

The connections stay open until the group is made: one that closes before says which rank has died. A rank
closes its own after all have made their contexts, or after it has written why it fails, so what closed can be
told from the store.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from typing import TYPE_CHECKING

from pycomm.hosts.addresses import Address
from pycomm.hosts.meeting import SHORTEST_S, LostRankError
from pycomm.ports import listen
from pycomm.survivors.door import WORD, Door, connect, hello_of, is_reply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pycomm.hosts.meeting import Meeting
    from pycomm.hosts.records import Record

AT_ONCE = 64  # connections that a leader begins
REACH_S = 30.0  # for one that has published its address
PATIENCE_S = 1.0  # with a leader that is about to say whom it cannot reach
LOOK_S = 0.02  # between two looks into the store
KIND = "reach"  # of visits at a door
ADVICE = "Is a firewall in the way? All ports between hosts are used."


class Listener:
    """Answers the leaders that connect to this rank."""

    def __init__(self, address: Address, token: str, rank: int) -> None:
        self.socket = listen(address.ip)
        self.door = Door(self.socket, token, rank, KIND)
        self.accepted: list[socket.socket] = []
        self.port = self.socket.getsockname()[1]

    def answer(self) -> None:
        let_in, _ = self.door.look()
        self.accepted += [connection for connection, _ in let_in]

    def close(self) -> None:
        self.door.close()
        for one in (self.socket, *self.accepted):
            one.close()


class Probe:
    """The connections of a leader to the ranks of the other hosts; none on other ranks."""

    def __init__(
        self, meeting: Meeting, records: Sequence[Record], leaders: Sequence[int], token: str
    ) -> None:
        self.meeting, self.records, self.token, self.leaders = meeting, records, token, leaders
        self.leading = meeting.rank in leaders
        mine = meeting.hosts[meeting.rank]
        others = [rank for rank, host in enumerate(meeting.hosts) if host != mine]
        self.left = list(reversed(others)) if self.leading else []
        self.selector = selectors.DefaultSelector()
        self.begun: dict[int, float] = {}  # rank -> when; those that have not answered
        self.connections: list[socket.socket] = []

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.selector.close()

    def look(self) -> None:
        """Goes on, without waiting. Raises RuntimeError, which says who cannot be reached, or has died."""
        while self.left and len(self.begun) < AT_ONCE:
            self._begin(self.left.pop())
        for key, _ in self.selector.select(0):
            self._read(*key.data)
        now, meeting = time.monotonic(), self.meeting
        for rank, begun in self.begun.items():
            if now - begun > REACH_S or now > meeting.deadline:
                raise self._unreachable(rank, f" within {min(REACH_S, meeting.timeout):g} s")

    def done(self) -> bool:
        return not self.left and not self.begun

    def _begin(self, rank: int) -> None:
        record = self.records[rank]
        connection, status = connect(self.records[self.meeting.rank].ip, record.ip, record.port)
        self.connections.append(connection)
        if status:
            raise self._unreachable(rank, f" ({os.strerror(status)})")
        self.selector.register(connection, selectors.EVENT_WRITE, (connection, rank))
        self.begun[rank] = time.monotonic()

    def _read(self, connection: socket.socket, rank: int) -> None:
        said: bytes | OSError
        try:
            if self.selector.get_key(connection).events == selectors.EVENT_WRITE:  # connected, or it failed
                connection.send(hello_of(self.token, rank, KIND, self.meeting.rank))
                self.selector.modify(connection, selectors.EVENT_READ, (connection, rank))
                return
            said = connection.recv(WORD)
        except OSError as error:
            said = error
        if rank in self.begun and isinstance(said, bytes) and is_reply(said, self.token, rank, KIND):
            del self.begun[rank]
            return
        self.selector.unregister(connection)
        self.meeting.raise_failure()
        if self.meeting.all_here("made", self.meeting.world_size):
            return  # the rank has done its part, and left
        if rank not in self.begun:
            text = f"Rank {rank} ({self.meeting.label(rank)}, {self.records[rank].ip}) has died"
            raise LostRankError(f"{text} while the group was made.", rank)
        why = said.strerror if isinstance(said, OSError) else "somebody else answers there"
        raise self._unreachable(rank, f" ({why})")

    def _unreachable(self, rank: int, why: str) -> RuntimeError:
        me, label, records = self.meeting.rank, self.meeting.label, self.records
        return RuntimeError(
            f"Cannot reach rank {rank} ({label(rank)}, {records[rank].ip}) from rank {me} ({label(me)}, "
            f"{records[me].ip}) over {records[me].interface}{why}. {ADVICE}"
        )


def check_reach(meeting: Meeting, probe: Probe, listener: Listener) -> None:
    """Until every leader has reached the ranks of all other hosts. Raises RuntimeError, TimeoutError."""
    looked, told = 0.0, not probe.leading
    while True:
        listener.answer()
        probe.look()
        if not told and probe.done():
            meeting.tell("reached", True)
            told = True
        if time.monotonic() - looked > LOOK_S:
            meeting.check()
            if told and meeting.all_here("reached", len(probe.leaders)):
                return
            looked = time.monotonic()
        if time.monotonic() > meeting.deadline + PATIENCE_S:
            late = meeting.missing("reached", probe.leaders)
            raise TimeoutError(f"{late} did not reach the other hosts within {meeting.timeout:g} s.")
        time.sleep(SHORTEST_S)
