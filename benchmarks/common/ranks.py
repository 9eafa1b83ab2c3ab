"""A function on every rank, by pycomm.testing, for benchmarks whose ranks end when it returns."""

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
GRACE_S = 1.0  # to collect the errors of further ranks: the first to fail need not be the one to blame


class RankError(Exception):
    """A rank failed, ended or did not answer; the text says which and how."""


def run(
    world_size: int, body: Callable[..., T], *args: object, timeout: float = 600.0, **options: Any
) -> list[T]:
    """body(joined, *args) on every rank, as run_ranks calls it; the results by rank. timeout: for all, in s;
    options: of run_ranks.

    Raises RankError with the tracebacks of the ranks that failed, or else the names of those that hang.
    """
    from pycomm.testing import RankFailure, run_ranks  # torch, which a rank under MPI does without

    try:
        return run_ranks(world_size, body, *args, timeout=timeout, **options)
    except RankFailure as failure:
        failures = sorted(failure.failures.items())
    hang = [f"rank {rank} did not end in time" for rank, error in failures if _hangs(error, rank)]
    failed = [f"rank {rank}: {told(error)}" for rank, error in failures if not _hangs(error, rank)]
    raise RankError("\n".join(failed or hang))


def _hangs(error: BaseException, rank: int) -> bool:
    return isinstance(error, TimeoutError) and str(error).startswith(f"rank {rank} did not finish")


def told(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).strip()
