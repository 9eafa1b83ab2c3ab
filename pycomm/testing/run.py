"""run_ranks: a function on every rank of a new group."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, cast, get_args, overload

import torch

from pycomm import _C, env
from pycomm.testing.groups import make_options
from pycomm.testing.processes import EXTRA_S, Args, RankProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from typing_extensions import Unpack

    from pycomm.testing.groups import GroupOptions, Options

T = TypeVar("T")
Failures: TypeAlias = dict[int, BaseException]  # by rank
Mode: TypeAlias = Literal["threads", "processes", "spawn"]
MODES: tuple[Mode, ...] = get_args(Mode)
GRACE_S = 5.0  # for the other ranks, when one has failed and that is all the caller wants to know
ENDING_S = 1.0  # for the last steps of threads that Python takes for ended


class RankFailure(RuntimeError):
    """A rank raised, died or did not finish. Of `failures` the first that is not the echo of another is the
    cause in the traceback.
    """

    def __init__(self, message: str, failures: Failures) -> None:
        super().__init__(message)
        self.failures = failures

    def __reduce__(self) -> tuple[type[RankFailure], tuple[object, ...]]:
        return RankFailure, (*self.args, self.failures)


@overload
def run_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: object,
    mode: Mode = ...,
    timeout: float = ...,
    fail: Literal[True] = ...,
    **options: Unpack[Options],
) -> list[T]: ...


@overload
def run_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: object,
    mode: Mode = ...,
    timeout: float = ...,
    fail: bool,
    **options: Unpack[Options],
) -> list[T | BaseException]: ...


def run_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: object,
    mode: Mode = "threads",
    timeout: float = 60.0,
    fail: bool = True,
    **options: Unpack[Options],
) -> list[T] | list[T | BaseException]:
    """Calls fn(comm, *args) on every rank of a new group and returns the results in order of rank; with a
    backend of torch.distributed fn(rank, *args).

    Args:
        world_size: number of ranks.
        fn: with processes its result must be picklable, with "spawn" itself too.
        mode: "threads", "processes" (forked) or "spawn" (processes in new interpreters).
        timeout: seconds for all of it; also the default of operation_timeout.
        fail: raise RankFailure when a rank failed; False: put its exception (or, for a dead process, a
            ChildProcessError) in its place.
        options: of the group:
            backend: None (default): the group is a Communicator. A name ("pycomm", "gloo", "nccl"): it is the
                default group of torch.distributed; for processes only.
            devices: the CUDA device of each rank, such as ["cuda:0", "cuda:1"].
            hosts: simulates several hosts on this one: "2x3" (two hosts of three ranks), "3+5", "0101" (the
                host of each rank). Between threads messages go through this process, between processes by
                the loopback interface.
            wire_delay_us: microseconds by which messages between simulated hosts are late, at most; they
                overtake each other. For threads only.
            operation_timeout: seconds of one operation whose peers do not come.
            name, staging_bytes, threads: of a Communicator.

    Raises RankFailure, with the exception of the first failed rank as its cause, and ValueError.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: must be one of {', '.join(map(repr, MODES))}")
    group = make_options(world_size, timeout, in_threads=mode == "threads", **options)
    results: dict[int, T]
    if mode == "threads":
        results, failures = _run_threads(world_size, group, timeout, fn, args)
    else:
        results, failures = _run_processes(world_size, group, timeout, fn, args, mode=mode, fail=fail)
    if failures and fail:
        raise _failure(world_size, failures)
    return [failures[rank] if rank in failures else results[rank] for rank in range(world_size)]


def _failure(world_size: int, failures: Failures) -> RankFailure:
    causes = [error for error in failures.values() if not _is_echo(error)] or list(failures.values())
    lines = "\n".join(
        f"  rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(failures.items())
    )
    failure = RankFailure(f"{len(failures)} of {world_size} ranks failed:\n{lines}", failures)
    failure.__cause__ = causes[0]
    return failure


def _is_echo(error: BaseException) -> bool:
    """An error that only says that another rank failed first."""
    return type(error).__name__ in ("PeerError", "AbortedError")


# --- threads --------------------


def _run_threads(
    world_size: int, group: GroupOptions, timeout: float, fn: Callable[..., T], args: Args
) -> tuple[dict[int, T], Failures]:
    store = _C.LocalStore(group.wire_delay_us)
    results: dict[int, T] = {}
    failures: Failures = {}
    if torch.version.cuda and not torch.cuda.is_initialized():  # asking for a GPU would already begin with it
        env.allow_thread_ranks()

    def body(rank: int) -> None:
        try:
            # torch has one thread for all backward passes on a GPU, where ranks would wait for each other
            on_this_thread = torch.autograd.set_multithreading_enabled(False)
            with group.join(store, rank, world_size) as joined, on_this_thread:
                results[rank] = fn(joined, *args)
        except BaseException as error:  # every rank's outcome is reported, whatever it was
            failures[rank] = error

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout + EXTRA_S
    for rank, thread in enumerate(threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            failures[rank] = TimeoutError(f"rank {rank} did not finish within {timeout} s")
    _await_end([thread for thread in threads if not thread.is_alive()])
    return results, failures


def _await_end(threads: Sequence[threading.Thread]) -> None:
    """Waits until the system has ended threads that have been joined.

    Python lets go of a thread before its last steps, in which libraries free what they kept for it. A process
    forked meanwhile inherits their locks as they are: it spun for ever on one of MKL's in its first product.
    """
    deadline = time.monotonic() + ENDING_S
    for thread in threads:
        while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < deadline:
            time.sleep(0.0002)


# --- processes --------------------


def _run_processes(
    world_size: int,
    group: GroupOptions,
    timeout: float,
    fn: Callable[..., T],
    args: Args,
    *,
    mode: Mode,
    fail: bool,
) -> tuple[dict[int, T], Failures]:
    method: Literal["spawn", "fork"] = "spawn" if mode == "spawn" else "fork"
    with tempfile.TemporaryDirectory(prefix="pycomm-") as folder:
        call = (world_size, group, os.path.join(folder, "store"), (fn, args))
        with RankProcesses(world_size, _rank, *call, method=method, limit=timeout + 2 * EXTRA_S) as ranks:
            found = ranks.outcomes(timeout, GRACE_S if fail else None)
    results = {rank: cast("T", outcome.value) for rank, outcome in found.items() if outcome.ok}
    failures = {
        rank: cast("BaseException", outcome.value) for rank, outcome in found.items() if not outcome.ok
    }
    return results, failures


def _rank(
    rank: int,
    link: Connection,
    world_size: int,
    group: GroupOptions,
    path: str,
    call: tuple[Callable[..., T], Args],
) -> T:
    fn, args = call
    with group.join(torch.distributed.FileStore(path, world_size), rank, world_size) as joined:
        return fn(joined, *args)
