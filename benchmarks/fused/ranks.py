"""Ranks of a benchmark: threads of this process over a Communicator, or processes over torch process groups. Every wait has a limit.

Processes are forked on the CPU, where torch is imported already; with CUDA they are new interpreters, since one that has used CUDA must not
fork. They have a pycomm group and one of Gloo (CPU) or, with a GPU for each, of NCCL. Threads have pycomm alone.
"""

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from typing import NamedTuple

import torch
import torch.distributed as dist

import pycomm

from .. import device as gpu
from ..channel import GRACE, RankError
from .peers import Native, Peers, Torch


class Place(NamedTuple):
    """Where the ranks run: mode "threads" or "processes"; device "cpu" or "cuda"; rank r uses GPU r // ranks_per_gpu."""

    mode: str
    device: str
    ranks_per_gpu: int = 1
    operation_timeout: float = 30.0  # seconds of one operation whose peers do not come
    timeout: float = 600.0  # seconds of all


def run(world_size, place, body, *args):
    """body(peers, *args) on every rank; the results by rank. Raises RankError."""
    with tempfile.TemporaryDirectory(prefix="pycomm-") as folder:
        store = os.path.join(folder, "store")
        start = _run_threads if place.mode == "threads" else _run_processes
        return start(world_size, place, store, body, args)


def _run_threads(world_size, place, store, body, args):
    from pycomm import testing

    results = testing.run_ranks(world_size, _thread, place, store, body, args, timeout=place.timeout, fail=False)
    failed = [f"rank {rank}: {_told(result)}" for rank, result in enumerate(results) if isinstance(result, BaseException)]
    if failed:
        raise RankError("\n".join(failed))
    return results


def _told(error):
    return "".join(traceback.format_exception(error)).strip()


def _thread(outer, place, path, body, args):
    """On a group with the time limit of an operation: that of run_ranks has the limit of all."""
    torch.set_num_threads(1)
    where = _enter(outer.rank, place)
    store = dist.FileStore(path, outer.world_size)
    with pycomm.Communicator(store, outer.rank, outer.world_size, timeout=place.operation_timeout) as comm:
        return body(Peers(Native(comm), {}, where, own_gpu=place.device == "cuda" and place.ranks_per_gpu == 1), *args)


def _enter(rank, place):
    if place.device == "cpu":
        return torch.device("cpu")
    index = rank // place.ranks_per_gpu
    gpu.enter(index)
    return torch.device("cuda", index)


def _run_processes(world_size, place, store, body, args):
    context = multiprocessing.get_context("fork" if place.device == "cpu" else "spawn")
    processes, pipes, results = [], {}, {}
    deadline = time.monotonic() + place.timeout
    try:
        for rank in range(world_size):
            pipe, other = context.Pipe(duplex=False)
            process = context.Process(target=_process, args=(rank, world_size, place, store, body, args, other), daemon=True)
            process.start()
            other.close()
            processes.append(process)
            pipes[pipe] = rank
        while pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(pipes), left):
                rank = pipes.pop(pipe)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    results[rank] = (False, "the process ended without a word")
                if not results[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
    finally:
        for rank, process in enumerate(processes):
            if rank not in results:
                process.kill()
            process.join(GRACE)
    failed = [f"rank {rank}: {text}" for rank, (ok, text) in sorted(results.items()) if not ok]
    silent = [f"rank {rank} did not end in time" for rank in range(world_size) if rank not in results]
    if failed or silent:
        raise RankError("\n".join(failed or silent))
    return [results[rank][1] for rank in range(world_size)]


def _process(rank, world_size, place, path, body, args, pipe):
    """Never returns."""
    try:
        torch.set_num_threads(1)
        where, own_gpu = _enter(rank, place), place.device == "cuda" and place.ranks_per_gpu == 1
        limit = datetime.timedelta(seconds=place.operation_timeout)
        store = dist.FileStore(path, world_size)
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=world_size, timeout=limit)
        other = "gloo" if place.device == "cpu" else "nccl"
        others = {other: Torch(dist.new_group(backend=other))} if place.device == "cpu" or own_gpu and dist.is_nccl_available() else {}
        outcome = (True, body(Peers(Torch(dist.group.WORLD), others, where, own_gpu=own_gpu), *args))
    except BaseException as error:
        outcome = (False, _told(error))
    with contextlib.suppress(BrokenPipeError):
        pipe.send(outcome)
    os._exit(0)  # without destroy_process_group: a peer that failed is not waited for
