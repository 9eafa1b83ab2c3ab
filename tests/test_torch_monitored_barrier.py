"""monitored_barrier: who is named, on which rank, in whose words; the group after it; many in a row."""

import contextlib
import datetime
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch_ranks import data, equal, meeting, spawn

import pycomm


def barrier(seconds=20.0, wait_all_ranks=False, group=None):
    timeout = datetime.timedelta(seconds=seconds)
    (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks)


def sums_are_right(r, n):
    for c in (4, 100_000):
        x = data(r, c)
        dist.all_reduce(x)
        equal(x, sum(data(p, c) for p in range(n)))


def check_missing(r, n):
    """Ranks 1 and 2 do not come. The group is used before, meanwhile and afterwards."""
    y = data(r, 50_000)
    pending = dist.all_reduce(y, async_op=True)
    x = data(r, 3)
    work = dist.all_reduce(x, async_op=True)
    for wait_all, sentence in ((False, "Rank 1 failed to"), (True, "Ranks 1, 2 failed to")):
        if r in (0, 3):
            with pytest.raises(pycomm.CommTimeoutError, match="ranks 1, 2 did not arrive") as caught:
                barrier(0.3, wait_all)
            text, error = str(caught.value), caught.value
            assert isinstance(error, RuntimeError) and (error.rank, error.peer) == (r, 1)
            assert f"[rank {r}/4" in text
            if r == 0:
                assert f"{sentence} pass monitoredBarrier in 300 ms" in text, text
            else:
                assert (
                    "Rank 3 successfully reached monitoredBarrier, but received errors while waiting for "
                    "send/recv from rank 0" in text
                ), text
        dist.barrier()
    pending.wait()
    work.wait()
    equal([x, y], [sum(data(p, 3) for p in range(n)), sum(data(p, 50_000) for p in range(n))])
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    sums_are_right(r, n)
    for _ in range(3):
        barrier()
    sums_are_right(r, n)


def test_missing_ranks_are_named_and_the_group_stays_usable():
    spawn(4, check_missing)


def check_no_time(r, n):
    if r == 0:
        with pytest.raises(pycomm.CommTimeoutError, match="Rank 0 timed out in monitoredBarrier after 0 ms"):
            barrier(0)
    dist.barrier()
    if r == 1:
        with pytest.raises(pycomm.CommTimeoutError, match="rank 0 did not arrive.*Rank 1 successfully"):
            barrier(0.1)
    dist.barrier()
    barrier()
    sums_are_right(r, n)


def test_no_time():
    spawn(2, check_no_time)


def check_gone_before_the_end(r, n):
    """Rank 1 was there before rank 0, and leaves before rank 0's time is up: rank 2 alone is missing."""
    if r < 2:
        time.sleep(0.1 * (r == 0))
        with pytest.raises(pycomm.CommTimeoutError) as caught:
            barrier(2.0 if r == 0 else 1.0)
        if r == 0:
            text = str(caught.value)
            assert "] barrier: rank 2 did not arrive within" in text and caught.value.peer == 2, text
    dist.barrier()
    barrier()


def test_who_was_there_is_not_missing():
    spawn(3, check_gone_before_the_end)


def check_pending(r, n):
    """What was issued before progresses while this rank waits."""
    xs = [data(r, c) for c in (3, 60_000, 5)]
    if r == 0:
        works = [dist.all_reduce(x, async_op=True) for x in xs]
        barrier()
        for work in works:
            work.wait()
    else:
        for x in xs:
            dist.all_reduce(x)
        barrier()
    equal(xs, [sum(data(p, c) for p in range(n)) for c in (3, 60_000, 5)])


def test_operations_issued_before_progress():
    spawn(3, check_pending)


def check_random(r, n, seed):
    """Barriers that some ranks skip or leave early, in an order that all know; sums between them."""
    rng = random.Random(seed)
    for _ in range(40):
        absent, patience = rng.random() < 0.3 and rng.randrange(n), rng.random() * 0.004
        if rng.random() < 0.5:
            sums_are_right(r, n)
        if absent is not False and n > 1:
            if r != absent:
                with pytest.raises(pycomm.CommTimeoutError):
                    barrier(patience if r else 0.01)
            dist.barrier()  # an earlier rank must not meet the next one
        else:
            barrier()
    return True


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_random_orders(world_size):
    assert all(spawn(world_size, check_random, 7))


def check_death(r, n, together):
    barrier()
    together.wait()
    if r == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerError, match="rank 1 died") as caught:
        barrier()
    assert "monitoredBarrier" in str(caught.value) and caught.value.peer == 1
    with contextlib.suppress(pycomm.CommError):
        dist.destroy_process_group()


def test_death():
    spawn(3, check_death, meeting(3), expect_deaths=[1])


def check_late_after_a_death(r, n):
    """Rank 2 comes when the group is broken already: the same words."""
    store = dist.distributed_c10d._get_default_store()
    if r == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if r == 2:
        store.wait(["raised"], datetime.timedelta(seconds=20))
    with pytest.raises(pycomm.PeerError, match="rank 1 died.*monitoredBarrier") as caught:
        barrier()
    assert caught.value.peer == 1
    if r == 0:
        store.set("raised", "")
    with contextlib.suppress(pycomm.CommError):
        dist.destroy_process_group()


def test_late_after_a_death():
    spawn(3, check_late_after_a_death, expect_deaths=[1])


def check_subgroup(r, n):
    group = dist.new_group([1, 2])
    if r == 1:
        with pytest.raises(pycomm.CommTimeoutError, match="Rank 1 failed to pass"):
            barrier(0.2, group=group)
    dist.barrier()
    if r in (1, 2):
        barrier(group=group)
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))


def test_subgroup():
    spawn(3, check_subgroup)
