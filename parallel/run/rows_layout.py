"""Where the tensors of a model's output have the rows of a batch. Inputs and targets have them as dim 0.

    (B, T, C)      dim 0                          (T, B, C)    dim 1: an LSTM's, by default
    (B T, C)       dim 0, each T, rows first      (T B, C)     dim 0, each T, rows last
    (layers, B, H) dim 1                          (8, C), ()   none: a table, a number of all rows

Sizes alone do not tell: T may be B, or a multiple of it. What tells is a run of the model with another number
of rows (rows_trial.py). For a model that does not run so, guesses_of has what the sizes allow.
"""

import weakref
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

__all__ = ["FIRST", "Layout", "Layouts", "guesses_of", "layouts_of", "named_tensors", "note_layouts"]


_known = weakref.WeakKeyDictionary()  # Parallelized -> {whether in training: Layouts of the output}


class Layout(NamedTuple):
    """Of one tensor. is_constant: of one without rows, that it is the same whatever the rows are."""

    dim: int | None = 0  # None: it has no rows
    rows_first: bool = True  # `dim` is (rows n), not (n rows); for n = 1 both
    is_constant: bool = False

    def fits(self, leaf, rows):
        return self.dim is None or leaf.dim() > self.dim and leaf.shape[self.dim] % rows == 0

    def take(self, leaf, rows, index):
        """Those rows of a tensor of `rows` rows."""
        if self.dim is None:
            return leaf
        sizes, at = ((rows, -1), self.dim) if self.rows_first else ((-1, rows), self.dim + 1)
        index = torch.tensor(index, device=leaf.device)
        return leaf.unflatten(self.dim, sizes).index_select(at, index).flatten(self.dim, self.dim + 1)

    def in_front(self, leaf, rows):
        """The tensor with the rows as dim 0."""
        if self.dim is None:
            return leaf
        if not self.rows_first:
            leaf = leaf.unflatten(self.dim, (-1, rows)).transpose(self.dim, self.dim + 1)
        return leaf.movedim(self.dim, 0)

    def positions(self, leaf, rows, length, index):
        """Those positions of it, or all of it where it does not have `length` of them for each row."""
        if self.dim is None:
            return leaf
        if self.dim + 1 < leaf.dim() and leaf.shape[: self.dim + 2] == (
            *leaf.shape[: self.dim],
            rows,
            length,
        ):
            return leaf.index_select(self.dim + 1, index)
        if self.dim == 1 and leaf.shape[:2] == (length, rows):
            return leaf.index_select(0, index)
        if leaf.shape[self.dim] == rows * length and length > 1:
            sizes, at = ((rows, length), 1) if self.rows_first else ((length, rows), 0)
            return (
                leaf.unflatten(self.dim, sizes)
                .index_select(self.dim + at, index)
                .flatten(self.dim, self.dim + 1)
            )
        return leaf


FIRST = Layout()


class Layouts(dict):
    """{where: Layout} of the tensors of an output. A tensor that is not named has the rows in front, or none
    where it cannot have.
    """

    def of(self, where, leaf, rows):
        if where in self and self[where].fits(leaf, rows):
            return self[where]
        is_wide = leaf.dim() > 1 or leaf.dim() == 1 and (rows > 1 or len(leaf) == 1)
        return FIRST if is_wide and FIRST.fits(leaf, rows) else Layout(None)

    def map(self, change, tree, rows):
        """tree with change(leaf, Layout) for each tensor, which has `rows` rows."""
        leaves, spec = tree_flatten(tree)
        names = (where for where, _ in named_tensors(tree))
        made = [
            change(leaf, self.of(next(names), leaf, rows)) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        return tree_unflatten(made, spec)

    def take(self, tree, rows, index):
        return self.map(lambda leaf, layout: layout.take(leaf, rows, index), tree, rows)

    def positions(self, tree, rows, length, index):
        return self.map(lambda leaf, layout: layout.positions(leaf, rows, length, index), tree, rows)


def guesses_of(output, rows):
    """[Layouts] that the sizes of an output allow: rows in front, as dim 1, or behind positions."""
    found = [Layouts()]
    named = named_tensors(output)
    second = {where: Layout(1) for where, leaf in named if leaf.dim() > 1 and leaf.shape[1] == rows}
    behind = {
        where: Layout(0, rows_first=False)
        for where, leaf in named
        if leaf.dim() and leaf.shape[0] % rows == 0 and leaf.shape[0] > rows
    }
    return found + [Layouts(each) for each in (second, behind) if each]


def named_tensors(tree):
    """[(where, tensor)] of a tree, in its order."""
    try:
        pairs = tree_flatten_with_path(tree)[0]
        named = [("".join(map(str, path)), leaf) for path, leaf in pairs]
    except ValueError:  # a kind of node that was registered without the names of its children
        named = [(f"<{number}>", leaf) for number, leaf in enumerate(tree_flatten(tree)[0])]
    return [(where, leaf) for where, leaf in named if isinstance(leaf, torch.Tensor)]


def layouts_of(parts):
    """Those of the output of a Parallelized's model in its mode, or None where they are not known."""
    return _known.get(parts, {}).get(parts.model.training)


def note_layouts(parts, layouts):
    _known.setdefault(parts, {})[parts.model.training] = layouts
