"""Time limits: what is one, and what is refused or cut, wherever one is taken."""

import datetime
import math
import threading
import time

import pytest
import torch
import torch.distributed as dist
from forked import Group
from torch_ranks import spawn

import pycomm
from pycomm.testing import run_ranks

WRONG = [0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf, 1e11, 1.1e8]
LONG = 1e8  # the longest

CALLS = {
    "all_reduce": lambda comm, t: comm.all_reduce(torch.ones(1), timeout=t),
    "all_reduce async": lambda comm, t: comm.all_reduce(torch.ones(1), async_op=True, timeout=t).wait(),
    "broadcast": lambda comm, t: comm.broadcast(torch.ones(1), timeout=t),
    "barrier": lambda comm, t: comm.barrier(timeout=t),
    "wait": lambda comm, t: comm.all_reduce(torch.ones(1 << 20), async_op=True).wait(t),
    "send, recv": lambda comm, t: (
        comm.send(torch.ones(1), 1, timeout=t) if comm.rank == 0 else comm.recv(torch.ones(1), 0, timeout=t)
    ),
    "recv.wait": lambda comm, t: (
        comm.send(torch.ones(1), 1, async_op=True).wait(t)
        if comm.rank == 0
        else comm.recv(torch.ones(1), 0, async_op=True).wait(t)
    ),
}


@pytest.mark.parametrize("hosts", [None, "1+1"])
def test_a_wait_has_its_time_from_its_begin(hosts):
    """However long ago the message was issued, and whatever the limit of the group is."""
    waits = threading.Event()

    def body(comm):
        x = torch.zeros(3)
        if comm.rank == 1:
            assert waits.wait(20)
            return comm.send(torch.ones(3), 0, timeout=20)
        work = comm.recv(x, 1, async_op=True, timeout=0.2)
        time.sleep(1.2)
        threading.Timer(0.1, waits.set).start()
        work.wait(1.0)
        return x.tolist()

    assert run_ranks(2, body, hosts=hosts, timeout=30) == [[1.0] * 3, None]


def test_a_wait_may_be_longer_than_the_limit_of_the_group():
    def body(comm):
        if comm.rank == 1:
            time.sleep(0.6)
        return comm.all_reduce(torch.ones(3), async_op=True).wait(20).tolist()

    assert run_ranks(2, body, operation_timeout=0.2, timeout=30) == [[2.0] * 3] * 2


MESSAGES = {
    "recv": lambda comm: comm.recv(torch.ones(3), 1, timeout=0.5),
    "recv from any": lambda comm: comm.recv(torch.ones(3), timeout=0.5),
    "large send": lambda comm: comm.send(torch.ones(5 << 20), 1, timeout=0.5),
    "async": lambda comm: comm.recv(torch.ones(3), 1, async_op=True, timeout=0.5).wait(),
}


@pytest.mark.parametrize("hosts", [None, "1+1"])
@pytest.mark.parametrize("call", MESSAGES)
def test_the_limit_of_a_message(call, hosts):
    """The limit of the call, not of the group."""
    told = threading.Event()

    def body(comm):
        if comm.rank == 1:
            return told.wait(30)
        try:
            with pytest.raises(pycomm.CommTimeoutError, match="rank 1 .*within the timeout of 0.5 s"):
                MESSAGES[call](comm)
        finally:
            told.set()
        return True

    assert run_ranks(2, body, hosts=hosts, operation_timeout=15, timeout=40) == [True, True]


def test_an_operation_keeps_its_limit_where_one_behind_it_is_waited_for():
    told = threading.Event()

    def body(comm):
        if comm.rank == 1:
            return told.wait(30)
        works = [comm.all_reduce(torch.ones(3), async_op=True, timeout=limit) for limit in (0.3, None)]
        began = time.monotonic()
        try:
            with pytest.raises(pycomm.CommTimeoutError, match="within the timeout of 0.3 s"):
                works[1].wait(15)
            return time.monotonic() - began < 10
        finally:
            told.set()

    assert run_ranks(2, body, timeout=30) == [True] * 2


@pytest.mark.parametrize("hosts", [None, "1+1"])
def test_the_limit_of_a_group_is_exactly_that(hosts):
    """However long its ranks needed to meet."""
    with Group(2, lambda comm, link: comm._comm.timeout, hosts=hosts, timeout=7.25) as group:
        group.expect(7.25)


def test_later_calls_say_in_which_one_the_group_broke():
    """Of its kind, or of another; that call itself need not."""
    told = threading.Event()

    def body(comm):
        comm.barrier()
        if comm.rank == 1:
            assert told.wait(20)
        texts = []
        for call in (comm.all_reduce, comm.all_reduce, comm.broadcast):
            with pytest.raises(pycomm.CommTimeoutError) as caught:
                call(torch.ones(3), timeout=0.5)
            texts.append(str(caught.value))
        told.set()
        return texts

    for rank, texts in enumerate(run_ranks(2, body, timeout=30)):
        for i, text in enumerate(texts):
            where = (
                f"[rank {rank}/2] {'broadcast' if i == 2 else 'all_reduce'} #{2 + i}: rank 1 did not arrive"
            )
            assert text.startswith(where) and (", in all_reduce #2." in text) == (i > 0), text


def refused(comm):
    for name, call in CALLS.items():
        for timeout in WRONG:
            with pytest.raises(ValueError, match=f"timeout={timeout}: .* above 0 and at most") as caught:
                call(comm, timeout)
            assert "1e8" in str(caught.value), name
            if "wait" in name:  # the operation was issued: finish it
                comm.barrier()
        call(comm, LONG)
    with pytest.raises(TypeError, match="seconds"):
        comm.barrier(timeout=datetime.timedelta(seconds=1))
    return comm.all_reduce(torch.ones(1), timeout=1).item()


def test_of_operations():
    assert run_ranks(2, refused, timeout=30) == [2.0] * 2


@pytest.mark.parametrize("timeout", WRONG)
def test_of_a_communicator(timeout):
    with pytest.raises(ValueError, match=f"timeout={timeout}: .* above 0 and at most 1e8"):
        pycomm.Communicator(dist.HashStore(), 0, 1, timeout=timeout)


def test_the_longest():
    with pycomm.Communicator(dist.HashStore(), 0, 1, timeout=LONG) as comm:
        assert comm._comm.timeout == LONG and comm.all_reduce(torch.ones(1)).item() == 1


def test_parts_have_the_limit_that_their_group_has_now():
    """A rank that joins has another one while it joins."""
    with pycomm.Communicator(dist.HashStore(), 0, 1, timeout=20.0) as comm:
        for limit in (20.0, 7.0, 0.5):
            comm._set_timeout(limit)
            with comm.split(0) as part, part.split(3) as inner:
                assert [each._comm.timeout for each in (comm, part, inner)] == [limit] * 3
                assert [each._timeout for each in (comm, part, inner)] == [limit] * 3


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e11", "200000000", "soon"])
def test_of_the_environment(monkeypatch, value):
    monkeypatch.setenv("PYCOMM_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"PYCOMM_TIMEOUT='{value}' .* above 0 and at most 1e8"):
        pycomm.Communicator(dist.HashStore(), 0, 1)


# --- torch --------------------

MILLISECONDS = datetime.timedelta(milliseconds=1)
# 0 and -1 ms mean "the group's own" in torch; what is longer than the longest is cut
LONGER = datetime.timedelta(days=100_000_000)  # near the longest that torch itself can turn into milliseconds
TAKEN = [0 * MILLISECONDS, -1 * MILLISECONDS, datetime.timedelta(days=100_000), LONGER]
BELOW = [datetime.timedelta(seconds=-5), -LONGER]


def options(cls, timeout):
    made = cls()
    made.timeout = timeout
    return made


def check_torch(r, n):
    group, backend = dist.group.WORLD, dist.group.WORLD._get_backend(torch.device("cpu"))
    for timeout in TAKEN:
        group.barrier(options(dist.BarrierOptions, timeout)).wait()
        dist.all_reduce(torch.ones(1), async_op=True).wait(timeout)
        dist.all_reduce(torch.ones(1 << 20), async_op=True).wait(timeout)
    for timeout in BELOW:
        with pytest.raises(ValueError, match="timeout .* is below 0"):
            group.barrier(options(dist.BarrierOptions, timeout))
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(ValueError, match="timeout .* is below 0"):
            work.wait(timeout)
        work.wait()
        with pytest.raises(ValueError, match="timeout .* is not above 0"):
            backend.set_timeout(timeout)
    with pytest.raises(ValueError, match="timeout .* is not above 0"):
        backend.set_timeout(datetime.timedelta(0))
    for timeout in TAKEN[2:]:
        backend.set_timeout(timeout)
        dist.all_reduce(torch.ones(1))
        assert backend.communicator.timeout == LONG
    sub = dist.new_group(timeout=LONGER)
    dist.all_reduce(torch.ones(1), group=sub)
    assert sub._get_backend(torch.device("cpu")).communicator.timeout == LONG
    for timeout in (datetime.timedelta(0), datetime.timedelta(seconds=-3)):
        with pytest.raises(ValueError, match="timeout .* is not above 0"):
            dist.new_group(timeout=timeout)


def test_torch():
    spawn(2, check_torch)
