"""What the user's code does at the end of an operation, on a thread of the group's: copies into tensors that
refuse it, hooks and callbacks that raise, callbacks that call collectives.
"""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch_ranks import spawn

import pycomm
from pycomm.testing import run_ranks

LIMIT = 20.0  # seconds of a wait in a test


# --- outputs that refuse the result --------------------


def into_inference_tensors(comm):
    """Non-contiguous tensors made in inference mode, written at the end of an operation outside of it, by the
    worker (nobody waits) and by the caller.
    """
    n, right = comm.world_size, []
    for rows in (3, 1000):
        with torch.inference_mode():
            x, y = torch.zeros(rows, 300).t(), torch.full((rows, 300), 1.0 + comm.rank).t()
        if comm.rank == 0:
            comm.send(torch.full((300, rows), 5.0), 1)
        else:
            work = comm.recv(x, 0, async_op=True)
            deadline = time.monotonic() + LIMIT
            while not work.done():
                assert time.monotonic() < deadline
                time.sleep(0.005)
            work.wait()
            right.append(bool(x.eq(5).all()))
        comm.all_reduce(y, async_op=True).wait()
        comm.all_reduce(y)
        right.append(bool(y.eq(n * n * (n + 1) / 2).all()))
    return all(right)


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_inference_tensors(mode):
    assert run_ranks(2, into_inference_tensors, mode=mode, timeout=LIMIT) == [True] * 2


OVERLAPPING = {
    "recv": lambda comm, x: comm.recv(x, 1 - comm.rank),
    "irecv": lambda comm, x: comm.recv(x, 1 - comm.rank, async_op=True),
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "broadcast": lambda comm, x: comm.broadcast(x, 1 - comm.rank),
    "all_gather": lambda comm, x: comm.all_gather(torch.ones(40000), x),
    "all_to_all": lambda comm, x: comm.all_to_all(torch.ones(80000), x),
}


def into_overlapping(comm):
    """Refused before anything is sent: the group works on."""
    for name, call in OVERLAPPING.items():
        with pytest.raises(ValueError, match="share memory") as caught:
            call(comm, torch.zeros(2, 1).expand(2, 40000))
        assert f"[rank {comm.rank}/2]" in str(caught.value), name
    if comm.rank == 0:
        comm.send(torch.ones(1).expand(70000), 1)  # an input may be expanded
    else:
        x = torch.zeros(70000)
        comm.recv(x, 0)
        assert x.eq(1).all()
    return comm.all_reduce(torch.ones(1).expand(1)).item()


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_overlapping_outputs(mode):
    assert run_ranks(2, into_overlapping, mode=mode, timeout=LIMIT) == [2.0] * 2


# --- callbacks that raise --------------------


def check_raising_hook(r, n):
    """On the worker: the group is aborted, with the hook's own words, and the process lives. The call after
    it is told on every rank.
    """

    def hook(info):
        if r == 0:
            raise KeyError("from the hook")

    dist.group.WORLD._register_on_completion_hook(hook)
    x = torch.ones(1 << 20)
    dist.all_reduce(x, async_op=True)
    dist.group.WORLD._wait_for_pending_works()
    with pytest.raises(pycomm.AbortedError, match="rank 0 aborted the group: .*hook.*from the hook"):
        for _ in range(1000):
            dist.all_reduce(torch.ones(1), async_op=True).wait()
            time.sleep(0.001)


@pytest.mark.filterwarnings("ignore")
def test_raising_hook():
    spawn(2, check_raising_hook)


# --- callbacks that call collectives --------------------


def check_callback_in_a_wait(r, n):
    """A message completes while this rank waits in an all_reduce, because the worker is held up by another
    callback. Its future's callback calls an all_reduce of the same group.
    """
    x, y, sums = torch.zeros(1 << 17), torch.zeros(1 << 17), []
    store = dist.distributed_c10d._get_default_store()
    if r == 1:
        store.wait(["the callback is there"])
        dist.send(x + 1, 0, tag=0)
        dist.send(x + 2, 0, tag=1)  # rank 0 can take it only while it waits for the next line
        for _ in range(2):
            z = torch.ones(1)
            dist.all_reduce(z)
            sums.append(z.item())
        return sums
    held, release, done = threading.Event(), threading.Event(), threading.Event()

    def hold_the_worker(future):
        held.set()
        release.wait(LIMIT)

    def call_a_collective(future):
        z = torch.ones(1)
        dist.all_reduce(z)
        sums.append(z.item())
        done.set()

    dist.irecv(x, 1, tag=0).get_future().then(hold_the_worker)
    store.set("the callback is there", "")  # that of a complete future would hold this thread
    assert held.wait(LIMIT)
    dist.irecv(y, 1, tag=1).get_future().then(call_a_collective)
    z = torch.ones(1)
    dist.all_reduce(z)
    sums.append(z.item())
    assert done.wait(LIMIT)
    release.set()
    assert y.eq(2).all()
    return sums


def test_callback_in_a_wait():
    assert spawn(2, check_callback_in_a_wait) == [[2.0, 2.0]] * 2
