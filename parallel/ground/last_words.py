"""What a rank raised, told to the ranks that then wait for it in vain.

A rank whose model raises leaves the step, and often its process ends. The group knows no more than that:
"rank 1 died". So before the error goes on to the caller its text is left where the others can read it: in
memory that all ranks of a node share, and that outlives them. Nothing waits and nothing is broken by it:
where all ranks raise alike and the caller goes on, the groups are as they were.

    memory, one slot per rank     length | about | text     empty from the beginning of each step on
    rank 1    KeyError: 'x'  -->  leaves "KeyError: 'x'", raises
    rank 0    PeerError      -->  reads the slots, raises: ... rank 1 died ... Rank 1 had raised KeyError: 'x'

A rank may also have waited in vain itself: rank 3 sleeps, rank 1 waits for it in one group, and rank 0 for
rank 1 in another. So an error of the wire is left, too, with the rank that it is about, and who reads follows
these ranks from one to the next. Where the time limit has passed it gives them MEANWHILE to tell.

    rank 1    CommTimeoutError: rank 3 ...  -->  leaves it, about 3
    rank 0    CommTimeoutError: rank 1 ...  -->  Rank 1 had raised CommTimeoutError: ... rank 3 did not arrive

Rank 0 makes the memory (memfd, without a name), the others open it as /proc/<process>/fd/<number>; its first
bytes prove that it is the right one. Who cannot open it, as on another host, does without.
"""

import contextlib
import mmap
import os
import re
import secrets
import struct
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from pycomm import CommTimeoutError, MismatchError
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.mesh import Mesh

__all__ = ["LastWords"]

TOKEN = 16  # bytes at the beginning
SLOT = 1024  # bytes per rank: the length of the text, and the text in UTF-8
LENGTH = struct.Struct("=qq")  # of the text, and the rank that it is about, -1: none
MEANWHILE = 0.5  # seconds
_GROUP = re.compile(r"\[rank \d+/\d+ of group (\S+)\]")


class LastWords:
    """mesh: of the plan; making it is collective over all its ranks. device: for the collective."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.mesh, self.group = mesh, mesh.world
        self.memory: mmap.mmap | None = None
        group = self.group
        if group.size == 1:
            return
        nbytes, fd, numbers = TOKEN + SLOT * group.size, None, [0, 0, 0, 0]
        if group.rank == 0:
            fd = os.memfd_create("pycomm last words")
            os.truncate(fd, nbytes)
            token = secrets.token_bytes(TOKEN)
            os.pwrite(fd, token, 0)
            numbers = [os.getpid(), fd, *struct.unpack("=qq", token)]
        place = torch.tensor(numbers, device=device)
        comm.broadcast(place, 0, group)
        pid, number, *halves = place.tolist()
        self.memory = _map(f"/proc/{pid}/fd/{number}", nbytes, struct.pack("=qq", *halves))
        opened = torch.ones(1, device=device)
        comm.all_reduce(opened, group)  # rank 0 may end right after this, and its descriptor with it
        if fd is not None:
            os.close(fd)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Around a step. An error of the wire that comes out of it has what other ranks raised; it and any
        other are left for them.
        """
        self._leave("")
        try:
            yield
        except dist.DistError as error:
            about = self._about(error)
            if about >= 0 and error.args:
                place = f" In the plan it is rank {about}." if about != getattr(error, "peer", None) else ""
                error.args = (f"{error.args[0]}{place}", *error.args[1:])
                self._leave(f"{type(error).__name__}: {error.args[0]}", about)
            words = self._chain(about, isinstance(error, CommTimeoutError)) + self.of_others()
            if words and error.args:
                error.args = (" ".join([str(error.args[0]), *words]), *error.args[1:])
            raise
        except BaseException as error:
            self.leave(error)
            raise

    def leave(self, error: BaseException | None) -> None:
        """What was raised here, for the others to find; None: nothing."""
        self._leave("" if error is None else f"{type(error).__name__}: {error}")

    def of_others(self) -> list[str]:
        """A sentence for each rank that has left something of its own, no error of the wire."""
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        told = ((rank, *self._told(rank)) for rank in others)
        return [_sentence(rank, text) for rank, about, text in told if text and about < 0]

    def _about(self, error: dist.DistError) -> int:
        """The rank of the plan that an error of the wire names, -1: none."""
        peer = getattr(error, "peer", None)
        if peer is None or isinstance(error, MismatchError) or self.memory is None:
            return -1  # all ranks of a group raise a MismatchError
        named = _GROUP.match(str(error))
        ranks = self.mesh.ranks_of(named[1]) if named else None
        return ranks[peer] if ranks is not None and peer < len(ranks) else -1

    def _chain(self, about: int, waits: bool) -> list[str]:
        """Sentences of the rank that an error is about, of the rank that this one names, and so on."""
        found, seen, end = [], {self.group.rank}, time.monotonic() + MEANWHILE * waits
        while about >= 0 and about not in seen:
            after, text = self._told(about)
            if text and after >= 0:
                seen.add(about)
                found.append(_sentence(about, text))
                about = after
            elif text or time.monotonic() >= end:
                break
            else:
                time.sleep(MEANWHILE / 50)
        return found

    def _leave(self, text: str, about: int = -1) -> None:
        if self.memory is None:
            return
        start = TOKEN + SLOT * self.group.rank
        data = text.encode(errors="replace")[: SLOT - LENGTH.size]
        self.memory[start : start + LENGTH.size] = LENGTH.pack(0, -1)
        self.memory[start + LENGTH.size : start + LENGTH.size + len(data)] = data
        self.memory[start : start + LENGTH.size] = LENGTH.pack(len(data), about)

    def _told(self, rank: int) -> tuple[int, str]:
        """(the rank that it is about, the text) of what a rank has left; the text is empty where it has left
        nothing.
        """
        if self.memory is None:
            return -1, ""
        start = TOKEN + SLOT * rank
        length, about = LENGTH.unpack(self.memory[start : start + LENGTH.size])
        start += LENGTH.size
        return about, self.memory[start : start + length].decode(errors="replace")


def _sentence(rank: int, text: str) -> str:
    return f"Rank {rank} had raised {text}"


def _map(path: str, nbytes: int, token: bytes) -> mmap.mmap | None:
    """The memory at a path, or None where it is not the one with this token."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size != nbytes or os.pread(fd, TOKEN, 0) != token:
            return None
        return mmap.mmap(fd, nbytes)
    except OSError:
        return None
    finally:
        os.close(fd)
