"""A training loop, by a plan that is written as text or as a Plan."""

import torch
import torch.nn.functional as F
from typing_extensions import assert_type

import pycomm.parallel as par


def train(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = par.parallelize(model, optimizer, par.Plan(dp=2, zero=1))
    loss = torch.zeros(())
    for batch in batches:
        loss = par.step(model, optimizer, batch, F.cross_entropy, microbatches=2, clip=1.0)
    assert_type(par.full_state_dict(model), dict[str, torch.Tensor])
    par.save(model, optimizer, "checkpoint")
    return loss.item()


def own_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def judge(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    par.verify(model, batch, "dp=2,tp=2", own_loss)
    with par.count_traffic() as traffic:
        print(par.evaluate(model, batch, own_loss), traffic)
