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
    judged    what loss_fn uses, as the gradients of a loss of the few rows tell

After a finding the trial is made again with other random numbers: a model that draws by itself, or mixes
other rows each time (mixup), is not judged. Nor are models that raise for few rows, that draw as many random
numbers as its values say, or that send something themselves, as they may compute over all ranks.

Afterwards all is as before: buffers, attributes of modules, what their code writes beside itself, random
numbers. Alternatives that lost: a row alone, which has other masks of dropout and which many models do not
take; eval mode, in which there are no statistics of the batch.
"""

import collections
import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from pycomm.parallel.expert import MoE
from pycomm.parallel.ground import comm, drawn
from pycomm.parallel.ground.batch import Microbatch
from pycomm.parallel.ground.modes import eager
from pycomm.parallel.ground.shared_state import keep
from pycomm.parallel.pipeline.outer_state import OuterState
from pycomm.parallel.run.passes import forward_pass
from pycomm.parallel.run.router_loss import plain_loss
from pycomm.parallel.tensor import cross_entropy
from pycomm.parallel.tensor.cut_logits import CutLogits
from pycomm.parallel.zero.units import Phase

__all__ = ["RowsTrial", "leaves_of", "tensors_in", "two_rows"]

MOST = {torch.float64: 1e-5, torch.float32: 1e-3}  # relative; a part may be computed in less
MOST_ELSE = 0.1
LARGEST = 1 << 22  # values of an output that are compared


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


def leaves_of(output, loss_fn):
    """{where: tensor} of the real numbers of an output that loss_fn may use."""
    if plain_loss(loss_fn) is cross_entropy:
        is_plain = isinstance(output, torch.Tensor)
        return {"" if is_plain else ".logits": output if is_plain else output.logits}
    found = {keystr(path): leaf for path, leaf in tree_flatten_with_path(output)[0]}
    return {where: leaf for where, leaf in found.items() if _is_real(leaf) and leaf.dim()}


class _Seen(NamedTuple):
    """What a run gave."""

    output: object
    leaves: dict[str, torch.Tensor]  # of at most LARGEST values
    shapes: dict[str, torch.Size]
    numbers: list  # what was drawn of random numbers before its end
    draws: bool  # whether it has drawn some
    sends: bool  # whether the model's own code has sent something


class RowsTrial:
    """parts: Parallelized. batch: (inputs, targets) of two rows. rows, shapes: of a microbatch, and of what
    the model gave for it. few: how many rows the trial has, another number.
    """

    def __init__(self, parts, loss_fn, batch, rows, shapes, few):
        self.parts, self.loss_fn, self.batch = parts, plain_loss(loss_fn), batch
        self.rows, self.shapes, self.few = rows, shapes, few
        self.state = OuterState(parts.model, ())
        weights = {p.dtype for p in parts.model.parameters() if p.is_floating_point()}
        if torch.is_autocast_enabled(parts.device.type):
            weights.add(torch.get_autocast_dtype(parts.device.type))
        self.most = max((MOST.get(dtype, MOST_ELSE) for dtype in weights), default=0.0)

    @torch.no_grad()
    def run(self, number):
        """(what was found, a sentence, or None; whether the model draws random numbers). number: 0 for the
        first trial, then that of a repetition. Collective where forwards are.
        """
        a, b = [0] * self.few, [1] * self.few
        both = [0] + b[1:]
        seen = [self._run(index, number) for index in (both, a, b, *([both] if number else []))]
        used = self._used(seen[0]) if number else None
        if any(each is None for each in seen):
            return None, False
        draws = any(each.draws for each in seen)
        alike = all(drawn.same(each.numbers, seen[0].numbers) for each in seen)
        if not alike or any(each.sends for each in seen):
            return None, draws
        words = {**self._pairs(seen[0]), **self._changes(*seen[:3])}
        noise = self._changes(seen[0], seen[3], seen[3]) if number else ()
        found = [where for where in words if where not in noise and (used is None or where in used)]
        return (f"its output{found[0]} {words[found[0]]}" if found else None), draws

    def _run(self, index, number):
        """A _Seen, or None where the model does not run in this way. index: the row of each row."""
        parts, (inputs, _) = self.parts, self.batch
        watch = _Watch() if number else contextlib.nullcontext()
        traffic = comm.count_traffic()
        try:
            with (
                self._kept(),
                parts.streams.kept(),
                parts.streams.recomputation(),
                drawn.kept(),
                eager(),
                traffic as own,
                forward_pass(parts, Phase.EVALUATE, ("rows", 0), 0),
                watch,
            ):
                drawn.pass_over(number, parts.device)
                before = drawn.drawn(parts.device)
                output = Microbatch(_taken(inputs, index), None).call(parts.model)
                after = drawn.drawn(parts.device)
            leaves = leaves_of(output, self.loss_fn)
        except dist.DistError:
            raise
        except Exception:  # of the model, which does not take such rows
            return None
        shapes = {where: leaf.shape for where, leaf in leaves.items()}
        leaves = {where: _few_of(leaf) for where, leaf in leaves.items()}
        sends = bool(number) and watch.calls > own.calls()
        kept = output if number else None
        return _Seen(kept, leaves, shapes, after, not drawn.same(before, after), sends)

    @contextlib.contextmanager
    def _kept(self):
        """What the model writes is afterwards as it was before."""
        modules, memo = list(self.parts.model.modules()), {}
        with self.state.kept(), contextlib.ExitStack() as stack:
            for module in modules:
                for name, value in list(vars(module).items()):
                    if name in _OWN:
                        continue
                    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                        memo.setdefault(id(value), value.clone())
                        vars(module)[name] = memo[id(value)]
                    elif isinstance(value, (list, dict, set, collections.deque)):
                        stack.callback(keep(value))
                    elif isinstance(value, torch.Generator):
                        stack.callback(value.set_state, value.get_state())
                if isinstance(module, (_BatchNorm, MoE)):
                    module.training = False  # no statistics, no balance over ranks
                if isinstance(module, _BatchNorm) and module.running_mean is None:
                    vars(module)["forward"] = _passed_over
            yield

    def _used(self, seen):
        """Where loss_fn uses the output; nowhere if it does not take few rows, or there is no output."""
        if seen is None or len(leaves_of(seen.output, self.loss_fn)) == 1:
            return set() if seen is None else set(seen.leaves)
        paths, tree = tree_flatten_with_path(seen.output)
        leaves = [_wide(leaf).detach().requires_grad_() if _is_real(leaf) else leaf for _, leaf in paths]
        made = {keystr(path): leaf for (path, _), leaf in zip(paths, leaves, strict=True) if _is_real(leaf)}
        targets = _taken(self.batch[1], [0] + [1] * (self.few - 1))
        parts = self.parts
        try:
            with (
                parts.streams.kept(),
                forward_pass(parts, Phase.EVALUATE, ("rows", 1), 0),
                torch.enable_grad(),
            ):
                given = [leaf.clone() if _is_real(leaf) else leaf for leaf in leaves]
                value = self.loss_fn(tree_unflatten(given, tree), targets)
                gradients = torch.autograd.grad(value, list(made.values()), allow_unused=True)
        except Exception:  # of loss_fn, which does not take such rows
            return set()
        return {where for where, gradient in zip(made, gradients, strict=True) if gradient is not None}

    def _grown(self, seen, where):
        """The dims that have other sizes than for the microbatch; none for another number of dims."""
        shape, whole = seen.shapes[where], self.shapes.get(where, ())
        return [dim for dim in range(len(shape)) if len(whole) == len(shape) and shape[dim] != whole[dim]]

    def _pairs(self, seen):
        """{where: words} of each output that has a value for each pair of rows."""
        found = {}
        for where, shape in seen.shapes.items():
            dims = self._grown(seen, where)
            if len(dims) > 1 and all(
                (shape[d], self.shapes[where][d]) == (self.few, self.rows) for d in dims
            ):
                found[where] = f"has {self.rows} x {self.rows} values for {self.rows} rows"
        return found

    def _changes(self, both, a, b):
        """{where: words} of each output of which a row changes with the other one."""
        found = {}
        for where, leaf in both.leaves.items():
            shape, dims = both.shapes[where], self._grown(both, where)
            is_known = len(dims) == 1 and all(each.shapes.get(where) == shape for each in (a, b))
            if not is_known or leaf.shape[dims[0]] != shape[dims[0]]:
                continue
            each, rest = divmod(shape[dims[0]], self.few)
            if rest or each * self.rows != self.shapes[where][dims[0]]:
                continue
            leaves = [one.leaves[where] for one in (both, a, b)]
            change = min(_change(leaves, dims[0], self.few, rows_first) for rows_first in (True, False))
            if change > max(self.most, MOST.get(leaf.dtype, MOST_ELSE)):
                words = f"by {change:.2g} of its size" if change < float("inf") else "from a number to none"
                found[where] = f"changes {words} for a row when the row beside it is another one"
        return found


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


def _is_real(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _taken(tree, index):
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

_OWN = {*torch.nn.Module().__dict__, "_parallel"}  # not a model's own attributes
_FOREIGN = {"c10d", "_c10d_functional"}  # where torch has its collectives


class _Watch(TorchDispatchMode):
    """Counts what is sent through torch."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.namespace in _FOREIGN
        return func(*args, **(kwargs or {}))


def _passed_over(input):
    return input
