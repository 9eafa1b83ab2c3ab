"""From the user's batch to the microbatches of this rank.

    sharded=False    every rank is given the whole batch and takes its rows: no communication
    sharded=True     every data rank is given its own rows: one all_reduce counts what all of them hold

Weights of losses: see [Note: global mean] in ground/batch.py.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._pytree import tree_map

from pycomm.parallel.checks.cut import COUNTERS, TOLD, BatchCheck
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.batch import Microbatch, check_microbatches, inputs_and_targets, split_batch
from pycomm.parallel.parts import Parallelized

if TYPE_CHECKING:
    from pycomm.parallel.checks.choice import Count
    from pycomm.parallel.given import Batch, Tree
    from pycomm.parallel.run.router_loss import Loss

__all__ = ["Counted", "Options", "place", "prepare"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the caller of step() or evaluate() asks for, see api.py. Raises ValueError for values that cannot
    be.
    """

    loss_fn: Loss  # mean over the targets that count
    microbatches: int = 1
    clip: float | None = None  # largest norm of the gradient; None: it is not computed
    count: Count | None = None  # None: count_targets
    sharded: bool = False  # the batch is that of this data rank, not the whole one
    update: bool = True  # False: the gradients wait for those of the next call
    scaler: torch.amp.GradScaler | None = None  # of the loss

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip >= 0:
            raise ValueError(f"step(clip={self.clip!r}): the largest norm, 0 or more; None for no clipping")
        check_microbatches(self.microbatches)


class Counted(NamedTuple):
    """A batch, before it is known what the mean of its losses runs over."""

    batch: tuple[Tree, Tree]  # (inputs, targets) on the device: the whole, or this rank's rows
    pieces: list[Microbatch]  # of this rank
    totals: list[list[float]]  # of each counter: how many targets of each whole microbatch count
    counters: tuple[Count, ...]
    separate: bool

    @property
    def first(self) -> Microbatch:
        """Of this rank's microbatches, weighted by the first counter."""
        return self.by(self.counters[0])[0][0]

    def by(self, counter: Count) -> tuple[list[Microbatch], float]:
        """(the Microbatches, how many targets of the whole batch count)."""
        totals = self.totals[self.counters.index(counter)]
        targets, share = sum(totals), 1.0 if self.separate else 1.0 / len(totals)
        totals = totals if self.separate else [targets] * len(totals)
        return [
            dataclasses.replace(piece, total=total or 1.0, count_of=counter, share=share)
            for piece, total in zip(self.pieces, totals, strict=True)
        ], targets


def prepare(
    parts: Parallelized, batch: Batch, options: Options, check: BatchCheck, separate: bool = False
) -> Counted:
    """check: is told of the rows, and has the counters. separate: each microbatch is a batch of its own
    (PipeDream), whose loss is a mean over its own targets. Collective where the step is sharded.
    """
    rows = (1, 0) if options.sharded else parts.mesh.rows
    pieces, told, totals, problem = [], [], [], None
    try:
        batch = place(parts, batch)
        pieces = split_batch(batch, options.microbatches, *rows)
        whole = pieces if options.sharded else split_batch(batch, options.microbatches, 1, 0)
        told = check.told(*batch)
        totals = [[float(counter(piece.targets)) for piece in whole] for counter in check.candidates]
    except ValueError as error:
        if not options.sharded:
            raise
        problem = error
    if options.sharded:
        told, totals = _summed(parts, told, totals, options.microbatches, problem)
        check.heard(told, parts.mesh.data.size)
    else:
        check.heard(told)
    return Counted(batch, pieces, totals, check.candidates, separate)


def _summed(
    parts: Parallelized,
    told: list[float],
    totals: list[list[float]],
    microbatches: int,
    problem: ValueError | None,
) -> tuple[list[float], list[list[float]]]:
    """(told, totals) of all data ranks. These have different batches, so one may fail alone: `problem`, an
    error or None, travels with the numbers.
    """
    most, flat = COUNTERS * microbatches, sum(totals, [])
    numbers = torch.zeros(most + TOLD + 1, dtype=torch.float64)
    numbers[: len(flat)] = torch.tensor(flat, dtype=torch.float64)
    numbers[most:][: len(told)] = torch.tensor(told, dtype=torch.float64)
    numbers[-1] = problem is not None
    numbers = numbers.to(parts.device)
    comm.all_reduce(numbers, parts.mesh.data)
    *sums, problems = numbers.tolist()
    if problem is not None:
        raise problem
    if problems:
        raise ValueError(
            f"[rank {parts.mesh.world.rank}] {int(problems)} other ranks could not cut their batches; see "
            "the error there"
        )
    # The ranks of ring and ulysses count the same rows once each.
    counts = [total / (parts.plan.ring * parts.plan.ulysses) for total in sums[: len(flat)]]
    counts = [counts[at : at + microbatches] for at in range(0, len(counts), microbatches)]
    return sums[most:][: len(told)], counts


def place(parts: Parallelized, batch: Batch) -> tuple[Tree, Tree]:
    """(inputs, targets) on the device; floating inputs in the dtype in which the model computes."""
    inputs, targets = inputs_and_targets(batch)

    def move(leaf: Tree, dtype: torch.dtype | None = None) -> Tree:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(parts.device, dtype if leaf.is_floating_point() else None, non_blocking=True)

    return tree_map(lambda leaf: move(leaf, parts.compute_dtype), inputs), tree_map(move, targets)
