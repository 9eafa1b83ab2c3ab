"""Run a function on many ranks of this machine: for tests, examples and trying things out.

    results = pycomm.testing.run_ranks(4, lambda comm: comm.all_reduce(torch.ones(3)))

Threads (the default) start in a millisecond and share the process; where there is CUDA each has a stream of its own, as ranks that share a
device must. Processes are forked, so torch is not imported again, and are what
faults need: a rank may be killed, and is ended by its own id when the time is up.
"""

import contextlib
import os
import pickle
import select
import signal
import tempfile
import threading
import time
import traceback

import torch

from pycomm import _C, env
from pycomm.communicator import Communicator

__all__ = ["RankFailure", "run_ranks"]


class RankFailure(RuntimeError):
    """A rank raised, died or did not finish. `failures`: rank -> exception or text; the first one is the cause in the traceback."""

    def __init__(self, message, failures):
        super().__init__(message)
        self.failures = failures


def run_ranks(world_size, fn, *args, mode="threads", timeout=60.0, fail=True, **options):
    """Calls fn(comm, *args) on every rank of a new group and returns the results in order of rank.

    Args:
        world_size: number of ranks.
        fn: any callable; in mode "processes" its result must be picklable.
        mode: "threads" or "processes".
        timeout: seconds for all of it; also the default timeout of the group's operations.
        fail: raise RankFailure when a rank failed; False: put its exception (or, for a dead process, a ChildProcessError) in its place.
        options: for Communicator (name, staging_bytes, threads).

    Raises RankFailure, with the exception of the first failed rank as its cause.
    """
    if mode not in ("threads", "processes"):
        raise ValueError(f"mode={mode!r}: must be 'threads' or 'processes'")
    options.setdefault("timeout", timeout)
    run = _run_threads if mode == "threads" else _run_processes
    results, failures = run(world_size, fn, args, timeout, options)
    if failures and fail:
        cause = next((error for error in failures.values() if not _is_echo(error)), next(iter(failures.values())))
        lines = "\n".join(f"  rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(failures.items()))
        raise RankFailure(f"{len(failures)} of {world_size} ranks failed:\n{lines}", failures) from cause
    return [failures.get(rank, results.get(rank)) for rank in range(world_size)]


def _is_echo(error):
    """An error that only says that another rank failed first."""
    return type(error).__name__ in ("PeerError", "AbortedError")


def _run_threads(world_size, fn, args, timeout, options):
    store = _C.LocalStore()
    results, failures = {}, {}
    if torch.cuda.is_available() and not torch.cuda.is_initialized():
        env.allow_thread_ranks()

    def body(rank):
        try:
            with _own_stream(), Communicator(store, rank, world_size, **options) as comm:
                results[rank] = fn(comm, *args)
        except BaseException as error:  # every rank's outcome is reported, whatever it was
            failures[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout + 5.0
    for rank, thread in enumerate(threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            failures[rank] = TimeoutError(f"rank {rank} did not finish within {timeout} s")
    return results, failures


def _own_stream():
    """Only where CUDA is in use already, or can be: making the first stream initialises it."""
    return torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_available() else contextlib.nullcontext()


def _run_processes(world_size, fn, args, timeout, options):
    results, failures = {}, {}
    with tempfile.TemporaryDirectory(prefix="pycomm-") as folder:
        children = {}  # read end of the result pipe -> (rank, pid, bytes so far)
        for rank in range(world_size):
            read_end, write_end = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(read_end)
                _child(rank, world_size, fn, args, options, os.path.join(folder, "store"), write_end)
            os.close(write_end)
            children[read_end] = (rank, pid, bytearray())
        deadline = time.monotonic() + timeout + 5.0
        while children:
            ready, _, _ = select.select(list(children), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for read_end in ready:
                rank, pid, data = children[read_end]
                chunk = os.read(read_end, 1 << 20)
                if chunk:
                    data += chunk
                    continue
                _, status = os.waitpid(pid, 0)
                os.close(read_end)
                del children[read_end]
                _collect(rank, data, status, results, failures)
        for read_end, (rank, pid, _) in children.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(read_end)
            failures[rank] = TimeoutError(f"rank {rank} did not finish within {timeout} s")
    return results, failures


def _collect(rank, data, status, results, failures):
    if data:
        ok, value = pickle.loads(bytes(data))
        (results if ok else failures)[rank] = value
    elif os.WIFSIGNALED(status):
        failures[rank] = ChildProcessError(f"rank {rank} was killed by signal {os.WTERMSIG(status)}")
    else:
        failures[rank] = ChildProcessError(f"rank {rank} exited with status {os.waitstatus_to_exitcode(status)}")


def _child(rank, world_size, fn, args, options, path, write_end):
    """Never returns."""
    outcome = None
    try:
        torch.set_num_threads(1)
        store = torch.distributed.FileStore(path, world_size)
        with Communicator(store, rank, world_size, **options) as comm:
            outcome = (True, fn(comm, *args))
    except BaseException as error:
        with contextlib.suppress(Exception):
            error.add_note("".join(traceback.format_exception(error)))
        outcome = (False, error)
    try:
        data = pickle.dumps(outcome)
    except Exception as error:
        data = pickle.dumps((False, RuntimeError(f"rank {rank}: cannot send {outcome!r}: {error}")))
    with contextlib.suppress(BrokenPipeError), os.fdopen(write_end, "wb") as pipe:
        pipe.write(data)
    os._exit(0)
