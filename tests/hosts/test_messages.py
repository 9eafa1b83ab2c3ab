"""send and recv of a group that spans hosts: all that tests/test_point_to_point.py asks of one host, with
other hosts in between, and what only hosts have: recvs from any source over both, the end of a link, memory
of one's own host.

Thresholds, csrc/hosts/link.h: up to 960 bytes travel with their header, what is larger is asked for.
"""

import itertools
import random
import threading
import time

import pytest
import test_callbacks
import test_message_progress as progress
import test_point_to_point as one_host
import test_torch_messages
import test_torch_sparse
import torch
import torch.distributed as dist
import torch_ranks
from places import over_hosts, raises
from test_point_to_point import message_is, pattern
from tiers import tier
from torch_ranks import data, equal, spawn

from pycomm import MismatchError
from pycomm.testing import run_ranks

ON_ONE_HOST = [
    one_host.test_sizes_around_thresholds,
    one_host.test_large_messages_both_ways_at_once,
    one_host.test_tags_out_of_order,
    one_host.test_any_source,
    one_host.test_many_outstanding,
    one_host.test_messages_progress_while_a_collective_waits,
    one_host.test_random_traffic,
    one_host.test_placements_and_dtypes,
    one_host.test_mismatched_messages_raise_on_both_sides_and_traffic_goes_on,
    one_host.test_registered_buffers,
]


@tier(quick=1 / 2)
@pytest.mark.parametrize("test", ON_ONE_HOST, ids=lambda test: test.__name__.removeprefix("test_"))
def test_as_on_one_host(test, run, monkeypatch):
    monkeypatch.setattr(one_host, "run_ranks", run)
    monkeypatch.setattr(one_host, "MOST_AT_ONCE", -1)
    test({"timeout": 60})


@pytest.mark.parametrize(
    "test", [one_host.test_wrong_peers, one_host.test_conjugated_views_are_not_sent_as_raw_memory]
)
def test_what_is_wrong_on_one_rank_alone(test, run_threads, monkeypatch):
    monkeypatch.setattr(one_host, "run_ranks", run_threads)
    test()


@pytest.mark.parametrize("count", [1, 70001])
def test_the_memory_of_an_unsent_message_is_given_back(count, run_threads):
    run_threads(2, one_host.leaves_with_a_message_unsent, count, threading.Event(), timeout=20)


@pytest.mark.parametrize("size", [40, 700001])
def test_a_recv_goes_on_while_its_rank_waits_in_another_group(size, run):
    assert run(2, progress.across_groups, size, timeout=30) == [True, True]


def test_a_finished_receiver_may_leave_at_once(run):
    def body(comm):
        if comm.rank == 0:
            works = [comm.send(torch.full((count,), k), 1, async_op=True) for k, count in enumerate(counts)]
            return [work.wait() is None for work in works]
        xs = [torch.empty(count, dtype=torch.int64) for count in counts]
        for x in xs:
            comm.recv(x, 0)
        return [int(x[-1]) for x in xs]

    counts = [2, 5000] * 8
    for _ in range(5):
        assert run(2, body, timeout=30)[1] == list(range(16))


# --- any source, over both kinds of peers --------------------


def race_to_rank_0(comm, rounds):
    """Every other rank sends to rank 0, which receives from any: each message arrives once, those of a rank
    in order."""
    n, r = comm.world_size, comm.rank
    if r:
        works = []
        for k in range(rounds):
            x = torch.full((1 if k % 3 else 3000,), 1000 * r + k)
            works.append(comm.send(x, 0, tag=k % 3, async_op=True))
        for work in works:
            work.wait()
        return None
    wrong = []
    for tag in range(3):
        size = 1 if tag else 3000
        expected = {p: list(range(tag, rounds, 3)) for p in range(1, n)}
        number = sum(map(len, expected.values()))
        xs = [torch.empty(size, dtype=torch.int64) for _ in range(number)]
        works = [comm.recv(x, None, tag, async_op=True) for x in xs]
        for x, work in zip(xs, works, strict=True):
            work.wait()
            if [int(x[0]), int(x[-1])] != [1000 * work.source() + expected[work.source()].pop(0)] * 2:
                wrong.append((tag, work.source(), int(x[0])))
    return wrong


def test_any_source_over_both_kinds_of_peers(run):
    for n in (3, 5):
        assert run(n, race_to_rank_0, 30, timeout=60)[0] == []


def mixed_order(comm):
    """Recvs from one and, behind them, from any source, all posted before anything is sent: a rank's first
    messages go to those for it, and all arrive in order."""
    r, n = comm.rank, comm.world_size
    if r:
        comm.barrier()
        for k in range(4):
            comm.send(torch.tensor([r, k]), 0, tag=5)
        return None
    xs, works = [], []
    for k in range(4):
        for p in range(1, n):
            x = torch.empty(2, dtype=torch.int64)
            xs.append(x)
            works.append(comm.recv(x, p if k < 2 else None, tag=5, async_op=True))
    comm.barrier()
    for work in works:
        work.wait()
    seen = {p: [] for p in range(1, n)}
    for x, work in zip(xs, works, strict=True):
        assert work.source() == int(x[0])
        seen[work.source()].append(int(x[1]))
    return seen


def test_recvs_from_any_and_from_one_together(run):
    got = run(4, mixed_order, timeout=40)[0]
    assert got == {p: [0, 1, 2, 3] for p in (1, 2, 3)}


def test_two_threads_of_a_rank(run_threads):
    def body(comm):
        other, wrong = comm.rank ^ 2, []

        def talk(tag):
            for k in range(40):
                size = (1, 960, 961, 20011)[k % 4]
                work = comm.send(pattern(size, 100 * tag + k), other, tag, async_op=True)
                x = torch.empty(size, dtype=torch.uint8)
                comm.recv(x, None if tag else other, tag)
                work.wait()
                if not message_is(x, 100 * tag + k):
                    wrong.append((tag, k))

        threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        return wrong, any(thread.is_alive() for thread in threads)

    assert run_threads(4, body, timeout=60) == [([], False)] * 4


# --- memory of one's own host --------------------


def test_registered_memory(run):
    def body(comm):
        x = comm.empty((5, 1000))
        assert x.shape == (5, 1000) and not x.any()
        x.fill_(comm.rank + 1)
        total = comm.world_size * (comm.world_size + 1) / 2
        comm.all_reduce(x)
        assert torch.equal(x, torch.full((5, 1000), total))
        raises(ValueError, lambda: comm._comm.peer_addresses(x), "is on another host")
        sizes = 3 if comm.rank == 1 else 4
        raises(MismatchError, lambda: comm.empty(sizes), "nbytes=", "All ranks must allocate equal sizes")
        return int(comm.all_reduce(torch.ones(1)))

    assert run(3, body, timeout=40) == [3] * 3


# --- through torch.distributed --------------------


def torch_calls(r, n):
    works = []
    for p in range(n):
        if p != r:
            works.append(dist.isend(data(r, 3001), p, tag=r))
    for p in range(n):
        if p != r:
            dist.recv(x := torch.empty(3001), p, tag=p)
            equal(x, data(p, 3001))
    for work in works:
        work.wait()
    if r:
        dist.send(torch.tensor([r]), 0, tag=50)
    else:
        got = [
            (dist.recv(x := torch.empty(1, dtype=torch.int64), None, tag=50), int(x)) for _ in range(n - 1)
        ]
        assert sorted(got) == [(p, p) for p in range(1, n)]
    batch = [
        dist.P2POp(dist.isend, data(r, 40000), (r + 1) % n),
        dist.P2POp(dist.irecv, y := torch.empty(40000), (r - 1) % n),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    equal(y, data((r - 1) % n, 40000))
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": r, "long": "x" * (3000 * r)})
    assert objects == [{"rank": p, "long": "x" * (3000 * p)} for p in range(n)]
    shared = [("from", 1), None] if r == 1 else [None, None]
    dist.broadcast_object_list(shared, 1)
    assert shared == [("from", 1), None]
    gathered = [None] * n if r == 2 else None
    dist.gather_object(r * 10, gathered, 2)
    assert r != 2 or gathered == [10 * p for p in range(n)]
    x = torch.sparse_coo_tensor([[r, 7]], torch.tensor([1.0, r]), (10,))
    dist.all_reduce(x)
    expected = torch.zeros(10)
    for p in range(n):
        expected[p] += 1
        expected[7] += p
    equal(x.to_dense(), expected)
    if r == 0:
        dist.send_object_list([{"a": 1}], n - 1)
    if r == n - 1:
        got = [None]
        dist.recv_object_list(got, 0)
        assert got == [{"a": 1}]
    return True


def futures(r, n):
    """Completed by the group where nobody waits, in order with a callback that sends on."""
    if r == 0:
        dist.send(data(0, 70001), n - 1)
        return dist.recv(torch.empty(1), n - 1, tag=2) == n - 1
    if r == n - 1:
        x = torch.empty(70001)
        work = dist.irecv(x, 0)
        answer = work.get_future().then(lambda f: dist.send(f.value()[0][:1].clone(), 0, tag=2))
        answer.wait()
        equal(x, data(0, 70001))
    return True


@pytest.fixture
def torch_over_hosts(monkeypatch):
    def run(n, *args, **options):
        return run_ranks(n, *args, hosts=[r % 2 for r in range(n)], **options)

    monkeypatch.setattr(torch_ranks, "run_ranks", run)


@pytest.mark.usefixtures("torch_over_hosts")
@pytest.mark.parametrize("body", [torch_calls, futures])
def test_torch(body):
    assert spawn(3, body) == [True] * 3


TORCH_ON_ONE_HOST = [
    test_callbacks.test_callback_in_a_wait,
    test_torch_messages.test_torch_messages_of_two_groups,
    test_torch_messages.test_torch_message_that_never_comes,
    test_torch_sparse.test_sums,
]


@tier(quick=1 / 4)
@pytest.mark.usefixtures("torch_over_hosts")
@pytest.mark.parametrize("test", TORCH_ON_ONE_HOST, ids=lambda test: test.__name__.removeprefix("test_"))
def test_torch_as_on_one_host(test):
    test()


# --- random programs against an oracle --------------------


def random_messages(comm, seed):
    """All ranks draw the same list of messages, post their part of it in an order of their own, with waits,
    polls and collectives in between. The oracle: what is received is what its sender drew."""
    plan, own, n, r = random.Random(seed), random.Random(f"{seed} {comm.rank}"), comm.world_size, comm.rank
    wrong = []
    for _ in range(plan.randrange(2, 5)):
        drawn = []
        for key in range(plan.randrange(1, 60)):
            src, dst = plan.sample(range(n), 2)
            size = plan.choice([0, 1, 959, 960, 961, 4096, 20011, 300007])
            drawn.append((key, src, dst, size, plan.random() < 0.3))
        mine = [each for each in drawn if r in each[1:3]]
        own.shuffle(mine)
        works = []
        for key, src, dst, size, from_any in mine:
            if r == src:
                works.append((comm.send(pattern(size, key), dst, key, async_op=True), None, key, dst))
            else:
                x = torch.empty(size, dtype=torch.uint8)
                works.append((comm.recv(x, None if from_any else src, key, async_op=True), x, key, src))
        if plan.random() < 0.5:
            total = comm.all_reduce(torch.full((plan.choice([1, 50000]),), float(r)))
            wrong += [] if total[-1] == n * (n - 1) / 2 else ["all_reduce"]
        own.shuffle(works)
        for work, x, key, peer in works:
            until = time.monotonic() + 30
            while own.random() < 0.5 and not work.done() and time.monotonic() < until:
                time.sleep(0)
            work.wait()
            if x is not None and (work.source() != peer or not message_is(x, key)):
                wrong.append((key, work.source(), peer, x.numel()))
        comm.barrier()  # tags are used again
    return wrong


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("hosts", ["01", "0011", "00101", "0123"])
def test_random_messages(hosts, seed):
    run = over_hosts("late", list(map(int, hosts)))
    n = len(hosts)
    assert run(n, random_messages, seed, timeout=60) == [[]] * n


def test_random_messages_over_gloo():
    for seed in itertools.islice(itertools.count(10), 2):
        assert run_ranks(4, random_messages, seed, hosts="0110", mode="processes", timeout=60) == [[]] * 4
