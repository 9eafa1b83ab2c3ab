"""Reductions keep denormal numbers and round to nearest, whatever the mode of the thread that runs them
(csrc/arithmetic/float_mode.h).
"""

import ctypes
import os
import time

import pytest
import torch
import torch.distributed as dist
from collective_cases import ALGORITHMS
from torch_ranks import spawn

import pycomm
from pycomm.testing import run_ranks

LIMIT = 45.0  # seconds
FE_UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}.get(os.uname().machine)
libm = ctypes.CDLL("libm.so.6")
needs_modes = pytest.mark.skipif(FE_UPWARD is None, reason="the mode of this processor is not known here")

# The bits of positive denormals add like integers, and go on so at the next exponent: (dtype, integers of its
# size, the largest one that 8 ranks may have).
TINY = {
    "f64": (torch.float64, torch.int64, 1 << 49),
    "f32": (torch.float32, torch.int32, 1 << 20),
    "bf16": (torch.bfloat16, torch.int16, 1 << 4),
    "f16": (torch.float16, torch.int16, 1 << 7),
}
OPS = {"sum": lambda x, n: x * n, "avg": lambda x, n: x, "min": lambda x, n: x, "max": lambda x, n: x}


def tiny(name, count):
    dtype, whole, most = TINY[name]
    numbers = (torch.arange(count, dtype=torch.int64) * 7919 % most + 1).to(whole)
    return numbers, lambda: numbers.clone().view(dtype)


def set_mode(mode):
    if mode == "flush":
        assert torch.set_flush_denormal(True)
    elif mode == "upward":
        assert libm.fesetround(FE_UPWARD) == 0
    return libm.fegetround()


def by_all_means(comm, x, op):
    """The same all_reduce by this thread, by the worker, and in parts: algorithm -> result."""
    found = {name: comm.all_reduce(x(), op, algorithm=name) for name in ALGORITHMS["all_reduce"]}
    y = x()
    work = comm.all_reduce(y, op, async_op=True)
    deadline = time.monotonic() + LIMIT
    while comm.rank % 2 and not work.done():  # leaves it to the worker
        assert time.monotonic() < deadline
        time.sleep(0.002)
    work.wait(LIMIT)
    found["worker"] = y
    parts = comm.reduce_scatter(x(), op=op)
    found["reduce_scatter"] = comm.all_gather(parts).flatten()
    return found


def denormals(comm, mode, when, counts):
    n = comm.world_size
    if when == "before":  # threads of the group inherit it
        set_mode(mode)
    comm.all_reduce(torch.ones(300_000), async_op=True).wait(LIMIT)
    rounding = set_mode(mode if comm.rank != n - 1 or when == "before" else "")
    wrong = []
    for name, op, count in ((name, op, count) for name in TINY for op in OPS for count in counts):
        numbers, x = tiny(name, count * n)
        right = OPS[op](numbers, n)
        for how, got in by_all_means(comm, x, op).items():
            if not torch.equal(got.view(numbers.dtype), right):
                wrong.append(
                    f"rank {comm.rank}: {name} {op} of {count * n} by {how}: {got.view(right.dtype)}"
                )
    numbers, x = tiny("f32", 2000 * n)
    for how, got in by_all_means(comm, lambda: torch.view_as_complex(x().view(-1, 2)), "sum").items():
        if not torch.equal(torch.view_as_real(got).flatten().view(torch.int32), numbers * n):
            wrong.append(f"rank {comm.rank}: c64 by {how}")
    got = comm.all_reduce(x(), pycomm.premul_sum(2.0))
    if not torch.equal(got.view(torch.int32), numbers * 2 * n):
        wrong.append(f"rank {comm.rank}: premul_sum")
    assert libm.fegetround() == rounding, "the mode of the caller is another one now"
    if mode == "flush":  # and flushes as before
        flushes = (torch.tensor([1e-40]) + 0).item() == 0
        assert flushes == (comm.rank != n - 1 or when == "before")
    return wrong


@needs_modes
@pytest.mark.parametrize("when", ["before", "later"])
@pytest.mark.parametrize(("n", "threads", "counts"), [(2, 1, [3, 40_000]), (3, 2, [700, 150_001])])
def test_denormals(n, threads, counts, when):
    """On all ranks but one (later), or on all, before the group's threads begin."""
    found = sum(
        run_ranks(n, denormals, "flush", when, counts, mode="processes", timeout=LIMIT, threads=threads), []
    )
    assert not found, f"{len(found)} wrong results:\n" + "\n".join(found[:8])


def rounded(comm, mode):
    """1 + 2^-25 lies between two numbers; sums of 16-bit types, products and averages are rounded as well."""
    inputs = []
    for count in (1, 50_000):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64):
            tiny = 2.0**-25 if dtype in (torch.float32, torch.complex64) else 2.0**-12
            inputs += [
                (torch.full((count,), 1.0 if comm.rank == 0 else tiny, dtype=dtype), "sum"),
                (torch.full((count,), (1.0 + comm.rank) / 3, dtype=dtype), "avg"),
                (torch.full((count,), 1.1, dtype=dtype), "product"),
            ]
    set_mode(mode if comm.rank == 0 else "")
    found = [comm.all_reduce(x, op) for x, op in inputs]
    return [torch.view_as_real(x) if x.is_complex() else x for x in found]


@needs_modes
def test_rounding():
    plain, upward = (run_ranks(2, rounded, mode, mode="processes", timeout=LIMIT) for mode in ("", "upward"))
    for one, other in zip(plain[0], plain[1], strict=True):
        assert torch.equal(one, other)
    for ranks in upward:
        for got, right in zip(ranks, plain[0], strict=True):
            assert torch.equal(got, right), (got[:1], right[:1])


@needs_modes
def test_traps():
    """A program that asks for a signal at an overflow gets none from a sum of the group's."""

    def body(comm):
        assert libm.feclearexcept(0x3D if os.uname().machine == "x86_64" else 0x1F) == 0
        if libm.feenableexcept(0x0C if os.uname().machine == "x86_64" else 0x06) < 0:
            return "not here"
        y = comm.all_reduce(torch.full((5000,), 3e38), algorithm="two_shot")
        libm.fedisableexcept(0x3D)
        return bool(y.isinf().all())

    assert set(run_ranks(2, body, mode="processes", timeout=LIMIT)) <= {True, "not here"}


def check_torch(r, n):
    """As a program has it: the worker runs one rank's operation, its caller the other's; and sparse sums."""
    dist.all_reduce(torch.ones(300_000), async_op=True).wait()
    torch.set_flush_denormal(True)
    numbers, x = tiny("f32", 3)
    for op, right in ((dist.ReduceOp.MAX, numbers), (dist.ReduceOp.SUM, numbers * n)):
        y = x()
        work = dist.all_reduce(y, op, async_op=True)
        if r == 0:
            work.wait()
        else:
            work.get_future().wait()
        assert torch.equal(y.view(torch.int32), right), y.view(torch.int32)
    for dtype in ("f32", "f64", "bf16"):
        numbers, x = tiny(dtype, 4)
        sparse = torch.sparse_coo_tensor([[0, 2, 5, 7]], x(), (9,), is_coalesced=True)
        dist.all_reduce(sparse)
        assert torch.equal(sparse._values().view(numbers.dtype), numbers * n), sparse
    numbers, x = tiny("f32", 6)
    several = [x(), x()]  # added on this rank first
    dist.group.WORLD.allreduce(several).wait()
    assert torch.equal(several[0].view(torch.int32), numbers * 2 * n)


@needs_modes
def test_torch():
    spawn(2, check_torch)
