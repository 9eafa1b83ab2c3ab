"""pycomm.parallel.data.naive against one process on the whole batch."""

import pytest
import torch
from torch import nn
from torch_ranks import data, equal, spawn

from pycomm.groups import as_group
from pycomm.parallel import count_traffic
from pycomm.parallel.data import NaiveDataParallel
from pycomm.parallel.data.naive import gather_and_broadcast


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(5, 16), nn.Linear(16, 3)
        self.sometimes, self.never = nn.Linear(5, 3), nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.single = nn.Parameter(torch.ones(3, dtype=torch.float32))
        self.register_buffer("scale", torch.rand(1).double())
        self.first.weight = nn.Parameter(torch.randn(5, 16).t())  # not contiguous

    def forward(self, x, more=False):
        y = self.second(self.first(x).tanh()) * self.scale + self.frozen + self.single
        return y + self.sometimes(x) if more else y


def make(seed):
    net = Net(seed).double()
    net.single.data = net.single.data.float()
    return net


def loss(net, x, more):
    return net(x, more=more).square().mean()


def batch(world_size):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(4 * world_size, 5, generator=generator, dtype=torch.float64)


def body(rank, world_size):
    net = NaiveDataParallel(make(rank))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        mine = batch(world_size)[4 * rank : 4 * rank + 4] + step
        loss(net, mine, rank == world_size - 1).backward()
        with count_traffic() as traffic:
            net.sync_gradients()
        optimizer.step()
    assert net.module.never.weight.grad is None
    return net.state_dict(), {name: p.grad for name, p in net.module.named_parameters()}, traffic


@pytest.mark.parametrize(
    "world_size, backend", [(1, "pycomm"), (2, "pycomm"), (3, "pycomm"), (4, "pycomm"), (2, "gloo")]
)
def test_equals_single_process(world_size, backend):
    net = make(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        parts = batch(world_size).split(4)
        sum(
            loss(net, part + step, rank == world_size - 1) / world_size for rank, part in enumerate(parts)
        ).backward()
        optimizer.step()
    results = spawn(
        world_size, body, backend=backend
    )  # after torch.optim has imported what it imports at its first use
    elements = {8: 0, 4: 0}
    for parameter in net.parameters():
        if parameter.requires_grad:
            elements[parameter.element_size()] += parameter.numel() + 1
    sent = sum(size * count for size, count in elements.items())
    for rank, (state, grads, traffic) in enumerate(results):
        for name, value in net.state_dict().items():
            tolerance = 1e-12 if value.dtype == torch.float64 else 1e-6
            torch.testing.assert_close(
                state["module." + name], value, rtol=tolerance, atol=tolerance, msg=name
            )
            equal(state["module." + name], results[0][0]["module." + name])
        for name, parameter in net.named_parameters():
            assert (grads[name] is None) == (parameter.grad is None), name
        if world_size > 1:
            assert [call.op for call in traffic.log] == ["gather", "broadcast"] * 2
            assert traffic.nbytes("gather") == (0 if rank == 0 else sent) and traffic.nbytes("broadcast") == (
                sent if rank == 0 else 0
            )


def body_sum(rank, world_size):
    results = []
    for count in (0, 1, 1000):
        flat = data(rank, count)
        gather_and_broadcast(flat, as_group())
        results.append(flat)
    for dtype in (torch.bfloat16, torch.float16):  # it is rounded once: each small term alone would be lost
        small = torch.full((2,), 2.0 if rank == 0 else 0.75 * torch.finfo(dtype).eps, dtype=dtype)
        gather_and_broadcast(small, as_group())
        results.append(small)
    with pytest.raises(ValueError, match=rf"rank {rank}/3.*on rank {2 if rank != 2 else 0}"):
        NaiveDataParallel(nn.Linear(3, 4 if rank == 2 else 5))
    return results


def test_sum_and_unequal_modules():
    for results in spawn(3, body_sum):
        equal(results[:3], [sum(data(rank, count) for rank in range(3)) for count in (0, 1, 1000)])
        assert all(
            torch.equal(found, torch.full_like(found, 2 + 2 * torch.finfo(found.dtype).eps))
            for found in results[3:]
        )
