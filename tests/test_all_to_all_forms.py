"""all_to_all where some ranks pass sizes and others pass none, which expect equal ones: as on Gloo, where
each pair of ranks has to agree and nothing else.
"""

import random

import pytest
import torch
import torch.distributed as dist
from torch_ranks import spawn

from pycomm import MismatchError
from pycomm.testing import run_ranks

LIMIT = 45.0  # seconds
SIZES = [0, 1, 300, 5_000, 40_000, 200_000]  # elements: in the header, in one step, in many, on several lanes


def plan(generator, n):
    """(elements from p to q for all p and q, ranks that pass no sizes)."""
    size, other = generator.choice(SIZES), generator.choice(SIZES)
    sizes = [[generator.choice([size, other, 0, 7]) for _ in range(n)] for _ in range(n)]
    plain = [r for r in range(n) if generator.random() < 0.5]
    for r in plain:  # they share one size with all
        for p in range(n):
            sizes[r][p] = sizes[p][r] = size
    return sizes, plain


def data(p, q, count):
    return torch.arange(count, dtype=torch.float32) + 1000 * p + 100_000 * q


def exchange(comm, sizes, plain, how):
    r, n = comm.rank, comm.world_size
    ins, outs = sizes[r], [sizes[p][r] for p in range(n)]
    splits = {} if r in plain else {"in_splits": ins, "out_splits": outs}
    x, y = torch.cat([data(r, q, ins[q]) for q in range(n)]), torch.full((sum(outs),), -1.0)
    work = comm.all_to_all(x, y, **splits, **how)
    if how.get("async_op"):
        work.wait(LIMIT)
    right = torch.cat([data(p, r, outs[p]) for p in range(n)])
    return torch.equal(y, right)


def mixes(comm, seed, rounds):
    """In between come operations that use the same memory in other ways."""
    generator, wrong = random.Random(seed), []
    for i in range(rounds):
        sizes, plain = plan(generator, comm.world_size)
        how = generator.choice([{}, {}, {"async_op": True}, {"algorithm": "staged"}, {"algorithm": "direct"}])
        if not exchange(comm, sizes, plain, how):
            wrong.append(f"seed {seed}, round {i}, rank {comm.rank}: {sizes}, plain {plain}, {how}")
        count = generator.choice([1, 3_000, 150_000])
        if generator.random() < 0.7 and not comm.all_reduce(torch.ones(count)).eq(comm.world_size).all():
            wrong.append(f"seed {seed}, round {i}, rank {comm.rank}: the all_reduce after it")
    return wrong


@pytest.mark.parametrize(
    ("mode", "n", "threads"),
    [("threads", 2, 1), ("processes", 2, 2), ("processes", 3, 1), ("threads", 4, 2), ("processes", 4, 1)],
)
def test_sizes_on_some_ranks(mode, n, threads):
    found = sum(run_ranks(n, mixes, 17 * n + threads, 40, mode=mode, threads=threads, timeout=LIMIT), [])
    assert not found, "\n".join(found[:5])


def differs(comm):
    """Rank 2 sends rank 0, which passes no sizes, one element too many. Then the group goes on."""
    r, found = comm.rank, []
    for size in (2, 50_000):
        ins = [size + (r == 2), size, size]
        splits = {} if r != 2 else {"in_splits": ins, "out_splits": [size] * 3}
        try:
            comm.all_to_all(torch.ones(sum(ins)), torch.zeros(3 * size), **splits)
            found.append("no error")
        except MismatchError as error:
            found.append(str(error))
        found.append(exchange(comm, [[size] * 3] * 3, [0, 1], {}))
        found.append(exchange(comm, [[size] * 3] * 3, [0, 1, 2], {}))
    return found


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_sizes_that_differ(mode):
    for small, *rights, large, right, also in run_ranks(3, differs, mode=mode, timeout=LIMIT):
        assert all((*rights, right, also)), (rights, right, also)
        assert "rank 2 sends 3 elements to rank 0, which expects 2" in small, small
        assert "rank 2 sends 50001 elements to rank 0, which expects 50000" in large, large


def counts_differ(comm):
    """Two ranks without sizes, of two counts; one with sizes: each rank raises."""
    r = comm.rank
    splits = {"in_splits": [2, 3, 4], "out_splits": [2, 3, 4]} if r == 2 else {}
    count = 9 if r == 2 else 3 * (2 + r)
    with pytest.raises(MismatchError):
        comm.all_to_all(torch.ones(count), torch.ones(count), **splits)
    return comm.all_reduce(torch.ones(3)).tolist()


def test_counts_that_differ():
    assert run_ranks(3, counts_differ, mode="processes", timeout=LIMIT) == [[3.0] * 3] * 3


def check_torch(r, n):
    """Sizes of one side only; an empty list is none; the form with a list of tensors."""
    for count in (2, 30_000):
        x = torch.arange(float(n * count)) + 10 * r
        right = torch.cat(
            [torch.arange(float(n * count))[r * count : (r + 1) * count] + 10 * p for p in range(n)]
        )
        equal = [count] * n
        for splits in ((None, None), (equal, None), (None, equal), ([], []), (equal, equal)):
            y = torch.zeros(n * count)
            dist.all_to_all_single(y, x, *(splits if r == 1 else (None, None)))
            assert torch.equal(y, right), (splits, y)
        y = torch.zeros(n * count)
        if r == 0:
            dist.all_to_all(list(y.split(count)), list(x.split(count)))
        else:
            dist.all_to_all_single(y, x)
        assert torch.equal(y, right), y


def test_torch():
    spawn(3, check_torch)


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_an_asynchronous_rank_is_not_needed_twice(mode):
    """Rank 0 passes no sizes, does not wait, and blocks in another group, where rank 1 comes after it."""

    def body(comm):
        n, other = 204, comm.split(0)
        if comm.rank == 0:
            x = torch.arange(2.0 * n)
            work = comm.all_to_all(x, async_op=True)
            other.barrier(timeout=20)
            return work.wait().tolist() == [*range(n), *range(1000, 1000 + n)]
        out = comm.all_to_all(torch.arange(n + 1.0) + 1000, torch.empty(n + 1), **both([n, 1]))
        other.barrier(timeout=20)
        return out.tolist() == [*range(n, 2 * n), 1000 + n]

    def both(sizes):
        return {"in_splits": sizes, "out_splits": sizes}

    assert run_ranks(2, body, mode=mode, timeout=60) == [True, True]
