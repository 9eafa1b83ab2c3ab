"""Inputs that are exact in every dtype, and the count of wrong elements in a result.

Rank r's input is a pattern of small whole numbers that repeats every PERIOD elements; patterns of two ranks, or of two salts, differ:

    input of rank r     p_r[0] p_r[1] ... p_r[PERIOD-1]  p_r[0] p_r[1] ...

PERIOD is prime, so a chunk that lands at a wrong place does not match either (chunks are seldom a multiple of it). What a rank must hold
afterwards is a list of segments, each a piece of one rank's input or of the reduction of all. So the oracle needs PERIOD elements of
memory, not world_size buffers. Numbers stay small enough that a sum over 31 ranks is exact in every dtype here.

Buffers are NumPy arrays for every backend: the same allocator, alignment and page state. NumPy has no bf16; such an array holds the bits
as uint16.
"""

import functools
from typing import NamedTuple

import numpy as np

PERIOD = 1021
BLOCK_ROWS = 512  # rows of PERIOD elements compared at once: temporaries stay small
ALIGNMENT = 64  # bytes, what torch gives its tensors
POISON = 0xA5  # fills results before a check; no pattern has these bytes
STORAGE = {"i8": "i1", "u8": "u1", "f16": "f2", "bf16": "u2", "i32": "i4", "f32": "f4", "i64": "i8", "f64": "f8"}


class Segment(NamedTuple):
    """recv[start : start+length] must be source[offset : offset+length]; source is a rank, or None for the reduction of all ranks."""

    start: int
    length: int
    source: int | None
    offset: int


def empty(count, dtype):
    """An uninitialised array of count elements, aligned."""
    kind = np.dtype(STORAGE[dtype])
    raw = np.empty(count * kind.itemsize + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + count * kind.itemsize].view(kind)


def encode(values, dtype):
    """Whole numbers as an array that holds them in dtype; integers wrap."""
    if dtype == "bf16":  # the upper half of an f32; exact for the values here
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(STORAGE[dtype])


@functools.lru_cache(maxsize=64)
def _numbers(redop, n, source, salt):
    drawn = np.random.default_rng([salt, source]).integers(0, 5, PERIOD)
    if redop == "product":
        return 1 + drawn % 2
    return drawn * n if redop == "avg" else drawn  # the mean of multiples of n is whole


def pattern(case, n, source, salt):
    """The pattern of a rank's input, or (source None) of the reduction over all n ranks."""
    if source is not None:
        return encode(_numbers(case.redop, n, source, salt), case.dtype)
    numbers = np.stack([_numbers(case.redop, n, rank, salt) for rank in range(n)])
    reduced = {"sum": np.sum, "avg": np.mean, "product": np.prod, "min": np.min, "max": np.max}[case.redop](numbers, axis=0)
    return encode(reduced, case.dtype)


def fill(array, period):
    """Writes the pattern over the whole array."""
    whole = len(array) // PERIOD * PERIOD
    array[:whole].reshape(-1, PERIOD)[:] = period
    array[whole:] = period[: len(array) - whole]


def poison(array):
    array.view(np.uint8).fill(POISON)


def expected(case, rank, n):
    """The segments that rank must hold after the operation; none where it gets nothing."""
    k, root = case.count, case.root
    match case.op:
        case "all_reduce":
            return [Segment(0, k, None, 0)]
        case "reduce":
            return [Segment(0, k, None, 0)] if rank == root else []
        case "reduce_scatter":
            return [Segment(0, k, None, rank * k)]
        case "all_gather":
            return [Segment(source * k, k, source, 0) for source in range(n)]
        case "gather":
            return [Segment(source * k, k, source, 0) for source in range(n)] if rank == root else []
        case "all_to_all":
            return [Segment(source * k, k, source, rank * k) for source in range(n)]
        case "scatter":
            return [Segment(0, k, root, rank * k)]
        case "broadcast":
            return [Segment(0, k, root, 0)]
        case "sendrecv":
            return [Segment(0, k, (rank - 1) % n, 0)]
        case "pingpong":
            return [Segment(0, k, rank ^ 1, 0)]
        case "barrier":
            return []
    raise AssertionError(case.op)


def count_wrong(array, segments, case, n, salt):
    """How many elements of array differ from what the segments say."""
    wrong = 0
    for segment in segments:
        period = np.roll(pattern(case, n, segment.source, salt), -(segment.offset % PERIOD))
        part = array[segment.start : segment.start + segment.length]
        whole = len(part) // PERIOD * PERIOD
        rows = part[:whole].reshape(-1, PERIOD)
        for first in range(0, len(rows), BLOCK_ROWS):
            wrong += np.count_nonzero(rows[first : first + BLOCK_ROWS] != period)
        wrong += np.count_nonzero(part[whole:] != period[: len(part) - whole])
    return int(wrong)
