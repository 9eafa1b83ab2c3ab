"""Whether a batch may be cut into rows: the model computes each row from this row alone, and the loss is a
mean over the targets that count. Asked of both together, as a relation between runs.

    A    a0 a1 a2 a3        A'   a0 b1 a2 b3       every second row exchanged, in its place
    B    b0 b1 b2 b3        B'   b0 a1 b2 a3       A and B: the two runs together, 2 k rows

    c     how many targets of a group count                f    the loss of a group

    outputs      min(A, B) = min(A', B') and max likewise, element by element    the model mixes no rows
    gradients    the same of c df/d(output)                                      nor does the loss
    value        c_A f(A) + c_B f(B) = c_A' f(A') + c_B' f(B')                   a mean over what counts ...
    size         c_AB f(AB) = c_A f(A) + c_B f(B)                                ... and no sum over rows

Shapes and random numbers are equal in the four, so equal rows give equal bits, and what mixes rows gives
something else. Where an output has its rows need not be known. Judged is what the loss and the metrics use:
elements that have a gradient. predict uses all of them.

What counts is not always known: a loss that shifts its labels counts one target less in each row. `counters`
are tried in their order, and the first for which the relation holds is used.

    asked    before the passes, which change buffers; with the first batch that is cut, again with the first
             whose rows differ in how many targets count, and for another loss
    rows     k = 4, or as many as a microbatch has, at least 2. If the model or the loss raises: twice as
             many, up to those of a microbatch
    found    once more with other random numbers; where the model draws some, AGAIN times: what mixes other
             rows each time (mixup) is no mistake
    told     one all_reduce of flags for each time

The model runs in the mode in which it is trained, through the plan's own passes: all axes take part.
BatchNorms and parallel.MoE stand aside, as they compute over the rows of all data ranks. In outputs equal
bits are expected, but where the model works on other shapes for other values (experts that choose tokens), or
gives other bits for the same rows: there rounding is allowed for (COARSE). The loss is computed in fp64
where it takes that.

Not judged: a model that draws as many random numbers as its values say, gives other values for the same rows
(a generator of its own), or sends something itself, as it may compute over all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm.parallel.checks.measures import Seen
from pycomm.parallel.checks.outputs import named_tensors, replaced
from pycomm.parallel.checks.tolerances import STRICT, Rounding, coarse
from pycomm.parallel.tensor.cut_logits import CutLogits

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree

__all__ = ["Fault", "differ_for_the_same", "distance", "fault_of_model", "groups_of", "put_together"]


def groups_of(k: int, few: int | None = None) -> list[list[int]]:
    """The indices of A, B, A', B' and AB among 2 k rows. few: of which that many in a group."""
    a, b = list(range(k))[:few], list(range(k, 2 * k))[:few]
    pairs = list(zip(a, b, strict=True))
    crossed = [pair if place % 2 == 0 else pair[::-1] for place, pair in enumerate(pairs)]
    return [a, b, [one for one, _ in crossed], [other for _, other in crossed], a + b]


class Fault(NamedTuple):
    """What was found: words of a sentence, and how large it is."""

    words: str
    size: float
    of_number: bool = False  # the loss uses a number that the model has computed of all rows


def fault_of_model(seen: list[Seen], rounding: Rounding, ignored: set[str], rows: int) -> Fault | None:
    """The first output of which a row changes with other rows. seen: of A, B, A', B', AB. rows: of A.
    ignored: outputs that are other ones for the same rows.
    """
    for where, leaf in seen[0].leaves.items():
        four = [each.leaves[where] for each in seen[:4] if where in each.leaves]
        is_alike = len(four) == 4 and all(each.shape == leaf.shape for each in four)
        if not is_alike or where in ignored:
            continue
        shape = seen[0].shapes[where]
        dims = _grown(shape, seen[4].shapes.get(where, torch.Size()))
        if not dims:
            continue
        if len(dims) > 1:
            return Fault(f"output{where} has {rows} x {rows} values for {rows} rows", torch.inf)
        apart = distance(four, _with_gradient(seen, where))
        if apart > max(STRICT, rounding.equal):
            how = f"by {apart:.2g} of its size" if apart < torch.inf else "from a number to none"
            return Fault(f"output{where} changes {how} when rows beside it are other ones", apart)
        apart = 0.0 if rounding.draws or where in ignored else _by_number(seen, where, dims[0], rows)
        if apart > rounding.other:
            words = f"changes by {apart:.2g} of its size for {2 * rows} rows instead of {rows}"
            return Fault(f"output{where} {words}", apart)
    return None


def _by_number(seen: list[Seen], where: str, dim: int, rows: int) -> float:
    """How far the rows of AB are from those of A and B, relative; 0 where some of them only are at hand."""
    a, b, both = seen[0].leaves[where], seen[1].leaves[where], seen[4].leaves.get(where)
    shape, whole = seen[0].shapes[where], seen[4].shapes[where]
    if both is None or whole[dim] != 2 * shape[dim] or both.numel() != whole.numel():
        return 0.0
    a, b, both = a.view(shape).double(), b.view(shape).double(), both.view(whole).double()
    used = _with_gradient(seen, where)
    used = torch.ones_like(a, dtype=torch.bool) if used is None else used.view(shape)
    n, worst = shape[dim] // rows, torch.inf
    for sizes, at in (((2, -1), dim), ((n, 2, rows), dim + 1)):  # (rows n), or (n rows)
        halves = [half.flatten(dim, dim + len(sizes) - 2) for half in both.unflatten(dim, sizes).unbind(at)]
        off = torch.cat([(half - one)[used] for half, one in zip(halves, (a, b), strict=True)])
        size = both.nan_to_num(0.0, 0.0, 0.0).norm().clamp_min(1e-300)
        worst = min(worst, float(off.nan_to_num(0.0, 0.0, 0.0).norm() / size))
    return worst


def put_together(a: Tree, b: Tree, both: Tree) -> Tree:
    """The outputs of A and B as one of all their rows. both: of AB, which tells where the rows are, and has
    what the model computes of all rows.
    """
    first, second = (dict(named_tensors(each)) for each in (a, b))

    def joined(where: str, leaf: torch.Tensor) -> torch.Tensor:
        one, other = first.get(where), second.get(where)
        if one is None or other is None:
            return leaf
        dims = _grown(one.shape, leaf.shape)
        if len(dims) != 1 or isinstance(leaf, CutLogits):
            return leaf
        (dim,) = dims
        found = torch.cat([one, other], dim)
        for n in range(2, one.shape[dim]):  # or the rows are last in it: (n rows)
            if one.shape[dim] % n == 0:
                pair = [each.unflatten(dim, (n, -1)) for each in (one, other)]
                twisted = torch.cat(pair, dim + 1).flatten(dim, dim + 1)
                found = twisted if _is_nearer(twisted, found, leaf) else found
        return found

    return replaced(both, joined)


def _is_nearer(one: torch.Tensor, other: torch.Tensor, to: torch.Tensor) -> bool:
    if not to.is_floating_point():
        return False
    off = [(each - to).double().nan_to_num(0.0, 0.0, 0.0).norm() for each in (one, other)]
    return bool(off[0] < 0.5 * off[1])


def _grown(shape: torch.Size, whole: torch.Size) -> list[int]:
    """The dims that have the rows."""
    return [dim for dim in range(len(shape)) if len(whole) == len(shape) and shape[dim] != whole[dim]]


def _with_gradient(seen: list[Seen], where: str) -> torch.Tensor | None:
    """Which elements of an output are used; None: all."""
    found = None
    for each in seen[:4]:
        for measure in each.measured.values():
            if where in measure.used:
                gradient = measure.gradients.get(where)
                if gradient is None:
                    return None
                found = gradient != 0 if found is None else found | (gradient != 0)
    return found


def distance(four: list[torch.Tensor], used: torch.Tensor | None = None) -> float:
    """How far min and max of the first two are from those of the others, relative to the larger."""
    a, b, c, d = (each.double() for each in four)
    size = torch.stack([each.nan_to_num(0.0, 0.0, 0.0).norm() for each in (a, b, c, d)]).max()
    worst = 0.0
    for pick in (torch.minimum, torch.maximum):
        one, other = pick(a, b), pick(c, d)
        same = (one == other) | (one.isnan() & other.isnan())
        same = same if used is None or used.shape != same.shape else same | ~used
        if not same.all():
            off = (one - other).masked_fill(same, 0.0).nan_to_num(torch.inf, torch.inf, torch.inf)
            worst = max(worst, float(off.norm() / size) if size else torch.inf)
    return worst


def differ_for_the_same(one: Seen, again: Seen) -> tuple[set[str], bool]:
    """(outputs that are other ones for the same rows by more than rounding, whether any bit differs)."""
    found, any_bit = set(), False
    for where, leaf in one.leaves.items():
        other = again.leaves.get(where)
        if other is None or other.shape != leaf.shape:
            any_bit = True
            found.add(where)
        elif not torch.equal(leaf.nan_to_num(), other.nan_to_num()):
            any_bit = True
            if distance([leaf, leaf, other, other]) > coarse(leaf.dtype):
                found.add(where)
    return found, any_bit
