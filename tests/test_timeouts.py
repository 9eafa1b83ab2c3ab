"""Time limits: what is one, and what is refused or cut, wherever one is taken."""

import datetime
import math

import pytest
import torch
import torch.distributed as dist
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
