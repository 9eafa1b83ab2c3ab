"""Rows dealt by torch's DistributedSampler through a DataLoader: the same training as one process with the
whole batches.
"""

import pytest
import torch
import torch.nn.functional as F
from models import GPT
from tiers import tier
from torch.utils.data import DataLoader, TensorDataset
from torch_ranks import spawn

import pycomm.parallel as par

ROWS, PER_RANK = 24, 3


def dataset():
    generator = torch.Generator().manual_seed(9)
    inputs, targets = (torch.randint(0, 37, (ROWS, 7), generator=generator) for _ in range(2))
    targets[torch.rand(ROWS, 7, generator=generator) < 0.4] = -100
    return TensorDataset(inputs, targets)


def make():
    torch.manual_seed(0)
    model = GPT().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def train(rank, world_size, text):
    model, opt = par.parallelize(*make(), par.Plan.parse(text))
    loader = DataLoader(dataset(), batch_size=PER_RANK, sampler=par.sampler(model, dataset(), shuffle=False))
    losses = [par.step(model, opt, tuple(batch), microbatches=2, sharded=True).item() for batch in loader]
    return losses, par.full_state_dict(model)


@tier(quick=1 / 4)
@pytest.mark.parametrize("text", ["dp=2", "dp=4,zero=3", "dp=2,tp=2,zero=1", "dp=2,pp=2"])
def test_loader_and_sampler(text):
    plan = par.Plan.parse(text)
    model, opt = make()
    losses = []
    for inputs, targets in DataLoader(dataset(), batch_size=PER_RANK * plan.dp):
        opt.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        opt.step()
        losses.append(loss.item())
    for found, state in spawn(plan.world_size, train, text):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12 * value.abs().max().item())
