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

from __future__ import annotations

import functools
import operator
import types
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from pycomm.parallel.checkpoint.whole import zeros_of
from pycomm.parallel.checks.agree import agreed
from pycomm.parallel.checks.choice import (
    SCORES,
    Count,
    are_uneven,
    chosen_rows,
    first_of,
    rows_differ,
    scores_of,
    span_of,
    taken,
    window_of,
)
from pycomm.parallel.checks.exchange import GATHERED, RAISES, ZERO, Asking, Cuts, Exchange
from pycomm.parallel.checks.measures import Measure
from pycomm.parallel.checks.outputs import tensors_in
from pycomm.parallel.checks.runs import Runs
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.answers import Asked, State
from pycomm.parallel.ground.batch import count_targets
from pycomm.parallel.ground.same_batch import differ, powers
from pycomm.parallel.parts import Parallelized
from pycomm.parallel.tensor import cross_entropy

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree

__all__ = ["COUNTERS", "TOLD", "BatchCheck"]

ROWS = 4  # of a group
TOLD = 5 + 2 * SCORES  # numbers that are told
COUNTERS = 3  # that may be candidates
WATCHED = 100  # batches: those of which all is looked at, behind them whether rows differ in what counts
_NOT_ASKED = torch.zeros(0, SCORES, dtype=torch.float64)
_BY_RANKS = "the ranks have batches of other shapes"
_ADVICE = (
    "par.verify compares the plan with one process. If each row is computed from itself, and losses are "
    'means over targets, you may say so: Plan(trust=("rows", "loss"))'
)


def shifted_targets(targets: Tree) -> torch.Tensor:
    """Of each row all but the first."""
    return (first_of(targets)[:, 1:] != -100).sum()


def rows_of(targets: Tree) -> torch.Tensor:
    return torch.tensor(len(first_of(targets)))


COUNTED: dict[Count, str] = {
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
        measures: Mapping[str, Measure] | None,
        count: Count | None,
        cuts: Cuts,
    ) -> None:
        self.parts, self.run, self.measures, self.cuts = parts, run, measures, cuts
        several = parts.mesh.data.size * cuts.microbatches > 1
        # Stages wait for each other by messages, where it is not seen that ranks were called in two ways.
        self.agrees_first = not several and parts.plan.pp > 1
        self.is_cut = parts.checks.asks and (several or cuts.others or self.agrees_first)
        self.count, self.key = count, (parts.model.training, None if measures is None else tuple(measures))
        trusted = set(parts.plan.trust)
        self.asks_model, self.asks_loss = (
            "rows" not in trusted,
            "loss" not in trusted and measures is not None,
        )
        for name in trusted & {"rows", "loss"}:
            parts.checks.note(name, State.TRUSTED, "Plan(trust=...)")
        self.known = known = next(filter(self._is_of, parts.checks.asked.get(self.key, ())), None)
        self.is_watched = self.is_cut and (self.asks_model or self.asks_loss)
        is_old = parts.checks.batches.get(self.key, 0) >= WATCHED
        is_known = known is not None and (all(known.uneven) or is_old and known.uneven[0])
        self.is_watched = self.is_watched and not is_known
        self.candidates: tuple[Count, ...] = (count or count_targets,)
        self.chosen = dict.fromkeys(measures or (), 0)
        if known:
            self.candidates = tuple(dict.fromkeys(known.counters)) or self.candidates
            places = (self.candidates.index(each) for each in known.counters)
            self.chosen = dict(zip(measures or (), places, strict=True))
        self.uneven: tuple[bool, ...] = (False,) * SCORES
        self.alike, self.differ, self.scores = True, False, _NOT_ASKED
        self.span, self.is_new = (0.0, 0.0), False

    def _is_of(self, known: Asked) -> bool:
        measures = tuple((self.measures or {}).values())
        same = zip(measures, known.measures, strict=True)
        return is_same(self.count, known.count) and all(is_same(one, other) for one, other in same)

    def counter_of(self, name: str) -> Count:
        return self.candidates[self.chosen[name]]

    # What travels with the counts ----------------------------------------------------

    def told(self, inputs: Tree, targets: Tree) -> list[float]:
        """Numbers of these rows, to be summed over the data ranks."""
        if not self.is_watched:
            return []
        first = first_of(targets)
        self._take_candidates(first)
        self.parts.checks.batches[self.key] = self.parts.checks.batches.get(self.key, 0) + 1
        if not len(first):  # another rank has some, which are of another shape
            return [0.0] * TOLD
        self.scores, self.span = scores_of(targets, self.count or count_targets), span_of(targets)
        shapes = [(leaf.dtype, leaf.shape) for leaf in tensors_in((inputs, targets))]
        mark = zlib.crc32(repr((tree_flatten((inputs, targets))[1], shapes)).encode()) % (1 << 20)
        sums = [*self.scores.sum(0).tolist(), *self.scores.square().sum(0).tolist()]
        differ = rows_differ(inputs if self.measures is None else (inputs, targets))
        return [float(len(self.scores)), *sums, *powers(mark), float(differ), float(self._is_wider())]

    def _take_candidates(self, first: torch.Tensor) -> None:
        only_known = all(each is cross_entropy for each in (self.measures or {}).values())
        if self.count is None and self.asks_loss and not only_known and not first.is_floating_point():
            shifted = (shifted_targets,) if first.dim() > 1 else ()
            wanted = (count_targets, *shifted, rows_of)
            chosen = {name: wanted.index(self.candidates[at]) for name, at in self.chosen.items()}
            self.candidates, self.chosen = wanted, chosen

    def _is_wider(self) -> bool:
        """Whether there are targets unlike those that were asked with: an ignored 255, say."""
        if self.known is None:
            return False
        (low, high), (known_low, known_high) = self.span, self.known.span
        return low < min(known_low, 0.0) or high > 1.25 * known_high + 1

    def heard(self, sums: list[float], ranks: int = 1) -> None:
        """sums: of what `ranks` ranks have told."""
        if sums:
            rows, *scores = torch.tensor(sums[: 1 + 2 * SCORES], dtype=torch.float64).unbind()
            self.uneven = are_uneven(rows, torch.stack(scores[:SCORES]), torch.stack(scores[SCORES:]))
            total, squares, differs, is_new = sums[1 + 2 * SCORES :]
            self.alike = not differ(total, squares, ranks)
            self.differ, self.is_new = differs > 0, is_new > 0

    @property
    def is_wanted(self) -> bool:
        if not (self.is_watched and self.differ):
            return False
        known = self.known
        return (
            known is None
            or self.is_new
            or any(u and not k for u, k in zip(self.uneven, known.uneven, strict=True))
        )

    # Asking ----------------------------------------------------------------------------

    def ask(self, inputs: Tree, targets: Tree) -> None:
        """inputs, targets: the whole batch, or this rank's rows. Collective over all ranks."""
        if not self.is_wanted:
            return
        if self.agrees_first and agreed(self.parts, not self.cuts.others)[0]:
            return
        parts = self.parts
        if not len(self.scores):  # a row of another rank
            self.scores = scores_of(targets, self.count or count_targets)
        why: str | None = _BY_RANKS
        if self.alike or not self._is_collective():
            unweighted = self.asks_loss and self.count is None
            asked = Asking(
                self.measures,
                self.candidates,
                self.asks_model,
                self.asks_loss,
                unweighted,
                len(self.candidates) > 1 and not self.uneven[0],
            )
            exchange = Exchange(parts, self.run, self.cuts, asked)
            for k, is_whole in self._attempts(len(self.scores)):
                batch = self._few(inputs, targets, k, is_whole)
                if batch is not None:
                    why = exchange.ask(*batch, k)
                if why is not RAISES:
                    break
            if why is RAISES and parts.units is None and parts.deferred is None:
                k, is_whole = self._attempts(len(self.scores))[0]
                batch = self._few(inputs, targets, k, is_whole)
                if batch is not None:
                    why = exchange.ask(*batch, k, graph=True)
            if why is RAISES and exchange.error is not None:
                why = f"{RAISES} ({type(exchange.error).__name__}: {str(exchange.error)[:200]})"
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
        if why is ZERO:  # another batch may tell more
            return
        self._remember(
            Asked(measures, self.count, self.uneven, self.span, counters), only_known or why is not None
        )
        self._note(why)

    def _remember(self, asked: Asked, for_good: bool) -> None:
        known = self.known
        if for_good:
            asked = asked._replace(uneven=(True,) * SCORES)
        elif known is not None:
            uneven = tuple(map(operator.or_, asked.uneven, known.uneven))
            span = min(asked.span[0], known.span[0]), max(asked.span[1], known.span[1])
            asked = asked._replace(uneven=uneven, span=span)
        self.parts.checks.note_asked(self.key, asked, known)

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
        """[(rows of a group, whether with all positions)], alike on all ranks."""
        if not self.alike:
            return [(ROWS, False)]
        most = max(2, self._rows_of_microbatch(rows))
        sizes = [min(ROWS, most)]
        while sizes[-1] * 2 <= most:
            sizes.append(sizes[-1] * 2)
        if sizes[-1] < ROWS:
            sizes.append(ROWS)
        whole = [] if self.parts.split is not None else [(k, True) for k in sizes]
        return [(k, False) for k in sizes] + whole

    def _few(self, inputs: Tree, targets: Tree, k: int, is_whole: bool) -> tuple[Tree, Tree] | None:
        """2 k rows; None where they are those of an attempt before. Collective where ranks have rows of their
        own.
        """
        own = 2 * k
        is_shared = self.cuts.sharded and self.alike
        if is_shared:
            own = -(-own // self.parts.mesh.rows[0])
        batch: tuple[Tree, Tree] = taken((inputs, targets), chosen_rows(inputs, targets, self.scores, own))
        if is_shared:
            batch = self._shared(batch, own, 2 * k)
        length = next((x.shape[1] for x in tensors_in(inputs) if x.dim() > 1), 1)
        split = self.parts.split
        pieces = 1 if split is None else split.degree * (split.tp.size if split.megatron else 1)
        window = window_of(*batch, self._rows_of_microbatch(len(self.scores)) * length, 4 * pieces + 1)
        if window is None:
            return None if is_whole else batch
        return batch if is_whole else window.of(batch)

    def _shared(self, batch: tuple[Tree, Tree], own: int, rows: int) -> tuple[Tree, Tree]:
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


def is_same(one: object, other: object, deep: int = 3) -> bool:
    """Also what was made anew: a function or partial from the same source with the same values in it, a
    method of the same object, a module of the same class with the same attributes.
    """
    if one is other or not deep or type(one) is not type(other):
        return one is other
    if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
        return one.__code__ is other.__code__ and _same_values(_held_by(one), _held_by(other), deep)
    if isinstance(one, types.MethodType) and isinstance(other, types.MethodType):
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        mine, others = ([each.func, each.args, each.keywords] for each in (one, other))
        return _same_values(mine, others, deep)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return _same_values(one, other, deep)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and _same_values(list(one.values()), list(other.values()), deep)
    if isinstance(one, (bool, int, float, str, bytes, set)):
        return one == other
    return isinstance(one, torch.nn.Module) and is_same(vars(one), vars(other), deep)


def _same_values(one: Sequence[object], other: Sequence[object], deep: int) -> bool:
    return len(one) == len(other) and all(is_same(a, b, deep - 1) for a, b in zip(one, other, strict=True))


def _held_by(function: types.FunctionType) -> list[object]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
