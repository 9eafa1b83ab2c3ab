"""Errors: ranks that call different things, do not come, or die. Every rank must raise, in time, and the GPU
must stay usable.

An error of a CUDA operation appears at the next call on the group, in wait(), or in barrier(); so each body
calls the operation and then waits for the group, and what counts is the first error on that way.
"""

import os
import signal
import time

import torch

import pycomm
from gpu.ranks import describe, settle, wait

WITHIN = 3.0  # seconds beyond what the operation was given


def mismatches(check):
    for n, mode in ((4, "threads"), (2, "threads"), (3, "processes")):
        for what in CALLS:
            check.each(f"one rank differs in its {what}", n, _differ, what, mode=mode)
            check.each(f"a new group after the {what} mismatch", n, usable, mode=mode)


CALLS = {
    "count": lambda comm, odd, x: comm.all_reduce(x[: 500 if odd else 1000]),
    "dtype": lambda comm, odd, x: comm.all_reduce(x[:1000].view(torch.int32) if odd else x[:1000]),
    "op": lambda comm, odd, x: comm.all_reduce(x[:1000], "max" if odd else "sum"),
    "root": lambda comm, odd, x: comm.broadcast(x[:1000], 1 if odd else 0),
    "collective": lambda comm, odd, x: comm.broadcast(x[:1000]) if odd else comm.all_reduce(x[:1000]),
}


def _differ(comm, check, what):
    x = check.tensor(torch.ones(2000))
    comm.all_reduce(x)
    settle(check, comm)
    error, took = first_error(comm, check, lambda: CALLS[what](comm, comm.rank == 1, x))
    if not isinstance(error, pycomm.MismatchError):
        return f"expected a MismatchError, got {describe(error) or 'none'} after {took:.2f} s"
    return "" if took < WITHIN else f"the MismatchError came after {took:.2f} s"


def first_error(comm, check, call):
    """(the first error of the call or of the barrier after it, seconds until it came)."""
    began = time.monotonic()
    try:
        call()
        wait(check)
        comm.barrier()
    except pycomm.CommError as error:
        return error, time.monotonic() - began
    return None, time.monotonic() - began


def usable(comm, check):
    """A sum on the GPU and one over the ranks."""
    x = check.tensor(torch.ones(1027))
    settle(check, comm)
    comm.all_reduce(x)
    wait(check)
    comm.barrier()
    total = float(x.cpu().sum())
    return "" if total == 1027 * comm.world_size else f"the sum is {total}, expected {1027 * comm.world_size}"


def missing(check):
    """A rank that never calls: the others time out and name it."""
    for n, mode in ((4, "threads"), (2, "threads"), (3, "processes")):
        check.each("one rank does not come, timeout 1 s", n, _absent, mode=mode, timeout=1.0)
        check.each("a new group after the timeout", n, usable, mode=mode)


def _absent(comm, check):
    x = check.tensor(torch.ones(1000))
    comm.all_reduce(x)
    settle(check, comm)
    if comm.rank == 1:
        time.sleep(1.0 + WITHIN)
        return ""
    error, took = first_error(comm, check, lambda: comm.all_reduce(x))
    if not isinstance(error, pycomm.CommTimeoutError):
        return f"expected a CommTimeoutError, got {describe(error) or 'none'} after {took:.2f} s"
    return "" if took < 1.0 + WITHIN else f"the CommTimeoutError came after {took:.2f} s"


def deaths(check):
    """A rank killed by SIGKILL, before or while the others are in an operation."""
    for n in (2, 4):
        for when in ("before the operation", "while others wait"):
            _killed(check, n, when)
            check.each(f"a new group after a rank was killed {when}", n, usable, mode="processes")


def _killed(check, n, when):
    if check.now != "processes":
        return
    results = check.run(n, _die, when, mode="processes")
    problems = [
        f"rank {rank}: {describe(result)}"
        for rank, result in enumerate(results)
        if rank != 1 and describe(result)
    ]
    if not isinstance(results[1], ChildProcessError):
        problems.append(f"rank 1 was to be killed: {describe(results[1])}")
    check.record(f"rank 1 of {n} processes is killed {when}", not problems, "; ".join(problems))


def _die(comm, check, when):
    x = check.tensor(torch.ones(100_003))
    comm.all_reduce(x)
    settle(check, comm)
    if comm.rank == 1:
        if when == "while others wait":
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if when == "before the operation":
        time.sleep(0.3)
    began, error = time.monotonic(), None
    while error is None and time.monotonic() - began < 2 * WITHIN:
        error, _ = first_error(comm, check, lambda: comm.all_reduce(x))
    took = time.monotonic() - began
    if not isinstance(error, pycomm.PeerError):
        return f"expected a PeerError, got {describe(error) or 'none'} after {took:.2f} s"
    if took > WITHIN:
        return f"the PeerError came after {took:.2f} s"
    y = check.tensor(torch.ones(1027))
    total = float((y + y).sum().cpu())
    return "" if total == 2054 else f"the GPU computes {total} after the error, expected 2054"
