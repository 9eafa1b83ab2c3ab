"""One asking of the relation of rows.py: the runs, what they show on this rank, what all ranks found.

    number 0      A, B, A', B', AB
    number 1 ..   after a finding, with other random numbers, watched: the same and A again. Once; AGAIN times
                  for a model that draws some. What is found each time is refused

Each time ends with one all_reduce of flags.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm.parallel.checks.agree import agreed, raise_together
from pycomm.parallel.checks.choice import Count, taken
from pycomm.parallel.checks.means import fault_of_loss, makes_whole
from pycomm.parallel.checks.measures import (
    Group,
    Measure,
    Measured,
    Refused,
    Seen,
    Unweighted,
    halves_of,
    measured,
)
from pycomm.parallel.checks.rows import Fault, differ_for_the_same, fault_of_model, groups_of, put_together
from pycomm.parallel.checks.runs import Ran, Runs
from pycomm.parallel.checks.tolerances import rounding_of
from pycomm.parallel.data.gather_rows import RowsGathered
from pycomm.parallel.models import drawn
from pycomm.parallel.parts import Parallelized

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree

__all__ = ["GATHERED", "RAISES", "ZERO", "Asking", "Cuts", "Exchange"]

AGAIN = 15  # with other random numbers, for a model that draws some
RAISES, *_, ZERO = _WHY = (
    "it, or the loss, raises for few rows of the batch",
    "it sends something itself",
    "it draws as many random numbers as its values say",
    "it gives other values for the same rows",
    "the loss is not finite",
    "a loss of zero, or a metric that is the same for all rows, shows nothing",
)
FIVE = "A", "B", "A'", "B'", "AB"
GATHERED = "gather_rows gives the rows of all ranks"


class Cuts(NamedTuple):
    """How a batch is cut. others: other batches take part, too (update=False)."""

    microbatches: int
    sharded: bool
    others: bool = False


class Asking(NamedTuple):
    """What is asked."""

    measures: Mapping[str, Measure] | None  # by name; None: the output is the result
    counters: tuple[Count, ...]
    model: bool  # whether the model is judged
    loss: bool  # whether the measures are
    unweighted: bool  # whether weights of classes are refused
    alike: bool  # whether rows do not tell counters apart


_Faults = dict[str | tuple[str, int], Fault | None]  # of the model, and of (measure, counter)


class Exchange:
    """`chosen`: name of a measure -> index of the first counter for which the relation holds."""

    def __init__(self, parts: Parallelized, run: Runs, cuts: Cuts, asked: Asking) -> None:
        self.parts, self.run, self.cuts, self.asked = parts, run, cuts, asked
        self.measures, self.counters = asked.measures, asked.counters
        self.asks_model, self.asks_loss = asked.model, asked.loss
        self.chosen: dict[str, int | None] = dict.fromkeys(asked.measures or (), 0)
        self.found: _Faults = {}
        self.wide: dict[str, int] = {}
        self.error: Exception | None = None

    def ask(self, inputs: Tree, targets: Tree, k: int, graph: bool = False) -> str | None:
        """Why the answer is not known, or None where all held. graph: gradients are recorded, as some models
        ask for them in their forward. Raises ValueError on all ranks.
        """
        number, most, draws, is_rough = 0, 1, False, False
        self.found, self.error, self.graph = {}, None, graph
        self.outputs: list[Tree] = []
        while True:
            few = 2 if number > 1 and draws else None
            rans = self._five(inputs, targets, groups_of(k, few), number)
            flags = self._judged(rans, few or k, number, draws, is_rough)
            *flags, gathered, refused, rough, drew = map(bool, agreed(self.parts, *flags, error=self.error))
            if gathered:
                return GATHERED
            if refused:
                raise_together(self.parts, str(self.error) if isinstance(self.error, Refused) else None)
            unknown, (of_model, *of_losses) = flags[: len(_WHY)], flags[len(_WHY) :]
            if any(unknown[:-1]) or (unknown[-1] and not of_model):  # a mute metric hides no mixed rows
                return _WHY[unknown.index(True)]
            self._choose(of_losses)
            if not of_model and None not in self.chosen.values():
                return None
            if rough and not is_rough:
                most = max(most, number + 1)
            draws, is_rough = draws or drew, is_rough or rough
            if number >= max(most, AGAIN if draws else 1):
                raise_together(self.parts, self._sentence(of_model))
            number += 1

    def _five(self, inputs: Tree, targets: Tree, groups: list[list[int]], number: int) -> list[Ran]:
        """A, B, A', B', AB; in a repetition A again."""
        rans: list[Ran] = []
        self.outputs = []
        for index in groups + groups[:1] * bool(number):
            take = functools.partial(self._take, taken(targets, index))
            failed = self.error is not None
            rans.append(self.run(taken(inputs, index), take, number, failed, graph=self.graph))
            self.error = self.error or rans[-1].error
            if rans[-1].all_know:
                break
        return rans

    def _take(self, targets: Tree, output: Tree) -> Seen:
        split, pieces = self.parts.split, 0
        if split is not None and self.measures is not None:  # else they are numbers of rows
            targets = split.cut_targets(targets)
            pieces = sum(split.sizes) if split.degree > 1 else 0
        group = Group(targets, self.measures, self.counters, pieces)
        with Unweighted() if self.asked.unweighted else contextlib.nullcontext():
            seen = measured(output, group, self.wide)
            if self.asked.alike and not self.outputs and not pieces:
                seen = seen._replace(halves=halves_of(output, group, self.wide))
            self.outputs.append(output)
            if len(self.outputs) == len(FIVE):
                with contextlib.suppress(Exception):  # of a measure that takes no such outputs
                    first, second = self.outputs[:2]
                    joined = put_together(first, second, output)
                    seen = seen._replace(measured=measured(joined, group, self.wide).measured)
            return seen

    def _judged(self, rans: list[Ran], rows: int, number: int, draws: bool, is_rough: bool) -> list[bool]:
        """[each of _WHY, of the model, of each measure by each counter; gathers, refused, rough, draws]"""
        names = [(name, at) for name in self.measures or () for at in range(len(self.counters))]
        nothing = [False] * (1 + len(names))
        if self.error is not None:
            kinds = [isinstance(self.error, kind) for kind in (RowsGathered, Refused)]
            return [True, *[False] * (len(_WHY) - 1), *nothing, *kinds, False, False]
        drew, sends = any(ran.draws for ran in rans), any(ran.sends for ran in rans)
        by_value = not all(drawn.same(ran.drawn, rans[0].drawn) for ran in rans[1:4])
        is_rough = is_rough or len({ran.work for ran in rans[:4]}) > 1
        if rans[0].result is None:
            return [False, sends, by_value, False, False, False, *nothing, False, False, is_rough, drew]
        seen: list[Seen] = [ran.result for ran in rans]
        ignored: set[str] = set()
        values_differ, not_finite = False, self._not_finite(seen)
        if number:
            ignored, any_bit = differ_for_the_same(seen[0], seen[5])
            values_differ = any(
                _is_other(seen[0].measured[name].value, seen[5].measured[name].value) and not any_bit
                for name in self.measures or ()
            )
            is_rough = is_rough or any_bit
        rounding = rounding_of(self._dtypes(), is_rough, draws or drew)
        rounding = rounding._replace(loss_draws=any(ran.loss_draws for ran in rans))
        found: _Faults = {"model": fault_of_model(seen, rounding, ignored, rows) if self.asks_model else None}
        for name, at in names:
            found[name, at] = fault_of_loss(seen, name, at, rounding) if self.asks_loss else None
        for name in self.measures or () if self.asks_loss else ():
            self._tell_apart(seen, name, found)
        found = {each: fault if not number or self.found[each] else None for each, fault in found.items()}
        self.found = found
        other = bool(ignored or values_differ) and not found["model"]
        return [
            *(False, sends, by_value, other, not_finite, self._shows_nothing(seen)),
            found["model"] is not None,
            *(found[each] is not None for each in names),
            *(False, False, is_rough, drew),
        ]

    def _tell_apart(self, seen: list[Seen], name: str, found: _Faults) -> None:
        """Of counters that rows of one length do not tell apart: that by which halves of the positions make
        the whole (halves that share one, for shifted labels); else rows.
        """
        left = [at for at in range(len(self.counters)) if found[name, at] is None]
        if len(left) > 1 and name in seen[0].halves:
            halves, whole = seen[0].halves[name], seen[0].measured[name]
            pairs = {
                at: halves.sharing if at == 1 and len(self.counters) == 3 else halves.apart for at in left
            }
            holds = [at for at in left if makes_whole(whole, pairs[at], at)] or left[-1:]
            fault = Fault("it is that of other counts", 0.0)
            found.update({(name, at): fault for at in left if at != holds[0]})

    def _not_finite(self, seen: list[Seen]) -> bool:
        judged = [each for one in seen for each in one.measured.values() if each.gradients and each.counts[0]]
        values = [each.value for each in judged if each.value is not None]
        return self.asks_loss and not all(abs(value) < torch.inf for value in values)

    def _shows_nothing(self, seen: list[Seen]) -> bool:
        """Whether a loss is zero for all rows, or a metric the same number, or none."""

        def is_mute(five: list[Measured]) -> bool:
            values = {each.value for each in five}
            if any(each.gradients for each in five):
                return values == {0.0}
            numbers = [each for each in values if each is not None]
            return len(numbers) == len(values) and (
                len(values) == 1 or not all(abs(each) < torch.inf for each in numbers)
            )

        names = self.measures or () if self.asks_loss else ()
        return any(is_mute([each.measured[name] for each in seen]) for name in names)

    def _dtypes(self) -> set[torch.dtype]:
        found = {each.dtype for each in self.parts.model.parameters() if each.is_floating_point()}
        kind = self.parts.device.type
        return found | ({torch.get_autocast_dtype(kind)} if torch.is_autocast_enabled(kind) else set())

    def _choose(self, of_losses: list[bool]) -> None:
        """For each measure the first counter for which it holds, or None."""
        number = len(self.counters)
        for place, name in enumerate(self.measures or ()):
            broken = of_losses[place * number : (place + 1) * number]
            self.chosen[name] = broken.index(False) if False in broken else None

    # Words -------------------------------------------------------------------------------

    def _sentence(self, of_model: bool) -> str | None:
        data, microbatches = self.parts.mesh.data.size, self.cuts.microbatches
        ways = [
            *([f"over {data} ranks"] if data > 1 else []),
            *([f"into {microbatches} microbatches"] if microbatches > 1 else []),
        ]
        cuts = f"The batch is cut {' and '.join(ways) or 'into calls'}"
        end = "" if self.measures is None else " No parameter was changed"
        if of_model:
            fault = self.found.get("model")
            return None if fault is None else _of_model(fault, cuts, end)
        for name in self.measures or ():
            found = (self.found.get((name, at)) for at in range(len(self.counters)))
            faults = [each for each in found if each is not None]
            if len(faults) == len(self.counters):
                fault = min(faults, key=lambda each: each.size)
                return _of_loss(name, fault, cuts, end)
        return None


def _is_other(one: float | None, again: float | None) -> bool:
    """A mean over nothing is not a number, again and again."""
    return one != again and not (one != one and again != again)


def _of_model(fault: Fault, cuts: str, end: str) -> str:
    return (
        f"the model mixes rows of the batch: its {fault.words}. {cuts}, so each part would be mixed by "
        "itself, which is not what one process computes. Look for what goes over dim 0 (a mean, a softmax, "
        "a sort, statistics of the batch) or decides by all values (if x.mean() > 0); par.verify names the "
        "module. Use nn.BatchNorm; or compute it over the rows of all ranks, which par.gather_rows gives; or "
        f"use a plan that does not cut the batch.{end}"
    )


def _of_loss(name: str, fault: Fault, cuts: str, end: str) -> str:
    if fault.of_number:
        return (
            f"the loss of a batch cannot be put together from those of its parts: {name} uses a number that "
            f"the model computes from all rows, and that is no mean over the targets that count: "
            f"{fault.words}. {cuts}, and each part would have a number of its own. Let the model return what "
            "the number is computed from, with a row for each row, and compute a mean over the targets that "
            "count in loss_fn. A loss that compares rows with each other (contrastive) needs the rows of all "
            "ranks: let the model call par.gather_rows on what it compares, with microbatches=1. Or use a "
            f"plan that does not cut the batch.{end}"
        )
    return (
        f"{name} is no mean over the targets that count: {fault.words}. {cuts}, and the loss of a batch is "
        "put together from its parts, weighted with the targets that count: return that mean, or say what "
        "yours runs over: count=(targets -> number). A loss that compares rows with each other (contrastive) "
        "needs the rows of all ranks: let it call par.gather_rows on what it compares, with "
        f"microbatches=1.{end}"
    )
