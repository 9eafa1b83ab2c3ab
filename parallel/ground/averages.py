"""What a rank keeps of averages of the model's values (EMA); checkpoint/ema.py says what they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["Average", "Averages", "Shadow"]


class Shadow(NamedTuple):
    """The average of elements start to stop of the flattened local parameter `name`."""

    name: str
    start: int
    stop: int
    values: torch.Tensor  # while the average is applied: the model's own values


class Average:
    """One average. buffers: {name: average}; None: buffers are not averaged. left_out: names of parameters
    that are frozen, and not averaged either.
    """

    def __init__(self, name: str, buffers: dict[str, torch.Tensor] | None, left_out: frozenset[str]) -> None:
        self.name, self.buffers, self.left_out = name, buffers, left_out
        self.updates = 0
        self.decays = 0.0  # their sum over the updates, which the ranks compare
        self.shadows: list[Shadow] = []


class Averages:
    """The averages of one model."""

    def __init__(self) -> None:
        self.all: dict[str, Average] = {}  # by name
        self.applied: list[Average] = []  # those in whose applied() the program is, outer to inner
        self.unread: dict[
            str, str
        ] = {}  # name of an average -> checkpoint that has it, and was loaded without
        self.refusal: str | None = None  # why this model can have none

    def refuse_applied(self, call: str) -> None:
        """Raises ValueError while the model has averaged values."""
        if self.applied:
            raise ValueError(
                f"{call}: the model has the averaged values of par.ema (average {self.applied[-1].name!r}), "
                "and gets its own values back at the end of `with ema.applied()`: call it after that block"
            )

    def note_loaded(self, updates: Mapping[str, int], source: str) -> None:
        """After a load: how often each average that `source` has was updated."""
        for name, average in self.all.items():
            average.updates, average.decays = updates[name], 0.0
        self.unread = {name: source for name in updates if name not in self.all}
