"""run_ranks: a function on every rank of a new group."""

import os
import tempfile
import threading
import time

import torch

from pycomm import _C, env
from pycomm.testing.groups import make_options
from pycomm.testing.processes import EXTRA_S, RankProcesses

MODES = ("threads", "processes", "spawn")
GRACE_S = 5.0  # for the other ranks, when one has failed and that is all the caller wants to know
ENDING_S = 1.0  # for the last steps of threads that Python takes for ended


class RankFailure(RuntimeError):
    """A rank raised, died or did not finish. `failures`: rank -> exception; the first that is not the echo of
    another is the cause in the traceback.
    """

    def __init__(self, message, failures):
        super().__init__(message)
        self.failures = failures

    def __reduce__(self):
        return RankFailure, (*self.args, self.failures)


def run_ranks(world_size, fn, *args, mode="threads", timeout=60.0, fail=True, **options):
    """Calls fn(comm, *args) on every rank of a new group and returns the results in order of rank; with a
    backend of torch.distributed fn(rank, *args).

    Args:
        world_size: number of ranks.
        fn: any callable; with processes its result must be picklable, with "spawn" itself too.
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
    if mode == "threads":
        results, failures = _run_threads(world_size, group, timeout, fn, args)
    else:
        results, failures = _run_processes(world_size, group, timeout, fn, args, mode=mode, fail=fail)
    if failures and fail:
        raise _failure(world_size, failures)
    return [failures.get(rank, results.get(rank)) for rank in range(world_size)]


def _failure(world_size, failures):
    causes = [error for error in failures.values() if not _is_echo(error)] or list(failures.values())
    lines = "\n".join(
        f"  rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(failures.items())
    )
    failure = RankFailure(f"{len(failures)} of {world_size} ranks failed:\n{lines}", failures)
    failure.__cause__ = causes[0]
    return failure


def _is_echo(error):
    """An error that only says that another rank failed first."""
    return type(error).__name__ in ("PeerError", "AbortedError")


# --- threads --------------------


def _run_threads(world_size, group, timeout, fn, args):
    store = _C.LocalStore(group.wire_delay_us)
    results, failures = {}, {}
    if torch.version.cuda and not torch.cuda.is_initialized():  # asking for a GPU would already begin with it
        env.allow_thread_ranks()

    def body(rank):
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


def _await_end(threads):
    """Waits until the system has ended threads that have been joined.

    Python lets go of a thread before its last steps, in which libraries free what they kept for it. A process
    forked meanwhile inherits their locks as they are: it spun for ever on one of MKL's in its first product.
    """
    deadline = time.monotonic() + ENDING_S
    for thread in threads:
        while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < deadline:
            time.sleep(0.0002)


# --- processes --------------------


def _run_processes(world_size, group, timeout, fn, args, *, mode, fail):
    method = "spawn" if mode == "spawn" else "fork"
    with tempfile.TemporaryDirectory(prefix="pycomm-") as folder:
        call = (world_size, group, os.path.join(folder, "store"), (fn, args))
        with RankProcesses(world_size, _rank, *call, method=method, limit=timeout + 2 * EXTRA_S) as ranks:
            found = ranks.outcomes(timeout, GRACE_S if fail else None)
    results = {rank: outcome.value for rank, outcome in found.items() if outcome.ok}
    failures = {rank: outcome.value for rank, outcome in found.items() if not outcome.ok}
    return results, failures


def _rank(rank, link, world_size, group, path, call):
    fn, args = call
    with group.join(torch.distributed.FileStore(path, world_size), rank, world_size) as joined:
        return fn(joined, *args)
