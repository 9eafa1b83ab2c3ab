"""The part of a batch that a rank works on, and what its loss counts for.

    batch, B rows          | microbatch 0        | microbatch 1        |     first by microbatch,
    rows of one            | rank 0   | rank 1   | rank 0   | rank 1   |     then over the data ranks (dp, ep)
    positions of a row     ring, ulysses: see sequence/sequence_split.py

A batch is (inputs, targets), or a dict whose "labels" are the targets. Inputs and targets are tensors, or
tuples, lists or dicts of tensors, with the rows as dim 0. All cuts are near even, so no number has to divide
another.

[Note: global mean] loss_fn returns the mean over the targets that count. The mean of means is wrong when
ranks or microbatches have different numbers of those, so each microbatch's loss is weighted with (its count)
/ (count of the whole batch), and gradients are summed. Counted are targets other than ignore_index (-100)
where they are whole numbers, and elements where they are real numbers; `count` of step() replaces that, and
may give fractions: the sum of weights, for a mean over weights.

[Note: no rows] A batch of few rows is cut into as many microbatches as it has rows. A data rank may then have
no row of a microbatch. A forward that others wait in must run all the same, and many models take no batch
without rows (x.view(len(x), -1)): so that rank runs a row of the batch once more (stand_in), and nothing of
it counts. Its loss is a zero whose gradients are zeros (run/loss.py), and modules that compute over all rows
leave it out (uncounted() of run/passes.py). As the row is one of the batch, it gives a number where one
process gets one.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pycomm.parallel.given import Batch, Tree
from pycomm.parallel.ground import comm

__all__ = [
    "CountFunction",
    "Microbatch",
    "check_microbatches",
    "count_targets",
    "inputs_and_targets",
    "row_of",
    "rows_in",
    "split_batch",
    "stand_in",
]


# targets -> how many of them count
CountFunction: TypeAlias = Callable[[Tree], torch.Tensor | float]


def count_targets(targets: Tree, ignore_index: int = -100) -> torch.Tensor:
    """How many values of `targets` (a tensor or a tree of them, whose first is taken) a mean loss runs over:
    a 0-dim int64 tensor.
    """
    first = next((leaf for leaf in tree_leaves(targets) if isinstance(leaf, torch.Tensor)), None)
    if first is None:
        raise ValueError("the targets of a batch hold no tensor")
    if first.is_floating_point():
        return torch.tensor(first.numel(), device=first.device)
    return (first != ignore_index).sum()


@dataclasses.dataclass(frozen=True, eq=False)
class Microbatch:
    """This rank's part of one microbatch. For total and count_of see [Note: global mean]."""

    inputs: Tree  # a tensor or a tree of them: this rank's rows, whole positions
    targets: Tree  # the same
    total: float = 1.0  # how many targets the mean of the batch runs over, on all ranks
    count_of: CountFunction = count_targets
    share: float = 1.0  # of what counts for each microbatch alike
    counts: bool = True  # False: its row stands in for none, see [Note: no rows]

    def call(self, model: Callable[..., Tree]) -> Tree:
        """The model's result for the inputs."""
        if isinstance(self.inputs, dict):
            return model(**self.inputs)
        if isinstance(self.inputs, (tuple, list)):
            return model(*self.inputs)
        return model(self.inputs)

    def shapes(self) -> tuple[tuple[torch.Size, torch.dtype], ...]:
        return tuple(
            (leaf.shape, leaf.dtype) for leaf in tree_leaves(self.inputs) if isinstance(leaf, torch.Tensor)
        )


def inputs_and_targets(batch: Batch) -> tuple[Tree, Tree]:
    """(inputs, targets) of a batch. Raises ValueError for what is none."""
    if isinstance(batch, dict):
        if "labels" not in batch:
            raise ValueError(
                f'a batch that is a dict needs "labels" among its keys; it has {", ".join(map(repr, batch))}'
            )
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise ValueError(
        f'a batch is a pair (inputs, targets) or a dict with "labels"; got {type(batch).__name__}'
    )


def check_microbatches(microbatches: int) -> None:
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"microbatches={microbatches!r}: a whole number, 1 or more")


def rows_in(batch: Batch | Tree) -> int:
    """Of the first tensor with dimensions; 0 where there is none."""
    leaves = tree_leaves(dict(batch) if hasattr(batch, "keys") else batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)


def row_of(batch: Tree) -> Tree:
    """The last row of all tensors."""
    return tree_map(_rows(-1, None), batch)


def stand_in(piece: Microbatch, row: tuple[Tree, Tree]) -> Microbatch:
    """row: (inputs, targets) to run where the piece has none, see [Note: no rows]."""
    if rows_in((piece.inputs, piece.targets)):
        return piece
    return dataclasses.replace(piece, inputs=row[0], targets=row[1], counts=False)


def split_batch(
    batch: Batch, microbatches: int, parts: int, part: int, takes_none: bool = False
) -> list[Microbatch]:
    """The Microbatches of data rank `part` of `parts`: as many as the batch has rows, at most. Some may be
    without rows here.

    takes_none: all `microbatches` of them, and a batch without rows too, if others have some. Raises
    ValueError, on every rank alike, for a batch without rows, or where tensors differ in rows.
    """
    inputs, targets = inputs_and_targets(batch)
    leaves = [leaf for leaf in tree_leaves((inputs, targets)) if isinstance(leaf, torch.Tensor)]
    if not leaves or any(leaf.dim() == 0 for leaf in leaves):
        raise ValueError(
            "a batch is made of tensors with the rows as dim 0; "
            + ("one has no dimensions" if leaves else "there is none")
        )
    rows = leaves[0].shape[0]
    if any(leaf.shape[0] != rows for leaf in leaves):
        raise ValueError(
            f"the tensors of a batch differ in rows (dim 0): {sorted({leaf.shape[0] for leaf in leaves})}"
        )
    if not rows and not takes_none:
        raise ValueError("a batch of 0 rows: it has no loss. Leave it out")
    result, start = [], 0
    for size in comm.even_sizes(rows, microbatches if takes_none else min(rows, microbatches)):
        sizes = comm.even_sizes(size, parts)
        first = start + sum(sizes[:part])
        pieces = tree_map(_rows(first, first + sizes[part]), (inputs, targets))
        result.append(Microbatch(*pieces))
        start += size
    return result


def _rows(start: int, stop: int | None) -> Callable[[Tree], Tree]:
    return lambda leaf: leaf[start:stop] if isinstance(leaf, torch.Tensor) else leaf
