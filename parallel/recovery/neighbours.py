"""Copies of snapshots on the next host, so that the loss of a host loses none.

    host A   rank 0   memory 0, held by 0 and 1        copy of memory 2, held by 0 and 1
             rank 1   memory 1, held by 0 and 1        copy of memory 3
    host B   rank 2   memory 2, held by 2 and 3        copy of memory 0, held by 2 and 3
             rank 3   memory 3                         copy of memory 1

A rank of the next host holds the copy: hosts follow each other in a ring, in the order of their lowest ranks,
and the ranks of a host share the copies evenly. Ranks without a part in the plan write nothing and hold, too.
So a memory is lost only where its whole host dies and the whole next one with it.

    writer   memory.write(n) | optimizer goes on | sends header, pieces of the slot ... waits for the answer
    holder                     a thread for each writer: header "none" -> pieces -> header n -> answers

The bytes of a slot are the same in the copy, at the same place. A copy is whole when its writer has heard the
answer; the ranks meet before the next snapshot begins ([Note: whole snapshots] in memory.py), so that of two
snapshots one is whole everywhere, copies too.

Cost per snapshot: what a host's ranks have written goes over its link once, beside the next steps; where that
takes longer than the steps to the next snapshot, the next one waits. Memory: two slots per copy.

The end: each writer sends END, and the holders' threads return before a rank closes the crew's group. A
thread that still waits for a rank that closes would break the group for ranks that are a little behind.

What can go wrong: the holder dies, or the link. The crew's group breaks, and all take part in a recovery. The
holder has no memory: it answers so, and the writer raises it.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, ParamSpec

import torch

from pycomm import CommError
from pycomm.parallel.recovery.memory import CopyMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pycomm import Communicator
    from pycomm.parallel.recovery.memory import Memory

__all__ = ["Neighbours", "holders_of", "receive_slot", "send_slot"]

FOREVER = 1e8  # seconds: a snapshot may be far away
PIECE = 4 << 20  # bytes of a message
DATA, ANSWER = 71, 72  # tags of the crew's messages
END = -1  # in the place of a slot
P = ParamSpec("P")


def holders_of(writers: Sequence[int], hosts: Sequence[int]) -> dict[int, int]:
    """{writer: the rank that holds its copy}; empty where there is one host. writers: ranks; hosts: the
    number of each rank's host.
    """
    order = list(dict.fromkeys(hosts))
    if len(order) == 1:
        return {}
    found: dict[int, int] = {}
    for host in order:
        following = order[(order.index(host) + 1) % len(order)]
        others = [rank for rank, its in enumerate(hosts) if its == following]
        mine = [rank for rank in writers if hosts[rank] == host]
        found.update({rank: others[i % len(others)] for i, rank in enumerate(mine)})
    return found


def send_slot(comm: Communicator, memory: Memory, number: int, dst: int) -> None:
    """The snapshot of this number in a memory, to rank dst. Raises RuntimeError where dst has no memory."""
    slot, (start, end), header = memory.extent(number)
    comm.send(torch.tensor([slot, start, end, *header]), dst, DATA)
    for place in range(start, end, PIECE):
        data = bytearray(memory.bytes_at(place, min(PIECE, end - place)))
        comm.send(torch.frombuffer(data, dtype=torch.uint8), dst, DATA)
    if not _answer(comm, dst):
        raise RuntimeError(f"rank {dst} of the crew has no memory for a copy of the snapshot")


def _answer(comm: Communicator, dst: int) -> bool:
    answer = torch.zeros(1, dtype=torch.int64)
    comm.recv(answer, dst, ANSWER)
    return bool(answer.item())


def receive_slot(comm: Communicator, copy: CopyMemory, src: int, timeout: float | None = None) -> bool:
    """One snapshot, into a CopyMemory. The sender gets an error if it fails here. Returns False at the
    end.
    """
    said = torch.zeros(6, dtype=torch.int64)
    comm.recv(said, src, DATA, timeout=timeout)
    slot, start, end, *header = said.tolist()
    if slot == END:
        comm.send(torch.ones(1, dtype=torch.int64), src, ANSWER)
        return False
    buffer = torch.empty(min(PIECE, end - start), dtype=torch.uint8)
    fine = _done(copy.begin, slot)
    for place in range(start, end, PIECE):
        piece = buffer[: min(PIECE, end - place)]
        comm.recv(piece, src, DATA)  # also what cannot be kept: the sender is in the middle
        fine = fine and _done(copy.put, place, piece)
    fine = fine and _done(copy.finish, slot, header)
    comm.send(torch.tensor([int(fine)]), src, ANSWER)
    return True


def _done(call: Callable[P, None], *args: P.args, **options: P.kwargs) -> bool:
    """Whether there was memory for it."""
    try:
        call(*args, **options)
    except OSError:
        return False
    return True


class Neighbours:
    """The copies that a rank holds for others, and where its own goes.

    comm: of the crew, which ends the threads when it is closed or aborted. holder: the rank for this one's
    copy, None: nobody. tokens: of the memories of which this rank holds copies, by their ranks.
    """

    def __init__(self, comm: Communicator, holder: int | None, tokens: Mapping[int, bytes]) -> None:
        self.comm, self.holder = comm, holder
        self.copies = {rank: CopyMemory(token) for rank, token in tokens.items()}
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Copies are taken from now on."""
        for rank, copy in self.copies.items():
            thread = threading.Thread(
                target=self._receive, args=(rank, copy), name="pycomm copies", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def _receive(self, rank: int, copy: CopyMemory) -> None:
        with contextlib.suppress(CommError):  # until the group ends; what that means its next call says
            while receive_slot(self.comm, copy, rank, FOREVER):
                continue

    def send(self, memory: Memory, number: int) -> None:
        """This rank's snapshot to its holder."""
        if self.holder is not None:
            send_slot(self.comm, memory, number, self.holder)

    def end(self) -> None:
        """No snapshot comes any more. Collective over the ranks that write; waits for those it holds."""
        holder, self.holder = self.holder, None
        if holder is not None:
            self.comm.send(torch.full((6,), END), holder, DATA)
            _answer(self.comm, holder)
        self.join()

    def join(self) -> None:
        """After end(), or the group has ended: nothing is written any more."""
        for thread in self._threads:
            thread.join()
        self._threads = []
