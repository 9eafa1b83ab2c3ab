"""What a model returns, as a tree of tensors: their names, and the same tree with others in their places.

A leaf that is no tensor may be an object whose attributes are some (an output of one's own, which torch's
pytree does not know): it is looked into, and copied when a tensor in it is replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from pycomm.parallel.pipeline.absent import Absent
from pycomm.parallel.tensor.cut_logits import CutLogits

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree

__all__ = ["named_tensors", "part_of", "replaced", "tensors_in"]

Named = list[tuple[str, torch.Tensor]]


def tensors_in(tree: Tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def named_tensors(tree: Tree) -> Named:
    """[(where, tensor)] in the order of the tree, without those that only earlier stages have."""
    found = []
    for where, leaf in _named_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append((where, leaf))
        else:
            found += [(f"{where}.{name}", value) for name, value in _attributes(leaf)]
    return [(where, leaf) for where, leaf in found if not isinstance(leaf, Absent)]


def _named_leaves(tree: Tree) -> list[tuple[str, object]]:
    try:
        return [("".join(map(str, path)), leaf) for path, leaf in tree_flatten_with_path(tree)[0]]
    except ValueError:  # a kind of node that was registered without the names of its children
        return [(f"<{number}>", leaf) for number, leaf in enumerate(tree_flatten(tree)[0])]


def _attributes(leaf: object) -> Named:
    space = getattr(leaf, "__dict__", None)
    if not isinstance(space, dict) or isinstance(leaf, torch.nn.Module):
        return []
    return [(name, value) for name, value in space.items() if isinstance(value, torch.Tensor)]


def replaced(tree: Tree, make: Callable[[str, torch.Tensor], torch.Tensor]) -> Tree:
    """The tree with make(where, tensor) in the place of each tensor."""
    leaves, spec = tree_flatten(tree)
    made = []
    for (where, _), leaf in zip(_named_leaves(tree), leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf if isinstance(leaf, Absent) else make(where, leaf)
        elif _attributes(leaf):
            own, leaf = _attributes(leaf), copy.copy(leaf)
            vars(leaf).update({name: make(f"{where}.{name}", value) for name, value in own})
        made.append(leaf)
    return tree_unflatten(made, spec)


def part_of(leaf: torch.Tensor, most: int) -> torch.Tensor:
    """A copy of at most `most` of its values, the same places for the same shape; of logits that tp has cut,
    of this rank's columns.
    """
    leaf = leaf.for_loss()[0] if isinstance(leaf, CutLogits) else leaf
    leaf = leaf.detach().reshape(-1)
    return leaf[:: -(-len(leaf) // most) | 1].clone() if len(leaf) > most else leaf.clone()
