"""Process groups of torch.distributed that lose ranks while pycomm.shrink_group gives the survivors a store:
the rank that has it dies or is stopped, and torch's stores would wait for it.
"""

import datetime
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from test_shrink import LIMIT, kill_self
from test_shrink_torch import DEATH, everything, expected_of, in_torch, until_broken
from tiers import tier

import pycomm

pytestmark = pytest.mark.timeout(120)
LATER_S = 0.3  # by which the others are late
SOON_S = 5.0  # far below the limit, and ten times what it takes


def shrink_to(world_size):
    """As programs do: again, where another rank has died in the middle."""
    while True:
        pycomm.shrink_group(timeout=LIMIT)
        try:
            dist.barrier()
        except DEATH:
            continue
        if dist.get_world_size() == world_size:
            return


def end_at_the_store(number, signal_number=signal.SIGKILL):
    """Rank 1, the new rank 0, is ended or stopped as soon as it has told where the new store is."""
    make = dist.TCPStore

    def made(*args, is_master, **options):
        dist.TCPStore = make
        if number == 1:
            threading.Timer(LATER_S / 3, os.kill, (os.getpid(), signal_number)).start()
        elif not is_master:
            time.sleep(LATER_S)
        return make(*args, is_master=is_master, **options)

    dist.TCPStore = made


def end_before_torch(number):
    """Rank 1 dies when it has done its part, before torch has cloned the store."""
    shrink = dist.shrink_group

    def shrunk(*args):
        dist.shrink_group = shrink
        if number == 1:
            kill_self()
        time.sleep(LATER_S)
        return shrink(*args)

    dist.shrink_group = shrunk


@pytest.mark.parametrize("end", [end_at_the_store, end_before_torch])
@pytest.mark.parametrize("world_size", [3, 4])
def test_the_owner_of_the_new_store_dies(end, world_size):
    def body(number):
        end(number)
        until_broken()
        begin = time.monotonic()
        shrink_to(world_size - 2)
        seconds = time.monotonic() - begin
        return everything(number), seconds < SOON_S or seconds

    alive = list(range(2, world_size))
    assert in_torch(world_size, body, [0]) == [(one, True) for one in expected_of(alive)]


def test_the_owner_of_the_new_store_is_stopped():
    """The others raise within the time limit, and go on without it when they call again."""

    def body(number):
        pids[number] = os.getpid()
        end_at_the_store(number, signal.SIGSTOP)
        until_broken()
        begin, limit = time.monotonic(), 2.0
        with pytest.raises(pycomm.CommTimeoutError, match="store of rank 0, .* did not answer") as caught:
            pycomm.shrink_group(timeout=limit)
        assert caught.value.peer == 0
        assert limit - LATER_S < time.monotonic() - begin < limit + LATER_S + 1
        shrink_to(2)
        result = everything(number)
        if number == 2:
            os.kill(pids[1], signal.SIGKILL)
        return result

    pids = multiprocessing.get_context("fork").Array("i", 4)
    assert in_torch(4, body, [0]) == expected_of([2, 3])


@tier(slow=1)
def test_the_owner_of_the_old_store_is_stopped():
    """It does not answer, and its connections do not end."""

    def body(number):
        pids[number] = os.getpid()
        if number == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(DEATH):
            dist.all_reduce(torch.ones(1), async_op=True).wait(datetime.timedelta(seconds=1))
        shrink_to(2)
        result = everything(number)
        if number == 1:
            os.kill(pids[0], signal.SIGKILL)
        return result

    pids = multiprocessing.get_context("fork").Array("i", 3)
    assert in_torch(3, body) == expected_of([1, 2])


def test_who_is_left_out_by_the_caller_stays_so():
    """A rank dies in the middle of a call that names another one."""

    def body(number):
        if number == 3:
            return None
        end_before_torch(number)
        try:
            pycomm.shrink_group(exclude=[3], timeout=LIMIT)
            dist.barrier()
        except DEATH:
            shrink_to(2)
        return everything(number)

    assert in_torch(4, body) == [*expected_of([0, 2]), None]
