"""Whether loss_fn is what it is taken for: a mean over the targets that count.

The loss of a batch is put together from those of its parts by their counts ([Note: global mean] in
ground/batch.py), which holds for nothing else: not for a sum, not for a mean over ignored targets too, not
where labels are shifted inside or rows are compared with each other. So loss_fn is called with some rows
together and with each alone:

    loss_fn(outputs of all, targets of all) = sum over rows of c_row loss_fn(row) / sum of c_row

    targets    of the rows that differ most, in how many count, are negative, or are not positive (of real
               numbers: are none), in their means, and of some between: what the targets at hand cannot show
               is not asked for
    outputs    of rows of this rank, each second one halved, so that losses differ
    where the sequence is cut, each row is cut into two pieces, too

Where an output has its rows, its Layouts say; where these are not known, all that its sizes allow are tried,
and loss_fn is refused if each of them shows it.

In fp64 where loss_fn takes it. Long rows are cut to a window of positions. A loss_fn that raises on such
rows, or gives two values for the same ones (random numbers), is not judged.

A model may return a loss of its own as a number beside the logits, and loss_fn may use that. A number has no
rows, so where rows count unequally it must be the cross-entropy of the logits, or the same for all parts of
the batch (a penalty on weights). Whether such numbers are means is tried with the model (loss_of_rows.py).
"""

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

from pycomm.parallel.ground.batch import count_targets
from pycomm.parallel.run.rows_layout import Layouts, guesses_of

__all__ = ["Rows", "Verdict", "numbers_in", "scores_of_rows", "some_rows", "try_loss"]

MORE_ROWS = 6
LARGEST = 1 << 23  # elements of a tensor of the output for these rows
MOST, MOST_OF_FP32 = 1e-6, 1e-3  # relative; in fp64 a part may still be computed in fp32
OWN_NUMBER = (
    "returns a loss that the model has computed, which is not the cross-entropy of its logits over the "
    "targets that count, and rows of this batch hold unequal numbers of them: it cannot be put together from "
    "those of microbatches and ranks. Compute it from the logits, (output, targets) -> mean; for a model of "
    "transformers leave loss_fn out"
)


class Verdict(NamedTuple):
    """fault: what is wrong, a sentence, or None. uneven: whether rows that differ have shown it, or nothing
    can. of_number: the fault is that of a number of the model, which is none where all parts have the same.
    """

    fault: str | None = None
    uneven: bool = False
    of_number: bool = False


class Rows(NamedTuple):
    """Two rows of what a model gave; see the head of the file."""

    outputs: list[tuple[object, Layouts]]  # of all Layouts that it may have, these two rows
    like: torch.Tensor  # targets of these rows, with a rank's positions where is_cut
    is_cut: bool  # at the sequence
    own_mean: bool  # numbers in it are cross-entropies of its logits


def some_rows(output, targets, is_cut=False, layouts=None):
    """Two rows of a microbatch's output, with its targets. is_cut: both have a rank's positions only.
    layouts: where the output has its rows; None: not known.
    """
    first = _first(targets)
    rows, index = len(first), [0, min(1, len(first) - 1)]
    output = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output)
    if layouts is None:
        layouts = [Layouts()] if is_cut else guesses_of(output, rows)
    else:
        layouts = [layouts]
    own_mean = any(_is_own_mean(output, first, each) for each in layouts)

    def chosen(leaf, layout):
        leaf = layout.take(leaf, rows, index)
        return leaf if layout.dim is None else _second_halved(leaf, layout)

    outputs = [(each.map(chosen, output, rows), each) for each in layouts]
    return Rows(outputs, first[index], is_cut, own_mean)


def scores_of_rows(targets, counter):
    """For each row, how many targets count, are negative, are not positive; of real numbers how many count
    and are none.
    """
    first = _first(targets)
    if counter is not count_targets:
        counts = [_plain(counter(_rows_of(targets, [row]))) for row in range(len(first))]
    elif first.is_floating_point():
        counts = [first[0].numel()] * len(first)
    else:
        counts = _sums(first, first != -100)
    if first.is_floating_point() or first.is_complex():
        return [(count, none, 0) for count, none in zip(counts, _sums(first, first.isnan()), strict=True)]
    return list(zip(counts, _sums(first, first < 0), _sums(first, first <= 0), strict=True))


def _plain(count):
    """A whole number where it is one."""
    count = float(count)
    return int(count) if count.is_integer() else count


def _sums(first, chosen):
    return chosen.reshape(len(first), -1).sum(1).tolist()


@torch.no_grad()
def try_loss(loss_fn, rows, targets, counter, name="loss_fn", differ=False):
    """The Verdict for rows of `targets`, which are whole where the sequence is cut. name: in the sentence.
    differ: rows of other ranks are unlike these.
    """
    scores = scores_of_rows(targets, counter)
    more = _more_rows(targets)
    chosen = {_extremes(scores, more, True), _extremes(scores, more, False)}
    found = Verdict()
    for index in sorted(filter(None, chosen)):
        some, uneven = _rows_of(targets, list(index)), len({scores[row] for row in index}) > 1
        if differ and not uneven:
            some, uneven = _with_holes(some, counter)
        counts = {score[:2] for score in scores_of_rows(some, counter)}
        faults = []
        for number in range(len(rows.outputs)):
            with contextlib.suppress(Exception):  # of loss_fn, which does not take such rows
                faults.append(_fault(loss_fn, rows, number, some, counter, len(counts) > 1))
        fault, uneven = (faults[0] if all(faults) else None, uneven) if faults else (None, True)
        of_number = found.of_number if found.fault else fault == OWN_NUMBER
        found = Verdict(found.fault or (fault and f"{name} {fault}"), found.uneven or uneven, of_number)
    return found


def _extremes(scores, more, with_none):
    """Rows whose scores are the largest and smallest, and those of `more`: two or more indices, or none where
    no target counts. with_none: rows in which none counts may be among them.
    """
    rows = [row for row, score in enumerate(scores) if with_none or score[0]]
    if not any(scores[row][0] for row in rows):
        return ()
    chosen = {end(rows, key=lambda row: scores[row][k]) for k in range(3) for end in (max, min)}
    chosen = sorted(chosen | (more & set(rows)) | {rows[0], rows[-1]})
    return tuple(chosen if len(chosen) > 1 else chosen * 2)


def _more_rows(targets):
    """Rows that may differ in what no score tells (weights, classes): of each tensor those with the largest
    and smallest mean, and some at equal distances.
    """
    rows = len(_first(targets))
    found = set(range(0, rows, max(1, rows // MORE_ROWS)))
    for leaf in tree_leaves(targets):
        if isinstance(leaf, torch.Tensor) and leaf.numel() and not leaf.is_complex():
            means = leaf.reshape(rows, -1).mean(1, dtype=torch.float64).nan_to_num()
            found |= {int(means.argmin()), int(means.argmax())}
    return found


def _with_holes(targets, counter):
    """(targets whose last row counts less, whether there is a value among them that does not count)."""
    first = _first(targets)
    values = first.unique()[:100] if first.dim() > 1 else ()
    nothing = next((value for value in values if not counter(torch.full_like(first, value))), None)
    if nothing is None:
        return targets, False
    made = first.clone()
    left = (made[-1] != nothing).nonzero()
    made[-1][left[(len(left) + 1) // 2 :].unbind(1)] = nothing
    return tree_map(lambda leaf: made if leaf is first else leaf, targets), True


def _fault(loss_fn, rows, number, targets, counter, differ):
    """What is wrong, or None. number: of the output in rows.outputs. differ: how many targets of these rows
    count.
    """
    output, layouts = _matching(rows, number, _first(targets))
    if _uses_numbers(loss_fn, output, targets, layouts):
        return OWN_NUMBER if differ and not rows.own_mean else None
    return _compare(loss_fn, *_window(output, targets, layouts, counter), layouts, counter, rows.is_cut)


def _compare(loss_fn, output, targets, layouts, counter, is_cut):
    """What is wrong, or None."""
    first, most = _first(targets), MOST
    rows, wide = len(first), tree_map(_in_fp64, output)
    try:
        whole, output = float(loss_fn(wide, targets)), wide
    except Exception:  # it has tensors of its own in fp32, as weights of classes
        whole, most = float(loss_fn(output, targets)), MOST_OF_FP32
    pieces = [(layouts.take(output, rows, [row]), _rows_of(targets, [row])) for row in range(rows)]
    counts = [_plain(counter(part)) for _, part in pieces]
    if is_cut:
        length = first.shape[1]
        spans = [(0, length // 2), (length // 2, length)]
        pieces = [_positions(*piece, layouts, 1, length, span) for piece in pieces for span in spans]
    weighted = [(float(counter(piece[1])), piece) for piece in pieces]
    weighted = [(weight, float(loss_fn(*piece))) for weight, piece in weighted if weight]
    together = sum(weight * value for weight, value in weighted) / sum(weight for weight, _ in weighted)
    again, values = float(loss_fn(output, targets)), [value for _, value in weighted]
    size = max(map(abs, [whole, *values]))
    if not size < float("inf") or whole != again or abs(whole - together) <= most * size:
        return None
    hint = "Return that mean, or say what yours runs over: count=(targets -> number)"
    if abs(whole - sum(values)) <= most * size:
        hint = "It is a sum: divide it by the number of targets that count"
    return (
        f"is no mean over the targets that count. For {len(counts)} rows, of which {counts} targets count, "
        f"it gives {whole:.6g}, and its values for parts of them, weighted with what counts there, "
        f"give {together:.6g}: the loss of a batch cannot be put together from microbatches and ranks. {hint}"
    )


# Trees of tensors with rows ----------------------------------------------------


def _first(targets):
    found = next((leaf for leaf in tree_leaves(targets) if isinstance(leaf, torch.Tensor)), None)
    if found is None:
        raise ValueError("the targets of a batch hold no tensor")
    return found


def _rows_of(targets, index):
    return tree_map(lambda leaf: leaf[index] if isinstance(leaf, torch.Tensor) else leaf, targets)


def _positions(output, targets, layouts, rows, length, span):
    """(output, targets) of a span of positions."""
    index = torch.arange(*span, device=_first(targets).device)
    plain = Layouts().positions(targets, rows, length, index)
    return layouts.positions(output, rows, length, index), plain


def _matching(rows, number, first):
    """(an output for the targets whose first tensor is given, its Layouts): rows and, where the sequence is
    cut, positions repeat those of this rank.
    """
    output, layouts = rows.outputs[number]
    output = layouts.take(output, 2, [row % 2 for row in range(len(first))])
    if rows.is_cut:
        local, length = rows.like.shape[1], first.shape[1]
        index = torch.arange(length, device=first.device) % local
        output = layouts.positions(output, len(first), local, index)
    return output, layouts


def _window(output, targets, layouts, counter):
    """(output, targets), or the positions of both in which rows differ most."""
    first = _first(targets)
    largest = _largest(output)
    if largest <= LARGEST or first.dim() < 2:
        return output, targets
    rows, length = first.shape[:2]
    width = max(2, length * LARGEST // largest)

    def window(start):
        return _positions(output, targets, layouts, rows, length, (start, start + width))

    def differences(start):
        index = torch.arange(start, start + width, device=first.device)
        part = Layouts().positions(targets, rows, length, index)
        return sum(max(score) - min(score) for score in zip(*scores_of_rows(part, counter), strict=True))

    found = window(max(range(0, length - width + 1, width), key=differences))
    return found if _largest(found[0]) < largest else (output, targets)  # positions are elsewhere in it


def _largest(tree):
    return max((leaf.numel() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)), default=0)


def _second_halved(leaf, layout):
    """Of two rows, so that their losses differ. Half of a probability is one, too."""
    if not leaf.is_floating_point():
        return leaf
    sizes, at = ((2, -1), layout.dim) if layout.rows_first else ((-1, 2), layout.dim + 1)
    leaf = leaf.clone()
    leaf.unflatten(layout.dim, sizes).select(at, 1).mul_(0.5)
    return leaf


def _in_fp64(leaf):
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


# Losses that a model computes --------------------------------------------------


def _is_number(leaf, layout):
    return layout.dim is None and not layout.is_constant and leaf.is_floating_point()


def numbers_in(output, targets, layouts=None):
    """Of an output for these targets: those that the model computed from all of its rows."""
    found, rows = [], len(_first(targets))

    def note(leaf, layout):
        if _is_number(leaf, layout):
            leaf = leaf.detach().double()
            found.extend([float(leaf)] if not leaf.dim() else [float(leaf.sum()), float(leaf.abs().sum())])
        return leaf

    (layouts or Layouts()).map(note, output, rows)
    return found


def _uses_numbers(loss_fn, output, targets, layouts):
    """Whether its value comes from numbers in the output."""
    rows, known = len(_first(targets)), []

    def forget(leaf, layout):
        is_number = _is_number(leaf, layout)
        known.append(not is_number)
        return torch.full_like(leaf, torch.nan) if is_number else leaf

    unknown = layouts.map(forget, output, rows)
    return not all(known) and bool(torch.as_tensor(loss_fn(unknown, targets)).isnan())


def _is_own_mean(output, targets, layouts):
    """Whether all numbers in it are the cross-entropy of logits in it, over the targets that count."""
    rows = len(targets)
    numbers, classes = numbers_in(output, targets, layouts), targets[targets != -100]
    if not numbers or targets.is_floating_point() or not len(classes) or classes.min() < 0:
        return False
    leaves = tree_leaves(layouts.map(lambda leaf, layout: layout.in_front(leaf, rows), output, rows))
    leaves = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    logits = [leaf for leaf in leaves if leaf.dim() > 1 and leaf.is_floating_point()]
    logits = [leaf.flatten(0, -2) for leaf in logits if leaf.shape[:-1].numel() == targets.numel()]
    logits = [leaf for leaf in logits if classes.max() < leaf.shape[1]]
    means = [float(F.cross_entropy(leaf.float(), targets.flatten())) for leaf in logits]
    return all(any(abs(a - b) <= MOST_OF_FP32 * abs(b) for b in means) for a in numbers)
