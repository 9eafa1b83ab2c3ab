"""What the ranks of an operation put in and what must come out, from the seed and the operation alone.

What only moves is random bits: it must arrive bit by bit. What is reduced is small whole numbers in floating
dtypes, whose reductions but averages are exact in any order of ranks, and random bits in integer ones, which
wrap.
"""

import oracle
import torch
from collective_cases import DTYPES, RANDOM_BOOLS, RANDOM_BYTES, SMALL_NUMBERS, window

FACTOR = 0.5  # of premul_sum
f32 = torch.float32


def _seed(program, op, part):
    return (program.seed * 7919 + op.number * 104729 + part * 611953) % (1 << 31)


def moved(program, op, part, count):
    """`count` elements, to be read only; others for each part of an operation."""
    dtype = DTYPES[op.dtype]
    pool = RANDOM_BOOLS if dtype == torch.bool else RANDOM_BYTES
    return window(pool, count * dtype.itemsize, _seed(program, op, part)).view(dtype)


def to_reduce(program, op, count, ranks, part=0):
    """(ranks, count): what each rank puts in."""
    dtype, seed = DTYPES[op.dtype], _seed(program, op, part)
    if not dtype.is_floating_point and not dtype.is_complex:
        pool = RANDOM_BOOLS if dtype == torch.bool else RANDOM_BYTES
        return window(pool, ranks * count * dtype.itemsize, seed).view(dtype).view(ranks, count)
    if dtype.is_complex:
        real, imaginary = (_whole(op, ranks * count, seed + i) for i in (0, 1))
        return torch.complex(real, imaginary).to(dtype).view(ranks, count)
    return _whole(op, ranks * count, seed).to(dtype).view(ranks, count)


def _whole(op, count, seed):
    values = window(SMALL_NUMBERS, count, seed)
    if op.reduce_op != "product":
        return values
    return torch.where(values > 0, 2.0, 1.0) * torch.where(values % 2 == 0, 1.0, -1.0)  # -2 -1 1 2


def reduced(program, op, values):
    return oracle.over_hosts(op.reduce_op, values, program.hosts_of(op), FACTOR)
