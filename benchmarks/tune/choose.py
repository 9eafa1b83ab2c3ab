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
from statistics import median

MARGIN = 1.05
MOST_RANGES = 8  # as TunedTable::most_ranges in csrc/collectives/tuned.h


def beats(one, other):
    """one, other: seconds by round."""
    ratios = sorted(b / a for a, b in zip(one, other, strict=True))
    return median(ratios) > MARGIN and ratios[len(ratios) // 4] > 1


def choices(times, built_in):
    """[[up to so many bytes, algorithm], ...]. times: {size: {algorithm: seconds by round}}; built_in: {size:
    what the built-in table says}.
    """
    sizes, before, best = sorted(times), None, []
    for size in sizes:
        found = times[size]
        fastest = min(found, key=lambda name: median(found[name]))
        kept = [name for name in (before, built_in[size]) if name in found]
        before = next((name for name in kept if not beats(found[fastest], found[name])), fastest)
        best.append(before)
    ranges = [
        [name, [size for size, _ in pairs]]
        for name, pairs in itertools.groupby(zip(sizes, best, strict=True), key=lambda pair: pair[1])
    ]
    while len(ranges) > MOST_RANGES:
        _drop_one(ranges, times)
    ends = [math.isqrt(a[1][-1] * b[1][0]) for a, b in itertools.pairwise(ranges)] + [2 * sizes[-1]]
    return [[end, name] for end, (name, _) in zip(ends, ranges, strict=True)]


def _drop_one(ranges, times):
    """Gives the sizes of one range to a neighbour: where that costs least."""

    def loss(which, to):
        name, sizes = ranges[which]
        other = ranges[to][0]
        mine = [median(times[size][name]) for size in sizes]
        theirs = [median(times[size].get(other, [math.inf])) for size in sizes]
        return sum(math.log(b / a) for a, b in zip(mine, theirs, strict=True))

    pairs = [(i, j) for i in range(len(ranges)) for j in (i - 1, i + 1) if 0 <= j < len(ranges)]
    which, to = min(pairs, key=lambda pair: loss(*pair))
    ranges[to][1] = sorted(ranges[to][1] + ranges[which][1])
    del ranges[which]
    merged = []
    for name, sizes in ranges:  # the neighbours of what went may be of one kind now
        if merged and merged[-1][0] == name:
            merged[-1][1] += sizes
        else:
            merged.append([name, sizes])
    ranges[:] = merged


def chosen(found, size):
    """What choices say of a size; None above the last."""
    return next((name for until, name in found if size <= until), None)
