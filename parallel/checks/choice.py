"""Which rows of a batch a check runs, and which of their positions.

rows         those that differ most: in how many targets count, are negative, are not positive (of real
             numbers: are none), in the means of their inputs and targets; then some at equal distances. In
             the order of counts and means, so that the two halves of them differ
positions    all, unless these rows would be more than a microbatch: then a window of them, where rows differ
             most in how many targets count
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pycomm.parallel.checks.outputs import tensors_in
from pycomm.parallel.ground.batch import count_targets

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree

__all__ = [
    "Window",
    "are_uneven",
    "chosen_rows",
    "first_of",
    "rows_differ",
    "scores_of",
    "span_of",
    "taken",
    "window_of",
]

Count: TypeAlias = "Callable[[Tree], torch.Tensor | float]"  # of targets: how many of them count

SCORES = 5
MORE_ROWS = 6
FEW_TOKENS, MOST_TOKENS = 256, 1024  # rows times positions: always run, and never exceeded
MOST_OF_SQUARES = 1e-9  # relative: what rounding makes of counts that are fractions and alike


def first_of(targets: Tree) -> torch.Tensor:
    """The tensor of the targets that is counted. Raises ValueError where there is none."""
    found = next((leaf for leaf in tree_leaves(targets) if isinstance(leaf, torch.Tensor)), None)
    if found is None:
        raise ValueError("the targets of a batch hold no tensor")
    return found


def taken(tree: Tree, index: list[int]) -> Tree:
    """The tree with copies of these rows of its tensors."""
    return tree_map(lambda leaf: leaf[index] if isinstance(leaf, torch.Tensor) else leaf, tree)


def rows_differ(inputs: Tree) -> bool:
    """Whether there are two rows that are not the same."""
    return any(bool((leaf[1:] != leaf[:1]).any()) for leaf in tensors_in(inputs))


# Rows ------------------------------------------------------------------------------


def scores_of(targets: Tree, counter: Count) -> torch.Tensor:
    """(rows, SCORES): how many targets count, are negative, are not positive (of real numbers: how many
    count, are none, 0), and the means of two further targets, such as masks. On the CPU, in fp64.
    """
    first = first_of(targets)
    rows = len(first)
    if counter is not count_targets:
        counts = torch.tensor([float(counter(taken(targets, [row]))) for row in range(rows)])
    elif first.is_floating_point():
        counts = torch.full((rows,), float(first[0].numel()))
    else:
        counts = _sums(first != -100)
    if first.is_floating_point() or first.is_complex():
        others = _sums(first.isnan()), torch.zeros(rows)
    else:
        others = _sums(first < 0), _sums(first <= 0)
    more = [_means(leaf, rows) for leaf in tensors_in(targets)[1:3]]
    more += [torch.zeros(rows)] * (SCORES - 3 - len(more))
    return torch.stack([each.double().cpu() for each in (counts, *others, *more)], 1)


def span_of(targets: Tree) -> tuple[float, float]:
    """The smallest and the largest of the first targets, where these are whole numbers."""
    first = first_of(targets)
    if first.is_floating_point() or first.is_complex() or not first.numel():
        return 0.0, 0.0
    low, high = first.long().aminmax()
    return float(low), float(high)


def _sums(chosen: torch.Tensor) -> torch.Tensor:
    return chosen.reshape(len(chosen), -1).sum(1)


def are_uneven(rows: torch.Tensor, sums: torch.Tensor, squares: torch.Tensor) -> tuple[bool, ...]:
    """In which scores c rows differ: n rows are alike where n * sum(c^2) = sum(c)^2."""
    return tuple((rows * squares - sums.square() > MOST_OF_SQUARES * sums.square()).tolist())


def chosen_rows(inputs: Tree, targets: Tree, scores: torch.Tensor, number: int) -> list[int]:
    """`number` indices; rows come again where there are fewer."""
    rows, found = len(scores), []
    for column in scores.unbind(1):
        found += _ends(column)
    means = [_means(leaf, rows) for leaf in tensors_in(inputs)]
    first = next((each for each in means if _ends(each)), torch.zeros(rows))
    for each in (first, *(_means(leaf, rows) for leaf in tensors_in(targets))):
        found += _ends(each)
    found += [0, rows - 1, *range(0, rows, max(1, rows // MORE_ROWS)), *range(min(rows, number))]
    found = list(dict.fromkeys(found))[:number]
    found = (found * number)[:number]
    return sorted(found, key=lambda row: (scores[row, 0].item(), first[row].item(), row))


def _ends(values: torch.Tensor) -> list[int]:
    """The indices of the smallest and the largest, or none where all are equal."""
    low, high = int(values.argmin()), int(values.argmax())
    return [low, high] if values[low] < values[high] else []


def _means(leaf: torch.Tensor, rows: int) -> torch.Tensor:
    leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    if not leaf.numel() or leaf.shape[0] != rows:
        return torch.zeros(rows, dtype=torch.float64)
    return leaf.reshape(rows, -1).mean(1, dtype=torch.float64).nan_to_num().cpu()


# Positions ---------------------------------------------------------------------------


class Window(NamedTuple):
    """Positions [start, start + width) of `length`."""

    length: int
    start: int
    width: int

    def of(self, tree: Tree) -> Tree:
        """Each dim behind the first that has the length is cut."""

        def cut(leaf: Tree) -> Tree:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            for dim in range(1, leaf.dim()):
                if leaf.shape[dim] == self.length:
                    leaf = leaf.narrow(dim, self.start, self.width)
            return leaf

        return tree_map(cut, tree)


def window_of(inputs: Tree, targets: Tree, tokens: int, least: int = 1) -> Window | None:
    """Of rows, so that there are no more than `tokens` of their positions, within FEW_TOKENS and MOST_TOKENS,
    but `least` of each row. None: all positions, or there are none.
    """
    x, y = next(iter(tensors_in(inputs)), None), first_of(targets)
    if x is None or x.dim() < 2:
        return None
    rows, length = x.shape[:2]
    has_positions = x.dim() == 2 and not x.is_floating_point() or y.dim() > 1 and y.shape[1] == length
    width = max(min(max(tokens, FEW_TOKENS), MOST_TOKENS) // rows, least, 8)
    if not has_positions or width >= length:
        return None
    return Window(length, _start(y, length, width), width)


def _start(y: torch.Tensor, length: int, width: int) -> int:
    """Where rows differ most in how many targets count, of these where most count."""
    if y.is_floating_point() or y.dim() < 2 or y.shape[1] != length:
        return 0

    def what_counts(start: int) -> tuple[int, int]:
        counts = _sums(y[:, start : start + width] != -100)
        return int(counts.max() - counts.min()), int(counts.sum())

    return max(range(0, length - width + 1, width), key=what_counts)
