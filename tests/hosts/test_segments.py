"""Collectives over hosts at the limits of their segments: one element less, just as many, one more, and more
than are under way at once.
"""

import pytest
import torch

from pycomm.testing import run_ranks

SEGMENT = 4 << 20  # bytes: csrc/hosts/operation.cc
PIECE = (
    SEGMENT // 4 // 4 + 1
)  # elements of int32 that reduce_scatter has under way: csrc/hosts/reduce_scatter.cc
NUMBERS = torch.arange(4 * SEGMENT // 4 + 99, dtype=torch.int32) % 9973


def around(limit):
    return [limit - 1, limit, limit + 1, 4 * limit]


def mine(rank, count):
    """Read-only, other numbers on each rank and at each place of a segment."""
    return NUMBERS[13 * rank : 13 * rank + count]


def total(n, count):
    return sum(mine(p, count) for p in range(n))


def all_reduce(comm, count):
    return torch.equal(comm.all_reduce(mine(comm.rank, count).clone()), total(comm.world_size, count))


def reduce(comm, count):
    n, r, right = comm.world_size, comm.rank, []
    for root in {0, n - 1}:
        x, out = mine(r, count), torch.full((count,), -1, dtype=torch.int32)
        comm.reduce(x, root, out=out if r == root else None)
        right.append(torch.equal(out, total(n, count)) if r == root else out.eq(-1).all())
    return all(right)


def broadcast(comm, count):
    n, r = comm.world_size, comm.rank
    return all(
        torch.equal(comm.broadcast(mine(r, count).clone(), root), mine(root, count)) for root in {0, n - 1}
    )


def all_gather(comm, count):
    """The blocks differ in length; the longest is at the limit."""
    n, r = comm.world_size, comm.rank
    lengths = [count - p for p in range(n)]
    out = [torch.full((length,), -1, dtype=torch.int32) for length in lengths]
    comm.all_gather(mine(r, lengths[r]), out)
    return all(torch.equal(out[p], mine(p, lengths[p])) for p in range(n))


def reduce_scatter(comm, count):
    n, r = comm.world_size, comm.rank
    lengths = [count - (p != 1) for p in range(n)]
    got = comm.reduce_scatter([mine(r + p, length) for p, length in enumerate(lengths)])
    return torch.equal(got, sum(mine(r + p, lengths[r]) for p in range(n)))


CASES = [(call, SEGMENT // 4) for call in (all_reduce, reduce, broadcast, all_gather)]
CASES += [(reduce_scatter, PIECE)]


@pytest.mark.parametrize("hosts", ["2+1", "1+1+1"])
@pytest.mark.parametrize(("call", "limit"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_at_the_limits(call, limit, hosts):
    def body(comm):
        return [count for count in around(limit) if not call(comm, count)]

    assert run_ranks(3, body, hosts=hosts, timeout=60) == [[]] * 3
