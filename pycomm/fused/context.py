"""What the kernels of one group share on one device: memory that all ranks have mapped, the number of the
launch, the error record.

    block of a rank     [ hello, fingerprints ] [ flags | staging ] [ flags | staging ]
                        kernels/signal.py says what they mean
    table               address of every rank's block, in this process
    local               number of the last launch, programs ended, failed
    record              what went wrong: what a wait that ended in vain waited for, or two fingerprints that
                        differ; in host memory, so that the host sees it without waiting for the device

A Context is made at the first call of a group and reused by all later ones. A block grows when a problem
needs more: all ranks come to that together, because they call the same problems in the same order; it waits
for the device and for all ranks. Blocks that a CUDA graph has captured are kept, with their own `local`, as
long as the context, so that a replay finds what it was captured with.

Calls of one group run one after the other on every rank, in order of issue: a call in another stream waits
for the one before by an event. In a capture, whose calls must be in one stream, that is their order; a replay
runs where and when the program says.

[Note: places] Where ranks share a GPU, a launch has as many programs as the group's collectives have blocks
(csrc/cuda/budget.h), and stands in their line: it never runs beside an asynchronous collective of its group,
with which it would have twice the multiprocessors that are the rank's. Elsewhere both may run at once: a rank
alone on a GPU takes no room from those that it waits for.

Ranks compare a problem when they meet it first. Later launches compare its fingerprint, so that ranks that
call known problems in different orders find out. A launch that gave up a wait, or found a peer at another
problem, leaves wrong results and a record; the next call on the context raises CommTimeoutError or
MismatchError. The context is broken then, on this rank; the peers' waits end likewise.
"""

from __future__ import annotations

import contextlib
import zlib
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch

from pycomm import _C
from pycomm.errors import CommTimeoutError, MismatchError
from pycomm.fused import machine
from pycomm.fused.machine import exchange

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from pycomm.fused.config import Config
    from pycomm.fused.loading import Loaded
    from pycomm.fused.machine import Machine
    from pycomm.fused.problem import Op, Problem
    from pycomm.fused.ranks import Ranks

__all__ = ["Block", "Context", "of"]

MAX_RANKS = 32  # words for hello and for each half's fingerprints, as in kernels/signal.py
WORD_BYTES = 4 * 3 * MAX_RANKS
ALIGNMENT = 4096
WHAT, OTHER = {1: "the launch", 2: "tiles", 3: "the result of a tile"}, 4  # codes in the record
# Looks at a word of this GPU's memory per second of a wait: 2.2 million on an H100 (2026-11-22). The bound on
# a wait is of this order, not exact.
LOOKS_PER_SECOND = 2_000_000
LOOKS_PER_SECOND_INTERPRETED = 2_000


class Block(NamedTuple):
    """Memory of a size that problems up to it can use."""

    tensor: torch.Tensor  # uint8, registered
    table: torch.Tensor  # int64, one address per rank
    local: torch.Tensor  # int32
    flags: int  # of a half
    staging: int  # bytes of a half

    @property
    def staging_offset(self) -> int:
        """Of the first half; its flags lie in front of it."""
        return aligned(WORD_BYTES) + 4 * self.flags

    @property
    def half(self) -> int:
        """Bytes from one half to the other."""
        return 4 * self.flags + self.staging

    @property
    def wide(self) -> tuple[bool, bool]:
        """Which of the two are numbers of 64 bits to a kernel."""
        return self.staging_offset >= 2**31, self.half >= 2**31


class Use(NamedTuple):
    """What ranks compare: a launch and the room that it needs."""

    problem: Problem  # as all ranks have it
    config: Config
    flags: int
    nbytes: int


class _Place(TypedDict):
    """What an error has as attributes."""

    rank: int
    world_size: int
    op: str
    sequence: int
    peer: int


def aligned(nbytes: int, to: int = ALIGNMENT) -> int:
    return (nbytes + to - 1) // to * to


def describe(problem: Problem, config: Config, flags: int, nbytes: int) -> str:
    """What ranks compare, and what an error says of it."""
    shape = f"rows={problem.m}, n={problem.n}, k={problem.k}, {problem.dtype}"
    shape += f", activation={problem.activation}, bias={problem.bias}"
    cut = f"outer={problem.outer}, inner={problem.inner}"
    cut += f", sizes={list(problem.sizes)}, shards={list(problem.shards)}"
    return f"{problem.op}({shape}, {cut}) in {config} with {flags} flags and {nbytes} bytes"


class Context:
    """See the head of the file.

    device: of the tensors.
    """

    def __init__(self, communicator: _C.Communicator, device: torch.device | str, machine: Machine) -> None:
        self.communicator, self.device = communicator, torch.device(device)
        self.rank, self.world_size = communicator.rank, communicator.world_size
        if self.world_size > MAX_RANKS:
            raise ValueError(f"[rank {self.rank}/{self.world_size}] fused kernels: at most {MAX_RANKS} ranks")
        cuda = self.device.type == "cuda"
        self.record = torch.zeros(
            4, dtype=torch.int32, device="cpu", pin_memory=cuda
        )  # code, own fingerprint, the peer's
        self.spans: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}  # by sizes and inner
        self.agreed: dict[Use, int] = {}  # -> fingerprint
        self.started: dict[Hashable, Loaded] = {}  # what all ranks have loaded, by use
        self.block: Block | None = None
        self.captured: list[Block] = []
        self.stream: torch.cuda.Stream | None = None
        self.event: torch.cuda.Event | None = None
        self.launches = 0
        self.broken: MismatchError | CommTimeoutError | None = None
        self.timeout: float = communicator.timeout
        self.looks_per_second = LOOKS_PER_SECOND if cuda else LOOKS_PER_SECOND_INTERPRETED
        self.programs, self.shares_device = machine.programs, machine.ranks_on_device > 1

    @property
    def limit(self) -> int:
        return max(1, min(2**31 - 1, int(self.timeout * self.looks_per_second)))

    def where(self, op: Op) -> str:
        return f"[rank {self.rank}/{self.world_size}] {op} #{self.launches}"

    def enter(self, problem: Problem, config: Config, flags: int, nbytes: int) -> tuple[Block, int]:
        """Before a launch that needs so many flags and bytes of staging: raises what an earlier one left,
        compares the problem with the other ranks' at its first use, makes room, and orders the current stream
        behind the last launch. Returns the room and the fingerprint of the problem."""
        self.check(problem.op)
        mark = self.agree(problem, config, flags, nbytes)
        capturing = self.capturing()
        block = self.block
        if block is None or flags > block.flags or nbytes > block.staging:
            if capturing:
                raise ValueError(
                    f"{self.where(problem.op)}: the first call with a problem of this size cannot be "
                    "captured, since it allocates"
                )
            block = self.grow(flags, nbytes)
        if self.device.type == "cuda":
            if capturing:
                if not any(kept is block for kept in self.captured):
                    self.captured.append(block)
            elif self.event is not None and self.stream != torch.cuda.current_stream(self.device):
                torch.cuda.current_stream(self.device).wait_event(self.event)
        self.launches += 1
        return block, mark

    def capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Around the launch itself, and nothing else: see [Note: places]. A trace has when it runs there."""
        traced = _C.trace_active() and self.device.type == "cuda"
        if self.shares_device:
            self.communicator.enter_line(self.device)
        try:
            if traced:
                self.communicator.launch_begins(self.device, self.launches)
            yield
            if traced:
                self.communicator.launch_ends(self.device)
        finally:
            if self.shares_device:
                self.communicator.leave_line(self.device)

    def leave(self) -> None:
        """After a launch."""
        if self.device.type == "cuda" and not self.capturing():
            self.stream = torch.cuda.current_stream(self.device)
            self.event = self.event or torch.cuda.Event()
            self.event.record(self.stream)

    def grow(self, flags: int, nbytes: int) -> Block:
        """Collective. A new block for at least so many flags and bytes of staging."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(
                self.device
            )  # no kernel of ours may still write to a peer's old block; the peers do the same
        old = self.block
        flags = aligned(max(flags, old.flags if old else 0), ALIGNMENT // 4)
        staging = aligned(max(nbytes, old.staging if old else 0))
        tensor = self.communicator.empty(
            [aligned(WORD_BYTES) + 2 * (4 * flags + staging)], torch.uint8, self.device
        )
        table = torch.tensor(self.communicator.peer_addresses(tensor), dtype=torch.int64, device=self.device)
        local = torch.zeros(4, dtype=torch.int32, device=self.device)
        self.block = Block(tensor, table, local, flags, staging)
        return self.block

    def spans_of(self, problem: Problem) -> torch.Tensor:
        """Where the pieces of the cut dimension begin, in rows of `inner`, as an int32 tensor on
        the device.
        """
        key = (problem.sizes, problem.inner)
        if key not in self.spans:
            if self.capturing():
                raise ValueError(
                    f"{self.where(problem.op)}: the first call with sizes={list(problem.sizes)} cannot be "
                    "captured, since it copies"
                )
            begins = [sum(problem.sizes[:rank]) * problem.inner for rank in range(self.world_size + 1)]
            self.spans[key] = torch.tensor(begins, dtype=torch.int32, device=self.device)
        return self.spans[key]

    def agree(self, problem: Problem, config: Config, flags: int, nbytes: int) -> int:
        """Collective at the first use of a problem: all ranks must have the same. Raises MismatchError on
        all. Returns its fingerprint: 31 bits."""
        key = Use(problem.shared(), config, flags, nbytes)
        if key in self.agreed:
            return self.agreed[key]
        text = describe(*key)
        for peer, theirs in enumerate(exchange(self.communicator, text)):
            if theirs != text:
                raise MismatchError(
                    f"{self.where(problem.op)}: {text} here, {theirs} on rank {peer}. "
                    "All ranks must pass fitting shapes, dtypes and sizes, and need gradients alike.",
                    **self._place(problem.op, peer),
                )
        self.agreed[key] = zlib.crc32(text.encode()) & 0x7FFFFFFF
        return self.agreed[key]

    def _place(self, op: Op, peer: int) -> _Place:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "op": op,
            "sequence": self.launches,
            "peer": peer,
        }

    def check(self, op: Op) -> None:
        """Raises what a launch has left in the record."""
        code, ours, theirs, _ = self.record.tolist()
        if code == 0:
            return
        if self.broken is None:
            what, peer = divmod(code, MAX_RANKS)
            place = self._place(op, peer)
            if what == OTHER:
                known = {mark: describe(*key) for key, mark in self.agreed.items()}
                self.broken = MismatchError(
                    f"{self.where(op)}: a launch before this computed {known[ours]}, on rank {peer} "
                    f"{known.get(theirs, 'another problem')}. "
                    "All ranks must call the same operations in the same order.",
                    **place,
                )
            else:
                self.broken = CommTimeoutError(
                    f"{self.where(op)}: a launch before this waited for {WHAT[what]} of rank {peer} for "
                    f"about {self.timeout:g} s. "
                    "Its results are wrong and the group's fused kernels are broken.", **place,
                )  # fmt: skip
        raise self.broken


def of(ranks: Ranks, device: torch.device | str) -> Context:
    """The Context of a group, whose backend is pycomm, on a device; made at the first call."""
    device, known = torch.device(device), ranks.cache.contexts
    if device not in known:
        assert ranks.communicator is not None
        known[device] = Context(ranks.communicator, device, machine.of(ranks, device))
    return known[device]
