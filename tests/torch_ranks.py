"""Ranks as forked processes with a torch.distributed default group, for the tests of the torch backend."""

import multiprocessing
import traceback

import torch
import torch._dynamo  # an optimizer imports it, which would take seconds in each forked rank

from pycomm.testing import run_ranks

LIMIT = 90  # seconds for the ranks of one test: it ends what hangs, and is no measure of speed
DIED = "died"


def spawn(world_size, body, *args, backend="pycomm", timeout=20.0, expect_deaths=(), hosts=None, limit=LIMIT):
    """Runs body(rank, world_size, *args) in forked ranks and returns their results, DIED for those of
    expect_deaths that died. Fails with the tracebacks of all that raised. hosts: of run_ranks. limit:
    seconds for all of it.
    """

    options = {"backend": backend, "operation_timeout": timeout, "timeout": limit, "fail": False}
    if hosts is not None:
        options["hosts"] = hosts
    results = run_ranks(world_size, body, world_size, *args, mode="processes", **options)
    for rank in expect_deaths:
        if isinstance(results[rank], ChildProcessError):
            results[rank] = DIED
    failed = [
        f"rank {rank}: {''.join(traceback.format_exception(result))}"
        for rank, result in enumerate(results)
        if isinstance(result, BaseException)
    ]
    assert not failed, "\n".join(failed)
    return results


def meeting(n: int):
    """Where n forked ranks wait for each other, by its wait(), without their group. Made before they fork. A
    rank that dies or aborts behind a barrier of the group may end it for those that are still inside.
    """
    return multiprocessing.get_context("fork").Barrier(n, timeout=LIMIT)


def data(rank, *shape, dtype=torch.float32):
    """Small whole numbers, so that every order of summing gives the same bits."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


def equal(actual, expected):
    actual, expected = (x if isinstance(x, (list, tuple)) else [x] for x in (actual, expected))
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == e.dtype and a.shape == e.shape and torch.equal(a, e), (
            f"item {i}: {a.flatten()[:8]}, expected {e.flatten()[:8]}"
        )
