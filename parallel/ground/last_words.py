"""What a rank raised, told to the ranks that then wait for it in vain.

A rank whose model raises leaves the step, and often its process ends. The group knows no more than that:
"rank 1 died". So before the error goes on to the caller its text is left where the others can read it: in
memory that all ranks of a node share, and that outlives them. Nothing waits and nothing is broken by it:
where all ranks raise alike and the caller goes on, the groups are as they were.

    memory, one slot per rank     length | text        empty from the beginning of each step on
    rank 1    KeyError: 'x'  -->  leaves "KeyError: 'x'", raises
    rank 0    PeerError      -->  reads the slots, raises: ... rank 1 died ... Rank 1 had raised KeyError: 'x'

Rank 0 makes the memory (memfd, without a name), the others open it as /proc/<process>/fd/<number>; its first
bytes prove that it is the right one. Who cannot open it, as on another host, does without.
"""

import contextlib
import mmap
import os
import secrets
import struct

import torch
import torch.distributed as dist

from pycomm.parallel.ground import comm

__all__ = ["LastWords"]

TOKEN = 16  # bytes at the beginning
SLOT = 1024  # bytes per rank: the length of the text, and the text in UTF-8
LENGTH = struct.Struct("=q")


class LastWords:
    """group: all ranks; making it is collective over them. device: for the collective."""

    def __init__(self, group, device):
        self.group, self.memory = group, None
        if group.size == 1:
            return
        nbytes, fd, place = TOKEN + SLOT * group.size, None, [0, 0, 0, 0]
        if group.rank == 0:
            fd = os.memfd_create("pycomm last words")
            os.truncate(fd, nbytes)
            token = secrets.token_bytes(TOKEN)
            os.pwrite(fd, token, 0)
            place = [os.getpid(), fd, *struct.unpack("=qq", token)]
        place = torch.tensor(place, device=device)
        comm.broadcast(place, 0, group)
        pid, number, *token = place.tolist()
        self.memory = _map(f"/proc/{pid}/fd/{number}", nbytes, struct.pack("=qq", *token))
        opened = torch.ones(1, device=device)
        comm.all_reduce(opened, group)  # rank 0 may end right after this, and its descriptor with it
        if fd is not None:
            os.close(fd)

    @contextlib.contextmanager
    def told(self):
        """Around a step. An error of the wire that comes out of it has what other ranks raised; any other is
        left for them.
        """
        self._leave("")
        try:
            yield
        except dist.DistError as error:
            words = self.of_others()
            if words and error.args:
                error.args = (" ".join([str(error.args[0]), *words]), *error.args[1:])
            raise
        except BaseException as error:
            self.leave(error)
            raise

    def leave(self, error: BaseException | None) -> None:
        """What was raised here, for the others to find; None: nothing."""
        self._leave("" if error is None else f"{type(error).__name__}: {error}")

    def _leave(self, text):
        if self.memory is None:
            return
        start = TOKEN + SLOT * self.group.rank
        data = text.encode(errors="replace")[: SLOT - LENGTH.size]
        self.memory[start : start + LENGTH.size] = LENGTH.pack(0)
        self.memory[start + LENGTH.size : start + LENGTH.size + len(data)] = data
        self.memory[start : start + LENGTH.size] = LENGTH.pack(len(data))

    def of_others(self) -> list[str]:
        """A sentence for each rank that has left something."""
        found = []
        for rank in range(self.group.size if self.memory is not None else 0):
            start = TOKEN + SLOT * rank
            (length,) = LENGTH.unpack(self.memory[start : start + LENGTH.size])
            if length and rank != self.group.rank:
                start += LENGTH.size
                text = self.memory[start : start + length].decode(errors="replace")
                found.append(f"Rank {rank} had raised {text}")
        return found


def _map(path, nbytes, token):
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
