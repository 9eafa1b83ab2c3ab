"""What the kernels of one group share on one device: memory that all ranks have mapped, the number of the launch, the error record.

    block of a rank     [ words: hello, fingerprint, flags | half 0 of the staging | half 1 ]         kernels/signal.py says what they mean
    table               address of every rank's block, in this process
    local               number of the last launch, programs ended, failed
    record              what a wait that ended in vain waited for; in host memory, so that the host sees it without waiting for the device

A Context is made at the first call of a group and reused by all later ones. A block grows when a problem needs more: all ranks come to that
together, because they call the same problems in the same order; it waits for the device and for all ranks. Blocks that a CUDA graph has
captured are kept, with their own `local`, as long as the context, so that a replay finds what it was captured with.

Calls of one group run one after the other on every rank, in order of issue: a call in another stream waits for the one before by an
event. In a graph that is the order of the capture.

A launch that gave up a wait leaves wrong results and a record; the next call on the context raises CommTimeoutError, or MismatchError
where the fingerprints show that the rank waited for was computing something else. The context is broken then, on this rank; the peers'
waits end likewise.
"""

import zlib
from typing import NamedTuple

import torch

from pycomm.errors import CommTimeoutError, MismatchError

__all__ = ["Block", "Context", "fingerprint", "of"]

MAX_RANKS = 32  # words for hello and for fingerprints, as in kernels/signal.py
FIRST_FLAG = 2 * MAX_RANKS
ALIGNMENT = 4096
WHAT = {1: "its launch", 2: "its tiles", 3: "the result of a tile"}
# Looks at a word of this GPU's memory per second of a wait: about 1 us each on an H100-class GPU. The bound on a wait is of this order,
# not exact.
LOOKS_PER_SECOND = 1_000_000
LOOKS_PER_SECOND_INTERPRETED = 2_000


class Block(NamedTuple):
    """Memory of a size that problems up to it can use."""

    tensor: torch.Tensor  # uint8, registered
    table: torch.Tensor  # int64, one address per rank
    local: torch.Tensor  # int32
    flags: int
    half: int  # bytes

    @property
    def staging_offset(self):
        return aligned(4 * (FIRST_FLAG + self.flags))

    def words(self):
        return self.tensor[: 4 * (FIRST_FLAG + self.flags)].view(torch.int32)


def aligned(nbytes, to=ALIGNMENT):
    return (nbytes + to - 1) // to * to


def fingerprint(problem, config):
    """31 bits that differ between problems that do not fit together."""
    shared = problem._replace(rank=0)
    return zlib.crc32(repr((tuple(shared), tuple(config))).encode()) & 0x7FFFFFFF


class Context:
    """See the head of the file.

    communicator: the extension's; device: of the tensors; programs: that may run at the same time, None: the multiprocessors of the device
    divided by the ranks that share it.
    """

    def __init__(self, communicator, device, programs=None):
        self.communicator, self.device = communicator, torch.device(device)
        self.rank, self.world_size = communicator.rank, communicator.world_size
        if self.world_size > MAX_RANKS:
            raise ValueError(f"[rank {self.rank}/{self.world_size}] fused kernels: at most {MAX_RANKS} ranks")
        cuda = self.device.type == "cuda"
        self.record = torch.zeros(1, dtype=torch.int32, pin_memory=cuda)
        self.spans = {}
        self.agreed = set()
        self.block, self.captured = None, []
        self.stream = self.event = None
        self.launches = 0
        self.broken = None
        self.timeout = communicator.timeout
        self.looks_per_second = LOOKS_PER_SECOND if cuda else LOOKS_PER_SECOND_INTERPRETED
        self.programs = programs or (self.share_of_device() if cuda else 3)

    def share_of_device(self):
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        return max(2, processors // self.ranks_on_device())

    def ranks_on_device(self):
        """How many ranks of the group are on this rank's GPU; collective."""
        mine = torch.tensor(list(torch.cuda.get_device_properties(self.device).uuid.bytes), dtype=torch.uint8)
        everyone = mine.new_empty((self.world_size, *mine.shape))
        self.communicator.all_gather_flat(mine, everyone, False, 0, 0.0)
        return int((everyone == mine).all(dim=1).sum())

    @property
    def limit(self):
        return max(1, min(2**31 - 1, int(self.timeout * self.looks_per_second)))

    def where(self, op):
        return f"[rank {self.rank}/{self.world_size}] {op} #{self.launches}"

    def enter(self, problem, config, flags, half):
        """Before a launch: raises what an earlier one left, compares the problem with the other ranks' at its first use, makes room, and
        orders the current stream behind the last launch. Returns the Block to use."""
        self.check(problem.op)
        self.agree(problem, config)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.block is None or flags > self.block.flags or half > self.block.half:
            if capturing:
                raise ValueError(
                    f"{self.where(problem.op)}: the first call with a problem of this size cannot be captured, since it allocates"
                )
            self.grow(flags, half)
        if self.device.type == "cuda":
            if capturing:
                self.captured.append(self.block)
            elif self.event is not None and self.stream != torch.cuda.current_stream(self.device):
                torch.cuda.current_stream(self.device).wait_event(self.event)
        self.launches += 1
        return self.block

    def leave(self):
        """After a launch."""
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self.stream = torch.cuda.current_stream(self.device)
            self.event = self.event or torch.cuda.Event()
            self.event.record(self.stream)

    def grow(self, flags, half):
        """Collective. A new block for at least so many flags and bytes."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # no kernel of ours may still write to a peer's old block; the peers do the same
        old = self.block
        flags = aligned(max(flags, old.flags if old else 0), 1024)
        half = aligned(max(half, old.half if old else 0))
        nbytes = aligned(4 * (FIRST_FLAG + flags)) + 2 * half
        tensor = self.communicator.empty([nbytes], torch.uint8, self.device)
        table = torch.tensor(self.communicator.peer_addresses(tensor), dtype=torch.int64, device=self.device)
        self.block = Block(tensor, table, torch.zeros(4, dtype=torch.int32, device=self.device), flags, half)

    def spans_of(self, problem):
        """Where the pieces of the cut dimension begin, in rows of `inner`, as an int32 tensor on the device."""
        key = (problem.sizes, problem.inner)
        if key not in self.spans:
            begins = [sum(problem.sizes[:rank]) * problem.inner for rank in range(self.world_size + 1)]
            self.spans[key] = torch.tensor(begins, dtype=torch.int32, device=self.device)
        return self.spans[key]

    def agree(self, problem, config):
        """Collective at the first use of a problem: all ranks must have the same. Raises MismatchError on all."""
        key = (problem, config)
        if key in self.agreed:
            return
        text = repr((tuple(problem._replace(rank=0)), tuple(config))).encode()[:1024]
        mine = torch.zeros(1024, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everyone = mine.new_empty((self.world_size, 1024))
        self.communicator.all_gather_flat(mine, everyone, False, 0, 0.0)
        for peer in range(self.world_size):
            if not torch.equal(everyone[peer], mine):
                theirs = bytes(everyone[peer].tolist()).rstrip(b"\0").decode()
                raise MismatchError(
                    f"{self.where(problem.op)}: {text.decode()} here, {theirs} on rank {peer}. "
                    "All ranks must pass fitting shapes, dtypes and sizes.",
                    rank=self.rank, world_size=self.world_size, op=problem.op, sequence=self.launches, peer=peer,
                )  # fmt: skip
        self.agreed.add(key)

    def check(self, op):
        """Raises what a launch has left in the record."""
        code = int(self.record[0])
        if code == 0:
            return
        if self.broken is None:
            what, peer = divmod(code, MAX_RANKS)
            words = self.block.words()[MAX_RANKS : MAX_RANKS + self.world_size].tolist()
            place = {"rank": self.rank, "world_size": self.world_size, "op": op, "sequence": self.launches, "peer": peer}
            text = f"a launch before this waited for {WHAT[what]} of rank {peer} for about {self.timeout:g} s"
            if words[peer] != words[self.rank]:
                self.broken = MismatchError(
                    f"{self.where(op)}: {text}; the last problem of rank {peer} was another (fingerprint {words[self.rank]} here, "
                    f"{words[peer]} there). All ranks must call the same operations in the same order.", **place,
                )  # fmt: skip
            else:
                self.broken = CommTimeoutError(
                    f"{self.where(op)}: {text}. Its results are wrong and the group's fused kernels are broken.", **place
                )
        raise self.broken


def of(ranks, device):
    """The Context of a group (pycomm.fused.ranks.Ranks) on a device, made at the first call."""
    key = ("context", torch.device(device))
    if key not in ranks.cache:
        ranks.cache[key] = Context(ranks.communicator, device)
    return ranks.cache[key]
