"""Forked processes with a torch.distributed default group. Every wait has a limit; what is left of the ranks at the end is killed."""

import contextlib
import datetime
import os
import pickle
import select
import signal
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

from pycomm.benchmarks.channel import GRACE, RankError


def run_ranks(world_size, body, *args, backend="pycomm", timeout=300.0):
    """Runs body(rank, *args) on each rank, with one thread each; returns the results by rank.

    timeout: seconds for all of it. Raises RankError with the tracebacks of the ranks that failed first, or named those that hang.
    """
    results, pids, pipes, deadline = {}, {}, {}, time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                pipe, other = os.pipe()
                pid = os.fork()
                if pid == 0:
                    _child(rank, world_size, body, args, backend, f"{folder}/store", timeout, other)
                os.close(other)
                pids[rank], pipes[pipe] = pid, (rank, bytearray())
            while pipes and (left := deadline - time.monotonic()) > 0:
                for pipe in select.select(list(pipes), [], [], left)[0]:
                    rank, data = pipes[pipe]
                    chunk = os.read(pipe, 1 << 20)
                    data += chunk
                    if not chunk:
                        os.close(pipe)
                        del pipes[pipe]
                        results[rank] = pickle.loads(data) if data else (False, "the process ended without a word")
                        if not results[rank][0]:
                            deadline = min(deadline, time.monotonic() + GRACE)
        finally:
            for pipe in pipes:
                os.close(pipe)
            for rank, pid in pids.items():
                if rank not in results:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    failed = [f"rank {rank}: {text}" for rank, (ok, text) in sorted(results.items()) if not ok]
    silent = [f"rank {rank} did not end in time" for rank in range(world_size) if rank not in results]
    if failed or silent:
        raise RankError("\n".join(failed or silent))
    return [results[rank][1] for rank in range(world_size)]


def _child(rank, world_size, body, args, backend, path, timeout, pipe):
    torch.set_num_threads(1)
    try:
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(backend, store=dist.FileStore(path, world_size), rank=rank, world_size=world_size, timeout=limit)
        outcome = (True, body(rank, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    with contextlib.suppress(BrokenPipeError), os.fdopen(pipe, "wb") as out:
        out.write(pickle.dumps(outcome))
    os._exit(0)  # without destroy_process_group: a peer that failed is not waited for
