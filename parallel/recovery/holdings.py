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

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pycomm.parallel.ground.background import Background
from pycomm.parallel.recovery.memory import Address, CopyMemory, Memory, OwnMemory
from pycomm.parallel.recovery.neighbours import Neighbours, holders_of, receive_slot, send_slot
from pycomm.parallel.recovery.snapshot import Source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pycomm.parallel.recovery.crew import Crew
    from pycomm.parallel.recovery.snapshot import Item, Own

__all__ = ["Generation", "Holdings", "Writer"]


class Generation(NamedTuple):
    """The memories of the ranks of one plan."""

    serial: int
    tokens: list[bytes]  # of all of them, by rank
    held: dict[bytes, Memory]  # token -> its memory, of those that this rank holds
    own: OwnMemory | None  # this rank's; None: it has no part
    neighbours: Neighbours  # copies on other hosts


Held: TypeAlias = tuple[Address, list[int]]  # a memory, and the snapshots that are whole in it


class _Told(NamedTuple):
    """What a rank says of a generation."""

    serial: int
    tokens: list[bytes]
    held: dict[bytes, Held]


class Holdings:
    """The generations that a rank holds."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []

    @property
    def last(self) -> Generation:
        return self.generations[-1]

    def clear(self) -> None:
        self.generations = []

    def end(self) -> None:
        """No snapshot is written any more. Collective over the ranks that write."""
        self.last.neighbours.end()

    def join(self) -> None:
        """After the crew's group has ended: no copy is written any more."""
        for generation in self.generations:
            generation.neighbours.join()

    def make(self, crew: Crew, active: bool) -> Generation:
        """A new generation, without a snapshot. Collective over the crew."""
        own = OwnMemory() if active else None
        known = max((generation.serial for generation in self.generations), default=0)
        told = crew.exchange((known, None if own is None else own.address))
        serial = 1 + max(known for known, _ in told)
        writers = {rank: address for rank, (_, address) in enumerate(told) if address is not None}
        tokens = [address.token for address in writers.values()]
        holders = holders_of(list(writers), crew.hosts)
        mine = {writer: writers[writer].token for writer, holder in holders.items() if holder == crew.rank}
        neighbours = Neighbours(crew.comm, holders.get(crew.rank), mine)
        held: dict[bytes, Memory] = {} if own is None else {own.token: own}
        held.update({copy.token: copy for copy in neighbours.copies.values()})
        there = [address for rank, address in writers.items() if crew.is_here(rank)]
        if holders:
            copies = crew.exchange([copy.address for copy in neighbours.copies.values()])
            there += [one for rank, some in enumerate(copies) if crew.is_here(rank) for one in some]
        for address in there:
            if address.token not in held:
                held[address.token] = Memory.open(address)
        self.generations.append(Generation(serial, tokens, held, own, neighbours))
        neighbours.begin()
        return self.last

    def let_go(self) -> None:
        """Of all generations but the last, which is whole."""
        self.generations = self.generations[-1:]

    def choose(self, crew: Crew) -> Source:
        """The last snapshot that is whole. Collective over the crew. Raises RuntimeError where none is."""
        told = crew.exchange([self._told(generation) for generation in self.generations])
        serials = sorted({serial for some in told for serial, _, _ in some}, reverse=True)
        for serial in serials:
            tokens: list[bytes] = []
            found: dict[bytes, dict[int, Held]] = {}  # token -> {rank: its memory}
            for rank, some in enumerate(told):
                for its, named, held in some:
                    if its == serial:
                        tokens = named
                        for token, memory in held.items():
                            found.setdefault(token, {})[rank] = memory
            number = _last_whole(tokens, found)
            if number is not None:
                has = {
                    token: {rank: address for rank, (address, numbers) in ranks.items() if number in numbers}
                    for token, ranks in found.items()
                }
                return Source(self._fetch(crew, tokens, has, number), number)
        raise RuntimeError(
            "no snapshot is whole: a part was held by lost ranks alone (over hosts: a host and the next)"
        )

    def _told(self, generation: Generation) -> _Told:
        held = {token: (memory.address, list(memory.numbers())) for token, memory in generation.held.items()}
        return _Told(generation.serial, generation.tokens, held)

    def _fetch(
        self, crew: Crew, tokens: Sequence[bytes], has: dict[bytes, dict[int, Address]], number: int
    ) -> list[Memory]:
        """The memories with these tokens, on this host. has: which ranks have them."""
        held = {token: memory for one in self.generations for token, memory in one.held.items()}
        held = {token: memory for token, memory in held.items() if crew.rank in has.get(token, ())}
        transfers = [
            (min(has[token]), crew.hosts.index(host), token)
            for token in tokens
            for host in dict.fromkeys(crew.hosts)
            if host not in [crew.hosts[rank] for rank in has[token]]
        ]
        got: dict[bytes, CopyMemory] = {}
        for src, dst, token in transfers:  # all in the same order: the first that is not done can go on
            if crew.rank == src:
                send_slot(crew.comm, held[token], number, dst)
            elif crew.rank == dst:
                got[token] = CopyMemory(token)
                receive_slot(crew.comm, got[token], src)
        if transfers:
            for rank, some in enumerate(crew.exchange([memory.address for memory in got.values()])):
                for address in some:
                    has[address.token][rank] = address
        return [held.get(token) or got.get(token) or _open_here(crew, has[token]) for token in tokens]


def _last_whole(tokens: Sequence[bytes], found: Mapping[bytes, Mapping[int, Held]]) -> int | None:
    """The last number that each memory of a generation has somewhere, or None."""
    numbers = [set().union(*[numbers for _, numbers in found.get(token, {}).values()]) for token in tokens]
    return max(set.intersection(*numbers), default=None) if numbers else None


def _open_here(crew: Crew, addresses: Mapping[int, Address]) -> Memory:
    return Memory.open(addresses[min(rank for rank in addresses if crew.is_here(rank))])


class Writer:
    """Writes snapshots beside the program, and sends copies when they are written."""

    def __init__(self) -> None:
        self._background, self._written, self._failed = (
            Background("pycomm snapshot"),
            threading.Event(),
            False,
        )
        self._written.set()

    def start(self, generation: Generation, number: int, own: Own, items: Sequence[Item]) -> None:
        """One snapshot, of a rank with a part. Waits for the one before, and raises as wait()."""
        memory, neighbours = generation.own, generation.neighbours
        assert memory is not None
        self.wait()
        self._written.clear()
        self._background.start(lambda: self._run(memory, neighbours, number, own, items))

    def _run(
        self, memory: OwnMemory, neighbours: Neighbours, number: int, own: Own, items: Sequence[Item]
    ) -> None:
        self._failed = True
        try:
            memory.write(number, own, items)
            self._failed = False
        finally:
            self._written.set()
        neighbours.send(memory, number)

    def before_updates(self, opt: torch.optim.Optimizer) -> None:
        """The optimizer waits until the snapshot of the values that it changes is written."""
        with contextlib.suppress(AttributeError):
            opt.register_step_pre_hook(lambda *_: self.wait_written())

    def wait_written(self) -> None:
        """Until the values may change. Raises what the writing raised."""
        self._written.wait()
        if self._failed:
            self._failed = False
            self._background.wait()

    def wait(self) -> None:
        """Until copies are there, too."""
        self._background.wait()
