"""Which ranks a group has: parts of it (split), those that are left when it has lost some (shrink), and more
of them (grow).

[Note: tickets] A process that wants to join a group that grows knows only the store. In it, under
pycomm/grow/:

    tickets          how many have asked so far; who asks gets the next number
    alive/<ticket>   counted up by its process while it waits: one that has died does not count on
    place/<ticket>   what it is told: name of the new group, its rank, and what must be equal on all ranks
    served           up to which ticket rank 0 of a group that grew has looked

Rank 0 takes the tickets that count, and the others learn from it how many they are. What can go wrong: a
process dies after it was counted. Then the new group is never complete, and its creation fails within the
time limit on all ranks, which keep the group that they have.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypedDict, TypeVar

import torch
import torch.distributed as dist

from pycomm.errors import CommTimeoutError, MismatchError
from pycomm.exchanges import Exchanges
from pycomm.reductions import Reductions
from pycomm.rooted import Rooted

if TYPE_CHECKING:
    from pycomm import _C, env

__all__ = ["Membership"]

_PREFIX = "pycomm/grow/"
_COUNT_EVERY = 0.02  # seconds
_MEET_EVERY = 0.2  # seconds
_ALIVE_WITHIN = 0.5  # seconds in which a living process has counted on


Self = TypeVar("Self", bound="Membership")


class Terms(TypedDict):
    """What all ranks of a group that grows must know."""

    name: str
    world_size: int
    staging_bytes: int
    timeout: float


class Membership(Reductions, Exchanges, Rooted):
    """The part of a Communicator that makes others of it."""

    former_ranks: list[int]

    if TYPE_CHECKING:  # a Communicator's

        def __init__(
            self,
            store: dist.Store | _C.LocalStore | _C.PageStore,
            rank: int,
            world_size: int,
            **options: object,
        ) -> None: ...

    def split(self: Self, color: int | None, key: int = 0) -> Self | None:
        """Collective: ranks with equal color form a new group, ordered by (key, rank). color=None: this rank
        joins none and gets None.
        """
        mine = torch.tensor([-1 if color is None else int(color), int(key)], dtype=torch.int64)
        if color is not None and int(color) < 0:
            raise self._wrong("split", f"color={color} must not be negative")
        entries = self.all_gather(mine).tolist()
        self._splits += 1
        if color is None:
            return None
        members = sorted((entry[1], rank) for rank, entry in enumerate(entries) if entry[0] == int(color))
        ranks = [rank for _, rank in members]
        name = f"{self.name}/{self._splits}.{int(color)}"
        options = {"name": name, "timeout": self._timeout, "_origin": (self._comm, ranks)}
        return type(self)(self._store, ranks.index(self.rank), len(ranks), **options)

    def shrink(self: Self, exclude: Iterable[int] = (), *, timeout: float | None = None) -> Self:
        """Collective among the ranks that live, after a PeerError or CommTimeoutError: a new Communicator of
        them, in their order, numbered from 0. This one is closed. No store is needed: it may be gone with a
        rank.

        Dead ranks, those that have closed the group and processes that are stopped (SIGSTOP) are left out;
        who dies meanwhile is, too. Every other rank must call, with equal arguments, within the time limit. A
        rank that was left out and calls later gets AbortedError.

        exclude: living ranks to leave out as well; they must not call. A group that works can be made smaller
            so.
        timeout: seconds, above 0 and at most 1e8; None: the group's.

        The new one's `former_ranks` are the numbers of its ranks in this one.

        Over hosts ranks that are stopped or not heard may live: the others go on without them if they are
        more than half of the group's ranks, or half with the lowest (pycomm/survivors/).

        Raises ValueError where nothing is lost and nobody excluded; CommTimeoutError naming those who live
        and did not come; MismatchError where `exclude` differs; PeerError where a survivor failed by itself,
        say without memory, or where others may go on without these. Then all survivors get an error, this
        Communicator is as it was, and the call may be made again.
        """
        comm, ranks = self._comm.shrink([int(rank) for rank in exclude], self._limit(timeout))
        new = self._around(comm, self._settings)
        new.former_ranks = ranks
        return new

    @classmethod
    def _around(cls: type[Self], comm: _C.Communicator, settings: env.Settings) -> Self:
        """A Communicator of a group that is there already. Its store is its own memory, or over hosts the one
        by which it was made.
        """
        new = object.__new__(cls)
        store = comm.pages() if comm.point is None else comm.point.store
        new._take(comm, store, comm.describe()["name"], comm.timeout, settings)
        return new

    def grow(self: Self, store: dist.Store, *, at_least: int = 1, timeout: float | None = None) -> Self:
        """Collective: a new Communicator of these ranks, with their numbers, and behind them of all processes
        that wait in Communicator.replacement(store). This one is closed.

        store: a torch.distributed Store that all of them share.
        at_least: how many to wait for.
        timeout: seconds, above 0 and at most 1e8; None: the group's.

        Raises CommTimeoutError where fewer wait, and what Communicator() raises; then this one is as it was.
        """
        if at_least < 1:
            raise self._wrong("grow", f"at_least={at_least}: must be 1 or more")
        self._comm.raise_deferred_error()
        self._comm.hold_deferred_errors(True)
        try:
            new = self._grow(store, at_least, self._limit(timeout))
        finally:
            self._comm.hold_deferred_errors(False)
        try:
            self.close()
        except MismatchError as error:  # this rank has the new group, too
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return new

    def _grow(self: Self, store: dist.Store, at_least: int, limit: float) -> Self:
        deadline = time.monotonic() + limit
        terms: Terms | None = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                terms = self._invite(store, at_least, limit)
            except Exception as failure:  # whatever the store raises; the others must not wait for it
                error = failure
        while not self._meet(self.rank == 0):
            pass
        said = [json.dumps(terms) if error is None else None, str(error)]
        agreed, text = self._tell(said)
        if agreed is None:
            if error is not None and not isinstance(error, _TooFew):
                raise error
            where = f"[rank {self.rank}/{self.world_size}] grow: "
            raise CommTimeoutError(f"{where}{text}", rank=self.rank, world_size=self.world_size, op="grow")
        terms = json.loads(agreed)
        left = max(deadline - time.monotonic(), 1.0)
        return _join(type(self), store, self.rank, terms, left, self._timeout)

    @classmethod
    def replacement(cls: type[Self], store: dist.Store, *, timeout: float | None = None) -> Self:
        """A process that joins a group that grows: waits until its ranks call grow(store), and returns the
        new Communicator.

        store: a torch.distributed Store, the same as theirs.
        timeout: seconds, above 0 and at most 1e8; None: PYCOMM_TIMEOUT, else 300.

        Raises CommTimeoutError where no group has grown, and what Communicator() raises.
        """
        limit = cls._own_limit(timeout)
        deadline = time.monotonic() + limit
        ticket = store.add(f"{_PREFIX}tickets", 1)
        place = f"{_PREFIX}place/{ticket}"
        while not store.check([place]):
            if time.monotonic() > deadline:
                raise CommTimeoutError(f"replacement: no group has grown within the timeout of {limit:g} s")
            store.add(f"{_PREFIX}alive/{ticket}", 1)
            time.sleep(_COUNT_EVERY)
        terms = json.loads(store.get(place))
        left = max(deadline - time.monotonic(), 1.0)
        return _join(cls, store, terms["rank"], terms, left, terms["timeout"])

    @staticmethod
    def waiting(store: dist.Store) -> int:
        """How many processes have asked in replacement(store) to be taken in, and were not. One that has
        died meanwhile counts.
        """
        return store.add(f"{_PREFIX}tickets", 0) - store.add(f"{_PREFIX}served", 0)

    def _invite(self, store: dist.Store, at_least: int, limit: float) -> Terms:
        """On rank 0: gives all processes that wait their places."""
        deadline, next_meeting = time.monotonic() + limit, 0.0
        first = store.add(f"{_PREFIX}served", 0) + 1
        # by ticket: the last count, and when it has risen
        counts: dict[int, int] = {}
        counted: dict[int, float] = {}
        while True:
            now, last = time.monotonic(), store.add(f"{_PREFIX}tickets", 0)
            for ticket in range(first, last + 1):
                count = store.add(f"{_PREFIX}alive/{ticket}", 0)
                if ticket in counts and count > counts[ticket]:
                    counted[ticket] = now
                counts[ticket] = count
            waiting = [ticket for ticket, when in counted.items() if now - when < _ALIVE_WITHIN]
            # all have been looked at twice, some time apart: who lives has counted on
            if len(waiting) >= at_least and len(counts) == last - first + 1:
                break
            if now >= next_meeting:
                self._meet(False)
                next_meeting = now + _MEET_EVERY
            if now > deadline:
                raise _TooFew(f"{len(waiting)} of {at_least} wait within the timeout of {limit:g} s")
            time.sleep(2 * _COUNT_EVERY)
        number = store.add(f"{_PREFIX}groups", 1)
        terms: Terms = {
            "name": f"{self.name}/grown{number}",
            "world_size": self.world_size + len(waiting),
            "staging_bytes": self.describe()["staging_bytes"],
            "timeout": self._timeout,
        }
        for place, ticket in enumerate(sorted(waiting)):
            store.set(f"{_PREFIX}place/{ticket}", json.dumps({**terms, "rank": self.world_size + place}))
        store.add(f"{_PREFIX}served", last - first + 1)
        return terms

    def _meet(self, is_over: bool) -> bool:
        """While rank 0 looks for others all wait for all, and see who dies. is_over: on rank 0, whether it
        looks no more; elsewhere False. Returns it, on all ranks.
        """
        return bool(self.all_reduce(torch.tensor([float(is_over)]), "max"))

    def _tell(self, texts: Sequence[str | None]) -> list[str | None]:
        """What rank 0 says, on all ranks."""
        data = torch.tensor(list(json.dumps(texts).encode()), dtype=torch.uint8)
        size = self.broadcast(torch.tensor([data.numel()]))
        if self.rank != 0:
            data = torch.empty(int(size), dtype=torch.uint8)
        return json.loads(bytes(self.broadcast(data).tolist()))


class _TooFew(Exception):
    """Fewer processes wait than are wanted."""


def _join(cls: type[Self], store: dist.Store, rank: int, terms: Terms, left: float, timeout: float) -> Self:
    """The new group; made within `left` seconds, `timeout` for its operations."""
    new = cls(
        store,
        rank,
        terms["world_size"],
        name=terms["name"],
        timeout=left,
        staging_bytes=terms["staging_bytes"],
    )
    new._set_timeout(timeout)
    return new
