"""From times to choices: the rows of the file that pycomm/tuned.py reads.

    times      12K {one_shot 5, two_shot 7}   24K {6, 8}   48K {11, 11}   96K {25, 16}   ...
    best       one_shot                       one_shot     (one_shot)     two_shot
    choices    [69511, one_shot], [.., two_shot]           68K: between 48K and 96K

Two of the same speed change places from run to run, so a size keeps what the size below it has, or what the
built-in table says, unless another beats it: by MARGIN as a median over the rounds, and in three of four
rounds. Above twice the largest size nothing was measured, and the built-in table decides.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias

MARGIN = 1.05
MOST_RANGES = 8  # as TunedTable::most_ranges in csrc/collectives/tuned.h
Times: TypeAlias = dict[int, dict[str, list[float]]]  # size -> algorithm -> seconds by round


class Choice(NamedTuple):
    """Up to `until` bytes this algorithm."""

    until: int
    algorithm: str


class _Range(NamedTuple):
    """An algorithm, and the sizes at which it is the best."""

    name: str
    sizes: list[int]


def beats(one: Sequence[float], other: Sequence[float]) -> bool:
    """one, other: seconds by round."""
    ratios = sorted(b / a for a, b in zip(one, other, strict=True))
    return median(ratios) > MARGIN and ratios[len(ratios) // 4] > 1


def choices(times: Times, built_in: Mapping[int, str]) -> list[Choice]:
    """built_in: what the built-in table says of a size."""
    sizes, before, best = sorted(times), None, list[str]()
    for size in sizes:
        found = times[size]
        fastest = min(found, key=lambda name: median(found[name]))
        kept = [name for name in (before, built_in[size]) if name in found]
        before = next((name for name in kept if not beats(found[fastest], found[name])), fastest)
        best.append(before)
    ranges = [
        _Range(name, [size for size, _ in pairs])
        for name, pairs in itertools.groupby(zip(sizes, best, strict=True), key=lambda pair: pair[1])
    ]
    while len(ranges) > MOST_RANGES:
        _drop_one(ranges, times)
    ends = [math.isqrt(a.sizes[-1] * b.sizes[0]) for a, b in itertools.pairwise(ranges)] + [2 * sizes[-1]]
    return [Choice(end, name) for end, (name, _) in zip(ends, ranges, strict=True)]


def _drop_one(ranges: list[_Range], times: Times) -> None:
    """Gives the sizes of one range to a neighbour: where that costs least."""

    def loss(which: int, to: int) -> float:
        name, sizes = ranges[which]
        other = ranges[to].name
        mine = [median(times[size][name]) for size in sizes]
        theirs = [median(times[size].get(other, [math.inf])) for size in sizes]
        return sum(math.log(b / a) for a, b in zip(mine, theirs, strict=True))

    pairs = [(i, j) for i in range(len(ranges)) for j in (i - 1, i + 1) if 0 <= j < len(ranges)]
    which, to = min(pairs, key=lambda pair: loss(*pair))
    ranges[to] = _Range(ranges[to].name, sorted(ranges[to].sizes + ranges[which].sizes))
    del ranges[which]
    merged: list[_Range] = []
    for name, sizes in ranges:  # the neighbours of what went may be of one kind now
        if merged and merged[-1].name == name:
            merged[-1].sizes.extend(sizes)
        else:
            merged.append(_Range(name, sizes))
    ranges[:] = merged


def chosen(found: Sequence[tuple[int, str]], size: int) -> str | None:
    """What choices say of a size; None above the last."""
    return next((name for until, name in found if size <= until), None)
