"""Deaths over hosts are seen early, and the error names the rank that died: a leader with a child that lives
on, a leader that ends by the error that it raises, a leader that is stopped, a death while a group is made.
Hosts are simulated: processes, with Gloo over the loopback interface.
"""

import os
import signal
import subprocess
import time

import pytest
import torch
from forked import Group, attempt, failure
from test_host_faults import HOST_OF, SOON, again_and_again, check_death, named
from tiers import tier

import pycomm
from pycomm.hosts import forks

pytestmark = pytest.mark.timeout(120)
CHILD_S = 20  # that a child lives on


def end_after_it(body):
    """The rank ends as soon as it has said what it raised, as a program does that does not catch it."""

    def until_the_end(comm, link):
        try:
            result = body(comm, link)
        except pycomm.CommError as error:
            result = failure(error)
        link.send(result)
        os._exit(1)

    return until_the_end


# --- a leader with a child --------------------


def fork():
    if os.fork() == 0:
        time.sleep(CHILD_S)
        os._exit(0)


def start_program():
    """One that gets all descriptors that are not closed by exec."""
    subprocess.Popen(["sleep", str(CHILD_S)], close_fds=False)


@pytest.mark.parametrize("child", [fork, start_program])
@pytest.mark.parametrize("dead", [0, 2])
def test_a_leader_dies_and_its_child_lives(child, dead):
    def body(comm, link):
        if comm.rank == dead:
            child()
        return again_and_again(5000)(comm, link)

    with Group(4, body, hosts="2+2") as group:
        group.expect("started")
        time.sleep(0.1)
        then = group.kill(dead)
        check_death(group, [group.get(rank) for rank in group.others(dead)], dead, then)


def test_a_child_has_none_of_the_sockets():
    """In the child the numbers are taken by something else; the group of the parent goes on."""

    def body(comm, link):
        comm.all_reduce(torch.ones(3000))
        sockets = dict(forks._KEPT)
        to_parent, to_child = os.pipe()
        child = os.fork()
        if child == 0:
            left = [fd for fd, inode in sockets.items() if os.fstat(fd).st_ino == inode]
            os.write(to_child, bytes([len(sockets), len(left)]))
            os._exit(0)
        found, left = os.read(to_parent, 2)
        os.waitpid(child, 0)
        assert comm.all_reduce(torch.ones(2)).eq(3).all()
        return found, left

    with Group(3, body, hosts="2+1") as group:
        # one that listens, one to each other rank, and of a leader one to each other leader
        assert [group.get(rank) for rank in range(3)] == [(4, 0), (3, 0), (4, 0)]


def test_descriptors_that_were_given_anew_stay():
    """Gloo closes its sockets with the group; what has their numbers then is the child's, too."""

    def body(comm, link):
        before = dict(forks._KEPT)
        os.environ["PYCOMM_HOST_ID"] = f"host{comm.rank}"
        part = comm.split(0)
        part.barrier()
        mine = [fd for fd in forks._KEPT if fd not in before]
        assert mine
        part.close()
        del part
        comm.barrier()
        end = time.monotonic() + 20
        while any(os.path.exists(f"/proc/self/fd/{fd}") for fd in mine) and time.monotonic() < end:
            time.sleep(0.01)
        files = [os.open("/proc/self/status", os.O_RDONLY) for _ in range(30)]
        assert set(files) & set(mine), (files, mine)
        child = os.fork()
        if child == 0:
            os._exit(sum(not os.read(fd, 5).startswith(b"Name:") for fd in files))
        comm.barrier()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    with Group(2, body, hosts="1+1") as group:
        assert [group.get(rank) for rank in range(2)] == [0, 0]


# --- a leader that ends by the error --------------------


def name_the_dead(hosts, dead):
    body = end_after_it(again_and_again(1000))
    with Group(len(hosts), body, hosts=hosts) as group:
        group.expect("started")
        time.sleep(0.1)
        then = group.kill(dead)
        reports = [group.get(rank) for rank in group.others(dead)]
        of_host = [int(digit) for digit in hosts]
        for report in reports:
            assert (report["kind"], report["peer"]) == ("PeerError", dead), report
            assert f"{named(dead, of_host)} died (its process ended)" in report["text"], report
        assert max(group.delays(then, reports)) < SOON


@tier(quick=1 / 6)
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize(("hosts", "dead"), [("0101", 2), ("0101", 3), ("01220", 4)])
def test_the_reason_goes_before_the_leader(hosts, dead, turn):
    """A rank that leads no host dies; its leader raises that, and ends at once."""
    name_the_dead(hosts, dead)


def test_the_reason_goes_with_an_abort():
    """abort(), and the end."""

    def body(comm, link):
        comm.barrier()
        if comm.rank == 0:
            link.send(None)
            comm.abort("the loss is nan")
            os._exit(1)
        return attempt(comm.all_reduce, torch.ones(1000))[1]

    with Group(3, body, hosts="2+1") as group:
        for rank in (1, 2):
            report = group.get(rank)
            assert (report["kind"], report["peer"]) == ("AbortedError", 0), report
            assert f"{named(0)} aborted the group: the loss is nan" in report["text"], report


# --- a leader that is stopped --------------------


@tier(quick=0)
@pytest.mark.parametrize("count", [2, 4000, 1 << 20])
@pytest.mark.parametrize("stopped", [0, 2])
def test_a_stopped_leader(count, stopped, monkeypatch):
    """All other ranks raise when it has not been heard for PYCOMM_HOST_TIMEOUT, those of its host, too; and
    they go on without it.
    """
    limit = 3.0
    monkeypatch.setenv("PYCOMM_HOST_TIMEOUT", str(limit))

    def body(comm, link):
        comm.barrier()
        link.send("started")
        link.recv()
        seconds, report = attempt(comm.all_reduce, torch.ones(count))
        new = comm.shrink(timeout=20)
        new.barrier()
        return seconds, report, new.former_ranks

    with Group(4, body, hosts="2+2", timeout=60.0) as group:
        group.expect("started")
        group.kill(stopped, signal.SIGSTOP)
        others = group.others(stopped)
        group.send(*others)
        for rank in others:
            seconds, report, left = group.get(rank)
            assert report["kind"] == "PeerError" and report["peer"] == stopped, report
            assert "has not been heard for 3 s" in report["text"] and "stopped" in report["text"], report
            assert limit / 2 < seconds.wall and seconds.own < limit + SOON, seconds
            assert left == others
        group.kill(stopped, signal.SIGCONT)


def test_ranks_that_were_stopped_together_and_one_that_is_alone(monkeypatch):
    """They find no leader silent when they go on: they have not listened themselves. Then one leader is."""
    monkeypatch.setenv("PYCOMM_HOST_TIMEOUT", "4")
    hosts = [0, 1, 1, 0]

    def body(comm, link):
        for _ in range(2):
            comm.barrier()
            link.send("started")
            link.recv()
            found = attempt(comm.all_reduce, torch.ones(3))[1]
            link.send(found.tolist() if isinstance(found, torch.Tensor) else found)

    with Group(4, body, hosts="0110", timeout=60.0) as group:
        group.expect("started")
        for rank in range(4):
            group.kill(rank, signal.SIGSTOP)
        time.sleep(5)
        for rank in (3, 2, 1, 0):  # those that lead no host look at their leaders while these are stopped
            group.kill(rank, signal.SIGCONT)
            time.sleep(0.4)
        group.send(*range(4))
        group.expect([4.0] * 3)
        group.expect("started")
        group.kill(0, signal.SIGSTOP)
        group.send(1, 2, 3)
        for rank in (1, 2, 3):
            report = group.get(rank)
            assert (report["kind"], report["peer"]) == ("PeerError", 0), report
            silent = "host0 (ranks 0, 3)" if hosts[rank] else f"{named(0)}, which speaks for host0,"
            assert f"{silent} has not been heard for 4 s" in report["text"], report
        group.kill(0, signal.SIGCONT)


# --- a rank that dies while a group is made --------------------


class Late(pycomm.Communicator):
    """Whose parts are made when it is told so."""

    link = None

    def __init__(self, *args, **options):
        self.link.recv()
        super().__init__(*args, **options)


@pytest.mark.parametrize("hosts", [None, "2+1"])
def test_a_death_in_split_is_not_that_of_another(hosts):
    """Rank 2 dies in split(); rank 1 sees it, raises and ends; rank 0 comes then, and finds two dead."""

    def body(comm, link):
        link.send("started")
        if comm.rank == 2:
            comm.all_gather(torch.tensor([0, 0]))  # its part of split(), up to where the group is made
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank == 0:
            Late.link, comm.__class__ = link, Late
        if hosts is not None:
            os.environ["PYCOMM_HOST_ID"] = f"host{HOST_OF[comm.rank]}"
        comm.split(0)

    with Group(3, end_after_it(body), hosts=hosts) as group:
        group.expect("started")
        reports = [group.get(1)]
        group.join(1)
        group.send(0)
        reports.append(group.get(0))
    for report in reports:
        assert (report["kind"], report["peer"]) == ("PeerError", 2), report
        assert "creating the group: rank 2 died" in report["text"], report
