"""Whether a loss that uses numbers of the model (a loss of its own, one of its routers, a mean over all rows)
is a mean over rows: the model and its loss together, for the rows of rows_trial.py.

    a b b     the loss of these rows must be the mean of those below, weighted with the targets that count
    a a a
    b b b
    a a a a   must be that of a a a: a sum over rows is not

A number has no rows, so nothing but this tells: it is not known how it was computed. Where the model draws
random numbers it runs in eval mode, as rows with other masks of dropout have other losses.
"""

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pycomm.parallel.run.router_loss import plain_loss
from pycomm.parallel.tensor import cross_entropy

__all__ = ["LossOfRows"]


class LossOfRows:
    """trial: RowsTrial, which has begun. counter: of targets. measures: {name: (output, targets) -> mean}."""

    def __init__(self, trial, counter, measures):
        self.trial, self.counter = trial, counter
        self.measures = {
            name: each for name, each in measures.items() if plain_loss(each) is not cross_entropy
        }

    @property
    def is_wanted(self):
        """Whether there are numbers in what the model gave."""
        layouts = self.trial.layouts if self.measures else None
        return any(each.dim is None and not each.is_constant for each in (layouts or {}).values())

    @torch.no_grad()
    def run(self, number):
        """As RowsTrial.run. Collective where forwards are, and over pp."""
        trial, few = self.trial, self.trial.few
        _, in_eval = trial.agreed(trial.first)
        indices = [*trial.indices, [0] * (few + 1), trial.indices[0]]
        seen = [trial.once(index, 1 + number, self._values, in_eval) for index in indices]
        is_judged, draws = trial.agreed(seen)
        if not is_judged or draws or seen[0].values is None:
            return None, False
        for name in self.measures:
            both, a, b, longer, again = (each.values[name] for each in seen)
            if None not in (both, a, b, longer, again) and both == again:
                fault = self._fault(both, a, b, longer)
                if fault:
                    return f"{name} uses {self._where()}, {fault}", False
        return None, False

    def _fault(self, both, a, b, longer):
        """Of pairs (count, value)."""
        few, most = self.trial.few, self.trial.most
        weights = a[0] / few, b[0] * (few - 1) / few
        if not all(weights):
            return None
        together = (weights[0] * a[1] + weights[1] * b[1]) / sum(weights)
        size = max(abs(each[1]) for each in (both, a, b, longer))
        if not size < float("inf"):
            return None
        if abs(both[1] - together) > most * size:
            return (
                f"which is no mean over rows: for {few} rows it gives {both[1]:.6g}, and its values for rows "
                f"that are alike, weighted with what counts there, give {together:.6g}"
            )
        if abs(a[1] - longer[1]) > most * size:
            return (
                f"which grows with the number of rows: for {few} equal rows it gives {a[1]:.6g}, for "
                f"{few + 1} {longer[1]:.6g}"
            )
        return None

    def _where(self):
        names = [
            where for where, each in self.trial.layouts.items() if each.dim is None and not each.is_constant
        ]
        return "output" + " and output".join(names[:3])

    def _values(self, output, targets):
        """{name: (count, value), or None where no number plays a part in it}"""
        parts, layouts = self.trial.parts, self.trial.layouts
        rows = len(next(leaf for leaf in tree_leaves(targets) if isinstance(leaf, torch.Tensor)))
        if parts.compute_dtype is not None:
            output = tree_map(lambda leaf: _precise(leaf, parts.compute_dtype), output)

        def forget(leaf, layout):
            is_number = layout.dim is None and not layout.is_constant and leaf.is_floating_point()
            return torch.full_like(leaf, torch.nan) if is_number else leaf

        unknown, count, found = layouts.map(forget, output, rows), float(self.counter(targets)), {}
        for name, measure in self.measures.items():
            is_used = bool(torch.as_tensor(measure(unknown, targets)).isnan())
            found[name] = (count, float(measure(output, targets))) if is_used and count else None
        return found


def _precise(leaf, compute_dtype):
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == compute_dtype else leaf
