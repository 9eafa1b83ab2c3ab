"""Ranks as forked processes with a torch.distributed default group, for the tests of the torch backend."""

import contextlib
import datetime
import os
import pickle
import select
import signal
import tempfile
import traceback

import torch
import torch._dynamo  # an optimizer imports it, which would take seconds in each forked rank
import torch.distributed as dist

LIMIT = 40  # seconds for the ranks of one test
DIED = "died"


def spawn(world_size, body, *args, backend="pycomm", timeout=20.0, expect_deaths=()):
    """Runs body(rank, world_size, *args) in forked ranks and returns their results. Fails with the tracebacks of all that raised."""
    results, children = {}, {}
    with tempfile.TemporaryDirectory(prefix="pycomm-") as folder:
        for rank in range(world_size):
            read_end, write_end = os.pipe()
            pid = os.fork()
            if pid == 0:
                _child(rank, world_size, body, args, backend, os.path.join(folder, "store"), timeout, write_end)
            os.close(write_end)
            children[read_end] = (rank, pid, bytearray())
        while children:
            ready, _, _ = select.select(list(children), [], [], LIMIT + 5)
            for read_end in ready or list(children):
                rank, pid, data = children[read_end]
                chunk = os.read(read_end, 1 << 20) if ready else b""
                data += chunk
                if not chunk:
                    if not ready:
                        os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    os.close(read_end)
                    del children[read_end]
                    results[rank] = pickle.loads(data) if data else (False, DIED)
    expected = [rank for rank in expect_deaths if results[rank][1] == DIED]
    failed = [f"rank {rank}: {text}" for rank, (ok, text) in sorted(results.items()) if not ok and rank not in expected]
    assert not failed, "\n".join(failed)
    return [results[rank][1] for rank in range(world_size)]


def _child(rank, world_size, body, args, backend, path, timeout, pipe):
    signal.alarm(LIMIT)
    torch.set_num_threads(1)
    try:
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(backend, store=dist.FileStore(path, world_size), rank=rank, world_size=world_size, timeout=limit)
        outcome = (True, body(rank, world_size, *args))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        outcome = (False, traceback.format_exc())
    with contextlib.suppress(BrokenPipeError), os.fdopen(pipe, "wb") as out:
        out.write(pickle.dumps(outcome))
    os._exit(0)


def data(rank, *shape, dtype=torch.float32):
    """Small whole numbers, so that every order of summing gives the same bits."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


def equal(actual, expected):
    actual, expected = (x if isinstance(x, (list, tuple)) else [x] for x in (actual, expected))
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == e.dtype and a.shape == e.shape and torch.equal(a, e), f"item {i}: {a.flatten()[:8]}, expected {e.flatten()[:8]}"
