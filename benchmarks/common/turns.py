"""Turns: what is compared is measured in one run, and takes turns.

    round 1      A: samples    B: samples    C: samples
    round 2      B: samples    C: samples    A: samples          (the order rotates)

A machine's speed drifts by the minute, and a slow minute hits all alike this way. A figure is the median over
the samples of all rounds; the ratio of two is the median over the rounds of the ratio in that round.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

K = TypeVar("K")
T = TypeVar("T")
Rounds: TypeAlias = list[list[float]]  # seconds of the samples of each round


class Ratio(NamedTuple):
    """Over the rounds."""

    median: float
    least: float
    most: float


def rotated(given: Iterable[K], rounds: int) -> Iterator[K]:
    """The names in the order of their turns: all of them in each round, from another first one."""
    names = list(given)
    for number in range(rounds):
        first = number % max(1, len(names))
        yield from names[first:] + names[:first]


def take(rounds: int, turns: Mapping[K, Callable[[], T]]) -> dict[K, list[T]]:
    """What each turn returned, for each round, by name."""
    found: dict[K, list[T]] = {name: [] for name in turns}
    for name in rotated(turns, rounds):
        found[name].append(turns[name]())
    return found


def slowest(by_rank: Sequence[Sequence[Sequence[float]]]) -> Rounds:
    """by_rank[rank][round][sample] -> [round][sample], of the slowest rank."""
    return [[max(times) for times in zip(*turn, strict=True)] for turn in zip(*by_rank, strict=True)]


def medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(samples) for samples in rounds]


def samples_of(rounds: Sequence[Sequence[float]]) -> list[float]:
    return sorted(sample for samples in rounds for sample in samples)


def percentile(samples: Sequence[float], part: float) -> float:
    """samples: sorted; part: 0 to 1."""
    return samples[min(len(samples) - 1, int(part * len(samples)))]


def times_faster(ours: Rounds, other: Rounds) -> Ratio:
    """How many times faster `ours` is than `other`."""
    ratios = [b / a for a, b in zip(medians(ours), medians(other), strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))
