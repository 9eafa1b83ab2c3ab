"""What all ranks have found, as one result.

Modules are in the order in which they end in one process, so that inner ones come before the ones around
them. The first that differs is named, if the difference also leaves the modules around it: experts, for
instance, may be given their tokens in another order.

Of gradients the one nearest to the loss is named, as backward comes to it first: what is wrong there is wrong
in all that lies before.

[Note: what differs] A value differs where it is off by more than tolerance * (the largest value of its tensor
+ a floor). The floor, tolerance * the median of these largest values over all tensors, is for tensors that
are zero but for rounding, such as the gradient of a bias in front of a softmax.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

__all__ = [
    "Difference",
    "Found",
    "Off",
    "Verification",
    "What",
    "both",
    "first_module",
    "first_parameter",
    "off",
]


class Off(NamedTuple):
    """How far two tensors are apart."""

    absolute: float  # largest difference of two values; inf where one is no number
    scale: float  # the largest value that is right

    def differs(self, tolerance: float, floor: float) -> bool:
        """See [Note: what differs]."""
        return not self.absolute <= tolerance * (self.scale + floor)

    @property
    def relative(self) -> float:
        return self.absolute / self.scale if self.scale else math.inf if self.absolute else 0.0


@torch.no_grad()
def off(found: torch.Tensor, right: torch.Tensor) -> Off:
    """Off, of two tensors of one shape."""
    found, right = (x.detach().to("cpu", torch.float64) for x in (found, right))
    if not right.numel():
        return Off(0.0, 0.0)
    same = (found == right) | (found.isnan() & right.isnan())  # infinities too
    apart = (found - right).abs().masked_fill(same, 0.0).nan_to_num(math.inf, math.inf)
    return Off(float(apart.max()), float(right.abs().nan_to_num(0.0, 0.0, 0.0).max()))


def both(one: Off, other: Off) -> Off:
    """Off, of two parts of one tensor."""
    return Off(max(one.absolute, other.absolute), max(one.scale, other.scale))


What: TypeAlias = Literal["output", "gradient", "value after the step", "loss"]


class Difference(NamedTuple):
    """Where a plan and one process differ."""

    name: str  # of the module or the parameter; "loss"
    what: What
    absolute: float  # largest difference of two values
    relative: float  # that, of the largest value in one process
    rank: int | None = None  # that saw it first; None: it is the same on all

    def __str__(self) -> str:
        name = f"{self.what} of {self.name or 'the model'!r}" if self.what != self.name else self.name
        place = "" if self.rank is None else f" on rank {self.rank}"
        return f"{name}{place} is off by {self.absolute:.1e} (relative: {self.relative:.1e})"


@dataclasses.dataclass(frozen=True)
class Verification:
    """What verify() has found, the same on all ranks. It is true where all is equal."""

    equal: bool
    loss: float  # under the plan, in `step`
    loss_alone: float  # of one process
    module: Difference | None  # the first module whose output differs
    parameter: Difference | None  # the first in backward whose gradient differs; else, whose new value does
    difference: Difference | None  # the first of: module, loss, parameter
    modules: tuple[str, ...]  # names of all that differ, in the order of the forward
    parameters: tuple[str, ...]
    compared: tuple[int, int]  # how many modules and parameters were
    largest: float  # relative difference of all that is equal
    notes: tuple[str, ...]
    plan: str
    step: int = 1  # the first that differs; where all are equal, how many there were
    steps: int = 1  # how many were asked for
    granted: tuple[str, ...] = ()  # what the plan takes for granted, by the names of docs/limits.md

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        compared = f"{self.compared[0]} modules and {self.compared[1]} parameters compared"
        if self.equal:
            steps = f" in {self.steps} steps" if self.steps > 1 else ""
            lines = [
                f"verify {self.plan}: equal to one process{steps}. Loss {self.loss:.6g}, {compared}, largest "
                f"relative difference {self.largest:.0e}"
            ]
        else:
            step = f" in step {self.step} of {self.steps}" if self.steps > 1 else ""
            lines = [
                f"verify {self.plan}: NOT equal to one process{step} ({compared})",
                f"  loss      {self.loss:.12g}, by one process {self.loss_alone:.12g}",
                f"  forward   {_line(self.module, self.modules, 'all outputs are equal')}",
                f"  backward  {_line(self.parameter, self.parameters, 'all gradients are equal')}",
            ]
        if self.granted:
            names = ", ".join(self.granted)
            lines.append(f"  taken for granted by the plan, and compared here by what comes of it: {names}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _line(first: Difference | None, names: Sequence[str], nothing: str) -> str:
    if first is None:
        return nothing
    others = len(names) - 1
    return f"{first}" + (f"; {others} more differ{'s' if others == 1 else ''}" if others else "")


class Found(NamedTuple):
    """Among modules, or among parameters."""

    first: Difference | None
    names: tuple[str, ...]  # of all that differ
    largest: float  # relative difference of the others


def first_module(told: Sequence[Mapping[str, Off]], order: Sequence[str], tolerance: float) -> Found:
    """told: by every rank. order: names of modules as they end."""
    worst: dict[str, Off] = {}
    seen: dict[str, int] = {}  # which rank has seen it
    for rank, found in enumerate(told):
        for name, one in found.items():
            if name not in worst or one.absolute > worst[name].absolute:
                seen[name] = rank
            worst[name] = both(worst.get(name, one), one)
    wrong, largest = _wrong(worst, order, tolerance)
    wrong = tuple(name for name in wrong if _leaves(name, worst, wrong))
    if not wrong:
        return Found(None, (), largest)
    one = worst[wrong[0]]
    first = Difference(wrong[0], "output", one.absolute, one.relative, seen[wrong[0]])
    return Found(first, wrong, largest)


def first_parameter(found: Mapping[str, Off], order: Sequence[str], tolerance: float, what: What) -> Found:
    """The same of parameters. found: equal on all ranks; order: as the forward uses them."""
    wrong, largest = _wrong(found, order, tolerance)
    if not wrong:
        return Found(None, (), largest)
    one = found[wrong[-1]]
    return Found(Difference(wrong[-1], what, one.absolute, one.relative), wrong, largest)


def _wrong(found: Mapping[str, Off], order: Sequence[str], tolerance: float) -> tuple[tuple[str, ...], float]:
    """(names of what differs, in this order; largest relative difference of the rest)."""
    floor = tolerance * statistics.median([one.scale for one in found.values()] or [0.0])
    wrong = tuple(name for name in order if name in found and found[name].differs(tolerance, floor))
    right = [
        one.absolute / (one.scale + floor)
        for name, one in found.items()
        if name not in wrong and one.absolute
    ]
    return wrong, max(right, default=0.0)


def _leaves(name: str, compared: Collection[str], wrong: Collection[str]) -> bool:
    """Whether all modules around it that were compared differ too."""
    while name:
        name = name.rpartition(".")[0]
        if name in compared and name not in wrong:
            return False
    return True
