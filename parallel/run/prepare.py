"""From the user's batch to the microbatches of this rank.

    sharded=False    every rank is given the whole batch and takes its rows: no communication
    sharded=True     every data rank is given its own rows: one all_reduce counts what all of them hold; where
                     one has no rows at all, it is given one of another rank to run

Weights of losses, and ranks without rows: see the notes in ground/batch.py.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._pytree import tree_map

from pycomm.parallel.checkpoint.agree import exchange_over
from pycomm.parallel.checks.cut import COUNTERS, TOLD, BatchCheck
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.batch import (
    Microbatch,
    check_microbatches,
    inputs_and_targets,
    row_of,
    rows_in,
    split_batch,
    stand_in,
)
from pycomm.parallel.parts import Parallelized

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    if not options.sharded:
        batch = place(parts, batch)
        whole = split_batch(batch, options.microbatches, 1, 0)
        check.heard(check.told(*batch))
        own = _Own(split_batch(batch, options.microbatches, *parts.mesh.rows), _counts(whole, check))
    else:
        batch, own = _own_rows(parts, batch, options.microbatches, check)
    row = row_of(batch)
    return Counted(
        batch, [stand_in(piece, row) for piece in own.pieces], own.totals, check.candidates, separate
    )


class _Own(NamedTuple):
    """See Counted."""

    pieces: list[Microbatch]  # without rows where this rank has none
    totals: list[list[float]]


def _counts(pieces: Sequence[Microbatch], check: BatchCheck) -> list[list[float]]:
    """How many targets of each count, by each counter."""
    rows = [rows_in((piece.inputs, piece.targets)) for piece in pieces]
    return [
        [float(counter(piece.targets)) if n else 0.0 for piece, n in zip(pieces, rows, strict=True)]
        for counter in check.candidates
    ]


def _own_rows(
    parts: Parallelized, batch: Batch, microbatches: int, check: BatchCheck
) -> tuple[tuple[Tree, Tree], _Own]:
    """(what this rank has, or a row to run where it has none; its part). The ranks have different batches, so
    one may fail alone: `problem` travels with the numbers. Collective over the data ranks.
    """
    most = COUNTERS * microbatches
    numbers = torch.zeros(most + TOLD + microbatches + 2, dtype=torch.float64)
    totals, told, of_rows, ends = numbers.split([most, TOLD, microbatches, 2])
    pieces, heard, problem = list[Microbatch](), list[float](), None
    counts = torch.zeros(0, dtype=torch.float64)
    try:
        batch = place(parts, batch)
        pieces = split_batch(batch, microbatches, 1, 0, takes_none=True)
        heard = check.told(*batch)
        told[: len(heard)] = torch.tensor(heard, dtype=torch.float64)
        counts = torch.tensor(_counts(pieces, check), dtype=torch.float64).flatten()
        totals[: len(counts)] = counts
        of_rows.copy_(torch.tensor([rows_in((each.inputs, each.targets)) for each in pieces]))
    except ValueError as error:
        problem = error
    ends[0], ends[1] = not of_rows[0], problem is not None
    sums = numbers.to(parts.device)
    comm.all_reduce(sums, parts.mesh.data)
    totals, told, of_rows, (without, problems) = sums.cpu().split([most, TOLD, microbatches, 2])
    _refuse_together(parts, problem, int(problems))
    used = int(of_rows.count_nonzero())  # the rest has rows nowhere
    if not used:
        raise ValueError("a batch of 0 rows on all data ranks: it has no loss. Leave it out")
    check.heard(told[: len(heard)].tolist(), parts.mesh.data.size)
    if without:
        batch = _with_row(parts, batch)
    # The ranks of ring and ulysses count the same rows once each.
    counted = totals[: len(counts)].view(-1, microbatches)[:, :used] / (parts.plan.ring * parts.plan.ulysses)
    return batch, _Own(pieces[:used], counted.tolist())


def _refuse_together(parts: Parallelized, problem: ValueError | None, problems: int) -> None:
    if problem is not None:
        raise problem
    if problems:
        raise ValueError(
            f"[rank {parts.mesh.world.rank}] {problems} other ranks could not cut their batches; see the "
            "error there"
        )


def _with_row(parts: Parallelized, batch: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """A row of the first data rank that has one, where this rank has none. Collective over the data ranks."""
    own = rows_in(batch)
    row = tree_map(_alone, row_of(batch))
    given = exchange_over(parts.mesh.data, parts.device, row if own else None)
    return batch if own else place(parts, next(each for each in given if each is not None))


def _alone(leaf: Tree) -> Tree:
    """Without the memory of the rows before it."""
    return leaf.to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf


def place(parts: Parallelized, batch: Batch) -> tuple[Tree, Tree]:
    """(inputs, targets) on the device; floating inputs in the dtype in which the model computes."""
    inputs, targets = inputs_and_targets(batch)

    def move(leaf: Tree, dtype: torch.dtype | None = None) -> Tree:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(parts.device, dtype if leaf.is_floating_point() else None, non_blocking=True)

    return tree_map(lambda leaf: move(leaf, parts.compute_dtype), inputs), tree_map(move, targets)
