"""send and recv: sizes around every threshold, tags in any order, any source, many under way, both ways at
once, beside collectives.

Thresholds, csrc/collectives/outgoing.cc and transport/layout.h: 960 bytes travel in a slot; what is
larger than 4 MiB (small rings: than 8 of them) is copied by the kernel; all else streams through a ring of at
most 2 MiB (small staging: 16 to 48 KiB). A channel has 8 slots.
"""

import random
import threading
import time

import eager
import numpy as np
import pytest
import torch
from tiers import tier
from torch_ranks import meeting

from pycomm import AbortedError, MismatchError, PeerError
from pycomm.testing import run_ranks

MOST_AT_ONCE = eager.MOST  # bytes; such a send completes before its recv is posted

SMALL = {"staging_bytes": 1 << 17}
# name -> (PYCOMM_CMA, options of run_ranks): pointers, streaming through a large ring, the kernel, and
# streaming through a small ring
ROUTES = {
    "threads": ("1", {"mode": "threads"}),
    "streamed": ("1", {"mode": "processes"}),
    "kernel": ("1", {"mode": "processes", **SMALL}),
    "streamed-small-ring": ("0", {"mode": "processes", **SMALL}),
}
EDGES = [
    0,
    1,
    959,
    960,
    961,
    4096,
    8191,
    8192,
    8193,
    (512 << 10) - 1,
    (512 << 10) + 1,
    1 << 20,
    (2 << 20) - 1,
    (2 << 20) + 1,
    (4 << 20) - 1,
    (4 << 20) + 1,
    5000011,
]


@pytest.fixture(params=ROUTES)
def route(request, monkeypatch):
    cma, options = ROUTES[request.param]
    monkeypatch.setenv("PYCOMM_CMA", cma)
    return {"timeout": 30, **options}


POOL = torch.randint(0, 256, (6 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def pattern(nbytes, key):
    """Read-only random bytes, others for every key, and mostly not aligned."""
    return POOL[key * 37 % (1 << 19) :][:nbytes]


def message_is(x, key):
    return torch.equal(x, pattern(x.numel(), key))


def test_sizes_around_thresholds(route):
    def body(comm):
        wrong, other = [], 1 - comm.rank
        for key, size in enumerate(EDGES):
            x = torch.full((size,), 255, dtype=torch.uint8)
            if comm.rank == 0:
                comm.send(pattern(size, key), other)
                source = comm.recv(x, other)
            else:
                source = comm.recv(x, other)
                comm.send(pattern(size, key + 1), other)
            if source != other or not message_is(x, key + 1 - comm.rank):
                wrong.append(f"rank {comm.rank}: {size} bytes from rank {source}")
        return wrong

    assert run_ranks(2, body, **route) == [[], []]


@tier(quick=1 / 4)
def test_large_messages_both_ways_at_once(route):
    """All ranks send to all and only then receive: no order of calls may block for good."""

    def body(comm):
        n, r, size = comm.world_size, comm.rank, 1500007
        peers = [p for p in range(n) if p != r]
        sends = [comm.send(pattern(size, 10 * r + p), p, async_op=True) for p in peers]
        outs = [torch.empty(size, dtype=torch.uint8) for _ in peers]
        recvs = [comm.recv(out, p, async_op=True) for out, p in zip(outs, peers, strict=True)]
        for work in sends + recvs:
            work.wait()
        return [p for out, p in zip(outs, peers, strict=True) if not message_is(out, 10 * p + r)]

    assert run_ranks(2, body, **route) == [[]] * 2
    assert run_ranks(4, body, **route) == [[]] * 4


def test_tags_out_of_order(route):
    """A ring of ranks; messages of all sizes are received in another order than they were sent in, equal tags
    in the order of sending.
    """

    def body(comm):
        n, r, wrong = comm.world_size, comm.rank, []
        dst, src = (r + 1) % n, (r - 1) % n
        sizes = [5, 961, 30011, 0, 300007, 8192]
        for repeat in range(3):
            tags = random.Random(repeat).sample(range(-3, 21), 24)
            sends = [
                comm.send(pattern(sizes[tag % 6], 50 * r + tag), dst, tag, async_op=True) for tag in tags
            ]
            sends += [comm.send(torch.tensor([r, k]), dst, 77, async_op=True) for k in range(5)]
            for k in range(5):
                x = torch.empty(2, dtype=torch.int64)
                comm.recv(x, src, 77)
                if x.tolist() != [src, k]:
                    wrong.append(f"tag 77 #{k}: {x.tolist()}")
            for tag in sorted(tags):
                x = torch.empty(sizes[tag % 6], dtype=torch.uint8)
                comm.recv(x, src, tag)
                if not message_is(x, 50 * src + tag):
                    wrong.append(f"tag {tag}, {x.numel()} bytes")
            for work in sends:
                work.wait()
        return wrong

    for n in (2, 3):
        assert run_ranks(n, body, **route) == [[]] * n


def test_any_source(route):
    def body(comm):
        n, r, each = comm.world_size, comm.rank, 12
        sizes = [3, 961, 20011]
        if r:
            messages = [
                torch.cat([torch.tensor([r, k], dtype=torch.uint8), pattern(sizes[k % 3], r + k)])
                for k in range(each)
            ]
            works = [comm.send(message, 0, tag=k % 3, async_op=True) for k, message in enumerate(messages)]
            for work in works:
                work.wait()
            return comm.recv(torch.empty(1), None, tag=9)
        counts, wrong = {p: 0 for p in range(1, n)}, []
        for k in range(each // 3 * (n - 1)):
            for tag in (2, 0, 1):
                x = torch.empty(2 + sizes[tag], dtype=torch.uint8)
                if k % 2:
                    source = comm.recv(x, tag=tag)
                else:
                    work = comm.recv(x, tag=tag, async_op=True)
                    source = (work.wait(), work.source())[1]
                counts[source] += 1
                if x[0] != source or not message_is(x[2:], source + int(x[1])):
                    wrong.append(f"tag {tag} from {source}")
        for p in range(1, n):
            comm.send(torch.zeros(1), p, tag=9)
        return counts, wrong

    for n in (2, 4):
        got = run_ranks(n, body, **route)
        assert got == [({p: 12 for p in range(1, n)}, [])] + [0] * (n - 1)


def test_many_outstanding(route):
    """More messages than slots, posted before any is received; then receives posted before any is sent."""

    def body(comm):
        r, other, number, wrong = comm.rank, 1 - comm.rank, 200, []
        size = [4, 960, 961, 9001, 33, 20011]
        for first in ("send", "recv"):
            outs = [torch.empty(size[k % 6], dtype=torch.uint8) for k in range(number)]

            def send(first=first):
                return [
                    comm.send(pattern(size[k % 6], 1000 * r + k), other, tag=k % 7, async_op=True)
                    for k in range(number)
                ]

            def recv(outs=outs):
                return [comm.recv(outs[k], other, tag=k % 7, async_op=True) for k in range(number)]

            works = send() + recv() if first == "send" else recv() + send()
            random.Random(r).shuffle(works)
            for work in works:
                work.wait()
            wrong += [
                f"rank {r}, {first} first: message {k}"
                for k in range(number)
                if not message_is(outs[k], 1000 * other + k)
            ]
        return wrong

    assert run_ranks(2, body, **route) == [[]] * 2


def test_messages_progress_while_a_collective_waits(route):
    """Rank 0 waits in an all_reduce for rank 1, which must first get its messages and needs rank 0's help to
    send large ones.
    """

    def body(comm):
        r, x = comm.rank, torch.empty(700001, dtype=torch.uint8)
        if r == 0:
            works = [comm.send(pattern(700001, 3), 1, async_op=True), comm.recv(x, 1, tag=1, async_op=True)]
            total = comm.all_reduce(torch.ones(3))
            for work in works:
                work.wait()
            return total.tolist(), message_is(x, 4)
        if r == 1:
            time.sleep(0.05)
            comm.recv(x, 0)
            comm.send(pattern(700001, 4), 0, tag=1)
        return comm.all_reduce(torch.ones(3)).tolist(), r != 1 or message_is(x, 3)

    for n in (2, 3):
        assert run_ranks(n, body, **route) == [([float(n)] * 3, True)] * n


@tier(quick=1 / 4)
def test_random_traffic(route):
    """A seeded program of messages, waits and collectives on 3 ranks, with the same plan everywhere."""

    def body(comm, seed):
        plan, own, r, wrong, pending = random.Random(seed), random.Random(seed + comm.rank), comm.rank, [], []
        for key in range(150):
            src, dst = plan.sample(range(3), 2)
            size, tag, any_source = (
                plan.choice([0, 7, 960, 961, 5000, 20011, 150001]),
                plan.randrange(10**6),
                plan.random() < 0.3,
            )
            if r == src:
                pending.append((comm.send(pattern(size, key), dst, tag, async_op=True), None, key))
            if r == dst:
                x = torch.empty(size, dtype=torch.uint8)
                pending.append((comm.recv(x, None if any_source else src, tag, async_op=True), x, key))
            if plan.random() < 0.08:
                comm.all_reduce(torch.ones(plan.choice([1, 40000])))
            if plan.random() < 0.05:
                own.shuffle(pending)
                wrong += finish(pending)
        return wrong + finish(pending)

    def finish(pending):
        wrong = []
        for work, x, key in pending:
            work.wait()
            if x is not None and not message_is(x, key):
                wrong.append(f"message {key} of {x.numel()} bytes")
        pending.clear()
        return wrong

    for seed in (1, 2, 3):
        assert run_ranks(3, body, seed, **route) == [[]] * 3, f"seed {seed}"


@tier(quick=1 / 4)
def test_a_finished_receiver_may_leave_at_once(route):
    """The last acknowledgements are on their way when the receiver closes: the sender's works still
    complete.
    """

    def body(comm):
        for k in (
            [comm.send(torch.full((2,), k), 1, async_op=True) for k in range(24)] if comm.rank == 0 else []
        ):
            k.wait()
        return (
            [int(comm.recv(x := torch.empty(2, dtype=torch.int64), 0) + x[0]) for _ in range(24)]
            if comm.rank == 1
            else None
        )

    for _ in range(60 if route["mode"] == "threads" else 15):
        assert run_ranks(2, body, **route)[1] == list(range(24))


def more_taken_than_acknowledged(comm, together):
    """Rank 0 takes 24 messages of each sender, which looks at none of the acknowledgements meanwhile: a
    channel has room for 8. Then rank 0 closes.
    """
    if comm.rank == 0:
        senders = range(1, comm.world_size)
        for p in senders:
            for _ in range(4):
                comm.recv(torch.empty(0), p, tag=99)  # those before it are put aside
        outs = torch.empty(comm.world_size, 24, dtype=torch.int64)
        for p in senders:
            for tag in reversed(range(24)):
                comm.recv(outs[p, tag], p, tag)
        together.wait()
        comm.close()  # waits for the senders, for a second at most
        return outs[1:].tolist()
    works = []
    for first in range(0, 24, 6):
        tags = range(first, first + 6)
        works += [comm.send(torch.tensor(100 * comm.rank + k), 0, tag=k, async_op=True) for k in tags]
        comm.send(torch.empty(0), 0, tag=99)
    together.wait()
    time.sleep(0.05)  # the receiver is in close(), most likely; right either way
    for work in works:
        work.wait()
    return len(works)


@pytest.mark.parametrize(("mode", "n"), [("threads", 2), ("threads", 3), ("processes", 3)])
def test_who_closes_first_sends_the_acknowledgements_that_it_owes(mode, n):
    results = run_ranks(n, more_taken_than_acknowledged, meeting(n), mode=mode, timeout=20)
    taken = [[100 * p + k for k in range(24)] for p in range(1, n)]
    assert results == [taken, *[24] * (n - 1)]


def test_placements_and_dtypes(route):
    def body(comm):
        wrong, other = [], 1 - comm.rank
        for count in (5, 3001):
            for dtype in (
                torch.float64,
                torch.bfloat16,
                torch.bool,
                torch.complex64,
                torch.float8_e5m2,
                torch.uint64,
            ):
                data = pattern(count * dtype.itemsize, count).clone()
                data = data % 2 if dtype == torch.bool else data
                strided = torch.zeros(count, 2, dtype=dtype)
                work = comm.send(data.view(dtype), other, async_op=True)
                comm.recv(strided[:, 1], other)
                work.wait()
                odd = torch.zeros(count + 1, dtype=dtype)
                work = comm.send(strided[:, 1], other, tag=1, async_op=True)
                comm.recv(odd[1:], other, tag=1)
                work.wait()
                if not torch.equal(odd[1:].clone().view(torch.uint8), data):
                    wrong.append(f"{dtype} {count}")
        array = np.arange(7.0)
        work = comm.send(array * (comm.rank + 1), other, async_op=True)
        comm.recv(array, other)
        work.wait()
        return wrong, array[-1]

    assert run_ranks(2, body, **route) == [([], 12.0), ([], 6.0)]


def test_conjugated_views_are_not_sent_as_raw_memory():
    """A lazy conjugate either arrives as what it means, or is refused."""

    def body(comm):
        x = torch.tensor([1 + 2j] * 3)
        if comm.rank == 0:
            try:
                comm.send(x.conj(), 1)
            except ValueError as error:
                assert "[rank 0/2] send" in str(error)
                comm.send(x.conj().resolve_conj(), 1)
            return None
        comm.recv(y := torch.zeros_like(x), 0)
        return y.tolist()

    assert run_ranks(2, body) == [None, [1 - 2j] * 3]


def test_mismatched_messages_raise_on_both_sides_and_traffic_goes_on(route):
    def body(comm):
        r, other, texts = comm.rank, 1 - comm.rank, []
        pairs = [
            ((5, torch.float32), (6, torch.float32)),
            ((50021, torch.uint8), (50020, torch.uint8)),
            ((4, torch.float32), (4, torch.int32)),
            ((900007, torch.uint8), (1, torch.uint8)),
        ]
        for early in (False, True):
            for pair in pairs:
                x = torch.zeros(pair[r][0], dtype=pair[r][1])
                if early != (r == 0):
                    time.sleep(0.01)
                small = pair[0][0] * pair[0][1].itemsize <= MOST_AT_ONCE
                if r == 0 and small:
                    error = eager.caught_later(comm, 1, lambda x=x: comm.send(x, 1, tag=4))
                else:
                    with pytest.raises(MismatchError) as caught:
                        comm.send(x, 1, tag=4) if r == 0 else comm.recv(x, 0, tag=4)
                    error = caught.value
                    if small:
                        eager.confirm_to(comm, 0)
                texts.append((error.peer == other, f"[rank {r}/2]" in str(error), "tag 4" in str(error)))
                for number in pair:
                    field = (
                        number[0]
                        if pair[0][1] == pair[1][1]
                        else {"torch.float32": "f32", "torch.int32": "i32"}[str(number[1])]
                    )
                    assert str(field) in str(error)
        work = comm.send(torch.full((70001,), float(r)), other, async_op=True)
        comm.recv(x := torch.empty(70001), other)
        work.wait()
        return set(texts), x[-1].item()

    assert run_ranks(2, body, **route) == [({(True, True, True)}, 1.0), ({(True, True, True)}, 0.0)]


def test_wrong_peers():
    def body(comm):
        for call, peer in (
            (comm.send, comm.rank),
            (comm.send, 2),
            (comm.send, -1),
            (comm.recv, comm.rank),
            (comm.recv, 7),
            (comm.recv, -2),
        ):
            with pytest.raises(
                ValueError, match=rf"^\[rank {comm.rank}/2\] {call.__name__}: peer rank {peer} must be"
            ):
                call(torch.zeros(1), peer)
        return True

    assert run_ranks(2, body) == [True, True]


def test_registered_buffers(route):
    def body(comm):
        n, r = comm.world_size, comm.rank
        x, y = comm.empty(300007, torch.uint8), comm.empty(300007, torch.uint8)
        x.copy_(pattern(300007, r))
        work = comm.send(x, (r + 1) % n, async_op=True)
        comm.recv(y, (r - 1) % n)
        work.wait()
        return message_is(y, (r - 1) % n)

    assert run_ranks(3, body, **route) == [True] * 3


def leaves_with_a_message_unsent(comm, count, gone):
    x = torch.ones(count)
    if comm.rank == 0:
        work = comm.send(x, 1, async_op=True)
        comm.close()
        with pytest.raises(AbortedError):
            work.wait()
        x.zero_()  # it is the caller's again
        gone.set()
        return
    assert gone.wait(20)
    with pytest.raises(PeerError, match=r"rank 0( \(host0\))? closed the group"):
        comm.recv(torch.empty(count), 0)


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_a_recv_from_any_source_ends_when_the_last_other_has_left(n, polls):
    """Not before: that one sends, before it leaves."""
    gone = threading.Barrier(max(1, n - 1), timeout=20)

    def body(comm):
        if comm.rank == n - 1:
            gone.wait()
            comm.send(torch.ones(3), 0)
        if comm.rank:
            comm.close()
            return gone.wait() if comm.rank < n - 1 else None
        comm.recv(torch.zeros(3), None)
        work = comm.recv(torch.zeros(3), None, async_op=True)
        while polls and not work.done():
            time.sleep(0.001)
        with pytest.raises(PeerError, match="closed the group before it came"):
            work.wait()

    run_ranks(n, body, timeout=20)


@pytest.mark.parametrize("count", [4583, 70001, 5000011])
def test_a_message_of_a_rank_that_has_left_is_not_read_from_its_memory(count):
    run_ranks(2, leaves_with_a_message_unsent, count, threading.Event(), timeout=20)
