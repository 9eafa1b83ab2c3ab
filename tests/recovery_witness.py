"""What the processes of a random training tell: who was lost, whom the errors name, and how long it took.

    Board      a file that all of them have mapped, one row for each; it outlives those that are killed
    Witness    in a rank: its losses, each with the one that the error names
    judge      every error that blames somebody blames a victim that was struck before
    Times      from a blow to the error, and to the end of the step in which the survivors go on

Each process has a slot: its rank at first, and ranks * n more where it takes the place of another. The crew
numbers its ranks anew after each loss; a Witness follows that, and always tells slots.
"""

import contextlib
import mmap
import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pycomm.parallel.recovery import Resilient
from pycomm.parallel.recovery.crew import Crew

FIELDS = ("pid", "struck", "over", "child")
SLOTS = 64
DEATH, SILENCE = "death", "silence"
PLACE = re.compile(r"In the plan it is rank (\d+)")
PROCESS = re.compile(r"process (\d+)")
BLAMED = re.compile(
    r"rank\(?s?\)? (\d+)(?: \(\w+\))?(?:, which speaks for \w+,)? "
    r"(?:died|is stopped|was lost|closed|does not answer)"
)


class Board:
    """pid: of the process. struck: when it was killed or stopped (time.monotonic). over: when it was through.
    child: the process that it has forked. 0: nothing yet.
    """

    def __init__(self, path: Path) -> None:
        nbytes = 8 * SLOTS * len(FIELDS)
        with open(path, "a+b") as file:
            os.truncate(file.fileno(), nbytes)
            self._values = memoryview(mmap.mmap(file.fileno(), nbytes)).cast("d")

    def get(self, field: str, slot: int) -> float:
        return self._values[FIELDS.index(field) * SLOTS + slot]

    def note(self, field: str, slot: int, value: float) -> None:
        self._values[FIELDS.index(field) * SLOTS + slot] = value

    def those(self, field: str) -> dict[int, float]:
        """{slot: value} where there is one."""
        return {slot: value for slot in range(SLOTS) if (value := self.get(field, slot))}


class Loss(NamedTuple):
    when: float
    blamed: int | None  # a slot; None: nobody
    text: str


class Recovery(NamedTuple):
    """A step that ended, in spite of these losses."""

    losses: list[Loss]
    until: float


class Witness:
    """Of the run of this process; to be made before it."""

    def __init__(self, slot: int, board: Board) -> None:
        self.slot, self.board, self.members = slot, board, []
        self.losses, self.recoveries, self.most_repeated = [], [], 0.0
        board.note("pid", slot, os.getpid())
        lose, shrink, look = Resilient._lose, Crew.shrink, Crew.look

        def losing(run: Resilient, error: Exception) -> None:
            self.losses.append(
                Loss(time.monotonic(), self._blamed(error), f"{type(error).__name__}: {error}")
            )
            lose(run, error)

        def shrinking(crew: Crew) -> None:
            shrink(crew)
            self.members = [self.members[rank] for rank in crew.comm.former_ranks if self.members]

        def looking(crew: Crew) -> None:
            look(crew)
            self.members = crew.exchange(slot)

        Resilient._lose, Crew.shrink, Crew.look = losing, shrinking, looking

    @contextlib.contextmanager
    def watch(self, run: Resilient) -> Iterator[None]:
        """Around a step."""
        seen, repeated = len(self.losses), run.repeated
        yield
        losses = self.losses[seen:]
        if losses:
            self.recoveries.append(Recovery(losses, time.monotonic()))
            self.most_repeated = max(self.most_repeated, (run.repeated - repeated) / len(losses))

    def _blamed(self, error: Exception) -> int | None:
        """The slot of the rank that is lost, as the error says. Who aborts a group blames nobody by that."""
        text = f"{type(error).__name__}: {error}".rpartition("had raised ")[2]  # the last one is the cause
        if process := PROCESS.search(text):
            return next((s for s, pid in self.board.those("pid").items() if pid == int(process[1])), None)
        if text.startswith("AbortedError"):
            return None
        is_own = text.endswith(str(error)) and not text.startswith("CommError")  # that is about who raises it
        number = getattr(error, "peer", None) if is_own else None
        if found := PLACE.search(text) or (number is None and BLAMED.search(text)):
            number = int(found[1])
        return self.members[number] if number is not None and number < len(self.members) else None


def judge(losses: Iterable[Loss], board: Board) -> int:
    """How many losses blame somebody. Raises AssertionError where that is none who was struck."""
    struck, count = board.those("struck"), 0
    for loss in losses:
        if loss.blamed is None:
            continue
        count += 1
        text = f"{loss.text!r} blames {loss.blamed}; struck were {struck}, and the error came at {loss.when}"
        assert loss.blamed in struck and struck[loss.blamed] <= loss.when, text
    return count


class Times:
    """Seconds after blows, by kind: DEATH, SILENCE."""

    def __init__(self) -> None:
        self.named, self.on = defaultdict(list), defaultdict(list)

    def add(self, recovery: Recovery, board: Board, kinds: dict[int, str]) -> None:
        """kinds: of the slots that may be blamed."""
        blows = {
            loss.blamed: board.get("struck", loss.blamed)
            for loss in recovery.losses
            if loss.blamed is not None
        }
        if not blows:
            return
        first = min(blows.values())
        silent = [board.get("struck", slot) for slot, kind in kinds.items() if kind == SILENCE]
        kind = SILENCE if any(first <= struck <= recovery.until for struck in silent) else DEATH
        self.on[kind].append(recovery.until - first)
        for loss in recovery.losses:
            if loss.blamed is not None:
                self.named[kinds[loss.blamed]].append(loss.when - blows[loss.blamed])

    def lines(self) -> Iterator[str]:
        for what, found in (("named", self.named), ("went on", self.on)):
            for kind, seconds in sorted(found.items()):
                seconds.sort()
                at = seconds[int(0.95 * (len(seconds) - 1))]
                yield (
                    f"{kind}: {what} after {statistics.median(seconds):.2f} s in the median, 95% {at:.2f} s, "
                    f"longest {seconds[-1]:.2f} s ({len(seconds)} of survivors)"
                )
