"""Whether all ranks were given the same batch, call step alike, have the same hyperparameters
(hyperparameters.py) and train the same parameters (zero/trained.py), found out by a sum that travels with
other numbers.

Each rank makes a number m of its batch. Over n ranks, the numbers are equal exactly where
n * sum(m^2) = sum(m)^2, so the sums of m and of m^2 say it, and no rank needs a gather.
"""

from typing import NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_leaves

from pycomm.parallel.given import Batch, Tree
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.batch import inputs_and_targets
from pycomm.parallel.ground.hyperparameters import Hyperparameters

__all__ = ["Call", "SameBatch", "differ", "mark_of", "powers"]

WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Marked(Protocol):
    """What has a mark, and names what differs where marks do."""

    def mark(self) -> int: ...

    def refuse(self, rank: int) -> None:
        """Raises ValueError where anything differs. Collective over all ranks."""


class Writes(Protocol):
    """What the user has written between calls (zero/writes.py). problem: what this rank would lose."""

    @property
    def problem(self) -> str | None: ...

    def refuse(self, call: str, rank: int) -> None:
        """Raises ValueError on every rank. Collective."""


class Call(NamedTuple):
    """What else all ranks must agree on."""

    update: bool = True  # gradients become a step, or wait
    scale: float = 1.0  # of the loss
    hyperparameters: Hyperparameters | None = None  # of the optimizer; None: they are not compared
    trained: Marked | None = None  # which parameters are; None: not compared
    writes: Writes | None = None  # of the user, to the parameters
    problem: str | None = None  # of this rank, for which all are to refuse the step


PLAIN = Call()


class SameBatch:
    """The check of one step. batch: None where ranks have batches of their own, which are not compared; the
    numbers are summed all the same, so that ranks that were called in two ways do not wait for each other.
    """

    def __init__(
        self, batch: Batch | None, world: comm.Group, device: torch.device, call: Call = PLAIN
    ) -> None:
        self.world = world  # all ranks
        self.scale, self.writes, self.problem = call.scale, call.writes, call.problem
        self.marked = [call.trained, call.hyperparameters]
        self.compares = batch is not None
        given = mark_of(inputs_and_targets(batch)) if self.compares else 0
        scale = mark_of(torch.tensor(call.scale)) if call.scale != 1.0 else 0
        mark = sum(each.mark() for each in self.marked if each is not None) % (1 << 20)
        lost = self.writes is not None and self.writes.problem is not None
        refused = [lost, self.problem is not None]
        numbers = [call.update, *refused, *powers(given), *powers(scale), *powers(mark)]
        self.numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
        self.work: comm.Work | None = None  # the sum under way

    def start(self) -> None:
        """Sums the numbers over all ranks, for callers that do not send them along with others."""
        self.work = comm.all_reduce(self.numbers, self.world, async_op=True)

    def check(self, sums: torch.Tensor | None = None) -> None:
        """Raises ValueError, on every rank, where batches, calls or hyperparameters differ, or a rank would
        lose a write of the user's. sums: of `numbers`; None: after start(). Only where the last three do it
        is collective over all ranks.
        """
        if sums is None and self.work is not None:
            self.work.wait()
        numbers = self.numbers if sums is None else sums
        updating, losing, problems, *powered = numbers.tolist()
        who, size = f"[rank {self.world.rank}] step:", self.world.size
        if losing and self.writes is not None:
            self.writes.refuse("step", self.world.rank)
        if problems:
            why = self.problem or f"{int(problems)} other ranks refuse it; see the error there"
            raise ValueError(f"{who} {why}; no parameter was changed")
        if updating not in (0, size):
            raise ValueError(
                f"{who} {int(updating)} of {size} ranks were called with update=True, the others with "
                "update=False. Update on all ranks in the same call; no parameter was changed"
            )
        if self.compares and differ(powered[0], powered[1], size):
            raise ValueError(
                f"{who} the ranks were given different batches. Give every rank the whole batch, or say "
                "sharded=True when each data rank has its own; no parameter was changed"
            )
        if differ(powered[2], powered[3], size):
            raise ValueError(
                f"{who} the scaler of this rank has the scale {self.scale}, others have another. Make it "
                "alike on all ranks, and leave scaler.update() to step; no parameter was changed"
            )
        if differ(powered[4], powered[5], size):
            for each in self.marked:
                if each is not None:
                    each.refuse(self.world.rank)


def powers(mark: int) -> tuple[float, float]:
    """What is to be summed over the ranks, in float64, which holds it exactly."""
    return float(mark), float(mark) ** 2


def differ(total: float, squares: float, size: int) -> bool:
    """Whether marks of `size` ranks are not all equal. total, squares: the sums of powers()."""
    return size * squares != total**2


def mark_of(tree: Tree) -> int:
    """A number below 2^20 that two different trees of tensors hardly share: from the bits of all values, so
    that no rounding and no nan is in it.
    """
    mark = 0
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            values = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            bits = values.reshape(-1).contiguous().view(WHOLE[values.element_size()]).long()
            places = torch.arange(1, bits.numel() + 1, device=bits.device)
            # The product and the sum wrap around, in the same way everywhere.
            mark = mark * 31 + int((bits * (2 * places * places + 1)).sum())
            mark += bits.numel()  # the bits of a zero add nothing
    return (mark ^ mark >> 23 ^ mark >> 44) % (1 << 20)
