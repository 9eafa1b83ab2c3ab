"""A training that goes on when ranks die, with a scheduler that is kept."""

import torch

import pycomm.parallel as par


def train(model: torch.nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    run = par.resilient(model, optimizer, "dp=4,zero=1", snapshot_every=5)
    run.keep("scheduler", scheduler)
    for number in run.steps(steps):
        torch.manual_seed(number)
        loss = run.step((torch.randn(8, 4), torch.randn(8, 2)), torch.nn.functional.mse_loss)
        if loss is not None:
            print(number, loss.item())
        scheduler.step()
