"""The questions of rows.py, asked of a model and its losses before a batch is cut into rows.

    BatchCheck(...)    of one step, evaluation or prediction: whether something is to be asked
    told, heard        numbers of this rank's rows, and their sums over the data ranks, which travel with the
                       counts of targets: whether rows are uneven, whether all ranks have such shapes
    ask                the runs; raises ValueError on all ranks where the batch must not be cut
    counters           what the mean of each measure runs over, from then on

[Note: equal rows] Where a forward is collective all ranks run the same rows, so they raise alike. A batch
that all have is the same everywhere; of batches of their own each data rank gives some rows, if shapes are
equal. If one rank alone raises, the others wait inside of the forward: see agree.py.

Cost: 5 forwards of k or 2 k rows without gradients, and one all_reduce; with rows of each rank's own one
more, of these rows. Later a look into a dict.
"""

import functools
import types
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from pycomm.parallel.checkpoint.whole import zeros_of
from pycomm.parallel.checks.choice import (
    are_uneven,
    chosen_rows,
    first_of,
    rows_differ,
    scores_of,
    taken,
    window_of,
)
from pycomm.parallel.checks.exchange import GATHERED, RAISES, Asking, Cuts, Exchange, Runs
from pycomm.parallel.checks.measures import Measure
from pycomm.parallel.checks.outputs import tensors_in
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.answers import Asked, State
from pycomm.parallel.ground.batch import count_targets
from pycomm.parallel.ground.same_batch import differ, powers
from pycomm.parallel.parts import Parallelized
from pycomm.parallel.tensor import cross_entropy

__all__ = ["TOLD", "BatchCheck"]

ROWS = 4  # of a group
TOLD = 10  # numbers that are told
_BY_RANKS = "the ranks have batches of other shapes"
_ADVICE = (
    "par.verify compares the plan with one process. If each row is computed from itself, and losses are "
    'means over targets, you may say so: Plan(trust=("rows", "loss"))'
)


def shifted_targets(targets: Any) -> torch.Tensor:
    """Of each row all but the first."""
    return (first_of(targets)[:, 1:] != -100).sum()


def rows_of(targets: Any) -> torch.Tensor:
    return torch.tensor(len(first_of(targets)))


COUNTED = {
    count_targets: "targets",
    shifted_targets: "targets without the first of each row",
    rows_of: "rows",
}


class BatchCheck:
    """run: Runs. measures: {name: (output, targets) -> number}; None: the output itself is the result. count:
    the caller's, or None.
    """

    def __init__(
        self,
        parts: Parallelized,
        run: Runs,
        measures: dict[str, Measure] | None,
        count: Callable | None,
        cuts: Cuts,
    ) -> None:
        self.parts, self.run, self.measures, self.cuts = parts, run, measures, cuts
        several = parts.mesh.data.size * cuts.microbatches > 1
        # Stages run together before it is known that all ranks were called alike (update=).
        self.is_cut = parts.checks.asks and (several or cuts.others and parts.stage_model is None)
        self.count, self.key = count, (parts.model.training, None if measures is None else tuple(measures))
        trusted = set(parts.plan.trust)
        self.asks_model, self.asks_loss = (
            "rows" not in trusted,
            "loss" not in trusted and measures is not None,
        )
        for name in trusted & {"rows", "loss"}:
            parts.checks.note(name, State.TRUSTED, "Plan(trust=...)")
        known = parts.checks.asked.get(self.key)
        if known is not None and not self._is_of(known):
            known = None
        self.known = known
        self.is_watched = self.is_cut and (self.asks_model or self.asks_loss)
        self.is_watched = self.is_watched and not (known and known.with_uneven)
        self.candidates: tuple = (count or count_targets,)
        self.chosen = dict.fromkeys(measures or (), 0)
        if known:
            self.candidates = tuple(dict.fromkeys(known.counters)) or self.candidates
            places = (self.candidates.index(each) for each in known.counters)
            self.chosen = dict(zip(measures or (), places, strict=True))
        self.uneven, self.alike, self.differ, self.scores = False, True, False, None

    def _is_of(self, known: Asked) -> bool:
        measures = tuple((self.measures or {}).values())
        same = zip(measures, known.measures, strict=True)
        return is_same(self.count, known.count) and all(is_same(one, other) for one, other in same)

    def counter_of(self, name: str) -> Callable:
        return self.candidates[self.chosen[name]]

    # What travels with the counts ----------------------------------------------------

    def told(self, inputs: Any, targets: Any) -> list[float]:
        """Numbers of these rows, to be summed over the data ranks."""
        if not self.is_watched:
            return []
        first = first_of(targets)
        only_known = all(each is cross_entropy for each in (self.measures or {}).values())
        if self.count is None and self.asks_loss and not only_known and not first.is_floating_point():
            shifted = (shifted_targets,) if first.dim() > 1 and first.shape[1] > 1 else ()
            wanted = (count_targets, *shifted, rows_of)
            chosen = {name: wanted.index(self.candidates[at]) for name, at in self.chosen.items()}
            self.candidates, self.chosen = wanted, chosen
        self.scores = scores_of(targets, self.count or count_targets)
        shapes = [(leaf.dtype, leaf.shape) for leaf in tensors_in((inputs, targets))]
        mark = zlib.crc32(repr((tree_flatten((inputs, targets))[1], shapes)).encode()) % (1 << 20)
        sums = [*self.scores.sum(0).tolist(), *self.scores.square().sum(0).tolist()]
        return [float(len(self.scores)), *sums, *powers(mark), float(rows_differ(inputs))]

    def heard(self, sums: list[float], ranks: int = 1) -> None:
        """sums: of what `ranks` ranks have told."""
        if sums:
            rows, *scores = torch.tensor(sums[:7], dtype=torch.float64).unbind()
            self.uneven = are_uneven(rows, torch.stack(scores[:3]), torch.stack(scores[3:]))
            self.alike = not differ(*sums[7:9], ranks)
            self.differ = sums[9] > 0

    @property
    def is_wanted(self) -> bool:
        return self.is_watched and self.differ and (self.known is None or self.uneven)

    # Asking ----------------------------------------------------------------------------

    def ask(self, inputs: Any, targets: Any) -> None:
        """inputs, targets: the whole batch, or this rank's rows. Collective over all ranks."""
        if not self.is_wanted:
            return
        parts, why = self.parts, _BY_RANKS
        if self.alike or not self._is_collective():
            unweighted = self.asks_loss and self.count is None
            asked = Asking(self.measures, self.candidates, self.asks_model, self.asks_loss, unweighted)
            exchange = Exchange(parts, self.run, self.cuts, asked)
            for k, is_whole in self._attempts(len(self.scores)):
                batch = self._few(inputs, targets, k, is_whole)
                if batch is not None:
                    why = exchange.ask(*batch, k)
                if why is not RAISES:
                    break
            self.chosen = {name: at or 0 for name, at in exchange.chosen.items()}
        counters = tuple(self.candidates[at] for at in self.chosen.values())
        if self.known is not None and counters != self.known.counters and not parts.window.is_empty:
            raise ValueError(
                f"[rank {parts.mesh.world.rank}] step: this batch shows that the loss is a mean over "
                f"{COUNTED[counters[0]]}, and earlier calls, whose gradients wait, were weighted with "
                f"{COUNTED.get(self.known.counters[0], 'other counts')}. Say which in all calls: count=..."
            )
        measures = tuple((self.measures or {}).values())
        only_known = all(each is cross_entropy for each in measures)
        with_uneven = self.uneven or only_known or why is not None
        parts.checks.asked[self.key] = Asked(measures, self.count, with_uneven, counters)
        self._note(why)

    def _note(self, why: str | None) -> None:
        """why: why it is not known; None where all held."""
        found = {"rows": ""} if self.asks_model else {}
        for name, at in self.chosen.items() if self.asks_loss else ():
            counted = COUNTED.get(self.candidates[at], "what count= counts")
            found["loss" if name == "loss_fn" else name] = f"a mean over {counted}"
        checks, rank = self.parts.checks, self.parts.mesh.world.rank
        checks.gathers |= why is GATHERED
        for name, text in found.items():
            if why is None:
                checks.note(name, State.HELD, text)
            elif why is GATHERED:
                checks.note(name, State.HELD, GATHERED)
            else:
                checks.note(name, State.NOT_TRIED, why, rank, _ADVICE)

    def _is_collective(self) -> bool:
        """Whether a forward waits for other ranks."""
        plan = self.parts.plan
        in_groups = plan.tp * plan.pp * plan.ep * plan.ring * plan.ulysses > 1
        return in_groups or self.parts.units is not None

    def _rows_of_microbatch(self, rows: int) -> int:
        ranks = 1 if self.cuts.sharded else self.parts.mesh.rows[0]
        return max(1, rows // (self.cuts.microbatches * ranks))

    def _attempts(self, rows: int) -> list[tuple[int, bool]]:
        """[(rows of a group, whether with all positions)]"""
        most = max(2, self._rows_of_microbatch(rows))
        sizes = [min(ROWS, most)]
        while sizes[-1] * 2 <= most:
            sizes.append(sizes[-1] * 2)
        if sizes[-1] < ROWS:
            sizes.append(ROWS)
        whole = [] if self.parts.split is not None else [(k, True) for k in sizes]
        return [(k, False) for k in sizes] + whole

    def _few(self, inputs: Any, targets: Any, k: int, is_whole: bool) -> tuple[Any, Any] | None:
        """2 k rows; None where they are those of an attempt before. Collective where ranks have rows of their
        own.
        """
        own = 2 * k
        is_shared = self.cuts.sharded and self.alike
        if is_shared:
            own = -(-own // self.parts.mesh.rows[0])
        batch = taken((inputs, targets), chosen_rows(inputs, targets, self.scores, own))
        if is_shared:
            batch = self._shared(batch, own, 2 * k)
        length = next((x.shape[1] for x in tensors_in(inputs) if x.dim() > 1), 1)
        split = self.parts.split
        pieces = 1 if split is None else split.degree * (split.tp.size if split.megatron else 1)
        window = window_of(*batch, self._rows_of_microbatch(len(self.scores)) * length, 4 * pieces + 1)
        if window is None:
            return None if is_whole else batch
        return batch if is_whole else window.of(batch)

    def _shared(self, batch: Any, own: int, rows: int) -> Any:
        """`rows` rows, of each data rank `own`, in the order of their counts. Collective over them."""
        parts, (_, part) = self.parts, self.parts.mesh.rows
        leaves, tree = tree_flatten(batch)
        tensors = tensors_in(leaves)
        kinds = [(at, each.dtype, (rows, *each.shape[1:])) for at, each in enumerate(tensors)]
        flat, views = zeros_of(kinds, parts.device)
        start = part * own
        is_first = not (parts.mesh.coordinate("ring") or parts.mesh.coordinate("ulysses"))
        for at, each in enumerate(tensors) if is_first else ():
            views[at][start : start + own] = each[: max(0, rows - start)]
        comm.all_reduce(flat, parts.mesh.data)
        given = iter(views.values())
        whole = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        inputs, targets = tree_unflatten(whole, tree)
        scores = scores_of(targets, self.count or count_targets)
        return taken((inputs, targets), chosen_rows(inputs, targets, scores, rows))


def is_same(one: Any, other: Any) -> bool:
    """Also a function or partial that was made anew, from the same source with the same values in it."""
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        values = [[*each.args, *each.keywords.values()] for each in (one, other)]
        return (
            is_same(one.func, other.func)
            and list(one.keywords) == list(other.keywords)
            and len(values[0]) == len(values[1])
            and all(a is b for a, b in zip(*values, strict=True))
        )
    if one is other or not all(isinstance(each, types.FunctionType) for each in (one, other)):
        return one is other

    def held(function: types.FunctionType) -> list:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]

    same_code = one.__code__ is other.__code__
    return same_code and all(a is b for a, b in zip(held(one), held(other), strict=True))
