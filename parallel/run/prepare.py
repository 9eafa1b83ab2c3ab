"""From the user's batch to the microbatches of this rank.

    sharded=False    every rank is given the whole batch and takes its rows: no communication
    sharded=True     every data rank is given its own rows: one all_reduce counts what all of them hold

Weights of losses: see [Note: global mean] in ground/batch.py.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_map

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.batch import check_microbatches, count_targets, inputs_and_targets, split_batch

__all__ = ["Options", "place", "prepare"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the caller of step() or evaluate() asks for, see api.py. Raises ValueError for values that cannot
    be.
    """

    loss_fn: Callable  # (output, targets) -> mean over the targets that count
    microbatches: int = 1
    clip: float | None = None  # largest norm of the gradient; None: it is not computed
    count: Callable | None = None  # targets -> how many count; None: count_targets
    sharded: bool = False  # the batch is that of this data rank, not the whole one
    update: bool = True  # False: the gradients wait for those of the next call
    scaler: torch.amp.GradScaler | None = None  # of the loss

    def __post_init__(self):
        if self.clip is not None and not self.clip >= 0:
            raise ValueError(f"step(clip={self.clip!r}): the largest norm, 0 or more; None for no clipping")
        check_microbatches(self.microbatches)


def prepare(parts, batch, options, separate=False):
    """(the Microbatches of this rank, how many targets of the whole batch count). parts: Parallelized.
    separate: each is a batch of its own (PipeDream), whose loss is a mean over its own targets.
    """
    counter = options.count or count_targets
    if options.sharded:
        pieces, totals = _prepare_sharded(parts, batch, options.microbatches, counter)
    else:
        batch = place(parts, batch)
        pieces = split_batch(batch, options.microbatches, *parts.mesh.rows)
        whole = split_batch(batch, options.microbatches, 1, 0)
        totals = [float(counter(piece.targets)) for piece in whole]
    targets = sum(totals)
    share = 1.0 if separate else 1.0 / options.microbatches
    if not separate:
        totals = [targets] * options.microbatches
    pieces = [
        dataclasses.replace(piece, total=total or 1.0, count_of=counter, share=share)
        for piece, total in zip(pieces, totals, strict=True)
    ]
    return pieces, targets


def _prepare_sharded(parts, batch, microbatches, counter):
    """Ranks have different batches here, so one may fail alone: the failure travels with the sum of
    the counts.
    """
    pieces, counts, problem = [], [0] * microbatches, None
    try:
        pieces = split_batch(place(parts, batch), microbatches, 1, 0)
        counts = [float(counter(piece.targets)) for piece in pieces]
    except ValueError as error:
        problem = error
    totals = torch.tensor([*counts, problem is not None], dtype=torch.float64, device=parts.device)
    comm.all_reduce(totals, parts.mesh.data)
    *totals, problems = totals.tolist()
    if problem is not None:
        raise problem
    if problems:
        raise ValueError(
            f"[rank {parts.mesh.world.rank}] {int(problems)} other ranks could not cut their batches; see "
            "the error there"
        )
    # The ranks of ring and ulysses count the same rows once each.
    return pieces, [total / (parts.plan.ring * parts.plan.ulysses) for total in totals]


def place(parts, batch):
    """(inputs, targets) on the device; floating inputs in the dtype in which the model computes."""
    inputs, targets = inputs_and_targets(batch)

    def move(leaf, dtype=None):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(parts.device, dtype if leaf.is_floating_point() else None, non_blocking=True)

    return tree_map(lambda leaf: move(leaf, parts.compute_dtype), inputs), tree_map(move, targets)
