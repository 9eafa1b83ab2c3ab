"""Which snapshots there are, who holds them, and how a rank comes to those that it needs.

A generation is what the ranks of one plan have written: a memory for each of them. After a death two may be
there, the last one only in part.

    choose   every rank tells which memories it holds, and which snapshots are whole in them; all come to the
             same generation and number: the last that every memory of the generation has somewhere
    fetch    a host where nobody holds one of these memories gets it from the lowest rank that does, through
             the crew's messages; its other ranks open it
    read     every rank reads from memories of its host alone (snapshot.py)

With two hosts nothing is fetched, as each holds copies of the other's (neighbours.py).
"""

import threading
from typing import NamedTuple

from pycomm.parallel.ground.background import Background
from pycomm.parallel.recovery.memory import Address, CopyMemory, Memory, OwnMemory
from pycomm.parallel.recovery.neighbours import Neighbours, holders_of, receive_slot, send_slot
from pycomm.parallel.recovery.snapshot import Source

__all__ = ["Generation", "Holdings", "Writer"]


class Generation(NamedTuple):
    """The memories of the ranks of one plan.

    tokens: of all of them, by rank. held: {token: Memory} of those that this rank holds. own: this rank's;
    None: it has no part. neighbours: copies on other hosts.
    """

    serial: int
    tokens: list
    held: dict
    own: OwnMemory | None
    neighbours: Neighbours


class Holdings:
    """The generations that a rank holds."""

    def __init__(self):
        self.generations = []

    @property
    def last(self):
        return self.generations[-1]

    def clear(self):
        self.generations = []

    def end(self) -> None:
        """No snapshot is written any more. Collective over the ranks that write."""
        self.last.neighbours.end()

    def join(self):
        """After the crew's group has ended: no copy is written any more."""
        for generation in self.generations:
            generation.neighbours.join()

    def make(self, crew, active):
        """A new generation, without a snapshot. Collective over the crew."""
        own = OwnMemory() if active else None
        known = max((generation.serial for generation in self.generations), default=0)
        told = crew.exchange((known, None if own is None else own.address))
        serial, told = 1 + max(known for known, _ in told), [_address(one) for _, one in told]
        writers = [rank for rank, address in enumerate(told) if address is not None]
        tokens, holders = [told[rank].token for rank in writers], holders_of(writers, crew.hosts)
        mine = {writer: told[writer].token for writer, holder in holders.items() if holder == crew.rank}
        neighbours = Neighbours(crew.comm, holders.get(crew.rank), mine)
        held = {} if own is None else {own.token: own}
        held.update({copy.token: copy for copy in neighbours.copies.values()})
        there = [told[rank] for rank in writers if crew.is_here(rank)]
        if holders:
            copies = crew.exchange([copy.address for copy in neighbours.copies.values()])
            there += [_address(one) for r, some in enumerate(copies) if crew.is_here(r) for one in some]
        for address in there:
            if address.token not in held:
                held[address.token] = Memory.open(address)
        self.generations.append(Generation(serial, tokens, held, own, neighbours))
        neighbours.begin()
        return self.last

    def let_go(self):
        """Of all generations but the last, which is whole."""
        self.generations = self.generations[-1:]

    def choose(self, crew):
        """A Source of the last snapshot that is whole, or None. Collective over the crew."""
        told = crew.exchange([self._told(generation) for generation in self.generations])
        serials = sorted({serial for some in told for serial, _, _ in some}, reverse=True)
        for serial in serials:
            tokens, found = [], {}  # token -> {rank: (its Address, numbers)}
            for rank, some in enumerate(told):
                for its, named, held in some:
                    if its == serial:
                        tokens = named
                        for token, (address, numbers) in held.items():
                            found.setdefault(token, {})[rank] = _address(address), numbers
            number = _last_whole(tokens, found)
            if number is not None:
                has = {
                    token: {rank: address for rank, (address, numbers) in ranks.items() if number in numbers}
                    for token, ranks in found.items()
                }
                return Source(self._fetch(crew, tokens, has, number), number)
        return None

    def _told(self, generation):
        held = {token: (memory.address, list(memory.numbers())) for token, memory in generation.held.items()}
        return generation.serial, generation.tokens, held

    def _fetch(self, crew, tokens, has, number):
        """The memories with these tokens, on this host. has: {token: {rank: Address}}."""
        held = {token: memory for one in self.generations for token, memory in one.held.items()}
        held = {token: memory for token, memory in held.items() if crew.rank in has.get(token, ())}
        transfers = [
            (min(has[token]), crew.hosts.index(host), token)
            for token in tokens
            for host in dict.fromkeys(crew.hosts)
            if host not in [crew.hosts[rank] for rank in has[token]]
        ]
        got = {}
        for src, dst, token in transfers:  # all in the same order: the first that is not done can go on
            if crew.rank == src:
                send_slot(crew.comm, held[token], number, dst)
            elif crew.rank == dst:
                got[token] = CopyMemory(token)
                receive_slot(crew.comm, got[token], src)
        if transfers:
            for rank, some in enumerate(crew.exchange([memory.address for memory in got.values()])):
                for address in map(_address, some):
                    has[address.token][rank] = address
        return [held.get(token) or got.get(token) or _open_here(crew, has[token]) for token in tokens]


def _address(told):
    return None if told is None else Address(*told)


def _last_whole(tokens, found):
    """The last number that each memory of a generation has somewhere, or None."""
    numbers = [set().union(*[numbers for _, numbers in found.get(token, {}).values()]) for token in tokens]
    return max(set.intersection(*numbers), default=None) if numbers else None


def _open_here(crew, addresses):
    return Memory.open(addresses[min(rank for rank in addresses if crew.is_here(rank))])


class Writer:
    """Writes snapshots beside the program, and sends copies when they are written."""

    def __init__(self):
        self._background, self._written, self._failed = (
            Background("pycomm snapshot"),
            threading.Event(),
            False,
        )
        self._written.set()

    def start(self, generation, number, own, items):
        """One snapshot. Waits for the one before, and raises as wait()."""
        self.wait()
        self._written.clear()
        self._background.start(lambda: self._run(generation, number, own, items))

    def _run(self, generation, number, own, items):
        self._failed = True
        try:
            generation.own.write(number, own, items)
            self._failed = False
        finally:
            self._written.set()
        generation.neighbours.send(generation.own, number)

    def wait_written(self):
        """Until the values may change. Raises what the writing raised."""
        self._written.wait()
        if self._failed:
            self._failed = False
            self._background.wait()

    def wait(self):
        """Until copies are there, too."""
        self._background.wait()
