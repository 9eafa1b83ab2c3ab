"""send and recv of a group that spans hosts: all that tests/test_point_to_point.py asks of one host, with
other hosts in between, and what only hosts have: recvs from any source over both, the end of a link, memory
of one's own host.

Thresholds, csrc/hosts/link.h: up to 960 bytes travel with their header, what is larger is asked for.
"""

import importlib
import itertools
import os
import random
import signal
import threading
import time

import pytest
import test_message_progress as progress
import test_point_to_point as one_host
import torch
import torch.distributed as dist
from test_point_to_point import message_is, pattern
from torch_ranks import data, equal, spawn

from pycomm import AbortedError, CommTimeoutError, MismatchError, PeerError, _C
from pycomm.testing import run_ranks

runner = importlib.import_module("pycomm.testing.run")

# name -> (the host of each of n ranks, microseconds that messages may be late, mode)
PLACES = {
    "apart": (lambda n: range(n), 0, "threads"),
    "two hosts": (lambda n: [2 * r // n for r in range(n)], 0, "threads"),
    "late": (lambda n: [r % 2 for r in range(n)], 1500, "threads"),
    "gloo": (lambda n: [r % 2 for r in range(n)], 0, "processes"),
}
THREADS = [name for name, (_, _, mode) in PLACES.items() if mode == "threads"]


def over_hosts(place, monkeypatch):
    """run_ranks with the ranks on several hosts."""
    hosts, delay_us, mode = PLACES[place]
    store = _C.LocalStore
    monkeypatch.setattr(_C, "LocalStore", lambda: store(delay_us))

    def run(n, body, *args, **options):
        return run_ranks(n, body, *args, **{**options, "hosts": list(hosts(n)), "mode": mode})

    return run


@pytest.fixture(params=PLACES)
def run(request, monkeypatch):
    return over_hosts(request.param, monkeypatch)


@pytest.fixture(params=THREADS)
def run_threads(request, monkeypatch):
    return over_hosts(request.param, monkeypatch)


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


@pytest.mark.parametrize("test", ON_ONE_HOST, ids=lambda test: test.__name__.removeprefix("test_"))
def test_as_on_one_host(test, run, monkeypatch):
    monkeypatch.setattr(one_host, "run_ranks", run)
    test({"timeout": 60})


@pytest.mark.parametrize("test", [one_host.test_wrong_peers, one_host.test_conjugated_views_are_not_sent_as_raw_memory])
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


# --- what goes wrong --------------------

SIZES = (4, 70001)


def raises(kind, call, *words):
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    for word in words:
        assert word in text, text
    return True


def test_mismatches_name_rank_and_host(run):
    def body(comm):
        r = comm.rank
        calls = {0: lambda: comm.send(torch.zeros(70001), 2, tag=3), 2: lambda: comm.recv(torch.zeros(5), None, 3)}
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
        if comm.rank == 0:
            limit = {"timeout": 0.3}
            call = (lambda: comm.send(x, 2, **limit)) if sends else (lambda: comm.recv(x, 2, **limit))
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
    run_threads(4, body, timeout=30, operation_timeout=0.3 if not polls else 20.0)


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
        if comm.rank == 1 and how != "peer aborts":
            comm.barrier()
            return [raises((PeerError, AbortedError), work.wait) for work in works]
        comm.barrier()
        if how == "close":
            comm.close()
        if how == "abort" or comm.rank == 1:
            comm.abort("enough")
        return [raises(AbortedError, work.wait) for work in works]

    assert run(2, body, timeout=30) == [[True] * 3] * 2


@pytest.mark.parametrize("size", SIZES)
def test_the_death_of_a_rank_ends_messages(size):
    def body(comm):
        x = torch.zeros(size)
        if comm.rank == 3:
            comm.send(x, 0, tag=7)
            comm.barrier()
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank == 0:
            comm.recv(x, 3, tag=7)
        comm.barrier()
        works = [comm.recv(x, 3, async_op=True)] if comm.rank != 1 else [comm.recv(x, None, async_op=True)]
        return [raises(PeerError, work.wait, "rank 3 (host1)") for work in works]

    options = {"hosts": "0011", "mode": "processes", "timeout": 40, "fail": False}
    results = run_ranks(4, body, **options)
    assert results[:3] == [[True]] * 3 and isinstance(results[3], ChildProcessError)


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
        got = [(dist.recv(x := torch.empty(1, dtype=torch.int64), None, tag=50), int(x)) for _ in range(n - 1)]
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


@pytest.mark.parametrize("body", [torch_calls, futures])
def test_torch(body, monkeypatch):
    import torch_ranks

    monkeypatch.setattr(
        torch_ranks, "run_ranks", lambda *args, **options: run_ranks(*args, hosts="001", **options)
    )
    assert spawn(3, body) == [True] * 3


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
def test_random_messages(hosts, seed, monkeypatch):
    run = over_hosts("late", monkeypatch)
    del run  # for the delay it has set
    n = len(hosts)
    assert run_ranks(n, random_messages, seed, hosts=hosts, timeout=60) == [[]] * n


def test_random_messages_over_gloo():
    for seed in itertools.islice(itertools.count(10), 2):
        assert run_ranks(4, random_messages, seed, hosts="0110", mode="processes", timeout=60) == [[]] * 4
