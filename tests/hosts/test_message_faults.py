"""What ends the messages of a group that spans hosts: mismatches, time limits, ranks that close, abort or
die, Ctrl-C, fork; and that nothing is left of them.
"""

import contextlib
import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from places import raises
from torch_ranks import meeting, spawn

from pycomm import AbortedError, CommTimeoutError, Communicator, MismatchError, PeerError, hosts
from pycomm.testing import run_ranks

SIZES = (4, 70001)


def test_mismatches_name_rank_and_host(run):
    def body(comm):
        r = comm.rank
        calls = {
            0: lambda: comm.send(torch.zeros(70001), 2, tag=3),
            2: lambda: comm.recv(torch.zeros(5), None, 3),
        }
        words = {
            0: ("[rank 0/3] send: count=70001 here, 5 on rank 2 (", "tag 3"),
            2: ("[rank 2/3] recv: count=5 here, 70001 on rank 0 (", "tag 3"),
        }
        if r in calls:
            raises(MismatchError, calls[r], *words[r])
        return int(comm.all_reduce(torch.ones(1)))

    hosts = {"hosts": "001", "timeout": 30}
    assert run_ranks(3, body, **hosts) == [3] * 3


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sends", [True, False])
def test_a_message_that_nobody_wants(size, sends, run_threads):
    """Its time limit names the rank that did not come, and ends the group."""

    def body(comm):
        if comm.rank == 2:
            gone.wait(20)
            return
        x = torch.zeros(size)

        def receive():
            comm.recv(x, 2, **limit)

        if comm.rank == 0:
            limit = {"timeout": 0.3}
            # Within a host eight small ones are sent before their recvs come.
            call = (lambda: [comm.send(x, 2, **limit) for _ in range(9)]) if sends else receive
            try:
                raises(CommTimeoutError, call, "rank 2 (", "did not arrive within the timeout of 0.3 s")
            finally:
                gone.set()
            raises(CommTimeoutError, lambda: comm.send(x, 1), "rank 2 (")

    gone = threading.Event()
    run_threads(3, body, timeout=20)


@pytest.mark.parametrize("polls", [False, True])
def test_all_missing_ranks_are_named(polls, run_threads):
    def body(comm):
        if comm.rank:
            gone.wait(20)
            return

        def call():
            if not polls:
                return comm.recv(torch.zeros(1), None)
            work, until = comm.recv(torch.zeros(1), None, async_op=True, timeout=0.3), time.monotonic() + 10
            while not work.done() and time.monotonic() < until:
                time.sleep(0.001)
            work.wait()

        try:
            raises(CommTimeoutError, call, "ranks 1, 2, 3 did not arrive")
        finally:
            gone.set()

    gone = threading.Event()
    run_threads(4, body, timeout=30, operation_timeout=20.0 if polls else 3.0)


@pytest.mark.parametrize("source", [2, None])
@pytest.mark.parametrize("size", SIZES)
def test_a_peer_that_closes_is_not_waited_for(size, source, run):
    def body(comm):
        x, y = torch.zeros(size), torch.zeros(size)
        if comm.rank == 2 or (comm.rank == 1 and source is None):
            comm.send(x, 0, tag=1)
            return True
        if comm.rank == 1:
            return True
        comm.recv(x, 2, tag=1)
        if source is None:
            comm.recv(x, 1, tag=1)
        began = time.monotonic()
        work = comm.recv(y, source, async_op=True)
        raises(PeerError, work.wait, "closed the group before it came to this operation")
        return time.monotonic() - began < 15

    assert run(3, body, timeout=40) == [True] * 3


def pending(comm, x):
    """A message of each kind that cannot complete."""
    other = 1 - comm.rank
    return [
        comm.send(x, other, tag=1, async_op=True),
        comm.recv(x, other, tag=2, async_op=True),
        comm.recv(x, None, tag=3, async_op=True),
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["close", "abort", "peer aborts"])
def test_pending_messages_end_with_the_group(how, size, run):
    def body(comm):
        works = pending(comm, torch.zeros(size))
        with contextlib.suppress(AbortedError):  # the other may be through it and have aborted
            comm.barrier()
        if comm.rank == 1 and how != "peer aborts":
            return [raises((PeerError, AbortedError), work.wait) for work in works]
        if how == "close":
            comm.close()
        if how == "abort" or comm.rank == 1:
            comm.abort("enough")
        return [raises(AbortedError, work.wait) for work in works]

    assert run(2, body, timeout=30) == [[True] * 3] * 2


@pytest.mark.parametrize("size", SIZES)
def test_the_death_of_a_rank_ends_messages(size):
    together = meeting(4)

    def body(comm):
        x = torch.zeros(size)
        if comm.rank == 3:
            comm.send(x, 0, tag=7)
        if comm.rank == 0:
            comm.recv(x, 3, tag=7)
        comm.barrier()
        together.wait()
        if comm.rank == 3:
            time.sleep(0.1)  # the others most often wait by then
            os.kill(os.getpid(), signal.SIGKILL)
        works = [comm.recv(x, 3, async_op=True)] if comm.rank != 1 else [comm.recv(x, None, async_op=True)]
        return [raises(PeerError, work.wait, "rank 3 (host1)") for work in works]

    options = {"hosts": "0011", "mode": "processes", "timeout": 40, "fail": False}
    results = run_ranks(4, body, **options)
    assert results[:3] == [[True]] * 3 and isinstance(results[3], ChildProcessError)


UNATTENDED = {
    "recv": lambda: dist.irecv(torch.ones(4), 3),
    "recv from any": lambda: dist.irecv(torch.ones(4)),
    "large send": lambda: dist.isend(torch.ones(1 << 22), 3),
}


def check_future_of_a_death(r, n, operation, together):
    """No rank waits or polls: ranks 0 and 2, one on each host, have only a future."""
    dist.barrier()
    together.wait()
    if r == 3:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 15
    with pytest.raises(PeerError, match=r"rank 3 \(host1\)"):  # under load the call itself may see it
        future = UNATTENDED[operation]().get_future()
        while not future.done():
            time.sleep(0.002)
            assert time.monotonic() < deadline, "the future has not seen the death"
        future.wait()
    with contextlib.suppress(AbortedError, PeerError):
        dist.destroy_process_group()


@pytest.mark.parametrize("operation", UNATTENDED)
def test_a_future_sees_a_death(operation):
    spawn(4, check_future_of_a_death, operation, meeting(4), hosts=[0, 0, 1, 1], expect_deaths=[3])


def check_future_of_a_limit(r, n, together):
    """As long as its group lives: rank 1 does not come."""
    if r == 0:
        future = dist.irecv(torch.ones(4), 1).get_future()
        with pytest.raises(
            CommTimeoutError, match=r"rank 1 \(host1\) did not arrive within the timeout of 4 s"
        ):
            future.wait()
    together.wait()


def test_a_future_has_a_limit():
    spawn(2, check_future_of_a_limit, meeting(2), hosts=[0, 1], timeout=4.0)


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("source", [0, None])
def test_the_death_of_its_leader_ends_messages_with_other_hosts(source, polls):
    """Rank 3 waits for another host, whose words of the death cannot reach it: who hears them has died."""
    together, seen = meeting(4), meeting(3)

    def body(comm):
        comm.barrier()
        together.wait()
        if comm.rank == 2:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        work = comm.recv(torch.zeros(1), source if comm.rank == 3 else 3, async_op=True)
        while polls and not work.done():
            time.sleep(0.001)
        try:
            return raises(PeerError, work.wait, "rank 2 (host1) died")
        finally:
            seen.wait()  # a rank that ends early would be reported in place of rank 2

    results = run_ranks(4, body, hosts="0011", mode="processes", timeout=40, fail=False)
    assert [result for rank, result in enumerate(results) if rank != 2] == [True] * 3, results


def test_interrupt_in_a_wait():
    def body(comm):
        if comm.rank:
            return raises(AbortedError, lambda: comm.recv(torch.zeros(3), 0), "rank 0 (host0)", "interrupted")
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        began = time.monotonic()
        with pytest.raises((KeyboardInterrupt, AbortedError)):
            comm.recv(torch.zeros(3), 1)
        return time.monotonic() - began < 10

    assert run_ranks(2, body, hosts="01", mode="processes", timeout=30) == [True, True]


def test_a_forked_child_leaves_the_links_alone():
    def body(comm):
        other = 1 - comm.rank
        work = comm.recv(torch.zeros(3), other, async_op=True)
        early = comm.recv(x := torch.zeros(3), other, tag=1, async_op=True)
        comm.send(torch.ones(3), other, tag=1)
        early.wait()
        child = os.fork()
        if child == 0:
            ok = False
            try:
                raises(AbortedError, lambda: comm.send(x, other), "fork")
                raises(AbortedError, work.wait, "fork")
                del comm
                ok = True
            finally:
                os._exit(0 if ok else 1)
        status = os.waitpid(child, 0)[1]
        comm.send(torch.ones(3), other)
        work.wait()
        return status

    assert run_ranks(2, body, hosts="01", mode="processes", timeout=30) == [0, 0]


def test_nothing_is_left_of_links(run_threads):
    """Threads and memory of a group go with it."""

    def body(comm):
        for peer in range(comm.world_size):
            if peer != comm.rank:
                comm.send(torch.ones(2), peer, async_op=True)
        for _ in range(comm.world_size - 1):
            comm.recv(torch.ones(2), None)
        comm.barrier()

    def links():
        found = 0
        for task in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{task}/comm") as name:
                    found += name.read().strip() == "pycomm-link"
            except OSError:  # it has ended meanwhile
                pass
        return found

    before = links()
    for _ in range(3):
        run_threads(4, body, timeout=30)
    until = time.monotonic() + 20
    while links() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert links() <= before


def test_ctrl_c_while_hosts_connect():
    def body(rank):
        store = dist.PrefixStore("connect", dist.distributed_c10d._get_default_store())
        if rank == 1:

            def wait_for_the_other(*arguments, **options):
                store.set("inside", "")
                store.wait(["over"], datetime.timedelta(seconds=20))

            hosts.engines = wait_for_the_other
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)

            def interrupt():
                store.wait(["inside"], datetime.timedelta(seconds=20))
                time.sleep(0.5)  # this rank is there, too
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=interrupt).start()
        try:
            Communicator(store, rank, 2, timeout=20.0, _host=f"host{rank}")
        except KeyboardInterrupt:
            store.set("over", "")
            return "interrupted"
        except Exception as error:
            return type(error).__name__

    options = {"mode": "processes", "backend": "gloo", "timeout": 40}
    assert run_ranks(2, body, **options)[0] == "interrupted"
