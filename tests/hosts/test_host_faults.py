"""Ranks over hosts that are missing, leave, die or stop: the others learn it soon, by rank and host. Hosts
are simulated: threads over a wire in memory, and processes over Gloo.
"""

import os
import signal
import threading
import time

import pytest
import torch
from forked import HARD_LIMIT, Group, attempt
from held import held, held_after
from test_joining import ToldStore, make
from tiers import tier

import pycomm
from pycomm.testing import run_ranks
from pycomm.testing.groups import hosts_of

SOON = 1.0  # seconds from a death to the error on every rank
HOST_OF = [0, 0, 1, 1]  # of 2+2
LATE = 0.6  # seconds


def named(rank, hosts=HOST_OF):
    return f"rank {rank} (host{hosts[rank]})"


# --- missing, aborted, closed: threads --------------------


CALLS = {
    "small": lambda comm: comm.all_reduce(torch.ones(2)),
    "large": lambda comm: comm.all_reduce(torch.ones(100000)),
    "all_to_all": lambda comm: comm.all_to_all(torch.ones(4, 600)),
    "async": lambda comm: comm.all_reduce(torch.ones(2), async_op=True).wait(),
}


@tier(quick=1 / 4)
@pytest.mark.parametrize("absent", range(4))
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_is_missing(call, absent):
    def body(comm):
        comm.barrier()
        if comm.rank == absent:
            time.sleep(LATE + 1.5)
        return attempt(CALLS[call], comm)[1]

    reports = run_ranks(4, body, hosts="2+2", operation_timeout=LATE, timeout=30)
    for rank, report in enumerate(reports):
        assert report["kind"] == "CommTimeoutError" and report["peer"] == absent, (rank, report)
        assert f"{named(absent)} did not arrive within the timeout of {LATE:g} s" in report["text"], report


@pytest.mark.parametrize(
    ("hosts", "absent"), [("2+2", [0, 1]), ("1+1+1", [0, 1]), ("1+1+1", [1, 2]), ("0121", [1, 2, 3])]
)
def test_all_missing_ranks_are_named(hosts, absent):
    """They are of one host, or of two; in the order of their numbers."""
    n = sum(map(int, hosts.split("+"))) if "+" in hosts else len(hosts)
    told = threading.Barrier(n, timeout=30)

    def body(comm):
        comm.barrier()
        if comm.rank in absent:
            told.wait()
        report = attempt(comm.all_reduce, torch.ones(3000), timeout=1.0)[1]
        if comm.rank not in absent:
            told.wait()
        return report

    names = ", ".join(named(rank, hosts_of(hosts, n)) for rank in absent)
    for rank, report in enumerate(run_ranks(n, body, hosts=hosts, timeout=60)):
        assert report["kind"] == "CommTimeoutError" and report["peer"] == absent[0], report
        assert (report["rank"], report["world_size"]) == (rank, n), report
        assert f"{names} did not arrive within the timeout of 1 s" in report["text"], report


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_is_missing_after_a_pause(absent):
    """The threads of a group go to sleep after a second without an operation."""
    told = threading.Barrier(2, timeout=30)

    def body(comm):
        comm.barrier()
        if comm.rank == absent:
            told.wait()
        time.sleep(1.6 * (comm.rank != absent))
        report = attempt(comm.all_reduce, torch.ones(3000), timeout=1.0)[1]
        if comm.rank != absent:
            told.wait()
        return report

    for report in run_ranks(2, body, hosts="1+1", timeout=60):
        assert report["kind"] == "CommTimeoutError" and report["peer"] == absent, report


@pytest.mark.parametrize("first", [0, 2], ids=["a waiting host is early", "the host of the missing is early"])
def test_the_missing_rank_is_named_whoever_came_first(first):
    """Rank 3 is missing. The ranks of one host begin a second before rank 2, which waits for rank 3."""

    def body(comm):
        comm.barrier()
        if comm.rank == 3:
            time.sleep(LATE + 3)
        elif HOST_OF[comm.rank] != HOST_OF[first]:
            time.sleep(1.0)
        return attempt(comm.all_reduce, torch.ones(3000))[1]

    reports = run_ranks(4, body, hosts="2+2", operation_timeout=1.3, timeout=30)
    for report in reports:
        assert report["kind"] == "CommTimeoutError" and report["peer"] == 3, report
        assert f"{named(3)} did not arrive" in report["text"], report


@pytest.mark.parametrize("who", range(4))
def test_abort(who):
    together = threading.Barrier(4, timeout=30)

    def body(comm):
        comm.barrier()
        together.wait()
        if comm.rank == who:
            time.sleep(0.1)
            comm.abort("enough")
        seconds, report = attempt(comm.all_reduce, torch.ones(5000))
        return seconds.wall, report

    for rank, (wall, report) in enumerate(run_ranks(4, body, hosts="2+2", timeout=30)):
        assert report["kind"] == "AbortedError" and report["peer"] == who, report
        assert (report["rank"], report["world_size"]) == (rank, 4), report
        assert f"{named(who)} aborted the group: enough" in report["text"] and wall < 0.1 + SOON, report


@pytest.mark.parametrize("who", range(4))
def test_close_before_an_operation(who):
    def body(comm):
        comm.barrier()
        if comm.rank == who:
            comm.close()
            time.sleep(2.5)  # its thread would close nothing else
            return None
        return attempt(comm.all_reduce, torch.ones(5000))

    reports = run_ranks(4, body, hosts="2+2", timeout=30)
    for rank, outcome in enumerate(reports):
        if rank == who:
            continue
        seconds, report = outcome
        assert report["kind"] == "PeerError" and report["peer"] == who, report
        assert f"{named(who)} closed the group before it came to this operation" in report["text"], report
        assert seconds.wall < 2 * SOON, seconds


@pytest.mark.parametrize("hosts", ["2+1", "1+2"])
def test_a_host_that_has_left_is_not_missed(hosts, monkeypatch):
    """What the ranks of the other host have to do with each other goes on for longer than a silent host is
    waited for.
    """
    monkeypatch.setenv("PYCOMM_HOST_TIMEOUT", "2")
    left = 2 if hosts == "2+1" else 0
    low, high = sorted({0, 1, 2} - {left})
    together = threading.Barrier(2, timeout=30)

    def body(comm):
        comm.barrier()
        if comm.rank == left:
            return comm.close()
        together.wait()
        time.sleep(2.6)
        together.wait()
        if comm.rank == low:
            return comm.send(torch.ones(3), high)
        x = torch.zeros(3)
        comm.recv(x, low)
        return x.tolist()

    results = run_ranks(3, body, hosts=hosts, timeout=30)
    assert [result for result in results if result is not None] == [[1.0] * 3]


@pytest.mark.parametrize("who", [0, 1])
def test_close_in_the_middle_of_an_operation(who):
    """By another thread: the own call ends, and so do the others'."""

    def body(comm):
        comm.barrier()
        if comm.rank == who:
            threading.Timer(0.2, comm.close).start()
        if comm.rank == 3:
            time.sleep(0.4)
        seconds, report = attempt(comm.all_reduce, torch.ones(3_000_000))
        return seconds.wall, report

    for rank, (wall, report) in enumerate(run_ranks(4, body, hosts="2+2", timeout=30)):
        assert isinstance(report, dict) and wall < 0.4 + 2 * SOON, (rank, wall, report)
        assert report["kind"] == ("AbortedError" if rank == who else "PeerError"), (rank, report)
        assert rank == who or report["peer"] == who, (rank, report)


# --- processes over Gloo --------------------


@pytest.mark.parametrize(("hosts", "late"), [("0011", [2]), ("0101", [2]), ("01100", [3, 4])], ids=str)
def test_ranks_that_are_missing_inside_their_host(hosts, late):
    """All ranks have met; then those of each host make their part of the group. Those that wait for the late
    ones have the shortest limit, and tell the others.
    """

    def body(comm, link):
        class Stuck(ToldStore):
            def set(self, key, value):
                if "/host" in key:
                    link.recv()
                super().set(key, value)

        store, host = comm._store, hosts[comm.rank]
        if comm.rank in late:
            store = Stuck(store, lambda *ignored: None)
        waits = host == hosts[late[0]] and comm.rank not in late
        comm.barrier()
        return attempt(make, comm, store, timeout=1.5 if waits else 30.0, _host=f"host{host}")[1]

    with Group(len(hosts), body, hosts=hosts) as group:
        reports = {rank: group.get(rank) for rank in group.others(*late)}
    for rank, report in reports.items():
        assert f"rank(s) {', '.join(map(str, late))} did not arrive within" in report["text"], (rank, report)
        assert (report["kind"], report["peer"]) == ("CommTimeoutError", late[0]), (rank, report)


def again_and_again(count):
    def body(comm, link):
        x = torch.ones(count)
        comm.all_reduce(x)
        link.send("started")
        while True:
            comm.all_reduce(x)

    return body


def check_death(group, reports, dead, then, text="died"):
    for report in reports:
        assert isinstance(report, dict) and (report["kind"], report["peer"]) == ("PeerError", dead), report
        assert f"{named(dead)} {text}" in report["text"], report
    delays = group.delays(then, reports)
    assert max(delays) < SOON, delays


@pytest.mark.parametrize("dead", range(4))
@pytest.mark.parametrize("count", [2, 1 << 20], ids=["small", "large"])
def test_kill(count, dead):
    with Group(4, again_and_again(count), hosts="2+2") as group:
        group.expect("started")
        time.sleep(0.1)
        then = group.kill(dead)
        check_death(group, [group.get(rank) for rank in group.others(dead)], dead, then)


@pytest.mark.parametrize("dead", [0, 1])
def test_kill_while_others_wait(dead):
    def body(comm, link):
        link.send("started")
        if comm.rank == dead:
            signal.pause()
        comm.all_reduce(torch.ones(2))

    with Group(4, body, hosts="2+2") as group:
        group.expect("started")
        time.sleep(0.3)
        then = group.kill(dead)
        check_death(group, [group.get(rank) for rank in group.others(dead)], dead, then)


def test_a_leader_dies_while_others_wait_for_another_host():
    """Rank 3 is stopped in the middle of its message to rank 1, which has to see the death of its leader
    itself: the only speaker of its host is gone, and its own connection lives.
    """

    def body(comm, link):
        x = torch.ones(4 << 20)
        out = torch.zeros(4, x.numel()) if comm.rank == 1 else None
        comm.gather(x, out, root=1)
        link.send("started")
        while True:
            comm.gather(x, out, root=1)

    with Group(4, body, hosts="2+2") as group:
        group.expect("started")
        group.kill(3, signal.SIGSTOP)
        time.sleep(0.3)
        then = group.kill(0)
        check_death(group, [group.get(rank) for rank in (1, 2)], 0, then)
        group.kill(3, signal.SIGCONT)


@pytest.mark.parametrize("count", [2, 100000], ids=["small", "large"])
def test_a_waiter_with_a_limit_of_its_own(count):
    """wait(timeout) of a work that the group's own thread runs names who is missing, too."""

    def body(comm):
        comm.barrier()
        if comm.rank == 3:
            time.sleep(LATE + 2.0)
            return None
        work = comm.all_reduce(torch.ones(count), async_op=True)
        time.sleep(0.1)
        return attempt(work.wait, timeout=LATE)

    for outcome in run_ranks(4, body, hosts="2+2", timeout=30)[:3]:
        seconds, report = outcome
        assert report["kind"] == "CommTimeoutError" and report["peer"] == 3, report
        assert f"{named(3)} did not arrive within" in report["text"], report
        assert seconds.own < LATE + 2 * SOON


@pytest.mark.parametrize("stopped", [1, 3])
def test_a_stopped_rank(stopped):
    def body(comm, link):
        comm.barrier()
        link.send("started")
        link.recv()
        return attempt(comm.all_reduce, torch.ones(4000))

    limit = 5.0  # of joining, too
    with Group(4, body, hosts="2+2", operation_timeout=limit) as group:
        group.expect("started")
        group.kill(stopped, signal.SIGSTOP)
        group.send(*group.others(stopped))
        for rank in group.others(stopped):
            seconds, report = group.get(rank)
            assert report["kind"] == "CommTimeoutError" and report["peer"] == stopped, report
            assert f"{named(stopped)} did not arrive within" in report["text"], report
            assert seconds.own < limit + 2.0, seconds
        group.kill(stopped, signal.SIGCONT)


def test_fork():
    """A child of a rank ends without a word to anybody, may not use the group, and the group goes on."""

    def body(comm, link):
        for _ in range(3):
            comm.all_reduce(torch.ones(3000))
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                code = 1
                try:
                    comm.all_reduce(torch.ones(2))
                except pycomm.AbortedError as error:
                    code = 0 if "before a fork" in str(error) else 2
                comm.close()
                del comm
                os._exit(code)
            deadline = time.monotonic() + 15
            pid, status = 0, None
            while pid == 0 and time.monotonic() < deadline:
                pid, status = os.waitpid(child, os.WNOHANG)
                time.sleep(0.01)
            if pid == 0:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            assert status == 0, f"the child ended with {status}"
            assert comm.all_reduce(torch.ones(2)).eq(4).all()
        return "done"

    with Group(4, body, hosts="2+2") as group:
        for rank in range(4):
            assert group.get(rank) == "done"


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_thirty_groups_leave_nothing(mode):
    def body(comm):
        for number in range(30):
            part = comm.split(number % 2 if number % 3 == 0 else 0, key=comm.rank)
            part.all_reduce(torch.ones(3000))
            part.close()
            del part
            comm.barrier()
            if number == 4:
                before = held()
                comm.barrier()
        after = held_after(before)
        comm.barrier()
        return before, after

    for before, after in run_ranks(4, body, hosts="0101", mode=mode, timeout=60):
        assert after.threads <= before.threads and after.files <= before.files + 2, (before, after)


def test_closing_is_prompt():
    """All ranks at once, right after an operation."""

    def body(comm):
        longest = 0.0
        for _ in range(8):
            part = comm.split(0)
            part.barrier()
            seconds, _ = attempt(part.close)
            longest = max(longest, seconds.own)
        return longest

    assert max(run_ranks(4, body, hosts="2+2", mode="processes", timeout=60)) < HARD_LIMIT / 2
