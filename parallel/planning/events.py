"""The pipeline by events: the runtime's own schedule (pipeline/schedules.py), played with a time for each
pass of each virtual stage.

Every rank runs its actions in the order of the schedule, each as soon as its input is there; a message
takes its time and occupies nobody. That is `play`, which the schedules' own pictures use; here stages may
differ.

[Note: steady state] A schedule of many microbatches repeats itself: from some microbatch on, one more takes
the time of the slowest rank's turn. With more than LIMIT per rank of the pipeline two shorter schedules are
played, whose microbatches differ by pp and are congruent to the wanted number (interleaved ones work in
groups of pp, which are longer where pp does not divide the number), and the rest is added at their rate.
tests/planning/test_events.py compares with schedules that are played whole.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from pycomm.parallel.ground.plan import Schedule as ScheduleWord
from pycomm.parallel.ground.plan import ScheduleName
from pycomm.parallel.pipeline.schedules import Schedule, make_schedule, peak_activations, play
from pycomm.parallel.planning.quantities import Seconds

__all__ = ["Pipeline", "StageTime", "in_flight", "run_pipeline"]

LIMIT = 6  # microbatches per rank of the pipeline that are played
AT_ONCE = Seconds(0.0)
AnyName: TypeAlias = ScheduleWord | ScheduleName
Spans: TypeAlias = tuple[tuple[tuple[float, float], ...], ...]  # of each rank: (start, end) of its actions


class StageTime(NamedTuple):
    """Of one microbatch: forward, gradient of the input, of the weights."""

    forward: Seconds
    input: Seconds
    weight: Seconds

    @property
    def total(self) -> Seconds:
        return Seconds(sum(self))


class Pipeline(NamedTuple):
    """ends[rank]: when its last pass ends. busy[rank]: time in which it computes. spans: of
    every action of `schedule` by rank; of the shorter schedule that was played where `extended` is above 0,
    the time that was added.
    """

    ends: tuple[Seconds, ...]
    busy: tuple[Seconds, ...]
    schedule: Schedule
    spans: Spans
    extended: Seconds

    @property
    def makespan(self) -> Seconds:
        return max(self.ends)

    @property
    def bubble(self) -> float:
        """Share of the passes' time in which the busiest rank is idle."""
        return 1 - max(self.busy) / self.makespan


def run_pipeline(
    name: AnyName,
    pp: int,
    microbatches: int,
    chunks: int,
    stages: Iterable[StageTime],
    message: Seconds = AT_ONCE,
) -> Pipeline:
    """stages: the time of every virtual stage, in order of the model. message: between two ranks."""
    times = tuple(stages)
    low, high = _played(pp, microbatches)
    if high == microbatches:
        schedule, spans = _play(name, pp, microbatches, chunks, times, message)
        ends, added = [row[-1][1] for row in spans], 0.0
    else:
        _, shorter = _play(name, pp, low, chunks, times, message)
        schedule, spans = _play(name, pp, high, chunks, times, message)
        before, after = ([row[-1][1] for row in rows] for rows in (shorter, spans))
        rate = (max(after) - max(before)) / (high - low)
        added = rate * (microbatches - high)
        ends = [end + added for end in after]
    busy = [
        microbatches * sum(times[stage].total for stage in schedule.stages_of(rank)) for rank in range(pp)
    ]
    return Pipeline(
        tuple(map(Seconds, ends)),
        tuple(map(Seconds, busy)),
        schedule,
        tuple(tuple(row) for row in spans),
        Seconds(added),
    )


def _played(pp: int, microbatches: int) -> tuple[int, int]:
    """The numbers of microbatches of the two schedules that are played."""
    if microbatches <= LIMIT * pp:
        return microbatches, microbatches
    low = (LIMIT - 1) * pp + microbatches % pp
    return low - pp, low


@functools.lru_cache(maxsize=512)
def _play(
    name: AnyName,
    pp: int,
    microbatches: int,
    chunks: int,
    times: tuple[StageTime, ...],
    message: Seconds,
) -> tuple[Schedule, list[list[tuple[float, float]]]]:
    schedule = make_schedule(name, pp, microbatches, chunks)
    table: dict[tuple[str, int], float] = {}
    for stage, (forward, gradient, weight) in enumerate(times):
        table.update({("F", stage): forward, ("B", stage): gradient, ("W", stage): weight, ("U", stage): 0.0})
    return schedule, play(schedule, lambda action: table[action.kind, action.stage], message)


@functools.lru_cache(maxsize=4096)
def in_flight(name: AnyName, pp: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """Per rank of the pipeline, the largest number of (virtual stage, microbatch) pairs whose activations
    are held. Counted in the runtime's schedule; it stops to grow at a few microbatches per rank, but for
    gpipe.
    """
    if name == "gpipe":
        return (microbatches * chunks,) * pp
    enough = 2 * pp + (microbatches % pp if name == "interleaved" else 0)
    return _counted(name, pp, min(microbatches, enough), chunks)


@functools.lru_cache(maxsize=4096)
def _counted(name: AnyName, pp: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    return tuple(peak_activations(make_schedule(name, pp, microbatches, chunks)))
