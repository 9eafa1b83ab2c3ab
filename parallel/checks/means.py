"""The relation of rows.py for losses: whether one is a mean over what a counter counts."""

from collections.abc import Mapping, Sequence

import torch

from pycomm.parallel.checks.measures import Half, Measured, Seen
from pycomm.parallel.checks.rows import Fault, distance
from pycomm.parallel.checks.tolerances import OF_DRAWN, Rounding, of_loss

__all__ = ["fault_of_loss", "makes_whole"]


def fault_of_loss(seen: list[Seen], name: str, counter: int, rounding: Rounding) -> Fault | None:
    """Why a measure is no mean over what this counter counts."""
    five = [each.measured[name] for each in seen]
    values = [each.value for each in five if each.value is not None]
    if len(values) < len(five):  # a mean that is known
        return None
    counts = [each.counts for each in five]
    if any(
        own[counter] and not own[0] and not abs(value) < torch.inf
        for own, value in zip(counts, values, strict=True)
    ):
        return Fault("for rows of which no target counts it gives no number", torch.inf)
    shapes = seen[0].shapes, seen[4].shapes
    loss = _Loss(five, values, counter, shapes, rounding)
    fault = loss.of_value() or loss.of_gradients() or loss.of_size() or loss.of_halves()
    return None if fault is None else fault._replace(of_number=loss.uses_number())


def makes_whole(whole: Measured, halves: Sequence[Half], counter: int) -> bool:
    """Whether a loss is the mean of those of halves of its positions, by what this counter counts."""
    terms = [counts[counter] * value if counts[counter] else 0.0 for counts, value in halves]
    together, size = whole.counts[counter] * (whole.value or 0.0), max(map(abs, terms), default=0.0)
    return abs(together - sum(terms)) <= of_loss(whole.wide) * max(size, abs(together))


class _Loss:
    """A measure, by one counter. values: of the five. shapes: of the outputs of A and AB."""

    def __init__(
        self,
        five: list[Measured],
        values: list[float],
        counter: int,
        shapes: tuple[Mapping[str, torch.Size], Mapping[str, torch.Size]],
        rounding: Rounding,
    ) -> None:
        self.five, self.values, self.counter, self.rounding = five, values, counter, rounding
        few, many = shapes
        self.without_rows = {where for where, shape in few.items() if many.get(where) == shape}
        self.counts = [each.counts[counter] for each in five]
        pairs = zip(self.counts, values, strict=True)
        self.terms = [count * value if count else 0.0 for count, value in pairs]
        self.size = max(map(abs, self.terms))
        self.most = max(rounding.equal, max(of_loss(each.wide) for each in five))
        self.first = (
            f"for two groups of rows, of which {self.counts[0]:g} and {self.counts[1]:g} targets count, it "
            f"gives {values[0]:.6g} and {values[1]:.6g}"
        )

    def uses_number(self) -> bool:
        return any(each.used & self.without_rows for each in self.five[:4])

    def of_value(self) -> Fault | None:
        before, after = self.terms[0] + self.terms[1], self.terms[2] + self.terms[3]
        off = abs(before - after)
        if not self.size < torch.inf or off <= self.most * self.size:
            return None
        c, values = self.counts, self.values
        return Fault(
            f"{self.first}; with every second row exchanged, {c[2]:g} and {c[3]:g} count, and it gives "
            f"{values[2]:.6g} and {values[3]:.6g}. The means of both, weighted with what counts, are "
            f"{before / (c[0] + c[1]):.6g} and {after / (c[2] + c[3]):.6g}",
            off / self.size,
        )

    def of_gradients(self) -> Fault | None:
        apart = max((self._gradient(where) for where in self._names()), default=0.0)
        if apart <= self.most:
            return None
        how = f"by {apart:.2g} of their size" if apart < torch.inf else "from numbers to none"
        return Fault(
            f"{self.first}, and its gradients for a row change {how} when rows beside it are other ones",
            apart,
        )

    def _names(self) -> set[str]:
        return set[str]().union(*(each.gradients for each in self.five[:4])) - self.without_rows

    def _gradient(self, where: str) -> float:
        like = next(each.gradients[where] for each in self.five if where in each.gradients)
        four = [
            each.gradients.get(where, torch.zeros_like(like)) * count if count else torch.zeros_like(like)
            for each, count in zip(self.five[:4], self.counts[:4], strict=True)
        ]
        return distance(four) if all(each.shape == like.shape for each in four) else 0.0

    def of_size(self) -> Fault | None:
        terms, together = self.terms, self.terms[0] + self.terms[1]
        size = max(abs(terms[4]), abs(terms[0]) + abs(terms[1]))
        most = max(self.most, self.rounding.other) if self.uses_number() else self.most
        if self.rounding.loss_draws or self.rounding.draws and self.uses_number():
            most = OF_DRAWN
        if not size < torch.inf or abs(terms[4] - together) <= most * size:
            return None
        whole, parts = self.values[4], self.values[0] + self.values[1]
        hint = ""
        if abs(whole - parts) <= most * abs(whole):
            hint = ". It is a sum: divide it by the number of targets that count"
        return Fault(
            f"{self.first}, and for all of these rows {whole:.6g}, where the mean, weighted with what "
            f"counts, is {together / self.counts[4]:.6g}{hint}",
            abs(terms[4] - together) / size,
        )

    def of_halves(self) -> Fault | None:
        for each, mean, count in zip(self.five[:2], self.values, self.counts, strict=False):
            halves = [(counts[self.counter], value) for counts, value in each.halves]
            terms = [own * value if own else 0.0 for own, value in halves]
            whole = count * mean if count else 0.0
            off, size = abs(whole - sum(terms)), max(map(abs, [whole, *terms]))
            if halves and abs(whole) < torch.inf and not off <= self.most * size:
                return Fault(
                    f"for some rows it gives {mean:.6g}, and for the halves of their positions, "
                    f"weighted with what counts there, {sum(terms) / (count or 1.0):.6g}",
                    off / size,
                )
        return None
