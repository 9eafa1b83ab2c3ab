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
from typing import NamedTuple

from pycomm.parallel.pipeline.schedules import make_schedule, peak_activations, play

__all__ = ["Pipeline", "StageTime", "in_flight", "run_pipeline"]

LIMIT = 6  # microbatches per rank of the pipeline that are played


class StageTime(NamedTuple):
    """Seconds of one pass of a virtual stage: forward, gradient of the input, of the weights."""

    forward: float
    input: float
    weight: float

    @property
    def total(self):
        return sum(self)


class Pipeline(NamedTuple):
    """ends[rank]: when its last pass ends. busy[rank]: seconds in which it computes. spans: (start, end) of
    every action of `schedule` by rank; of the shorter schedule that was played where `extended` is above 0,
    the seconds that were added.
    """

    ends: tuple[float, ...]
    busy: tuple[float, ...]
    schedule: object
    spans: tuple
    extended: float

    @property
    def makespan(self):
        return max(self.ends)

    @property
    def bubble(self):
        """Share of the passes' time in which the busiest rank is idle."""
        return 1 - max(self.busy) / self.makespan


def run_pipeline(name, pp, microbatches, chunks, times, message=0.0):
    """times: StageTime of every virtual stage, in order of the model. message: seconds between two ranks."""
    times = tuple(times)
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
    return Pipeline(tuple(ends), tuple(busy), schedule, tuple(map(tuple, spans)), added)


def _played(pp, microbatches):
    """The numbers of microbatches of the two schedules that are played."""
    if microbatches <= LIMIT * pp:
        return microbatches, microbatches
    low = (LIMIT - 1) * pp + microbatches % pp
    return low - pp, low


@functools.lru_cache(maxsize=512)
def _play(name, pp, microbatches, chunks, times, message):
    schedule = make_schedule(name, pp, microbatches, chunks)
    table = {}
    for stage, (forward, gradient, weight) in enumerate(times):
        table.update({("F", stage): forward, ("B", stage): gradient, ("W", stage): weight, ("U", stage): 0.0})
    return schedule, play(schedule, lambda action: table[action.kind, action.stage], message)


@functools.lru_cache(maxsize=4096)
def in_flight(name, pp, microbatches, chunks):
    """Per rank of the pipeline, the largest number of (virtual stage, microbatch) pairs whose activations
    are held. Counted in the runtime's schedule; it stops to grow at a few microbatches per rank, but for
    gpipe.
    """
    if name == "gpipe":
        return (microbatches * chunks,) * pp
    enough = 2 * pp + (microbatches % pp if name == "interleaved" else 0)
    return _counted(name, pp, min(microbatches, enough), chunks)


@functools.lru_cache(maxsize=4096)
def _counted(name, pp, microbatches, chunks):
    return tuple(peak_activations(make_schedule(name, pp, microbatches, chunks)))
