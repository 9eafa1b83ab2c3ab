"""The rows of all data ranks, for what compares rows with each other: contrastive losses, in-batch negatives.

    rank 0    x0 x1   \\              / x0 x1 x2 x3     each rank computes the loss of the whole batch, and
    rank 1    x2 x3   /  all_gather  \\ x0 x1 x2 x3     differentiates its own rows of x

The loss of a rank counts with its share c_r / c of the targets, so the sum over the ranks is the loss, and
the gradient of x_r is the sum of what all ranks have for it (reduce_scatter): value and gradient are those of
one process. Chen et al. 2020 (SimCLR, with all devices' negatives).

Cost: one all_gather of 8 bytes and one of x in the forward, one reduce_scatter of x in the backward.

It holds for a whole batch only. So it is refused with several microbatches, with update=False, and where the
sequence is cut. A check that finds it in a model or a loss asks nothing more (checks/cut.py).
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import torch

from pycomm.parallel.ground import comm, differentiable

__all__ = ["RowsGathered", "gather_rows", "gathering", "take_gathered"]


class RowsGathered(Exception):
    """In a run of a check: the model or the loss takes care of the rows of other ranks."""


class _Step(NamedTuple):
    """The step, evaluation or prediction that runs. refusal: why rows cannot be gathered in it. counts: this
    rank has rows in it. given: what was gathered in it.
    """

    group: comm.Group
    refusal: str | None
    is_check: bool
    counts: bool
    given: list[torch.Tensor]


_running: contextvars.ContextVar[_Step | None] = contextvars.ContextVar("pycomm gather_rows", default=None)


@contextlib.contextmanager
def gathering(
    group: comm.Group, refusal: str | None = None, is_check: bool = False, counts: bool = True
) -> Iterator[None]:
    """Around the passes of a step. group: the data ranks. refusal, counts: see _Step. is_check: in a run
    aside.
    """
    token = _running.set(_Step(group, refusal, is_check, counts, []))
    try:
        yield
    finally:
        _running.reset(token)


def gather_rows(x: torch.Tensor) -> torch.Tensor:
    """The rows (dim 0) of all data ranks, in their order. Collective over these, in a model or a loss that
    parallel.step, evaluate or predict runs; elsewhere, as in one process, it returns x.

    x: (rows of this rank, ...), of the same dtype and other sizes on all ranks. Returns (rows of all, ...),
    differentiable: each rank's gradients reach the rank that the rows come from. Two views of a batch are
    gathered one by one. Raises ValueError with several microbatches, with update=False, in a block that is
    computed again in backward, and under ring and ulysses.
    """
    step = _running.get()
    if step is None:
        if torch._C._current_graph_task_id() >= 0:
            raise ValueError("gather_rows: called in backward, by a block that is computed again there")
        return x
    if step.is_check:
        raise RowsGathered
    if step.refusal is not None:
        raise ValueError(f"gather_rows: {step.refusal}")
    if x.dim() == 0:
        raise ValueError("gather_rows: x needs rows (dim 0); it has no dimensions")
    x = x if step.counts else x[:0]
    own = torch.tensor([x.shape[0]], device=x.device)
    sizes = torch.zeros(step.group.size, dtype=own.dtype, device=x.device)
    comm.all_gather(sizes, own, step.group)
    whole = differentiable.gather_sum(x, 0, sizes.tolist(), step.group)
    step.given.append(whole)
    return whole


def take_gathered() -> list[torch.Tensor]:
    """What was gathered in the step that runs, since it was asked for last."""
    step = _running.get()
    given = [] if step is None else list(step.given)
    if step is not None:
        step.given.clear()
    return given
