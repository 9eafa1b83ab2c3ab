"""Model parallelism: consecutive layers on each rank. The activation goes to the next rank, its gradient
comes back.

    python examples/06_model_parallel.py
    torchrun --nproc-per-node 3 examples/06_model_parallel.py

    rank 0   [0 1 2] --h-->                                          <--dh-- [2 1 0]
    rank 1                 [3 4] --h-->              <--dh-- [4 3]
    rank 2                             [5 6]  loss  [6 5]
             ------------------------------------------------------------------------> time

A model that is too large for one rank fits on three, but only one of them works at a time. 07_pipeline.py
fills the gaps.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist
from common import on_ranks, same, say
from torch import nn

import pycomm.parallel as par

RANKS, BALANCE = 3, [3, 2, 2]

Backward: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # output, targets -> loss


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    widths = [16, 64, 64, 48, 8]
    layers = [nn.Linear(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True)]
    return nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2], nn.GELU(), layers[3]).double()


def train(model: nn.Module, backward: Backward) -> list[float]:
    """The same loop for the whole model and for a rank's part."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, generator = [], torch.Generator().manual_seed(1)
    for _ in range(4):
        inputs = torch.randn(10, 16, generator=generator, dtype=torch.float64)
        targets = torch.randn(10, 8, generator=generator, dtype=torch.float64)
        loss = backward(model(inputs), targets)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    def backward(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(output, targets)
        loss.backward()
        return loss

    whole = make_layers()
    expected = train(whole, backward)
    model = par.pipeline.ModelParallel(make_layers(), balance=BALANCE, broadcast_output=True)
    with par.count_traffic() as traffic:
        losses = train(model, backward)  # every rank gets the output, so the loop needs no branch
    difference = same(losses, expected)
    held = [(0, 0)] * RANKS
    dist.all_gather_object(held, (sum(p.numel() for p in model.parameters()), traffic.calls("send")))
    total = sum(p.numel() for p in whole.parameters())
    say(
        f"parameters per rank: {' + '.join(str(count) for count, _ in held)} = {total}; messages sent: "
        f"{[sent for _, sent in held]}"
    )
    say(f"model parallel on {RANKS} ranks equals one process: losses differ by {difference:.0e}")


if __name__ == "__main__":
    on_ranks(RANKS, main)
