"""Batches of few rows, as the last one of an epoch: fewer microbatches, and rows that do not count. And what
a trainer's loader must offer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pycomm.parallel.ground.batch import inputs_and_targets

if TYPE_CHECKING:
    from pycomm.parallel.given import Batch, Tree
    from pycomm.parallel.ground.plan import Plan

__all__ = ["enough_rows", "fewer_microbatches"]


class Loader(Protocol):
    """What is asked of a trainer's loader."""

    worker_init_fn: Callable[[int], None] | None  # is given the number of a worker

    def __iter__(self) -> Iterator[Batch]: ...


def fewer_microbatches(batch: Batch, microbatches: int, plan: Plan) -> int:
    """`microbatches`, or as many as the rows of the batch allow; one at least. The loss is the same."""
    return max(1, min(microbatches, _rows(batch) // (plan.dp * plan.ep)))


def enough_rows(batch: Batch, plan: Plan) -> Batch:
    """A batch to be evaluated, with a row for each data rank at least: the last one again, with targets that
    do not count. Targets that are real numbers all count, and the batch is as it was.
    """
    missing = plan.dp * plan.ep - _rows(batch)
    inputs, targets = inputs_and_targets(dict(batch) if hasattr(batch, "keys") else batch)
    tensors = [leaf for leaf in tree_leaves(targets) if isinstance(leaf, torch.Tensor)]
    if missing <= 0 or any(leaf.is_floating_point() for leaf in tensors):
        return batch

    def again(leaf: Tree, value: float | None = None) -> Tree:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        last = leaf[-1:] if value is None else torch.full_like(leaf[-1:], value)
        return torch.cat([leaf, *[last] * missing])

    inputs, targets = tree_map(again, inputs), tree_map(lambda leaf: again(leaf, -100), targets)
    return {**inputs, "labels": targets} if hasattr(batch, "keys") else (inputs, targets)


def _rows(batch: Batch) -> int:
    """Of the first tensor; 0 where there is none, which par.step refuses."""
    leaves = tree_leaves(dict(batch) if hasattr(batch, "keys") else batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
