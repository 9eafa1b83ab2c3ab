"""Whether the model computes each row of a batch from this row alone.

    run    a b    two rows of the batch, in inputs of equal shapes
           a a
           b b    row 0 of (a b) must be that of (a a), row 1 that of (b b)

What mixes rows (`x - x.mean(0)`, a softmax over dim 0, a sort, a decision by `x.mean() > 0`) gives something
else. a and b are the rows whose means are the smallest and the largest, so that decisions differ.

The model runs in the mode in which it is trained, as statistics of one's own are often those of the batch in
training only. Shapes and random numbers are equal in all runs, and so are dropout's masks; only where experts
choose tokens does rounding differ. BatchNorms, which are over the rows of all data ranks here, stand aside:
they take their running averages, or are passed over.

    rows      of an output are the dim that grows with those of the inputs, from the few of the trial to those
              of the microbatch, wherever it is; flattened ones are (rows n) or (n rows). n x n values for n
              rows are made of pairs of rows
    judged    what loss_fn and metrics use, as their gradients for the few rows tell; for predict all of it

After a finding the trial is made again with other random numbers: a model that draws by itself, or mixes
other rows each time (mixup), is not judged. Nor are models that raise for few rows, that draw as many random
numbers as its values say, or that send something themselves, as they may compute over all ranks.

Afterwards all is as before: what modules hold (checks/kept.py), what their code writes beside itself, random
numbers. Alternatives that lost: a row alone, which has other masks of dropout and which many models do not
take; eval mode, in which there are no statistics of the batch.
"""

import contextlib
import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pycomm.parallel.checks.kept import kept
from pycomm.parallel.expert import MoE
from pycomm.parallel.ground import comm, drawn
from pycomm.parallel.ground.batch import Microbatch
from pycomm.parallel.ground.modes import eager
from pycomm.parallel.ground.shared_state import SharedState
from pycomm.parallel.pipeline.absent import Absent
from pycomm.parallel.run.passes import forward_pass
from pycomm.parallel.run.router_loss import plain_loss
from pycomm.parallel.run.rows_layout import Layout, Layouts, named_tensors
from pycomm.parallel.run.rows_stages import kept_stages, run_rows, some_stage
from pycomm.parallel.tensor import cross_entropy
from pycomm.parallel.tensor.cut_logits import CutLogits
from pycomm.parallel.zero.units import Phase

__all__ = ["RowsTrial", "leaves_of", "taken", "tensors_in", "two_rows"]

MOST = {torch.float64: 1e-5, torch.float32: 1e-3}  # relative; a part may be computed in less
MOST_ELSE = 0.1
LARGEST = 1 << 22  # values of an output that are compared
LARGEST_NUMBER = 1 << 16  # of one that is kept as it may be without rows


def two_rows(inputs, rows):
    """The indices of those whose means are farthest apart."""
    for leaf in tensors_in(inputs):
        leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        if leaf.numel():
            means = leaf.reshape(rows, -1).mean(1, dtype=torch.float64).nan_to_num()
            ends = int(means.argmin()), int(means.argmax())
            if means[ends[0]] < means[ends[1]]:
                return ends
    return 0, rows - 1


def leaves_of(output, measures):
    """{where: tensor} of the real numbers with dims in an output that are judged. measures: what may use
    them, (output, targets) -> number; None: all of it is the result.
    """
    logits = getattr(output, "logits", None)
    by_default = measures is not None and all(plain_loss(each) is cross_entropy for each in measures)
    if by_default and isinstance(output, torch.Tensor):
        return {"": output}
    if by_default or measures is None and isinstance(logits, torch.Tensor):
        return {".logits": logits}
    return {where: leaf for where, leaf in _present(output) if _is_real(leaf) and leaf.dim()}


class _Seen(NamedTuple):
    """What a run gave."""

    output: object  # None but in a repetition
    leaves: dict[str, torch.Tensor]  # that are judged, of at most LARGEST values
    shapes: dict[str, torch.Size]  # of these
    numbers: dict[str, torch.Tensor]  # other tensors of at most LARGEST_NUMBER values
    sizes: dict[str, torch.Size]  # of all tensors
    few: int = 0  # rows
    drawn: list = ()  # what was drawn of random numbers before its end
    draws: bool = False  # whether it has drawn some
    sends: bool = False  # whether the model's own code has sent something
    values: dict | None = None  # what `take` gave


class RowsTrial:
    """parts: Parallelized. measures: of leaves_of(). batch: (inputs, targets) of two rows. few: how many rows
    the trial has, another number than a microbatch.
    """

    def __init__(self, parts, measures, batch, few):
        self.parts, self.measures, self.batch, self.few = parts, measures, batch, few
        self.rows, self.shapes = 0, {}  # of a microbatch, and of what the model gave for it
        self.given = {}  # {where: a tensor of it; on meta where it has more than LARGEST_NUMBER values}
        self.layouts = None  # of what it gave; None: not known
        self.shared = SharedState(parts.model.modules())
        weights = {p.dtype for p in parts.model.parameters() if p.is_floating_point()}
        if torch.is_autocast_enabled(parts.device.type):
            weights.add(torch.get_autocast_dtype(parts.device.type))
        self.most = max((MOST.get(dtype, MOST_ELSE) for dtype in weights), default=0.0)
        self.indices = [0] + [1] * (few - 1), [0] * few, [1] * few
        self.first = None  # the _Seen of the runs of begin()

    @torch.no_grad()
    def begin(self):
        """The first trial. Collective where forwards are."""
        self.first = []
        for index in self.indices:  # without stages, whoever has raised sends nothing more
            fails = self.parts.stage_model is None and None in self.first
            self.first.append(None if fails else self.once(index, 0))

    def see(self, output, rows):
        """What the model gave for a microbatch."""
        self.rows = rows
        self.shapes = {where: leaf.shape for where, leaf in leaves_of(output, self.measures).items()}
        self.given = {where: _given_of(leaf) for where, leaf in _present(output)}

    def find_layouts(self):
        """After begin() and see()."""
        if all(each is not None for each in self.first):
            found = {where: self._layout(where, leaf) for where, leaf in self.given.items()}
            self.layouts = Layouts({where: layout for where, layout in found.items() if layout is not None})

    def _layout(self, where, leaf):
        """The Layout of a tensor of the microbatch, or None where it is not known."""
        dims = _grown(self.first[0].sizes.get(where, ()), leaf.shape)
        if dims is None or any(each.sizes.get(where) != self.first[0].sizes[where] for each in self.first):
            return None
        if not dims:
            values = [each.numbers.get(where, each.leaves.get(where)) for each in self.first]
            return Layout(None, is_constant=all(_are_close(value, leaf) for value in values))
        each = self._each(self.first[0].sizes[where], leaf.shape, dims)
        if each is None:
            return None
        values = [seen.leaves.get(where, seen.numbers.get(where)) for seen in self.first]
        if each == 1 or any(
            value is None or value.shape != leaf_shape
            for value, leaf_shape in zip(values, [seen.sizes[where] for seen in self.first], strict=True)
        ):
            return Layout(dims[0])
        front, behind = (_change(values, dims[0], self.few, rows_first) for rows_first in (True, False))
        return Layout(dims[0], front <= behind)

    @torch.no_grad()
    def run(self, number):
        """(what was found, a sentence, or None; whether the model draws random numbers). number: 0 for the
        first trial, then that of a repetition. Collective where forwards are, but for number 0.
        """
        seen = self.first
        if number:
            seen = [self.once(index, number) for index in (*self.indices, self.indices[0])]
        used = self._used(seen[0]) if number else None
        is_judged, draws = self.agreed(seen)
        if not is_judged:
            return None, draws
        words = {**self._pairs(seen[0]), **self._changes(*seen[:3])}
        noise = self._changes(seen[0], seen[3], seen[3]) if number else ()
        found = [where for where in words if where not in noise and (used is None or where in used)]
        return (f"its output{found[0]} {words[found[0]]}" if found else None), draws

    def agreed(self, seen):
        """Whether the runs can be compared, and whether the model draws random numbers, in some stage.
        Collective over pp.
        """
        runs = all(each is not None for each in seen)
        draws = runs and any(each.draws for each in seen)
        is_known = runs and not any(each.sends for each in seen)
        is_known = is_known and all(
            drawn.same(each.drawn, seen[0].drawn) for each in seen if each.few == self.few
        )
        is_unknown, draws = some_stage(self.parts, not is_known, draws)
        return not is_unknown, draws

    def once(self, index, number, take=None, eval_mode=False):
        """A _Seen, or None where the model does not run in this way. index: the row of each row. take:
        (output, targets) -> values. Collective where forwards are, and over pp.
        """
        parts, (inputs, targets) = self.parts, self.batch
        sends = []

        def around(forward, is_last):
            watch = _Watch() if number else contextlib.nullcontext()
            with comm.count_traffic() as own, watch:
                drawn.pass_over(number, parts.device)
                before = drawn.drawn(parts.device)
                output = forward()
            values = take(output, taken(targets, index)) if take and is_last else None
            sends.append(bool(number) and watch.calls > own.calls())
            return output, values, before, drawn.drawn(parts.device)

        try:
            with (
                kept_stages(parts),
                self.shared.kept(),
                kept(parts.model),
                parts.streams.kept(),
                parts.streams.recomputation(),
                drawn.kept(),
                eager(),
            ):
                _stand_aside(parts.model, eval_mode)
                runs = run_rows(parts, Microbatch(taken(inputs, index), None), around)
            output, values = runs[-1][:2] if parts.stages.last in parts.stages.mine else (None, None)
            before, after = (list(itertools.chain(*(run[at] for run in runs))) for at in (2, 3))
            draws = not drawn.same(before, after)
            seen = self._seen(output, bool(number))
            return seen._replace(few=len(index), drawn=after, draws=draws, sends=any(sends), values=values)
        except dist.DistError:
            raise
        except Exception:  # of the model, which does not take such rows
            return None

    def _seen(self, output, is_kept):
        """A _Seen of an output; None for the ranks before the last stage."""
        leaves = leaves_of(output, self.measures) if output is not None else {}
        shapes = {where: leaf.shape for where, leaf in leaves.items()}
        leaves = {where: _few_of(leaf) for where, leaf in leaves.items()}
        named = _present(output)
        numbers = {
            where: leaf.clone()
            for where, leaf in named
            if where not in leaves and leaf.numel() <= LARGEST_NUMBER
        }
        sizes = {where: leaf.shape for where, leaf in named}
        return _Seen(output if is_kept else None, leaves, shapes, numbers, sizes)

    def _used(self, seen):
        """Where the measures use the output; nowhere if they do not take few rows, or there is no output."""
        if seen is None or self.measures is None or len(seen.leaves) < 2:
            return set() if seen is None else set(seen.leaves)
        parts, targets = self.parts, taken(self.batch[1], self.indices[0])
        with (
            parts.streams.kept(),
            drawn.kept(),
            forward_pass(parts, Phase.EVALUATE, ("rows", 1), 0),
        ):
            return {
                where
                for where in seen.leaves
                if any(_uses(each, where, seen.output, targets) for each in self.measures)
            }

    def _each(self, few, whole, dims):
        """How many values of the one dim that has grown belong to a row, or None where they do not."""
        each, rest = divmod(few[dims[0]], self.few)
        is_known = len(dims) == 1 and not rest and each * self.rows == whole[dims[0]]
        return each if is_known else None

    def _pairs(self, seen):
        """{where: words} of each output that has a value for each pair of rows."""
        found = {}
        for where, shape in seen.shapes.items():
            whole = self.shapes.get(where, ())
            dims = _grown(shape, whole) or ()
            if len(dims) > 1 and all((shape[d], whole[d]) == (self.few, self.rows) for d in dims):
                found[where] = f"has {self.rows} x {self.rows} values for {self.rows} rows"
        return found

    def _changes(self, both, a, b):
        """{where: words} of each output of which a row changes with the other one."""
        found = {}
        for where, leaf in both.leaves.items():
            shape, whole = both.shapes[where], self.shapes.get(where, ())
            dims = _grown(shape, whole)
            if not dims or any(each.shapes.get(where) != shape for each in (a, b)):
                continue
            if leaf.shape[dims[0]] != shape[dims[0]] or self._each(shape, whole, dims) is None:
                continue
            leaves = [one.leaves[where] for one in (both, a, b)]
            change = min(_change(leaves, dims[0], self.few, rows_first) for rows_first in (True, False))
            if change > max(self.most, MOST.get(leaf.dtype, MOST_ELSE)):
                words = f"by {change:.2g} of its size" if change < float("inf") else "from a number to none"
                found[where] = f"changes {words} for a row when the row beside it is another one"
        return found


def _grown(shape, whole):
    """The dims that have other sizes for the microbatch; None for another number of dims."""
    if len(whole) != len(shape):
        return None
    return [dim for dim in range(len(shape)) if shape[dim] != whole[dim]]


def _are_close(value, leaf):
    if value is None or leaf.is_meta or value.shape != leaf.shape or value.dtype != leaf.dtype:
        return False
    return torch.allclose(value, leaf.detach().to(value), rtol=1e-6, atol=0.0, equal_nan=True)


def _uses(measure, where, output, targets):
    """Whether a tensor of the output plays a part in what it gives for few rows: by its gradient, or, for
    what has none (an argmax), by what it gives for another one.
    """
    measure = plain_loss(measure)

    def put(make):
        names = (name for name, _ in named_tensors(output))
        return tree_map(
            lambda leaf: make(leaf) if isinstance(leaf, torch.Tensor) and next(names) == where else leaf,
            output,
        )

    with torch.enable_grad():
        leaf = _wide(dict(named_tensors(output))[where]).detach().requires_grad_()
        try:
            value = torch.as_tensor(measure(put(lambda _: leaf.clone()), targets))
            if value.requires_grad:
                return torch.autograd.grad(value, leaf, allow_unused=True)[0] is not None
            return any(
                not torch.equal(value, torch.as_tensor(measure(put(make), targets)))
                for make in (lambda one: -one, lambda one: torch.full_like(one, torch.nan))
            )
        except Exception:  # of the measure, which does not take such rows
            return False


def _change(leaves, dim, few, rows_first):
    """Of the rows of the first, beside those of the others, relative to the largest. rows_first: `dim` is
    (rows n), not (n rows).
    """
    sizes = (few, -1) if rows_first else (-1, few)
    both, a, b = (
        leaf.unflatten(dim, sizes).movedim(dim + (not rows_first), 0).flatten(1).double() for leaf in leaves
    )
    right = torch.cat([a[:1], b[1:]])
    same = (both == right) | (both.isnan() & right.isnan())
    apart = (both - right).masked_fill(same, 0.0).nan_to_num(torch.inf, torch.inf, torch.inf)
    size = torch.cat([both, a, b]).nan_to_num(0.0, 0.0, 0.0).norm(dim=1).max()
    return float(apart.norm(dim=1).max() / size) if apart.any() else 0.0


# Trees of tensors with rows ------------------------------------------------------


def _present(output):
    """named_tensors() without those that only earlier stages have, say an encoder's."""
    return [(where, leaf) for where, leaf in named_tensors(output) if not isinstance(leaf, Absent)]


def _given_of(leaf):
    """A copy, or on meta where it is large. Logits that tp has cut are not gathered."""
    if isinstance(leaf, CutLogits) or leaf.numel() > LARGEST_NUMBER:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return leaf.detach().clone()


def _is_real(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def taken(tree, index):
    """Copies of rows."""
    return tree_map(lambda leaf: leaf[index] if isinstance(leaf, torch.Tensor) else leaf, tree)


def _few_of(leaf):
    """At most LARGEST of its values; of logits that tp has cut, of this rank's columns."""
    leaf = leaf.for_loss()[0] if isinstance(leaf, CutLogits) else leaf
    step = -(-leaf.numel() // LARGEST)
    return leaf[..., ::step].clone() if step > 1 else leaf


def _wide(leaf):
    return leaf.float() if leaf.element_size() < 4 else leaf


# Of the model -------------------------------------------------------------------

_FOREIGN = {"c10d", "_c10d_functional"}  # where torch has its collectives


class _Watch(TorchDispatchMode):
    """Counts what is sent through torch."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.namespace in _FOREIGN
        return func(*args, **(kwargs or {}))


def _stand_aside(model: torch.nn.Module, eval_mode: bool) -> None:
    """No statistics, no balance over ranks."""
    for module in model.modules():
        if eval_mode or isinstance(module, (_BatchNorm, MoE)):
            module.training = False
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            vars(module)["forward"] = _passed_over


def _passed_over(input):
    return input
