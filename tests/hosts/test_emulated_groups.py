"""Whole groups over hosts that are emulated by namespaces: own addresses and boot ids, links that can be cut.
Skipped, with the reason, where the system does not permit them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from collective_cases import run_cases
from held import held, held_after
from test_emulated import COMMAND, LIMIT, open_hosts, own_store
from tiers import tier
from torch_ranks import meeting

import pycomm
from pycomm import env
from pycomm.testing import emulated

ROOT = Path(__file__).parent.parent.parent
HOST_TIMEOUT = 2.0


@pytest.fixture(scope="module")
def two_by_two():
    hosts = open_hosts("2x2")
    yield hosts
    hosts.close()


def groups(hosts, body, *args, expect_deaths=()):
    """body(comm, link, *args) on every rank; fails with what any of them raised."""

    def main(rank, link):
        os.environ["PYCOMM_HOST_TIMEOUT"] = str(HOST_TIMEOUT)
        with pycomm.Communicator(own_store(), rank, len(hosts.placement), timeout=30.0) as comm:
            return body(comm, link, *args)

    with hosts.ranks(main, limit=LIMIT) as processes:
        found = {rank: outcome.value for rank, outcome in processes.outcomes(LIMIT).items()}
    for rank in expect_deaths:
        assert isinstance(found.pop(rank), ChildProcessError)
    failed = {rank: value for rank, value in found.items() if isinstance(value, BaseException)}
    assert not failed, failed
    return found


def values(comm, link):
    cases = [
        (name, count, "dense", seed, {})
        for seed, (name, count) in enumerate(
            (name, count)
            for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
            for count in (0, 1, 331, 70_001)
        )
    ]
    assert comm.describe()["hosts"].startswith("2 hosts x 2") or comm.world_size != 4
    return run_cases(comm, cases)


@tier(quick=1 / 3)
@pytest.mark.parametrize(("placement", "ipv6"), [("2x2", True), ("1+2", False), ("0101", False)])
def test_values(placement, ipv6):
    with contextlib.closing(open_hosts(placement, ipv6=ipv6)) as hosts:
        found = groups(hosts, values)
    assert not any(found.values()), found


def mismatch(comm, link):
    with pytest.raises(pycomm.MismatchError, match=r"count=\d+ here, \d+ on rank \d \(host[01]\)"):
        comm.all_reduce(torch.ones(5000 + (comm.rank == 3)))
    assert comm.all_reduce(torch.ones(5000)).eq(4).all()


def test_mismatch(two_by_two):
    groups(two_by_two, mismatch)


def death(comm, link, victim, together):
    comm.barrier()
    together.wait()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(pycomm.PeerError, match=rf"rank {victim} \(host1\) died") as caught:
        comm.all_reduce(torch.ones(100_000))
    assert caught.value.peer == victim
    return time.monotonic() - start


@pytest.mark.parametrize("victim", [2, 3])
def test_death(two_by_two, victim):
    groups(two_by_two, death, victim, meeting(4), expect_deaths=[victim])


def abort(comm, link, together):
    comm.barrier()
    together.wait()
    if comm.rank == 3:
        comm.abort("enough")
    with pytest.raises(pycomm.AbortedError, match="enough"):
        comm.all_reduce(torch.ones(100_000))


def test_abort(two_by_two):
    groups(two_by_two, abort, meeting(4))


def fork(comm, link):
    """A child has none of it; the group goes on."""
    comm.all_reduce(torch.ones(5000))
    pid = os.fork()
    if pid == 0:
        try:
            comm.all_reduce(torch.ones(3))
        except pycomm.CommError:
            os._exit(7)
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert comm.all_reduce(torch.ones(5000)).eq(4).all()


def test_fork(two_by_two):
    groups(two_by_two, fork)


def link_down(comm, link):
    """Messages of this size are under way when the cable is taken out."""
    x = torch.ones(1 << 20)
    comm.all_reduce(x)
    link.send("begun")
    other = "host1" if comm.rank < 2 else "host0"
    with pytest.raises(
        pycomm.PeerError, match=f"{other} .* has not been heard for {HOST_TIMEOUT:g} s"
    ) as caught:
        while True:
            comm.all_reduce(x.fill_(1))
    with pytest.raises(pycomm.PeerError, match="has not been heard"):
        comm.barrier()
    return str(caught.value)


def test_link_down(two_by_two):
    def main(rank, link):
        os.environ["PYCOMM_HOST_TIMEOUT"] = str(HOST_TIMEOUT)
        with pycomm.Communicator(own_store(), rank, 4, timeout=60.0) as comm:
            return link_down(comm, link)

    with two_by_two.ranks(main, limit=LIMIT) as processes:
        try:
            for rank in range(4):
                assert processes.recv(rank, LIMIT) == "begun"
            two_by_two.set_link(1, False)
            found = {rank: outcome.value for rank, outcome in processes.outcomes(LIMIT).items()}
        finally:
            two_by_two.set_link(1, True)
    assert all(isinstance(text, str) for text in found.values()), found


def many_groups(comm, link, number):
    for made in range(number):
        with comm.split(0) as other:
            assert other.all_reduce(torch.ones(3)).eq(comm.world_size).all()
        if made == 9:
            comm.barrier()
            before = held()
    comm.barrier()
    return before, held_after(before)


@tier(slow=1)
def test_two_hundred_groups_leave_nothing():
    with contextlib.closing(open_hosts("2x1")) as hosts:
        for before, after in groups(hosts, many_groups, 200).values():
            assert after.threads <= before.threads and after.files <= before.files, (before, after)


@tier(slow=1)
def test_an_example_in_one_command():
    words = ["2x2", "--rate", "1gbit", "--", sys.executable, "examples/01_all_reduce.py"]
    done = subprocess.run(
        [*COMMAND, *words], env=env.for_child(), capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    if done.returncode == emulated.SKIPPED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
