"""Losses and metrics of a few rows: their values, what counts for them, and their gradients by the outputs.

They are called with copies of the outputs, in fp64 if they take that, else in fp32, else as they are. The
gradients stop there: no parameter gets one. What a measure without gradients uses (an argmax) is what changes
it: each output is negated, and made nan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from pycomm.parallel.checks.outputs import named_tensors, part_of, replaced
from pycomm.parallel.tensor import cross_entropy
from pycomm.parallel.tensor.cut_logits import CutLogits

if TYPE_CHECKING:
    from pycomm.parallel.checks.choice import Count
    from pycomm.parallel.given import Tree

__all__ = [
    "LARGEST",
    "Group",
    "Leaves",
    "Measure",
    "Measured",
    "Refused",
    "Seen",
    "Unweighted",
    "measured",
    "halves_of",
]

LARGEST = 1 << 21  # values of a tensor that are compared

Measure: TypeAlias = "Callable[[Tree, Tree], torch.Tensor | float]"  # of (output, targets): a loss or metric
Leaves = dict[str, torch.Tensor]


class Half(NamedTuple):
    """A loss of a half of the positions."""

    counts: tuple[float, ...]
    value: float


class Measured(NamedTuple):
    """A loss or metric of one group."""

    counts: tuple[float, ...]  # of targets, by each counter
    value: float | None = None  # None: a mean that is known (parallel.cross_entropy)
    gradients: dict[str, torch.Tensor] = {}  # by the outputs that it uses
    used: frozenset[str] = frozenset()  # outputs that it uses, without a gradient too
    wide: torch.dtype = torch.float64  # in which it was computed
    halves: tuple[Half, ...] = ()


class Seen(NamedTuple):
    """What one run gave, on the ranks that have the last stage."""

    shapes: dict[str, torch.Size]
    leaves: Leaves  # of real numbers, at most LARGEST values of each
    measured: dict[str, Measured]
    halves: dict[str, Halves] = {}  # of each measure that takes them


class Group(NamedTuple):
    """Rows of a run. targets: of this rank's positions."""

    targets: Tree
    measures: Mapping[str, Measure] | None  # None: the outputs themselves are what is asked for
    counters: tuple[Count, ...]
    pieces: int = 0  # positions of this rank, where the sequence is cut


def measured(output: Tree, group: Group, wide: dict[str, int]) -> Seen:
    """wide: name of a measure -> in which of _WIDTHS it was computed before. Raises what measures raise."""
    found = {
        name: _measure(measure, output, group, name, wide) for name, measure in (group.measures or {}).items()
    }
    named = named_tensors(output)
    used = None if group.measures is None else {where for each in found.values() for where in each.used}
    judged = [(where, leaf) for where, leaf in named if leaf.is_floating_point() and leaf.dim()]
    leaves = {where: part_of(leaf, LARGEST) for where, leaf in judged if used is None or where in used}
    return Seen({where: leaf.shape for where, leaf in named}, leaves, found)


class Halves(NamedTuple):
    """Of a loss: for the halves of positions, and for halves that share one position."""

    apart: tuple[Half, ...]
    sharing: tuple[Half, ...]


def halves_of(output: Tree, group: Group, wide: dict[str, int]) -> dict[str, Halves]:
    """Of the measures that take them; none where positions are not dim 1 of the only targets. Targets are
    never changed: a kernel may read with them where there is no memory.
    """
    found: dict[str, Halves] = {}
    targets = group.targets
    if not isinstance(targets, torch.Tensor) or targets.dim() < 2 or targets.shape[1] in (1, len(targets)):
        return found
    group = group._replace(pieces=targets.shape[1])
    for name, measure in (group.measures or {}).items():
        with contextlib.suppress(Exception):  # of the measure, which does not take fewer positions
            pair = [_halves(measure, output, group, _WIDTHS[wide.get(name, 0)], shared) for shared in (0, 1)]
            found[name] = Halves(*pair)
    return found


def _measure(measure: Measure, output: Tree, group: Group, name: str, wide: dict[str, int]) -> Measured:
    counts = tuple(float(counter(group.targets)) for counter in group.counters)
    if measure is cross_entropy:
        logits = output if isinstance(output, torch.Tensor) else output.logits
        return Measured(
            counts, used=frozenset(where for where, leaf in named_tensors(output) if leaf is logits)
        )
    if not any(counts):
        return Measured(counts, 0.0)
    for number in range(wide.get(name, 0), len(_WIDTHS)):
        try:
            found = _computed(measure, output, group.targets, counts, _WIDTHS[number])
        except Exception:  # of the measure: it has tensors of its own in fp32, as weights of classes
            if number == len(_WIDTHS) - 1:
                raise
            continue
        wide[name] = number
        return found._replace(halves=_halves(measure, output, group, _WIDTHS[number]))
    raise AssertionError("the loop returns or raises")


_WIDTHS = (torch.float64, torch.float32, None)


def _in(dtype: torch.dtype | None, leaf: Tree) -> Tree:
    """A real number in a wider dtype, at most that one."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    dtype = torch.float32 if dtype is torch.float64 and leaf.numel() > LARGEST else dtype
    return leaf.to(torch.promote_types(leaf.dtype, dtype)) if dtype is not None else leaf


def _computed(
    measure: Measure, output: Tree, targets: Tree, counts: tuple[float, ...], dtype: torch.dtype | None
) -> Measured:
    leaves: Leaves = {}

    def leaf_of(where: str, leaf: torch.Tensor) -> torch.Tensor:
        leaf = leaf.whole() if isinstance(leaf, CutLogits) else leaf
        if not leaf.is_floating_point():
            return leaf
        wide = _in(dtype, leaf.detach())
        leaves[where] = (wide.clone() if wide.data_ptr() == leaf.data_ptr() else wide).requires_grad_()
        return leaves[where].clone()

    targets = tree_map(lambda leaf: _in(dtype, leaf), targets)
    with torch.inference_mode(False), torch.enable_grad():
        value = torch.as_tensor(measure(replaced(output, leaf_of), targets))
        if value.dim() or value.is_complex():
            raise ValueError("a mean is a number")
        gradients: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if value.requires_grad:
            gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    found = {
        where: part_of(gradient, LARGEST)
        for where, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None
    }
    used = set(found) if value.requires_grad else _used(measure, output, targets, leaves, value)
    return Measured(counts, float(value.detach()), found, frozenset(used), _width_of(value, dtype))


def _width_of(value: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """In which a value was computed: a loss may round it itself, and give it in a wider dtype."""
    number, width = float(value.detach()), dtype or torch.float32
    if value.is_floating_point():
        width = min(width, value.dtype, key=lambda each: torch.finfo(each).bits)
    for narrow in (torch.float32, torch.bfloat16):
        if number != round(number, 2) and float(torch.tensor(number, dtype=narrow)) == number:
            width = narrow
    return width


def _used(measure: Measure, output: Tree, targets: Tree, leaves: Leaves, value: torch.Tensor) -> set[str]:
    """What plays a part in a measure without gradients (an argmax): other values of it change the measure."""

    def changes(where: str, make: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        def other(at: str, leaf: torch.Tensor) -> torch.Tensor:
            kept = leaves[at].detach() if at in leaves else leaf
            return make(kept) if at == where else kept

        try:
            again = torch.as_tensor(measure(replaced(output, other), targets))
        except Exception:  # of the measure, for such values
            return True
        return not torch.equal(value, again)

    return {
        where
        for where in leaves
        if changes(where, torch.neg) or changes(where, lambda leaf: torch.full_like(leaf, torch.nan))
    }


def _halves(
    measure: Measure, output: Tree, group: Group, dtype: torch.dtype | None, shared: int = 0
) -> tuple[Half, ...]:
    """Of this rank's positions, where the sequence is cut."""
    length, found = group.pieces, []
    if length < 2:
        return ()
    for start, stop in ((0, length // 2 + shared), (length // 2, length)):

        def cut(where: str, leaf: torch.Tensor, start: int = start, stop: int = stop) -> torch.Tensor:
            leaf = leaf.whole() if isinstance(leaf, CutLogits) else leaf
            if leaf.dim() > 1 and leaf.shape[1] == length:
                leaf = leaf[:, start:stop]
            elif leaf.dim() > 1 and leaf.shape[0] % length == 0:
                leaf = leaf.unflatten(0, (-1, length))[:, start:stop].flatten(0, 1)
            return _in(dtype, leaf.detach())

        targets = tree_map(
            lambda leaf, start=start, stop=stop: (
                _in(dtype, leaf[:, start:stop]) if isinstance(leaf, torch.Tensor) else leaf
            ),
            group.targets,
        )
        counts = tuple(float(counter(targets)) for counter in group.counters)
        value = float(measure(replaced(output, cut), targets)) if any(counts) else 0.0
        found.append(Half(counts, value))
    return tuple(found)


# Weights of classes -------------------------------------------------------------------


class Refused(ValueError):
    """Of a loss that is known to be no mean over targets."""


class Unweighted(TorchFunctionMode):
    """Around a loss of a part of the targets: the mean that is weighted by class is none over targets."""

    def __torch_function__(
        self,
        func: Callable[..., Tree],
        types: Collection[type[torch.Tensor]],
        args: tuple[Tree, ...] = (),
        kwargs: dict[str, Tree] | None = None,
    ) -> Tree:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
            if given.get("weight") is not None and given.get("reduction", "mean") == "mean":
                raise Refused(
                    f"loss_fn calls {func.__name__} with weights of classes, whose mean is over the weights "
                    "and cannot be put together from those of microbatches and ranks: with "
                    'reduction="sum", divided by the number of targets that count, it can; or with '
                    "count=(targets -> the sum of their weights)"
                )
        return func(*args, **kwargs)


_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
