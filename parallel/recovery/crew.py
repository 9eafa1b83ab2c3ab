"""All ranks of a run, those too for which the plan has no part, and torch's default group of the others.

    crew     a Communicator: agrees on who lives, takes replacements in, tells the ranks without a part
    group    torch.distributed's default group: the first ranks of the crew; made anew whenever these change

    killed: 1    crew 0 1 2 3 -> shrink -> 0 1 2        plan dp=1,tp=2 -> group 0 1, and 2 waits in the crew
    replaced     crew 0 1 2   -> grow   -> 0 1 2 3      plan dp=2,tp=2 -> group 0 1 2 3

Why two: the crew's operations wait for ranks that have no part in the training, and none in its groups; and
it can be shrunk when torch's groups are beyond use. A rank that has lost one in any group aborts all of its
groups, and the crew, so that whoever waits in one of them comes, too.

[Note: how long shrink waits] A rank that lives and does not come is busy, hangs, or has given up. It may be
as late as in an operation of torch's groups, whose limit the user has set, so shrink() waits as long, and at
most PYCOMM_TIMEOUT. If the rank has not come by then, all others raise an error that names it. They do not go
on without it by themselves: over hosts it might go on, too, with others that have not come. A rank that gives
up calls Resilient.leave(), and then the others go on at once.
"""

import contextlib
import datetime
import pickle
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pycomm import CommError, CommTimeoutError, Communicator
from pycomm.groups import host_mark, is_launched, note_joined, numbered, shrink_limit
from pycomm.parallel.recovery.store import CrewStore, HostsStore

__all__ = ["Crew"]

BACKEND = "pycomm"
STAGING = 1 << 18  # bytes per rank: the crew moves little
FOREVER = 1e8  # seconds: until a word comes, or somebody dies
JOINING = 30.0  # seconds for processes that wait already to be taken in
T = TypeVar("T")


class Crew:
    """comm: the Communicator; its limit is PYCOMM_TIMEOUT, as a rank that computes comes late. store: where
    replacements ask to be taken in, None: nowhere. timeout: seconds of the operations of torch's groups.
    """

    def __init__(self, comm: Communicator, store: dist.Store | None, timeout: float | None) -> None:
        self.comm, self.store, self.timeout = comm, store, timeout
        self.hosts: list[int] = []  # the number of each rank's host, as look() has found it
        # Of torch's groups; torch holds no more than its C++ part.
        self.group_store: CrewStore | HostsStore | None = None
        self._passed_over = 0  # tickets of processes that did not come

    @classmethod
    def of_all(cls, store: dist.Store | None, timeout: float | None) -> "Crew":
        """Collective over all ranks: of torch's default group, which is made where it is not there and a
        launcher has started this process. Raises ValueError for a group of another backend.
        """
        if not dist.is_initialized() and is_launched():
            dist.init_process_group(BACKEND)
        if dist.is_initialized():
            if dist.get_backend() != BACKEND:
                raise ValueError(
                    f"resilient: torch.distributed runs on {dist.get_backend()!r}, whose groups cannot go on "
                    'without a rank: init_process_group("pycomm")'
                )
            shared, rank, size = c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
            backend = c10d._get_default_group()._get_backend(torch.device("cpu"))
            if timeout is None:
                timeout = backend.options._timeout.total_seconds()
            else:  # the groups that a plan makes have that of the default group
                backend._set_default_timeout(datetime.timedelta(seconds=timeout))
        else:
            shared, rank, size = dist.HashStore(), 0, 1
        comm = Communicator(
            dist.PrefixStore("pycomm/crew", shared), rank, size, name="crew", staging_bytes=STAGING
        )
        return cls(comm, store, timeout)

    @classmethod
    def joined(cls, store: dist.Store | None, timeout: float | None) -> "Crew":
        """This process as a replacement: waits until the crew takes it in."""
        assert store is not None  # resilient() has seen to it
        while True:
            try:
                comm = Communicator.replacement(store, timeout=FOREVER)
            except CommError:  # another died while all joined: the crew begins anew
                continue
            note_joined(store)
            crew = cls(comm, store, timeout)
            crew.leave_groups()  # of init_process_group() at the top of the script, which have no peers
            return crew

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.world_size

    def look(self) -> None:
        """Collective: who is on which host."""
        self.hosts = numbered(self.exchange(host_mark()))

    def is_here(self, rank: int) -> bool:
        """Whether a rank is on this one's host."""
        return self.hosts[rank] == self.hosts[self.rank]

    def tell(self, value: T, forever: bool = False) -> T:
        """Rank 0's object, on all. Collective. forever: this rank has no part, and waits for a word."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = self.comm.broadcast(torch.tensor([data.numel()]), timeout=FOREVER if forever else None)
        if self.rank:
            data = torch.empty(int(size), dtype=torch.uint8)
        return pickle.loads(bytes(self.comm.broadcast(data).tolist()))

    def exchange(self, value: T) -> list[T]:
        """An object of every rank. Collective."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        longest = self.comm.all_reduce(torch.tensor([data.numel()]), "max")
        padded = torch.zeros(int(longest), dtype=torch.uint8)
        padded[: data.numel()] = data
        return [pickle.loads(bytes(row.tolist())) for row in self.comm.all_gather(padded)]

    def interrupt(self) -> None:
        """Whoever waits for this rank in the crew's group comes to shrink(), too."""
        self.comm.abort("a rank is lost: the others agree on who is left")

    def shrink(self) -> None:
        """Collective among those that live, after interrupt(): the crew is of them. A rank that was stopped
        while they made the group ends the call on all of them at its time limit; the next one leaves it out.
        Raises what Communicator.shrink() does. See [Note: how long shrink waits].
        """
        spans_hosts = max(self.hosts, default=0) > 0
        limit = shrink_limit(self.timeout, spans_hosts)
        for left in reversed(range(self.size)):
            try:
                self.comm = self.comm.shrink(timeout=limit)
                return
            except CommTimeoutError as error:
                text, absent, _ = str(error).partition(". Call shrink() again")  # one lives and did not come
                if left and not absent and error.op != "shrink":
                    continue
                if absent:
                    error.args = (
                        f"{text}. It hangs, or gave up the training without run.leave(); if it was only "
                        "busy, give par.resilient(timeout=) more seconds",
                    )
                raise

    def waiting(self) -> int:
        """How many processes wait to be taken in; for rank 0."""
        if self.store is None:
            return 0
        return max(0, Communicator.waiting(self.store) - self._passed_over)

    def grow(self, at_least: int, timeout: float = JOINING) -> bool:
        """Collective: takes in who waits. Returns whether at least so many came in time."""
        before = self.waiting() if self.rank == 0 else 0
        try:
            self.comm = self.comm.grow(cast(dist.Store, self.store), at_least=at_least, timeout=timeout)
        except CommTimeoutError:
            self._passed_over += before
            return False
        self._passed_over = 0
        return True

    def leave_groups(self, at_once: bool = True) -> None:
        """Ends torch's groups of this rank; the ranks that wait for it in one of them get an error. at_once:
        so do those that are in an operation in which this rank has done its part.
        """
        if dist.is_initialized():
            for group in list(c10d._world.pg_map) if at_once else ():
                with contextlib.suppress(Exception):  # one that is broken already
                    group.abort()
            dist.destroy_process_group()
        kept, self.group_store = self.group_store, None
        if kept is not None:
            kept.close()

    def grow_to(self, size: int, wait: float) -> None:
        """Collective: all wait for as many as are missing, a replacement too that is here already."""
        if wait and self.store is not None and size > self.size:
            self.grow(size - self.size, wait)

    def make_group(self, ranks: int) -> None:
        """torch's default group of the first `ranks` of the crew. Collective over the crew, after look()."""
        if max(self.hosts) > 0:
            self.group_store = HostsStore(self.comm)
        else:
            self.group_store = CrewStore(self.exchange, self.rank)
        self.timeout = self.tell(self.timeout)  # a replacement may not know it
        if self.rank >= ranks:
            return
        limit = None if self.timeout is None else datetime.timedelta(seconds=self.timeout)
        dist.init_process_group(
            BACKEND, store=self.group_store, rank=self.rank, world_size=ranks, timeout=limit
        )
