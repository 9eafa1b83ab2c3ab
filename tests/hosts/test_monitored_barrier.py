"""monitored_barrier over hosts: as within one (test_torch_monitored_barrier.py), with the hosts' names."""

import contextlib
import datetime
import os
import random
import signal

import pytest
import torch
import torch.distributed as dist
from tiers import tier
from torch_ranks import data, equal, meeting, spawn

import pycomm

PLACES = [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 2, 0]]


def barrier(seconds=20.0, wait_all_ranks=False, group=None):
    timeout = datetime.timedelta(seconds=seconds)
    (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks)


def sums_are_right(r, n):
    for c in (4, 5000):
        x = data(r, c)
        dist.all_reduce(x)
        equal(x, sum(data(p, c) for p in range(n)))


def check_missing(r, n, hosts):
    """Ranks 1 and 2 do not come; all others are told so by name, and the group goes on."""
    names = ", ".join(f"rank {p} (host{hosts[p]})" for p in (1, 2))
    x = data(r, 5000)
    work = dist.all_reduce(x, async_op=True)
    for wait_all, sentence in ((False, "Rank 1 failed to"), (True, "Ranks 1, 2 failed to")):
        if r in (0, 3):
            # rank 0's time is up first: it knows who is missing, wherever the others are
            with pytest.raises(pycomm.CommTimeoutError) as caught:
                barrier(1.0 if r == 0 else 20.0, wait_all)
            text, error = str(caught.value), caught.value
            assert f"{names} did not arrive within the timeout of" in text, text
            assert "the group is still usable" in text and (error.rank, error.peer) == (r, 1)
            if r == 0:
                assert f"{sentence} pass monitoredBarrier in 1000 ms" in text, text
            else:
                assert "Rank 3 successfully reached monitoredBarrier, but received errors" in text, text
        dist.barrier()
    work.wait()
    equal(x, sum(data(p, 5000) for p in range(n)))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    for _ in range(3):
        barrier()
    sums_are_right(r, n)


@pytest.mark.parametrize("hosts", PLACES, ids=str)
def test_missing_ranks(hosts):
    spawn(4, check_missing, hosts, hosts=hosts)


def check_far_ranks(r, n, missing):
    """The first rank has the largest number of those that are awaited, and of those that are missing."""
    if r not in missing:
        with pytest.raises(pycomm.CommTimeoutError, match="did not arrive within") as caught:
            barrier(3.0 if r == 0 else 60.0, wait_all_ranks=True)
        text = str(caught.value)
        assert all(f"rank {p} (host1)" in text for p in missing), text
        assert text.count("(host") == len(missing) and caught.value.peer == missing[0], text
    dist.barrier()


@tier(slow=1)
def test_ranks_of_large_numbers_are_missing():
    """The words by which the host of rank 0 tells another one have 64 bits."""
    hosts = [int(rank >= 31) for rank in range(67)]
    spawn(67, check_far_ranks, [33, 63, 64, 66], hosts=hosts)


def check_rank_0_missing(r, n, hosts):
    """A rank on another host whose time is up takes its arrival back through rank 0's host."""
    if r:
        with pytest.raises(pycomm.CommTimeoutError, match=r"rank 0 \(host0\)") as caught:
            barrier(0.4)
        assert "the group is still usable" in str(caught.value)
    dist.barrier()
    for _ in range(3):
        barrier()
    sums_are_right(r, n)


def test_rank_0_does_not_come():
    spawn(4, check_rank_0_missing, PLACES[1], hosts=PLACES[1])


def check_random(r, n, seed):
    """Barriers that some ranks skip or leave early, in an order that all know; sums between them."""
    rng = random.Random(seed)
    for _ in range(12):
        absent, patience = rng.random() < 0.4 and rng.randrange(n), rng.random() * 0.05
        if rng.random() < 0.5:
            sums_are_right(r, n)
        if absent is not False:
            if r != absent:
                with pytest.raises(pycomm.CommTimeoutError):
                    barrier(patience if r else 0.03)
            dist.barrier()
        else:
            barrier()
    return True


@pytest.mark.parametrize("hosts", PLACES[:2], ids=str)
def test_random_orders(hosts):
    assert all(spawn(4, check_random, 7, hosts=hosts))


def check_death(r, n, victim, together):
    barrier()
    together.wait()
    if r == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerError, match=rf"rank {victim} \(host1\) died") as caught:
        barrier()
    assert "monitoredBarrier" in str(caught.value) and caught.value.peer == victim
    with contextlib.suppress(pycomm.CommError):
        dist.destroy_process_group()


@pytest.mark.parametrize("victim", [2, 3])
def test_death(victim):
    """Of a leader, and of another rank."""
    spawn(4, check_death, victim, meeting(4), hosts=PLACES[0], expect_deaths=[victim])


def check_leaving(r, n):
    """The verdict of rank 0 arrives although it closes the group behind the barrier."""
    for _ in range(5):
        group = dist.new_group()
        barrier(group=group)
        dist.destroy_process_group(group)


def test_rank_0_may_leave():
    spawn(3, check_leaving, hosts=[0, 1, 1])
