"""Groups that lose ranks and go on (Communicator.shrink), and that take processes in (grow): every survivor
has the same new group, whoever dies, and whenever.
"""

import multiprocessing
import os
import random
import resource
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from forked import Group
from tiers import tier
from torch_ranks import meeting

import pycomm
from pycomm.testing import run_ranks

pytestmark = pytest.mark.timeout(120)
FORK = multiprocessing.get_context("fork")
LIMIT = 30.0  # seconds; never reached where the code is right


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
    with pytest.raises(pycomm.CommError) as caught:
        while True:
            comm.all_reduce(torch.ones(3))
    return type(caught.value).__name__


def survivors_of(results):
    return [result for result in results if not isinstance(result, ChildProcessError)]


@pytest.mark.parametrize(
    ("world_size", "dead"),
    [(2, [0]), (2, [1]), (3, [0, 2]), (4, [1]), (4, [0, 3]), (5, [0, 1, 2, 3]), (8, [0, 5])],
)
def test_survivors_go_on(world_size, dead):
    """The store is that of rank 0's process where it is a TCPStore; nothing asks for it."""
    together = meeting(world_size)

    def rank_main(comm):
        sum_of_ranks(comm, comm.rank)
        together.wait()
        if comm.rank in dead:
            kill_self()
        until_broken(comm)
        new = comm.shrink(timeout=LIMIT)
        half = new.split(new.rank % 2)
        return (new.rank, new.former_ranks, new.world_size, sum_of_ranks(new, comm.rank), half.world_size)

    results = run_ranks(world_size, rank_main, mode="processes", fail=False)
    alive = [rank for rank in range(world_size) if rank not in dead]
    n = len(alive)
    expected = [(new, alive, n, [float(sum(alive))] * 5, len(range(new % 2, n, 2))) for new in range(n)]
    assert survivors_of(results) == expected


def live_on(comm, number, wanted, moments):
    """Shrinks until `wanted` ranks are left. `moments`: seconds after which this rank kills itself, counted
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
    """At random moments around the shrink, which takes a few milliseconds."""
    chance = random.Random(seed)
    world_size = chance.randint(3, 6)
    lost = chance.sample(range(world_size), chance.randint(1, world_size - 1))
    first, later = lost[0], {rank: chance.uniform(0, 0.012) for rank in lost[1:]}

    together = meeting(world_size)

    def rank_main(comm):
        comm.barrier()
        together.wait()
        if comm.rank == first:
            kill_self()
        new = live_on(comm, comm.rank, world_size - len(lost), later.get(comm.rank))
        return new.rank, new.world_size, sum_of_ranks(new, comm.rank)

    results = run_ranks(world_size, rank_main, mode="processes", fail=False)
    alive = [rank for rank in range(world_size) if rank not in lost]
    expected = [(new, len(alive), [float(sum(alive))] * 5) for new in range(len(alive))]
    assert survivors_of(results) == expected, f"seed {seed}: {results}"


@pytest.mark.parametrize("seed", range(8))
def test_more_die_meanwhile(seed):
    random_deaths(seed)


@tier(slow=1)
@pytest.mark.timeout(600)
def test_more_die_meanwhile_many_times(some):
    for seed in some(range(100, 250)):
        random_deaths(seed)


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_a_group_that_works_is_made_smaller(mode):
    def rank_main(comm):
        if comm.rank == 1:
            return None
        new = comm.shrink(exclude=[1], timeout=LIMIT)
        return new.rank, new.former_ranks, sum_of_ranks(new, comm.rank)

    expected = [(0, [0, 2, 3], [5.0] * 5), None, (1, [0, 2, 3], [5.0] * 5), (2, [0, 2, 3], [5.0] * 5)]
    assert run_ranks(4, rank_main, mode=mode) == expected


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

    assert run_ranks(4, rank_main) == [[4.0] * 5] * 4


def test_who_lives_and_does_not_come_is_named_and_may_come_later():
    def rank_main(comm, late):
        if comm.rank == 3:
            kill_self()
        until_broken(comm)
        if comm.rank == 1:
            late.wait(LIMIT)
            new = comm.shrink(timeout=LIMIT)
        else:
            with pytest.raises(
                pycomm.CommTimeoutError, match=r"rank 1 lives and did not come within the timeout of 0.3 s"
            ) as caught:
                comm.shrink(timeout=0.3)
            assert caught.value.peer == 1
            late.set()
            new = comm.shrink(timeout=LIMIT)
        return sum_of_ranks(new, comm.rank)

    late = FORK.Event()
    results = run_ranks(4, rank_main, late, mode="processes", fail=False)
    assert survivors_of(results) == [[3.0] * 5] * 3, results


def test_the_same_ranks_may_be_left_out_in_any_order():
    def rank_main(comm):
        if comm.rank in (0, 3):
            return None
        return sum_of_ranks(
            comm.shrink(exclude=[0, 3] if comm.rank == 1 else [3, 0], timeout=LIMIT), comm.rank
        )

    assert run_ranks(4, rank_main) == [None, [3.0] * 5, [3.0] * 5, None]


def test_survivors_that_leave_out_different_ranks():
    def rank_main(comm):
        if comm.rank >= 2:
            return None
        with pytest.raises(pycomm.MismatchError, match="leaves out .*All survivors must pass equal ranks"):
            comm.shrink(exclude=[3] if comm.rank else [3, 2], timeout=LIMIT)
        return sum_of_ranks(comm.shrink(exclude=[2, 3], timeout=LIMIT), comm.rank)

    assert run_ranks(4, rank_main) == [[1.0] * 5, [1.0] * 5, None, None]


def test_a_stopped_rank_is_left_out_and_told_so():
    """It wakes up in the middle of a group that has gone on without it."""

    def rank_main(comm, pids, resumed):
        pids[comm.rank] = os.getpid()
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            kind = until_broken(comm)
            with pytest.raises(pycomm.AbortedError, match="left out of the group that ranks 0, 2 have made"):
                comm.shrink(timeout=LIMIT)
            return kind
        with pytest.raises(pycomm.CommTimeoutError, match="rank 1"):
            comm.barrier(timeout=0.5)
        new = comm.shrink(timeout=LIMIT)
        if comm.rank == 0:
            os.kill(pids[1], signal.SIGCONT)
            resumed.set()
        resumed.wait(LIMIT)
        return [sum_of_ranks(new, comm.rank) for _ in range(200)][-1]

    pids, resumed = FORK.Array("i", 3), FORK.Event()
    results = run_ranks(3, rank_main, pids, resumed, mode="processes")
    assert results == [[2.0] * 5, "CommTimeoutError", [2.0] * 5]


def stop_for_moments(group, rank):
    """The seconds of the longest one."""
    longest = 0.0
    for _ in range(3):
        begin = time.monotonic()
        group.kill(rank, signal.SIGSTOP)
        time.sleep(0.03)
        group.kill(rank, signal.SIGCONT)
        longest = max(longest, time.monotonic() - begin)
        time.sleep(0.25)
    return longest


@pytest.mark.parametrize("hosts", [None, "2+1"])
def test_who_is_stopped_for_moments_is_not_left_out(hosts):
    """By a debugger that looks in. Who is stopped for 0.2 s is lost: then it is tried again."""

    def body(comm, link):
        if comm.rank == 2:
            return comm.rank
        if comm.rank == 1:
            link.recv()
        return comm.shrink(exclude=[2], timeout=LIMIT).former_ranks

    for _ in range(10):
        with Group(3, body, hosts=hosts) as group:
            group.asleep(0)
            longest = stop_for_moments(group, 1)
            group.send(1)
            found = [group.get(rank) for rank in (0, 1)]
        if longest < 0.1:
            break
    assert longest < 0.1 and found == [[0, 1]] * 2, (longest, found)


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

    assert run_ranks(3, rank_main) == [None, [3.0] * 5, [3.0] * 5]


def test_again_and_again():
    """The pages of a group hold what several shrinks and splits leave."""

    def rank_main(comm):
        number = comm.rank
        for size in range(6, 1, -1):
            for _ in range(3):
                comm.split(0).close()
            if comm.rank == size - 1:
                return number
            comm = comm.shrink(exclude=[size - 1], timeout=LIMIT)
        return sum_of_ranks(comm, number), comm.name.count("/shrunk1")

    assert run_ranks(6, rank_main) == [([0.0] * 5, 5), 1, 2, 3, 4, 5]


def test_a_survivor_that_fails_by_itself():
    """All are told, and none has a new group."""

    def rank_main(comm):
        if comm.rank == 3:
            kill_self()
        until_broken(comm)
        if comm.rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # no descriptor for the new group
        with pytest.raises(pycomm.CommError) as caught:
            comm.shrink(timeout=LIMIT)
        return str(caught.value)

    texts = survivors_of(run_ranks(4, rank_main, mode="processes", fail=False))
    assert len(texts) == 3 and all("Too many open files" in text for text in texts), texts
    assert all("rank 1" in text for text in texts), texts


# --- grow


def shared_store(comm):
    """A TCPStore in the process of rank 0."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    port = comm.broadcast(torch.tensor([store.port if store else 0]))
    return store or dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)


def test_a_group_takes_processes_in():
    def rank_main(comm):
        store = shared_store(comm)
        part = comm.split(0 if comm.rank < 2 else None)
        if part is None:
            new = pycomm.Communicator.replacement(store, timeout=LIMIT)
        else:
            new = part.grow(store, at_least=2, timeout=LIMIT)
        got = new.rank, new.world_size, sum_of_ranks(new, new.rank)
        comm.barrier()
        return got

    results = run_ranks(4, rank_main, mode="processes")
    assert [result[1:] for result in results] == [(4, [6.0] * 5)] * 4
    assert [result[0] for result in results[:2]] == [0, 1]
    assert sorted(result[0] for result in results[2:]) == [2, 3]


def test_one_dies_and_one_replaces_it():
    """What a run of several processes does without a restart of those that live."""
    together = meeting(4)

    def rank_main(comm):
        store = shared_store(comm)
        part = comm.split(0 if comm.rank < 3 else None)
        together.wait()
        if part is None:
            new = pycomm.Communicator.replacement(store, timeout=LIMIT)
        else:
            if part.rank == 2:
                kill_self()
            until_broken(part)
            new = part.shrink(timeout=LIMIT).grow(store, timeout=LIMIT)
        total = sum_of_ranks(new, comm.rank)
        new.barrier()
        return new.rank, new.world_size, total

    results = run_ranks(4, rank_main, mode="processes", fail=False)
    assert survivors_of(results) == [(0, 3, [4.0] * 5), (1, 3, [4.0] * 5), (2, 3, [4.0] * 5)]


def test_nobody_waits():
    def rank_main(comm):
        store = shared_store(comm)
        if comm.rank == 1:  # one that asks and dies does not count
            store.add("pycomm/grow/tickets", 1)
        comm.barrier()
        with pytest.raises(pycomm.CommTimeoutError, match=r"grow: 0 of 1 wait within the timeout of 0.3 s"):
            comm.grow(store, timeout=0.3)
        with pytest.raises(ValueError, match="at_least=0"):
            comm.grow(store, at_least=0)
        total = sum_of_ranks(comm, 1)
        comm.barrier()
        return total

    assert run_ranks(2, rank_main, mode="processes") == [[2.0] * 5] * 2


def test_growing_waits_longer_than_an_operation() -> None:
    """Rank 0 looks for others until its limit; the other ranks wait for it, and blame nobody."""
    store = dist.HashStore()

    def rank_main(comm: pycomm.Communicator) -> list[float]:
        with pytest.raises(pycomm.CommTimeoutError, match="grow: 0 of 1 wait within the timeout of 1.5 s"):
            comm.grow(store, timeout=1.5)
        return sum_of_ranks(comm, 1.0)

    assert run_ranks(2, rank_main, operation_timeout=0.5) == [[2.0] * 5] * 2


def test_a_death_ends_the_wait_for_others() -> None:
    def rank_main(comm: pycomm.Communicator) -> tuple[float, int | None]:
        store = dist.HashStore()
        if comm.rank == 2:
            kill_self_after(0.3)
        begun = time.monotonic()
        with pytest.raises(pycomm.PeerError, match="rank 2 died") as caught:
            comm.grow(store, timeout=LIMIT)
        return time.monotonic() - begun, caught.value.peer

    for took, peer in survivors_of(run_ranks(3, rank_main, mode="processes", fail=False)):
        assert took < LIMIT / 3 and peer == 2, (took, peer)


def test_no_group_grows():
    store = dist.HashStore()
    with pytest.raises(pycomm.CommTimeoutError, match="no group has grown within the timeout of 0.1 s"):
        pycomm.Communicator.replacement(store, timeout=0.1)


def test_a_store_that_fails_is_told_to_all():
    class Broken:
        def add(self, key, amount):
            raise RuntimeError("the store is gone")

    def rank_main(comm):
        with pytest.raises((RuntimeError, pycomm.CommTimeoutError), match="the store is gone"):
            comm.grow(Broken(), timeout=LIMIT)
        return sum_of_ranks(comm, 1)

    assert run_ranks(2, rank_main) == [[2.0] * 5] * 2
