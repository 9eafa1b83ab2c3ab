"""Shapes of tiles and numbers of programs: what may be chosen about a kernel without changing what it
computes.

All ranks must use the same Config in one call, since tiles travel. The shipped ones are for the architectures
that tests/fused/ compiles ahead of time; the tuner (tuner.py) measures those of `candidates` on the machine
and remembers the fastest.
"""

from typing import NamedTuple

import torch

from pycomm.fused.problem import Activation, Op, Problem

__all__ = ["Config", "candidates", "default", "fitting"]


class Config(NamedTuple):
    """A choice for one kernel.

    block_m, block_n, block_k: the tile of a program, and how much of K it takes at a time. Powers of two, 16
    or more.
    group_m: rows of tiles that are visited together (L2).
    warps, stages: of a program; loads that are under way at once.
    movers: programs that push, reduce or finish beside those that multiply (each of these roles); where they
        are more than the GPU has multiprocessors they start when those that multiply end.
    tma: operands by the tensor memory accelerator where their strides allow it (sm_90 and later).
    flatten: one loop over tiles and K, so that loads run on from tile to tile (matmul alone, with tma).
    specialize: loads by a warp of their own (Triton's warp_specialize; matmul alone).
    one_shot: matmul_all_reduce: every rank adds everything.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    warps: int = 8
    stages: int = 3
    movers: int = 16
    tma: bool = False
    flatten: bool = False
    specialize: bool = False
    one_shot: bool = False


# Shared memory a program may use, bytes (CUDA C++ programming guide, table of compute capabilities).
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}

WIDE, SQUARE, NARROW, SMALL = (128, 256, 64), (128, 128, 64), (128, 64, 64), (64, 64, 64)
# For sm_80, where operands of the tensor cores are in registers too: half of K at a time, half the registers
# for it.
WIDE_SHALLOW = (128, 256, 32)
FP32 = Config(
    64, 64, 32, warps=4, stages=3
)  # exact fp32 has no tensor cores: the tile only has to feed the FMA units


def candidates(
    op: Op, dtype: torch.dtype, arch: int, panels: int = 1, activation: Activation | None = None
) -> list[Config]:
    """The configurations worth measuring for an op, the default first. arch: compute capability, e.g. 90;
    panels: 2 for swiglu; activation: as in Problem, because the polynomials of erf need registers that the
    widest tiles have not left."""
    if dtype == torch.float32:
        base = FP32._replace(warps=4 * panels)  # as many sums per thread with two panels as with one
        return [base, base._replace(movers=32)]
    tma = arch >= 90
    if op == "matmul":
        # Two panels keep two accumulators, so a tile of half the width.
        if panels == 2:
            shapes = [SQUARE, NARROW] if tma else [NARROW]
        elif tma:
            shapes = [SQUARE] if activation == "gelu" else [WIDE, SQUARE]
        else:
            shapes = [SQUARE] if activation else [WIDE_SHALLOW, SQUARE]
        found = [Config(*shape, tma=tma, flatten=tma) for shape in shapes]
        if tma:
            found.append(Config(*shapes[0], tma=True))
        found.append(Config(*shapes[-1], stages=4, tma=tma, flatten=tma))
        if arch >= 100 and panels == 1:  # with two Triton 3.7 cannot compile it
            found.append(Config(*shapes[-1], tma=True, flatten=True, specialize=True))
        found.append(Config(*SMALL, warps=4, stages=4, tma=tma))
        return found
    # Two panels: two accumulators in all_gather_matmul, two sums at a time in the reductions.
    base = Config(*(SQUARE if panels == 1 else NARROW), tma=tma)
    found = [base, base._replace(movers=8), base._replace(movers=32)]
    if op == "matmul_reduce_scatter":
        found.append(base._replace(movers=1024))
    if op == "matmul_all_reduce":
        found += [base._replace(one_shot=True), base._replace(one_shot=True, movers=1024)]
    if tma and panels == 1 and activation is None:
        found.append(base._replace(block_n=256))
    found.append(base._replace(block_m=64, block_n=64, warps=4, stages=4))
    return found


def default(
    op: Op,
    dtype: torch.dtype,
    arch: int,
    world_size: int = 1,
    panels: int = 1,
    activation: Activation | None = None,
) -> Config:
    """The first choice where nothing was measured."""
    config = candidates(op, dtype, arch, panels, activation)[0]
    return config._replace(one_shot=True) if op == "matmul_all_reduce" and world_size == 2 else config


def fitting(problem: Problem, config: Config, save: bool = False) -> Config:
    """The Config with a tile that leaves enough registers for what this call needs besides; the same on all
    ranks.

    Rows that do not begin at multiples of 16 bytes come element by element, by way of registers. A
    preactivation that is saved is held together with the result. Without tma (sm_80) registers hold the
    operands of the tensor cores too. The bounds come from tests/fused/test_aot.py under Triton 3.6 to 3.9.
    Fitting again what was fitted changes nothing.
    """
    shared, saved = problem.shared(), save and problem.activation is not None
    if saved:  # Triton 3.7.1 for sm_100 spills with it, and cannot compile swiglu
        config = config._replace(specialize=False)
    if (
        saved and problem.activation == "gelu"
    ):  # sm_100, 128x128: 255 registers and spills of 16 bytes instead of 204
        config = config._replace(flatten=False)
    unaligned = any(length * problem.dtype.itemsize % 16 for length in (shared.k, shared.n))
    if unaligned and problem.dtype.itemsize == 2:
        smaller = {name: min(getattr(config, name), 64) for name in ("block_m", "block_n", "block_k")}
        if saved and problem.panels == 2 and not config.tma:
            smaller["block_k"] = min(config.block_k, 32)
        return config._replace(**smaller, warps=8, stages=3, flatten=False, specialize=False)
    if problem.dtype == torch.float32:
        return _fitting_float32(problem, config, saved, unaligned)
    accumulators = config.block_m * config.block_n * problem.panels
    half = {"matmul": problem.panels == 1 and not config.tma, "all_gather_matmul": problem.panels == 1}
    half["matmul_reduce_scatter"] = problem.panels == 2
    most = 128 * 64 if half.get(problem.op) else 128 * 128
    if saved and accumulators > most:
        return config._replace(block_n=config.block_n // 2)
    return config


def _fitting_float32(problem: Problem, config: Config, saved: bool, unaligned: bool) -> Config:
    """Without tensor cores operands are in registers, element by element where rows are unaligned. Which of
    these spilled differs between architectures and versions of ptxas, by 8 to 112 bytes."""
    narrow, low = min(config.block_n, 64 // problem.panels), min(config.block_m, 32)
    if problem.op == "matmul":
        spills = unaligned and (saved or problem.panels == 1)
        return config._replace(block_m=low, block_n=narrow, warps=4 * problem.panels) if spills else config
    if problem.op == "matmul_all_reduce" and problem.panels == 2 and unaligned:
        return config._replace(block_m=low, warps=4)
    if problem.op == "all_gather_matmul" and problem.panels == 1 and saved:
        return config._replace(block_m=low, warps=4)
    return (
        config._replace(block_n=narrow if saved else config.block_n, warps=8)
        if unaligned or saved
        else config
    )
