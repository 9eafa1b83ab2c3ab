"""Groups over hosts that lose ranks, or whole hosts, and go on: every survivor has the same new group,
whoever dies, and whenever. Hosts are simulated: processes, with Gloo over the loopback interface.
"""

import gc
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from multiprocessing.synchronize import Barrier

import pytest
import torch
from tiers import tier
from torch_ranks import meeting

import pycomm
from pycomm.testing import run_ranks

pytestmark = pytest.mark.timeout(120)
FORK = multiprocessing.get_context("fork")
LIMIT = 60.0  # seconds; never reached where the code is right


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_self_after(seconds):
    threading.Thread(target=lambda: (time.sleep(seconds), kill_self()), daemon=True).start()


def sum_of_ranks(comm, number):
    """Works only where all members take part: the sum of what they are called."""
    x = torch.full((5,), number, dtype=torch.float64)
    comm.all_reduce(x)
    return x.tolist()


def until_broken(comm):
    while True:
        try:
            comm.all_reduce(torch.ones(3))
        except pycomm.MismatchError:  # the others may still be in another operation, and it breaks nothing
            continue
        except pycomm.CommError as error:
            return type(error).__name__


def over(world_size, hosts, body, *args, fail=False, **options):
    """The results of body(comm, *args) of the ranks that were not killed. When it begins, all have the
    group.
    """
    together = meeting(world_size)

    def begin(*given):
        together.wait()
        return body(*given)

    results = run_ranks(world_size, begin, *args, hosts=hosts, mode="processes", fail=fail, **options)
    return [result for result in results if not isinstance(result, ChildProcessError)]


@tier(quick=1 / 5)
@pytest.mark.parametrize(
    ("hosts", "dead", "left"),
    [
        ("0011", [1], "hosts of 1 + 2"),
        ("0011", [0], "hosts of 1 + 2"),  # a leader, and rank 0
        ("0011", [0, 1], None),  # a host, that of rank 0 and of the store
        ("0011", [2, 3], None),
        ("0101", [0, 2], None),
        ("0011", [1, 2], "2 hosts x 1"),
        ("0011", [0, 1, 2], None),
        ("012", [0], "2 hosts x 1"),
        ("01", [0], None),
        ("0001122", [0, 1, 2, 5], "hosts of 2 + 1"),
    ],
)
def test_survivors_go_on(hosts, dead, left):
    together = meeting(len(hosts))

    def rank_main(comm):
        sum_of_ranks(comm, comm.rank)
        together.wait()
        if comm.rank in dead:
            kill_self()
        until_broken(comm)
        new = comm.shrink(timeout=LIMIT)
        half = new.split(new.rank % 2)
        got = (new.rank, new.former_ranks, new.world_size, sum_of_ranks(new, comm.rank), half.world_size)
        return *got, new.describe()["hosts"]

    world_size = len(hosts)
    alive = [rank for rank in range(world_size) if rank not in dead]
    n = len(alive)
    expected = [(new, alive, n, [float(sum(alive))] * 5, len(range(new % 2, n, 2)), left) for new in range(n)]
    assert over(world_size, hosts, rank_main) == expected


def live_on(comm, wanted, moments):
    """Shrinks until `wanted` ranks are left. moments: seconds after which this rank kills itself, counted
    from its first shrink; None: never.
    """
    first = True
    while True:
        try:
            comm.barrier()
            if comm.world_size == wanted:
                return comm
        except pycomm.PeerError:
            if first and moments is not None:
                kill_self_after(moments)
            first = False
            comm = comm.shrink(timeout=LIMIT)


def random_deaths(seed):
    """At random moments around the shrink, which takes some tens of milliseconds."""
    chance = random.Random(seed)
    world_size = chance.randint(3, 6)
    hosts = [chance.randrange(3) for _ in range(world_size)]
    hosts = pycomm.groups.numbered([*hosts[:-1], 3])  # two at least
    lost = chance.sample(range(world_size), chance.randint(1, world_size - 1))
    first, later = lost[0], {rank: chance.uniform(0, 0.15) for rank in lost[1:]}

    together = meeting(world_size)

    def rank_main(comm):
        comm.barrier()
        together.wait()
        if comm.rank == first:
            kill_self()
        new = live_on(comm, world_size - len(lost), later.get(comm.rank))
        return new.rank, new.world_size, sum_of_ranks(new, comm.rank)

    alive = [rank for rank in range(world_size) if rank not in lost]
    expected = [(new, len(alive), [float(sum(alive))] * 5) for new in range(len(alive))]
    results = over(world_size, hosts, rank_main)
    assert results == expected, f"seed {seed}, hosts {hosts}, lost {lost}: {results}"


@tier(quick=1 / 6)
@pytest.mark.parametrize("seed", range(6))
def test_more_die_meanwhile(seed):
    random_deaths(seed)


@tier(slow=1)
@pytest.mark.timeout(1200)
def test_more_die_meanwhile_many_times(some):
    for seed in some(range(100, 250)):
        random_deaths(seed)


def test_again_and_again():
    """A group that was shrunk is shrunk, across hosts and down to one."""

    def rank_main(comm):
        number = comm.rank
        for size in range(6, 1, -1):
            comm.split(0).close()
            if comm.rank == size - 1:
                return number
            comm = comm.shrink(exclude=[size - 1], timeout=LIMIT)
            assert comm._comm.timeout == comm._timeout == 47.5, "the limit of operations is another one"
        return sum_of_ranks(comm, number), comm.name.count("/shrunk1")

    results = over(6, "010212", rank_main, fail=True, operation_timeout=47.5)
    assert results == [([0.0] * 5, 5), 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("exclude", "text"),
    [
        ([], "the group works and no rank is to be left out"),
        ([4], r"exclude names rank 4, which is not in \[0, world_size\)"),
        ([-1], "exclude names rank -1, which is not in"),
        ([2, 3, 2], "exclude names rank 2 twice"),
        ([0], "exclude names rank 0, which is this one"),
    ],
)
def test_wrong_arguments(exclude, text):
    def rank_main(comm):
        if comm.rank == 0:
            with pytest.raises(ValueError, match=rf"\[rank 0/4\] shrink: {text}"):
                comm.shrink(exclude)
        return sum_of_ranks(comm, 1)

    assert over(4, "0011", rank_main, fail=True) == [[4.0] * 5] * 4


def test_who_lives_and_does_not_come_is_named_and_may_come_later():
    def rank_main(comm, late):
        if comm.rank == 3:
            kill_self()
        until_broken(comm)
        if comm.rank == 1:
            late.wait(LIMIT)
            new = comm.shrink(timeout=LIMIT)
        else:
            words = r"rank 1 \(host0\) lives and did not come within the timeout of 0.5 s"
            with pytest.raises(pycomm.CommTimeoutError, match=words) as caught:
                comm.shrink(timeout=0.5)
            assert caught.value.peer == 1
            late.set()
            new = comm.shrink(timeout=LIMIT)
        return sum_of_ranks(new, comm.rank)

    assert over(4, "0011", rank_main, FORK.Event()) == [[3.0] * 5] * 3


def test_survivors_that_leave_out_different_ranks():
    def rank_main(comm):
        if comm.rank == 2 or comm.rank == 3:
            comm.recv(torch.empty(1), 0)
            return None
        with pytest.raises(pycomm.MismatchError, match="leaves out .*All survivors must pass equal ranks"):
            comm.shrink(exclude=[3] if comm.rank else [3, 2], timeout=LIMIT)
        for rank in (2, 3) if comm.rank == 0 else ():
            comm.send(torch.ones(1), rank)
        return sum_of_ranks(comm.shrink(exclude=[2, 3], timeout=LIMIT), comm.rank)

    assert over(4, "0101", rank_main, fail=True) == [[1.0] * 5, [1.0] * 5, None, None]


@pytest.mark.parametrize("hosts", ["001", "011"], ids=["seen by its host", "only silent"])
def test_a_stopped_rank_is_left_out_and_told_so(hosts, monkeypatch):
    """It wakes up in the middle of a group that has gone on without it. With rank 1 on host 0 its host says
    that it is stopped; the hosts of "021" have one rank each, and it is silent.
    """
    monkeypatch.setenv("PYCOMM_HOST_TIMEOUT", "2")

    def rank_main(comm, pids, resumed):
        pids[comm.rank] = os.getpid()
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            kind = until_broken(comm)
            with pytest.raises(pycomm.AbortedError, match="left out of the group that ranks 0, 2 have made"):
                comm.shrink(timeout=LIMIT)
            return kind
        with pytest.raises(pycomm.CommError):
            comm.barrier(timeout=0.5)
        new = comm.shrink(timeout=LIMIT)
        if comm.rank == 0:
            os.kill(pids[1], signal.SIGCONT)
            resumed.set()
        resumed.wait(LIMIT)
        found = [sum_of_ranks(new, comm.rank) for _ in range(200)][-1]
        comm.close()
        late.wait(LIMIT)
        return found

    late = FORK.Event()

    def body(comm, pids, resumed):
        found = rank_main(comm, pids, resumed)
        if comm.rank == 1:
            late.set()
        return found

    places = "012" if hosts == "011" else hosts
    results = over(3, places, body, FORK.Array("i", 3), FORK.Event(), fail=True)
    assert results[::2] == [[2.0] * 5] * 2 and results[1] in ("CommTimeoutError", "PeerError"), results


def test_who_is_not_heard_is_named_and_nobody_who_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit is shorter than the silence after which a rank is left out. The others are in shrink(),
    and have not begun, as rank 1 may know what was decided.
    """
    monkeypatch.setenv("PYCOMM_HOST_TIMEOUT", str(LIMIT))

    def rank_main(comm: pycomm.Communicator, pids: list[int], told: Barrier) -> tuple[str, int | None]:
        pids[comm.rank] = os.getpid()
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(pycomm.CommError):
            comm.barrier(timeout=0.5)
        time.sleep(0.1 * comm.rank)
        with pytest.raises(pycomm.CommTimeoutError) as caught:
            comm.shrink(timeout=1.5)
        told.wait(LIMIT)
        os.kill(pids[1], signal.SIGKILL)
        return str(caught.value), caught.value.peer

    results = over(3, "012", rank_main, FORK.Array("i", 3), FORK.Barrier(2))
    for text, peer in results:
        assert "rank 1 (host1) was not heard within the timeout of 1.5 s" in text and peer == 1, results


def test_who_has_closed_the_group_is_left_out():
    def rank_main(comm):
        if comm.rank == 0:
            comm.close()
            return None
        until_broken(comm)
        new = comm.shrink(timeout=LIMIT)
        with pytest.raises(pycomm.AbortedError, match="closed"):
            comm.shrink(timeout=LIMIT)
        return sum_of_ranks(new, comm.rank)

    assert over(3, "010", rank_main, fail=True) == [None, [3.0] * 5, [3.0] * 5]


@pytest.mark.parametrize("hosts", [None, "010", "012"])
def test_an_error_about_no_rank_has_no_peer(hosts):
    """On one host and over several, of a rank that was left out and of those who have closed the group."""
    together = meeting(3)

    def rank_main(comm):
        new = comm.shrink(exclude=[2], timeout=LIMIT) if comm.rank < 2 else None
        together.wait()
        with pytest.raises(pycomm.AbortedError) as caught:
            comm.shrink(exclude=[(comm.rank + 1) % 3], timeout=LIMIT)
        together.wait()  # until then the others can be asked
        if new is not None:
            new.close()
        assert ("left out" if comm.rank == 2 else "closed") in str(caught.value)
        return caught.value.rank, caught.value.world_size, caught.value.peer

    assert over(3, hosts, rank_main, fail=True) == [(rank, 3, None) for rank in range(3)]


def test_a_survivor_that_fails_by_itself():
    """All are told, and none has a new group."""

    def rank_main(comm):
        if comm.rank == 3:
            kill_self()
        until_broken(comm)
        if comm.rank == 1:
            original = pycomm._C.connect

            def connect(*arguments):
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # no descriptor for the new group
                return original(*arguments)

            pycomm._C.connect = connect
        with pytest.raises(pycomm.CommError) as caught:
            comm.shrink(timeout=LIMIT)
        return str(caught.value)

    texts = over(4, "0011", rank_main)
    assert len(texts) == 3 and all("rank 1 (host0) gave up" in text for text in texts), texts
    assert all("Too many open files" in text for text in texts), texts


def test_threads_that_play_hosts():
    def rank_main(comm):
        with pytest.raises(ValueError, match="not there for threads of one process that play 2 hosts x 2"):
            comm.shrink(exclude=[3])
        return sum_of_ranks(comm, 1)

    assert run_ranks(4, rank_main, hosts="2x2") == [[4.0] * 5] * 4


def test_a_forked_child_cannot_shrink_and_keeps_no_port():
    """The parent's death is seen although a child lives that it has forked."""

    def rank_main(comm):
        if comm.rank == 1:
            child = os.fork()
            if child == 0:
                with pytest.raises(ValueError, match="created before a fork"):
                    comm.shrink(exclude=[0])
                time.sleep(3)
                os._exit(0)
            kill_self()
        until_broken(comm)
        begun = time.monotonic()
        new = comm.shrink(timeout=LIMIT)
        assert sum_of_ranks(new, comm.rank) == [2.0] * 5
        return time.monotonic() - begun

    assert max(over(3, "010", rank_main)) < 10, "only the silence of its point was seen"


def test_what_is_left_of_a_shrink():
    """One socket, for ranks that wake up late."""

    def rank_main(comm):
        counts = []
        for number in range(12):
            part = comm.split(0)
            small = part.shrink(exclude=[2], timeout=LIMIT) if comm.rank < 2 else None
            if small is not None:
                small.barrier()
                small.close()
            part.close()
            del part, small
            comm.barrier()
            if number in (3, 11):
                gc.collect()
                time.sleep(0.5)
                counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
        return [late - early for early, late in zip(*counts, strict=True)]

    results = over(3, "010", rank_main, fail=True)
    for rank, (tasks, files) in enumerate(results):
        assert tasks <= 0 and files <= (8 if rank < 2 else 0), results
