"""Asynchronous operations: issued in bulk, waited for in any order, polled, behind one another, on many
groups and threads at once.
"""

import random
import threading
import time

import pytest
import torch

from pycomm.testing import run_ranks

KINDS = [
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "barrier",
]
RUNS = [
    ("threads", 1, {}),
    ("threads", 2, {}),
    ("threads", 4, {}),
    ("processes", 2, {}),
    ("processes", 3, {"staging_bytes": 1 << 18}),
]
runs = pytest.mark.parametrize(
    ("mode", "n", "options"), RUNS, ids=lambda value: value if isinstance(value, str) else None
)


def issue(comm, kind, count, key):
    """Issues one operation on whole numbers made from `key`: returns its work and a function that is true
    when the result is right.
    """
    n, r, total = comm.world_size, comm.rank, comm.world_size * (comm.world_size - 1) // 2
    ramp = torch.arange(count, dtype=torch.float32) % 89 + key
    grid = torch.stack(
        [ramp + 100 * p for p in range(n)]
    )  # row p: what rank p contributes, or what is for rank p
    mine = grid[r].clone()

    def result_is(expected):
        return lambda result: torch.equal(result, expected)

    if kind == "all_reduce":
        return comm.all_reduce(mine, async_op=True), result_is(ramp * n + 100 * total)
    if kind == "broadcast":
        return comm.broadcast(mine, key % n, async_op=True), result_is(grid[key % n])
    if kind == "all_gather":
        return comm.all_gather(mine, async_op=True), result_is(grid)
    if kind == "reduce_scatter":
        return comm.reduce_scatter(grid + r, async_op=True), result_is(grid[r : r + 1] * n + total)
    if kind == "all_to_all":
        return comm.all_to_all(grid + r, async_op=True), result_is(
            torch.stack([grid[r] + p for p in range(n)])
        )
    if kind == "reduce":
        right = result_is(ramp * n + 100 * total)
        return comm.reduce(
            mine, key % n, async_op=True
        ), right if r == key % n else lambda result: result is None
    if kind == "gather":
        return comm.gather(mine, root=key % n, async_op=True), result_is(
            grid
        ) if r == key % n else lambda result: result is None
    if kind == "scatter":
        return comm.scatter(grid, torch.empty(count), key % n, async_op=True), result_is(grid[r])
    return comm.barrier(async_op=True), lambda result: result is None


def bulk(comm, seed, length):
    """Issues `length` operations, some of them synchronous, then waits for the rest in an order of this
    rank's own.
    """
    plan, own = random.Random(seed), random.Random(seed * 100 + comm.rank)
    pending, wrong = [], []
    for key in range(length):
        kind, count = plan.choice(KINDS), plan.choice([0, 1, 9, 11, 300, 2049, 9001, 60013])
        pending.append((f"#{key} {kind}({count})", *issue(comm, kind, count, key)))
        while pending and plan.random() < 0.2:  # equal draws, unequal picks
            finish(pending.pop(own.randrange(len(pending))), wrong)
        if plan.random() < 0.1 and not torch.equal(
            comm.all_reduce(torch.full((5,), 1.0)), torch.full((5,), float(comm.world_size))
        ):
            wrong.append(f"#{key}: the synchronous all_reduce behind {len(pending)} others")
    own.shuffle(pending)
    for entry in pending:
        finish(entry, wrong)
    return [f"rank {comm.rank}, seed {seed}: {text}" for text in wrong]


def finish(entry, wrong):
    what, work, right = entry
    result = work.wait()
    if not work.done() or not right(result) or work.wait() is not result:
        wrong.append(what)


@runs
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_bulk_in_any_order(mode, n, options, seed):
    assert sum(run_ranks(n, bulk, seed, 120, mode=mode, timeout=40, **options), []) == []


def polled(comm):
    """done() alone completes operations, and never blocks."""
    for kind in KINDS:
        for count in (3, 50021):
            comm.barrier()
            if comm.rank == 1:
                time.sleep(0.02)
            work, right = issue(comm, kind, count, 5)
            deadline, slowest = time.monotonic() + 20, 0.0
            while True:
                start = time.monotonic()
                done = work.done()
                slowest = max(slowest, time.monotonic() - start)
                if done:
                    break
                assert time.monotonic() < deadline, f"{kind}({count}) is never done"
                time.sleep(0)
            assert slowest < 5, f"done() of {kind}({count}) blocked for {slowest} s"
            assert right(work.wait()), f"{kind}({count})"
    return True


@runs
def test_polling_completes(mode, n, options):
    assert run_ranks(n, polled, mode=mode, timeout=40, **options) == [True] * n


def early(comm):
    """While rank 1 is away nothing that needs it is done, neither small nor large, and the sync call behind
    them waits in turn.
    """
    if comm.rank == 1:
        comm.recv(torch.empty(1), 0)
    works = [issue(comm, "all_reduce", count, key) for key, count in enumerate([3, 100003, 7])]
    if comm.rank == 0:
        time.sleep(0.1)
        assert not any(work.done() for work, _ in works)
        comm.send(torch.zeros(1), 1)
    last = comm.all_gather(torch.tensor([comm.rank]))
    assert all(work.done() for work, _ in works), (
        "a later synchronous operation returned before the earlier ones were done"
    )
    return last.flatten().tolist(), all(right(work.wait()) for work, right in works)


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_not_done_before_the_peers_have_come(mode):
    assert run_ranks(2, early, mode=mode, timeout=20) == [([0, 1], True)] * 2


def overlapping(comm):
    """A large operation completes while the caller computes and never looks."""
    x = torch.ones(500009)
    work = comm.all_reduce(x, async_op=True)
    deadline = time.monotonic() + 20
    while x[-1] != comm.world_size or x[0] != comm.world_size:
        torch.ones(64, 64) @ torch.ones(64, 64)
        assert time.monotonic() < deadline, "no progress without wait() or done()"
    work.wait()
    return bool((x == comm.world_size).all())


@pytest.mark.parametrize(("mode", "n"), [("threads", 2), ("processes", 3)])
def test_progress_while_the_caller_computes(mode, n):
    assert run_ranks(n, overlapping, mode=mode, timeout=30) == [True] * n


def many_groups(comm, count):
    """`count` groups of all ranks, with operations of all of them under way at once; issued in another order
    on every rank.
    """
    groups = [comm.split(0, key=-comm.rank if i % 2 else comm.rank) for i in range(count)]
    assert [group.rank for group in groups[:2]] == [comm.rank, comm.world_size - 1 - comm.rank]
    order = random.Random(comm.rank)
    pending, wrong = [], []
    for round_ in range(3):
        for i in order.sample(range(count), count):
            size = [3, 3001, 40009][(i + round_) % 3]
            pending.append(
                (f"group {i}", *issue(groups[i], KINDS[(i + round_) % len(KINDS)], size, 10 * i + round_))
            )
    order.shuffle(pending)
    for entry in pending:
        finish(entry, wrong)
    for group in groups:
        group.close()
    return wrong


@pytest.mark.parametrize(("mode", "n"), [("threads", 2), ("threads", 3), ("processes", 2)])
def test_many_groups_at_once(mode, n):
    assert run_ranks(n, many_groups, 18, mode=mode, timeout=40) == [[]] * n


def threaded(comm):
    """Each thread of a rank has a group of its own; they run at once."""
    groups, wrong = [comm.split(0) for _ in range(4)], []

    def body(index):
        try:
            wrong.extend(f"thread {index}: {text}" for text in bulk(groups[index], index, 30))
        except Exception as error:
            wrong.append(f"thread {index}: {error!r}")

    threads = [threading.Thread(target=body, args=(i,)) for i in range(len(groups))]
    for thread in threads:
        thread.start()
    own = bulk(comm, 99, 10)
    for thread in threads:
        thread.join(30)
    for group in groups:
        group.close()
    return wrong + own


@pytest.mark.parametrize(("mode", "n"), [("threads", 2), ("processes", 2), ("processes", 3)])
def test_threads_with_groups_of_their_own(mode, n):
    assert run_ranks(n, threaded, mode=mode, timeout=45) == [[]] * n


def shared(comm):
    """Several threads wait for works of one group that the main thread has issued."""
    works = [issue(comm, KINDS[key % len(KINDS)], [5, 5003, 50021][key % 3], key) for key in range(24)]
    wrong = []

    def body(first):
        for key in range(first, len(works), 3):
            finish((f"#{key}", *works[key]), wrong)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return wrong


@pytest.mark.parametrize(("mode", "n"), [("threads", 2), ("processes", 3)])
def test_threads_wait_for_works_of_one_group(mode, n):
    assert run_ranks(n, shared, mode=mode, timeout=40) == [[]] * n


def overlapping_groups(comm):
    """Rows and columns of a grid, and a window that slides over the ranks: every rank is in several groups,
    none is in all.
    """
    n, r, sums = comm.world_size, comm.rank, []
    row, column = comm.split(r // 2), comm.split(r % 2, key=-r)
    windows = [comm.split(0 if first <= r < first + 2 else None) for first in range(n - 1)]
    assert [window is not None for window in windows] == [first <= r < first + 2 for first in range(n - 1)]
    pending = []
    for repeat in range(5):
        for group in [row, column, *filter(None, windows)]:
            x = torch.full((1 + 5000 * repeat,), float(r))
            pending.append((group.all_reduce(x, async_op=True), x))
    for work, _ in reversed(pending):
        work.wait()
    for _, x in pending[-(len(pending) // 5) :]:
        assert (x == x[0]).all()
        sums.append(int(x[0]))
    order = column.all_gather(torch.tensor([r])).flatten().tolist()
    groups = [row, column, *filter(None, windows)]
    names = {group.name for group in groups}
    assert len(names) == len(groups)
    for group in groups:
        group.close()
    return sums, order


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_overlapping_sub_groups(mode):
    got = run_ranks(4, overlapping_groups, mode=mode, timeout=40)
    for r, (sums, order) in enumerate(got):
        windows = [2 * first + 1 for first in range(3) if first <= r < first + 2]
        assert sums == [1 if r < 2 else 5, 2 if r % 2 == 0 else 4, *windows], f"rank {r}"
        assert order == ([2, 0] if r % 2 == 0 else [3, 1]), f"rank {r}"


def test_split_checks_its_color():
    def body(comm):
        with pytest.raises(ValueError, match="color=-1"):
            comm.split(-1)
        sub = comm.split(None)
        return sub, comm.all_reduce(torch.ones(1)).item()

    assert run_ranks(2, body) == [(None, 2.0)] * 2


def waits_shortly(comm, waited):
    """A limit of time for wait() alone."""
    from pycomm import CommTimeoutError

    work, right = issue(comm, "all_reduce", 70001, 1) if comm.rank == 0 else (None, None)
    if comm.rank == 0:
        start = time.monotonic()
        with pytest.raises(CommTimeoutError, match="0.2"):
            work.wait(timeout=0.2)
        waited.set()
        return time.monotonic() - start < 5
    return waited.wait(20)


def test_wait_with_a_limit():
    assert run_ranks(2, waits_shortly, threading.Event(), timeout=20) == [True, True]
