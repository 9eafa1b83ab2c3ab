"""What was found of each assumption: held, broken or not tried. It belongs to one parallelized model."""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from pycomm.parallel.given import Metric
    from pycomm.parallel.ground.batch import CountFunction

__all__ = ["Answer", "Answers", "Asked", "State"]

Key: TypeAlias = "tuple[bool, tuple[str, ...] | None]"  # whether in training, names of results

RECENT = 8
LOG = logging.getLogger("pycomm.parallel")


class State(enum.Enum):
    HELD = "held"
    BROKEN = "broken"  # it was refused
    NOT_TRIED = "not tried"
    TRUSTED = "trusted"  # the user has answered


class Answer(NamedTuple):
    state: State
    why: str = ""  # of what is not tried or trusted; what else there is to say

    def __str__(self) -> str:
        return f"{self.state.value}: {self.why}" if self.why else self.state.value


class Asked(NamedTuple):
    """Of one mode and one kind of result: for what it is known."""

    measures: tuple[Metric, ...]  # losses and metrics, in order
    count: CountFunction | None  # type: ignore[assignment]  # the caller's; tuple.count is not used
    uneven: tuple[bool, ...]  # in which of the scores of checks/choice.py rows have differed
    span: tuple[float, float]  # of the first targets, where these are whole numbers
    counters: tuple[CountFunction, ...]  # what is counted, for each measure


class Answers:
    """asks: False asks nothing, for a comparison of trainings with and without. of: name of an assumption ->
    Answer.
    """

    asks = True

    def __init__(self) -> None:
        self.of: dict[str, Answer] = {}
        self.asked: dict[Key, list[Asked]] = {}
        self.batches: dict[Key, int] = {}  # how many were looked at
        self.gathers = False  # the model or its loss calls gather_rows()
        self._warned: set[str] = set()

    def note(self, name: str, state: State, why: str = "", rank: int = 0, advice: str = "") -> None:
        """One WARNING on rank 0 for each assumption that is not tried. advice: what to do."""
        self.of[name] = Answer(state, why)
        if state is State.NOT_TRIED and rank == 0 and name not in self._warned:
            self._warned.add(name)
            LOG.warning("%s was not tried: %s. %s", name, why, advice)

    def note_asked(self, key: Key, asked: Asked, before: Asked | None) -> None:
        """before: what was known of the same losses. The last RECENT are known, as losses may alternate."""
        others = [each for each in self.asked.get(key, ()) if each is not before]
        self.asked[key] = [asked, *others][:RECENT]

    def take_over(self, other: Answers) -> None:
        """Those of the same model under the same axes, as after a recovery."""
        self.of, self._warned = dict(other.of), set(other._warned)
        self.asked = {key: list(asked) for key, asked in other.asked.items()}
        self.gathers = other.gathers
