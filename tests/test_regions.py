"""Registered memory: several regions in one call, whose places differ from rank to rank; the end of one
rank's part while the others use theirs; more regions than 255.
"""

import mmap

import pytest
import torch
from collective_cases import difference, same, whole

from pycomm.testing import run_ranks

MIB = 1 << 20
# name -> (PYCOMM_CMA, mode): between processes with the kernel's copies and without, between threads
WHERE = {"kernel": ("1", "processes"), "mapped": ("0", "processes"), "threads": ("1", "threads")}


@pytest.fixture(params=WHERE)
def where(request, monkeypatch):
    cma, mode = WHERE[request.param]
    monkeypatch.setenv("PYCOMM_CMA", cma)
    return {"mode": mode, "timeout": 30}


def two_regions(comm, count):
    """[x, y], of n rows each, in two regions: which lies above the other differs from rank to rank."""
    pages = comm.world_size * (comm.world_size * count * 4 // 4096 + 1) + 1
    place = mmap.mmap(-1, pages * 4096)
    if comm.rank % 2 == 0:
        place.close()
    x = comm.empty((comm.world_size, count))
    place.close()  # y takes it
    y = comm.empty((comm.world_size, count))
    return [x, y]


def distances(comm, regions):
    """From one to the other, on each rank."""
    x, y = regions
    return comm.all_gather(torch.tensor([x.data_ptr() - y.data_ptr()])).flatten().tolist()


def lists(comm, counts):
    """Every collective that takes a list, with parts from two regions in turn; some of them are empty, or in
    memory of the rank's own.
    """
    n, r, found = comm.world_size, comm.rank, []
    ins = two_regions(comm, max(counts))
    outs = two_regions(comm, max(counts))

    def check(what, got, expected):
        if not same(got, expected):
            found.append(difference(f"rank {r}: {what}", got, expected))

    for turn, count in enumerate(counts):
        for algorithm in (None, "direct", "staged"):
            kw = {"algorithm": algorithm}
            v = whole(n, n, count, seed=turn)
            for first in (0, 1):
                xs = [ins[(p + first) % 2][p, :count].copy_(v[r, p]) for p in range(n)]
                ys = [outs[(p + first) % 2][p, :count].fill_(-1) for p in range(n)]
                mixed = [torch.full((count,), -1.0), *ys[1:]]
                what = f"({count}, {algorithm}, region {first} first)"
                comm.all_to_all(xs, ys, **kw)
                for p in range(n):
                    check(f"all_to_all{what}[{p}]", ys[p], v[p, r])
                check(f"reduce_scatter{what}", comm.reduce_scatter(xs, ys[0], **kw), v[:, r].sum(0))
                for p, part in enumerate(comm.all_gather(xs[r], mixed, **kw)):
                    check(f"all_gather{what}[{p}]", part, v[p, p])
                for root in {0, n - 1}:
                    comm.gather(xs[r], ys if r == root else None, root, **kw)
                    for p in range(n if r == root else 0):
                        check(f"gather{what} to {root}[{p}]", ys[p], v[p, p])
                    comm.scatter(xs if r == root else None, mixed[0], root, **kw)
                    check(f"scatter{what} from {root}", mixed[0], v[root, r])
    comm.barrier()
    return found


def test_lists_with_parts_in_two_regions(where):
    assert sum(run_ranks(3, lists, [0, 1, 1500, 20011], **where), []) == []


def test_the_distance_of_two_regions_differs():
    """So that the tests here ask for more than one that is the same on all ranks."""

    def body(comm):
        return any(len(set(distances(comm, two_regions(comm, 20011)))) > 1 for _ in range(5))

    assert run_ranks(3, body, mode="processes") == [True] * 3


def input_and_output(comm):
    """In one region each, in regions of another order, and half of them in no region."""
    n, r, found = comm.world_size, comm.rank, []
    a, b = two_regions(comm, 20011)
    v = whole(n, n, 20011)
    plain = torch.empty(n, 20011)
    for algorithm in (None, "direct"):
        for x, y in ((a, b), (b, a), (a, plain), (plain, b), (b, b)):
            got = comm.all_reduce(x.copy_(v[r]), out=y, algorithm=algorithm)
            if not same(got, v.sum(0)):
                found.append(difference(f"rank {r}: all_reduce({algorithm})", got, v.sum(0)))
            got = comm.all_to_all(x.copy_(v[r]), y, algorithm=algorithm)
            if not same(got, v[:, r]):
                found.append(difference(f"rank {r}: all_to_all({algorithm})", got, v[:, r]))
    comm.barrier()
    return found


def test_input_and_output_in_two_regions(where):
    assert sum(run_ranks(3, input_and_output, **where), []) == []


@pytest.mark.parametrize("gone", [0, 2])
def test_the_part_of_one_rank_goes_alone(gone, where):
    """The others keep what they have in theirs, and the next region is another."""

    def body(comm):
        n, r = comm.world_size, comm.rank
        x, y = comm.empty(5000), comm.empty(5000)
        x.fill_(10.0 + r)
        y.fill_(20.0 + r)
        comm.barrier()
        if r == gone:
            del x
            x = torch.full((5000,), 10.0 + r)
        comm.barrier()
        kept = x.unique().tolist(), y.unique().tolist()
        z = comm.empty(5000).fill_(30.0 + r)
        sums = [comm.all_reduce(some)[-1].item() - n * start for some, start in ((x, 10), (y, 20), (z, 30))]
        return kept, sums, z.data_ptr() not in (x.data_ptr(), y.data_ptr())

    results = run_ranks(3, body, **where)
    assert results == [(([10.0 + r], [20.0 + r]), [3.0] * 3, True) for r in range(3)]


def test_more_regions_than_a_byte_counts(monkeypatch):
    monkeypatch.setenv("PYCOMM_CMA", "0")

    def body(comm):
        n, r = comm.world_size, comm.rank
        many = [comm.empty(3).fill_(i + r) for i in range(260)]
        work = [comm.all_reduce(x, async_op=True) for x in many]
        for each in work:
            each.wait()
        ends = comm.all_to_all(many[:: len(many) - 1], [torch.zeros(3), torch.zeros(3)])
        return [int(x[2]) for x in many] == [n * i + 1 for i in range(260)], [x[0].item() for x in ends]

    assert run_ranks(2, body, mode="processes") == [(True, [1.0, 1.0]), (True, [519.0, 519.0])]


def resident():
    """Bytes of shared segments in this process that are there."""
    found, ours = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if line.split("-")[0].isalnum() and "-" in line:
                ours = "memfd:pycomm " in line
            elif ours and line.startswith("Rss:"):
                found += int(line.split()[1]) << 10
    return found


def test_the_memory_of_a_freed_part_is_given_back_at_once():
    """While the other rank has its own still."""
    gone = 1

    def body(comm):
        x = comm.empty(4 * MIB).fill_(1.0)  # 16 MiB
        comm.barrier()
        before = resident()
        if comm.rank == gone:
            del x
        freed = before - resident()
        comm.barrier()
        return freed > 15 * MIB if comm.rank == gone else bool(x.eq(1).all())

    assert run_ranks(2, body, mode="processes") == [True, True]
