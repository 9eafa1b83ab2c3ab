"""Process groups of torch.distributed over hosts that lose ranks or whole hosts: pycomm's shrink_group and
torch's.
"""

import pytest
import torch
import torch.distributed as dist
from test_shrink_hosts import LIMIT, kill_self, over
from tiers import tier
from torch_ranks import meeting

import pycomm

pytestmark = pytest.mark.timeout(120)


def in_torch(hosts, body, dead=()):
    """The results of body(rank) in the default group of torch.distributed; the dead end themselves before."""
    together = meeting(len(hosts))

    def rank_main(rank):
        dist.all_reduce(torch.ones(1))
        together.wait()
        if rank in dead:
            kill_self()
        return body(rank)

    return over(len(hosts), hosts, rank_main, backend="pycomm", operation_timeout=LIMIT)


def until_broken():
    with pytest.raises(dist.DistBackendError):
        while True:
            dist.all_reduce(torch.ones(3))


def everything(number):
    """What programs do next, on the new default group: its result, and that of a new group of all."""
    x = torch.full((3,), float(number))
    dist.all_reduce(x)
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, number)
    part = dist.new_group(list(range(dist.get_world_size())))
    y = torch.full((3,), float(number))
    dist.all_reduce(y, group=part)
    model = torch.nn.Linear(2, 2, bias=False)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp(torch.full((1, 2), float(number))).sum().backward()
    dist.barrier()
    return x.tolist(), y.tolist(), names, round(model.weight.grad[0, 0].item(), 5), dist.get_backend()


def expected_of(alive):
    total = [float(sum(alive))] * 3
    return [(total, total, alive, round(sum(alive) / len(alive), 5), "pycomm")] * len(alive)


@tier(quick=1 / 2)
@pytest.mark.parametrize(
    ("hosts", "dead"), [("0011", [1]), ("0011", [0, 1]), ("0101", [0]), ("0011", [0, 2]), ("012", [2])]
)
def test_survivors_go_on(hosts, dead):
    def body(number):
        until_broken()
        pycomm.shrink_group(timeout=LIMIT)
        return everything(number)

    alive = [rank for rank in range(len(hosts)) if rank not in dead]
    assert in_torch(hosts, body, dead) == expected_of(alive)


def test_twice():
    """The second time the store that the survivors have opened is lost."""

    def body(number):
        until_broken()
        pycomm.shrink_group(timeout=LIMIT)
        dist.all_reduce(torch.ones(3))
        if number == 1:
            kill_self()
        until_broken()
        pycomm.shrink_group(timeout=LIMIT)
        return everything(number)

    assert in_torch("0011", body, [0]) == expected_of([2, 3])


def test_torch_shrinks_by_a_list():
    def body(number):
        until_broken()
        with pytest.raises(
            pycomm.PeerError, match=r"rank 3 \(host1\) is lost, too. Pass all ranks that are to be left"
        ):
            dist.shrink_group([1])
        dist.shrink_group([1, 3])
        return everything(number)

    assert in_torch("0011", body, [1, 3]) == expected_of([0, 2])


def test_a_group_that_works():
    def body(number):
        if number == 2:
            return None
        dist.shrink_group([2])
        return everything(number)

    assert in_torch("010", body) == [*expected_of([0, 1]), None]


def test_a_part_of_the_ranks():
    """The default group stays as it is."""

    def body(number):
        part, got = dist.new_group([1, 2, 3]), None
        if number in (1, 3):
            new = pycomm.shrink_group(part, exclude=[1], timeout=LIMIT)
            x = torch.full((3,), float(number))
            dist.all_reduce(x, group=new)
            got = x.tolist(), dist.get_process_group_ranks(new), dist.get_world_size()
        dist.barrier()
        return got

    assert in_torch("0011", body) == [None, ([4.0] * 3, [1, 3], 4), None, ([4.0] * 3, [1, 3], 4)]


def test_the_group_works():
    def body(number):
        with pytest.raises(ValueError, match="the group works and no rank is to be left out"):
            pycomm.shrink_group()
        dist.barrier()
        return number

    assert in_torch("01", body) == [0, 1]
