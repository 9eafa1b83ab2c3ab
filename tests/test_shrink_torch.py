"""Process groups of torch.distributed that lose ranks: torch's shrink_group and pycomm's, which finds out
who is lost.
"""

import datetime

import pytest
import torch
import torch.distributed as dist
from test_shrink import LIMIT, kill_self, shared_store, survivors_of
from torch_ranks import meeting

import pycomm
from pycomm.testing import run_ranks

pytestmark = pytest.mark.timeout(120)
DEATH = dist.DistBackendError


def in_torch(world_size, body, dead=(), mode="processes"):
    """The results of body(rank) in the default group of torch.distributed, whose store is in the process of
    rank 0; the dead end themselves before.
    """
    together = meeting(world_size)

    def rank_main(comm):
        store = shared_store(comm)
        limit = datetime.timedelta(seconds=LIMIT)
        dist.init_process_group("pycomm", store=store, rank=comm.rank, world_size=world_size, timeout=limit)
        dist.all_reduce(torch.ones(1))
        together.wait()
        if comm.rank in dead:
            kill_self()
        return body(comm.rank)

    return survivors_of(run_ranks(world_size, rank_main, mode=mode, fail=False))


def until_broken():
    with pytest.raises(DEATH):
        while True:
            dist.all_reduce(torch.ones(3))


def everything(number):
    """What programs do next, on the new default group: its result, and that of a new group of all."""
    x = torch.full((3,), float(number))
    dist.all_reduce(x)
    last = torch.tensor([float(number)])
    dist.broadcast(last, dist.get_world_size() - 1)
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, number)
    part = dist.new_group(list(range(dist.get_world_size())))
    y = torch.full((3,), float(number))
    dist.all_reduce(y, group=part)
    model = torch.nn.Linear(2, 2, bias=False)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp(torch.full((1, 2), float(number))).sum().backward()
    return (
        x.tolist(),
        y.tolist(),
        last.item(),
        names,
        round(model.weight.grad[0, 0].item(), 5),
        dist.get_backend(),
    )


def expected_of(alive):
    total = [float(sum(alive))] * 3
    return [(total, total, float(alive[-1]), alive, round(sum(alive) / len(alive), 5), "pycomm")] * len(alive)


@pytest.mark.parametrize("dead", [[1], [0], [0, 2], [1, 2, 3]])
def test_survivors_go_on(dead):
    def body(number):
        until_broken()
        pycomm.shrink_group(timeout=LIMIT)
        return everything(number)

    assert in_torch(4, body, dead) == expected_of([rank for rank in range(4) if rank not in dead])


def test_torch_shrinks_by_a_list():
    def body(number):
        until_broken()
        with pytest.raises(pycomm.PeerError, match="rank 3 is lost, too. Pass all ranks that are to be left"):
            dist.shrink_group([1])
        dist.shrink_group([1, 3])
        return everything(number)

    assert in_torch(4, body, [1, 3]) == expected_of([0, 2])


def test_a_group_that_works():
    def body(number):
        if number == 2:
            return None
        dist.shrink_group([2])
        return everything(number)

    results = in_torch(3, body)
    assert results == [*expected_of([0, 1]), None]


def test_a_part_of_the_ranks():
    """The default group stays as it is."""

    def body(number):
        part, got = dist.new_group([1, 2, 3]), None
        if number in (1, 3):
            new = pycomm.shrink_group(part, exclude=[1], timeout=LIMIT)
            x = torch.full((3,), float(number))
            dist.all_reduce(x, group=new)
            got = x.tolist(), dist.get_process_group_ranks(new), dist.get_world_size()
        dist.barrier()  # rank 0 has the store
        return got

    assert in_torch(4, body) == [None, ([4.0] * 3, [1, 3], 4), None, ([4.0] * 3, [1, 3], 4)]


def test_wrong_groups():
    def body(number):
        with pytest.raises(ValueError, match="the group works and no rank is to be left out"):
            pycomm.shrink_group()
        other = dist.new_group(backend="gloo")
        with pytest.raises(TypeError, match="the backend of .* is not pycomm's"):
            pycomm.shrink_group(other)
        dist.barrier()
        return number

    assert in_torch(2, body) == [0, 1]
