"""Every collective over simulated hosts against the oracles of one host (collective_cases.py): placements,
sizes around the payload of a card and beyond two segments, placement of buffers, late messages.
"""

import functools
import itertools
import threading

import oracle
import pytest
import torch
import torch.distributed as dist
from collective_cases import ALGORITHMS, CHECKS, DTYPES, MOVING, PLACEMENTS, check, difference, raw, same
from test_reductions import (
    EDGES,
    FACTOR,
    REDUCTIONS,
    combinations,
    expected_edges,
    reduction,
    values,
    with_one_nan,
)
from tiers import tier

import pycomm
from pycomm.testing import run_ranks
from pycomm.testing.groups import hosts_of

CARD = 1024  # card_payload of csrc/hosts/agree.h
SEGMENT = 4 << 20  # segment_bytes of csrc/hosts/operation.cc
HOSTS = {"1+1": 2, "2x2": 4, "0101": 4, "1+4": 5, "4+1": 5, "2+1+1": 4, "012012": 6, "1+2+1+3": 7}


def sizes(n):
    """In f32 elements: around nothing, the world size and a card, whole and per rank."""
    edges = {CARD // 4 + d for d in (-1, 0, 1)} | {CARD // 4 // n + d for d in (0, 1)}
    return sorted({0, 1, n - 1, n, n + 1, 1009, 4099} | edges)


def table(n, counts):
    for seed, (name, count) in enumerate(itertools.product(CHECKS, counts)):
        yield name, count, list(PLACEMENTS)[seed % 4], seed, {}


@tier(quick=1 / 8)
@pytest.mark.parametrize("delay", [0, 400], ids=["prompt", "late"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_table(hosts, delay):
    n = HOSTS[hosts]
    counts = [1, CARD // 4, 1009] if delay else sizes(n)
    check(n, list(table(n, counts)), hosts=hosts, wire_delay_us=delay)


@pytest.mark.parametrize("hosts", ["2+1", "0110", "1+1+2"])
def test_around_a_card(hosts):
    n = len(hosts_of(hosts, HOSTS.get(hosts, 3 if hosts == "2+1" else 4)))
    check(n, list(table(n, sizes(n))), hosts=hosts)


@pytest.mark.parametrize("hosts", ["3+5", "01010111"])
def test_many_unequal(hosts):
    check(8, list(table(8, [0, 1, 33, 4099])), hosts=hosts)


@pytest.mark.parametrize("hosts", [9, 16])
def test_many_hosts(hosts):
    """Of one rank each."""
    check(hosts, list(table(hosts, [0, 1, 331])), hosts=list(range(hosts)))


def every_placement():
    """1 to 5 ranks on each of 2 to 4 hosts, in order, and dealt out in turn."""
    for count in (2, 3, 4):
        for ranks in itertools.combinations_with_replacement(range(1, 6), count):
            together = [host for host, k in enumerate(ranks) for _ in range(k)]
            turns = [h for turn in range(5) for h, k in enumerate(ranks) if turn < k]
            yield from {tuple(together), tuple(turns)}


def test_four_hosts_of_five():
    hosts = [rank // 5 for rank in range(20)]
    check(20, [(name, 331, "dense", seed, {}) for seed, name in enumerate(CHECKS)], hosts=hosts)


@tier(slow=1 / 2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("delay", [0, 300], ids=["prompt", "late"])
def test_every_placement_of_up_to_four_hosts_of_five(delay, some):
    for hosts in some(every_placement()):
        cases = [(name, count, "dense", count, {}) for name in CHECKS for count in (1, 331)]
        check(len(hosts), cases, hosts=hosts, wire_delay_us=delay)


# More than two segments for all ranks together, so that every pipeline is full: what a rank has is larger
# still where all of it goes into the operation.
LONG = {"all_reduce": 2, "reduce": 2, "broadcast": 2, "all_gather": 2, "reduce_scatter": 0.5}


def long(comm, name, count):
    n, r = comm.world_size, comm.rank
    element = lambda rank, size: (torch.arange(size) * 7 + rank * 13) % 251  # noqa: E731
    if name in ("all_reduce", "reduce"):
        x = element(r, count).int()
        right = sum(element(p, count).int() for p in range(n))
        got = comm.all_reduce(x) if name == "all_reduce" else comm.reduce(x, n - 1)
        return got is None if name == "reduce" and r < n - 1 else torch.equal(got, right)
    if name == "broadcast":
        return torch.equal(comm.broadcast(element(r, count).byte(), 1), element(1, count).byte())
    if name == "all_gather":
        lengths = [count - 3 * p * p for p in range(n)]
        out = [torch.zeros(size, dtype=torch.uint8) for size in lengths]
        comm.all_gather(element(r, lengths[r]).byte(), out)
        return all(torch.equal(out[p], element(p, lengths[p]).byte()) for p in range(n))
    lengths = [count - 5 * p for p in range(n)]
    got = comm.reduce_scatter([element(r + p, size).int() for p, size in enumerate(lengths)])
    return torch.equal(got, sum(element(q + r, lengths[r]).int() for q in range(n)))


@tier(quick=1 / 15)
@pytest.mark.parametrize("hosts", ["1+1", "2+1", "1+1+1"])
@pytest.mark.parametrize("name", LONG)
def test_beyond_two_segments(name, hosts):
    count = int(LONG[name] * SEGMENT / (1 if name in ("broadcast", "all_gather") else 4)) + 1003
    n = len(hosts_of(hosts, sum(map(int, hosts.split("+")))))
    assert all(run_ranks(n, long, name, count, hosts=hosts))


# --- bits --------------------


def run_reductions(comm, hosts, counts):
    found, n, r = [], comm.world_size, comm.rank
    table = [(name, op, count) for name, ops in REDUCTIONS.items() for op in ops for count in counts]
    for seed, (name, op, count) in enumerate(table):
        v = values(DTYPES[name], n, n * count, seed)
        right = oracle.over_hosts(op, v, hosts, FACTOR)
        part = right[r * count : (r + 1) * count]
        for _ in range(2):
            got = {
                "all_reduce": (comm.all_reduce(v[r].clone(), reduction(op)), right),
                "reduce": (comm.reduce(v[r].clone(), n - 1, reduction(op)), right if r == n - 1 else None),
                "reduce_scatter": (comm.reduce_scatter(v[r].clone(), op=reduction(op)), part),
            }
            for kind, (result, wanted) in got.items():
                what = f"rank {r}: {kind}({name}, {op}, count={n * count})"
                if wanted is None or result is None:
                    found += [f"{what}: at the wrong rank"] if wanted is not result else []
                elif not same(result, wanted):
                    found.append(difference(what, result, wanted))
        everyone = comm.all_gather(raw(got["all_reduce"][0]))
        if (everyone != everyone[0]).any():
            found.append(f"rank {r}: all_reduce({name}, {op}): bits differ between ranks")
    return found


@tier(quick=1 / 4)
@pytest.mark.parametrize(
    ("hosts", "counts"), [("1+1", [3, 701]), ("2x2", [5, 401]), ("0121", [301]), ("1+4", [7])]
)
def test_bits_of_sums(hosts, counts):
    """Every dtype and reduce op: bit for bit the sum of the hosts' sums, on all ranks and from run to run."""
    n = {"1+1": 2, "1+4": 5}.get(hosts, 4)
    numbers = hosts_of(hosts, n)
    found = sum(run_ranks(n, run_reductions, numbers, counts, hosts=hosts, wire_delay_us=50), [])
    assert not found, f"{len(found)} wrong results:\n" + "\n".join(found[:8])


def reduce_edges(comm, hosts):
    """In pieces that travel in a card, and at once. See test_reductions.py."""
    found, n, r = [], comm.world_size, comm.rank
    for name, op in EDGES:
        v = combinations(DTYPES[name], n)
        count = v.shape[1] // n
        right = expected_edges(op, v, functools.partial(oracle.over_hosts, hosts=hosts))
        pieces = range(0, v.shape[1], CARD // v.itemsize)
        for begin in pieces if op == "sum" else pieces[:2]:
            piece = slice(begin, begin + CARD // v.itemsize)
            got = comm.all_reduce(v[r, piece].clone(), reduction(op))
            if not same(with_one_nan(op, got), with_one_nan(op, right[piece])):
                found.append(f"rank {r}: small all_reduce({name}, {op}) at {begin}")
        got = {
            "all_reduce": (comm.all_reduce(v[r].clone(), reduction(op)), right),
            "reduce": (comm.reduce(v[r].clone(), n - 1, reduction(op)), right),
            "reduce_scatter": (
                comm.reduce_scatter(v[r, : n * count].clone(), op=reduction(op)),
                right[r * count : (r + 1) * count],
            ),
        }
        for kind, (result, wanted) in got.items():
            if result is not None and not same(with_one_nan(op, result), with_one_nan(op, wanted)):
                found.append(f"rank {r}: {kind}({name}, {op})")
    return found


@pytest.mark.parametrize("hosts", ["1+1+1", "2+1", "1+2"])
def test_values_at_the_edges(hosts):
    found = sum(run_ranks(3, reduce_edges, hosts_of(hosts, 3), hosts=hosts), [])
    assert not found, f"{len(found)} wrong results:\n" + "\n".join(found[:8])


def test_a_sum_over_hosts_is_near_the_sum():
    """The oracle is of two levels itself: 16-bit sums lie within their roundings (one per host, and
    one) of the sum in f64.
    """

    def body(comm):
        for dtype, bits in ((torch.float16, 11), (torch.bfloat16, 8)):
            v = values(dtype, 5, 999, 1)
            got = comm.all_reduce(v[comm.rank].clone()).double()
            of_hosts = [v[:2].double().sum(0), v[2:].double().sum(0)]
            bound = (sum(x.abs() for x in of_hosts) + sum(of_hosts).abs()) * 1.01 * 2.0**-bits
            assert ((got - sum(of_hosts)).abs() <= bound).all()

    run_ranks(5, body, hosts="2+3")


@pytest.mark.parametrize("hosts", ["2x2", "012"])
def test_every_dtype_is_moved_bit_by_bit(hosts):
    cases = []
    for i, (name, dtype) in enumerate(itertools.product(MOVING, DTYPES.values())):
        cases.append((name, [0, 1, 7, 1031][i % 4], list(PLACEMENTS)[i % 3], i, {"dtype": dtype}))
    check(4 if hosts == "2x2" else 3, cases, hosts=hosts)


@pytest.mark.parametrize("hosts", ["2x2", "012"])
def test_algorithms_are_accepted(hosts):
    cases = [
        (name, 1009, "dense", seed, {"algorithm": algorithm})
        for seed, (name, wished) in enumerate(ALGORITHMS.items())
        for algorithm in wished
    ]
    check(4 if hosts == "2x2" else 3, cases, hosts=hosts)


# --- in flight together --------------------


def many_at_once(comm):
    """Works of all kinds are issued before the first is waited for, and waited for from the last."""
    n, r = comm.world_size, comm.rank
    for round in range(3):
        xs = [torch.full((count,), float(r + count)) for count in (1, 300, 5001, 70001)]
        works = [comm.all_reduce(x, async_op=True) for x in xs]
        gathered = torch.zeros(n, 500)
        works.append(comm.all_gather(torch.full((500,), float(r)), gathered, async_op=True))
        works.append(comm.barrier(async_op=True))
        for work in reversed(works) if round % 2 else works:
            work.wait()
        for x in xs:
            assert x.eq(n * (n - 1) / 2 + n * x.numel()).all()
        assert gathered.eq(torch.arange(n)[:, None]).all()


def two_groups(comm):
    """Of the same ranks, one the other way round, in use at once."""
    n, r = comm.world_size, comm.rank
    other = comm.split(0, key=-r)
    for _ in range(5):
        x, y = torch.full((9000,), float(r)), torch.full((9000,), float(r))
        works = [comm.all_reduce(x, async_op=True), other.broadcast(y, 0, async_op=True)]
        z = other.all_reduce(torch.ones(3))
        for work in works:
            work.wait()
        assert x.eq(n * (n - 1) / 2).all() and y.eq(n - 1).all() and z.eq(n).all()
    other.close()


@pytest.mark.parametrize("hosts", ["2x2", "0112"])
@pytest.mark.parametrize("body", [many_at_once, two_groups])
def test_together(body, hosts):
    run_ranks(4, body, hosts=hosts, wire_delay_us=100, timeout=40)


def test_two_groups_from_two_threads():
    """Nothing of one group waits for the other."""

    def body(comm):
        other, errors = comm.split(0), []

        def loop(group, count):
            try:
                for step in range(20):
                    assert group.all_reduce(torch.full((count,), float(step))).eq(4 * step).all()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=loop, args=args) for args in ((comm, 100), (other, 40000))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert not errors, errors

    run_ranks(4, body, hosts="0101", wire_delay_us=100, timeout=40)


def callback_ends_the_group(rank):
    """The last reference goes in a callback of an operation over hosts, on a thread of the group's."""
    for _ in range(3):
        held, ended = [dist.new_group()], threading.Event()

        def end(future, held=held, ended=ended):
            dist.destroy_process_group(held.pop())
            ended.set()

        x = torch.ones(5000)
        work = dist.all_reduce(x, group=held[0], async_op=True)
        work.get_future().then(end)
        assert ended.wait(20) and x.eq(4).all()
        work.wait()
        dist.barrier()


def test_a_callback_ends_the_group():
    run_ranks(4, callback_ends_the_group, hosts="2x2", mode="processes", backend="pycomm", timeout=50)


def test_processes():
    """The same table over Gloo."""
    cases = list(table(4, [0, 3, CARD // 4, 4099]))
    check(4, cases, hosts="2+2", mode="processes")


def test_delay_is_for_hosts_of_threads():
    for options in ({}, {"hosts": "1+1", "mode": "processes"}):
        with pytest.raises(ValueError, match="wire_delay_us=5: for simulated hosts of threads"):
            run_ranks(2, pycomm.Communicator.barrier, wire_delay_us=5, **options)
