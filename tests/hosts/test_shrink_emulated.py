"""Groups that lose hosts which cannot be heard any more: of two sides one at most goes on. Hosts are emulated
by namespaces; skipped, with the reason, where the system does not permit them.
"""

import contextlib
import os
import signal

import pytest
import torch
from test_emulated import LIMIT, open_hosts, own_store
from torch_ranks import meeting

import pycomm

HOST_TIMEOUT = 2.0
REFUSED = "neither more than half nor half with the lowest"


def play(placement, body, *, cut=None):
    """{rank: what body(comm, link) has returned}. A rank that says "ready" is told "go" when the link of the
    host `cut` is down, and one that says "alone" when it is up again; those that ended are left out.
    """

    def main(rank, link):
        os.environ["PYCOMM_HOST_TIMEOUT"] = str(HOST_TIMEOUT)
        comm = pycomm.Communicator(own_store(), rank, world_size, timeout=30.0)
        comm.barrier()
        together.wait()
        return body(comm, link)

    with contextlib.closing(open_hosts(placement)) as hosts:
        world_size = len(hosts.placement)
        together = meeting(world_size)
        with hosts.ranks(main, limit=LIMIT) as ranks:
            if cut is not None:
                for rank in range(world_size):
                    assert ranks.recv(rank, LIMIT) == "ready"
                hosts.set_link(cut, False)
                for rank in range(world_size):
                    ranks.links[rank].send("go")
                for rank in range(world_size):
                    assert ranks.recv(rank, LIMIT) == "shrunk"
                hosts.set_link(cut, True)
                for rank in range(world_size):
                    ranks.links[rank].send("up")
            found = {rank: outcome.value for rank, outcome in ranks.outcomes(LIMIT).items()}
    return {rank: value for rank, value in found.items() if not isinstance(value, ChildProcessError)}


def until_broken(comm):
    with pytest.raises(pycomm.CommError):
        while True:
            comm.all_reduce(torch.ones(3))


def total(comm):
    return comm.all_reduce(torch.ones(3)).tolist()


def attempt(comm, *args):
    """(the new group or None, what was raised)."""
    try:
        return comm.shrink(*args, timeout=LIMIT), ""
    except (pycomm.PeerError, pycomm.AbortedError) as error:
        return None, f"{type(error).__name__}: {error}"


def cut_off(comm, link):
    """What each rank found while the link was down, and afterwards."""
    link.send("ready")
    assert link.recv() == "go"
    until_broken(comm)
    new, text = attempt(comm)
    found = total(new) if new is not None else text
    link.send("shrunk")
    assert link.recv() == "up"
    later = total(new) if new is not None else attempt(comm)[1]
    return found, later


@pytest.mark.parametrize(
    ("placement", "cut", "going_on"),
    [pytest.param("2+1", 1, [0, 1], marks=pytest.mark.slow), ("1+2", 0, [1, 2]), ("2x1", 0, [0])],
    ids=["the larger side", "the larger side, without rank 0", "of two halves that of rank 0"],
)
def test_one_side_goes_on(placement, cut, going_on):
    found = play(placement, cut_off, cut=cut)
    assert len(found) == {"2+1": 3, "1+2": 3, "2x1": 2}[placement], found
    for rank, value in found.items():
        assert isinstance(value, tuple), value
        during, later = value
        if rank in going_on:
            assert during == later == [float(len(going_on))] * 3, found
        else:
            assert during.startswith("PeerError") and REFUSED in during, found
            assert later.startswith("AbortedError") and "left out of the group that rank" in later, found


def test_half_without_the_lowest_goes_on_if_the_caller_says_so():
    def body(comm, link):
        link.send("ready")
        assert link.recv() == "go"
        until_broken(comm)
        found = []
        if comm.rank == 1:
            _, text = attempt(comm)
            assert REFUSED in text and "pass exclude=[0]" in text, text
            new, _ = attempt(comm, [0])
            found = total(new)
        link.send("shrunk")
        assert link.recv() == "up"
        return found

    assert play("2x1", body, cut=0) == {0: [], 1: [1.0] * 3}


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_whose_processes_end_needs_no_quorum(host):
    """Its ports refuse, so the others are certain."""
    dead = [2 * host, 2 * host + 1]

    def body(comm, link):
        if comm.rank in dead:
            os.kill(os.getpid(), signal.SIGKILL)
        until_broken(comm)
        new = comm.shrink(timeout=LIMIT)
        return new.former_ranks, total(new), new.describe()["hosts"]

    left = [rank for rank in range(4) if rank not in dead]
    assert play("2x2", body) == {rank: (left, [2.0] * 3, None) for rank in left}


def test_across_hosts():
    """The survivors of three hosts connect over their own addresses."""

    def body(comm, link):
        if comm.rank in (0, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        until_broken(comm)
        new = comm.shrink(timeout=LIMIT)
        return new.former_ranks, total(new), new.describe()["hosts"]

    left = [1, 2, 4, 5]
    assert play("3x2", body) == {rank: (left, [4.0] * 3, "hosts of 1 + 1 + 2") for rank in left}
