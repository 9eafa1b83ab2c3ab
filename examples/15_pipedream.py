"""PipeDream: a pipeline without a flush. Every microbatch is an update of its own, and stages make theirs
without waiting.

    python examples/15_pipedream.py
    torchrun --nproc-per-node 2 examples/15_pipedream.py

    rank 0     F0 F1 B0 U0 F2 B1 U1 F3 ...      U is the optimizer's step of this stage
    weights    v0 v0 v0    v1 v0    v2          F1 used v0, so B1 uses v0 too: a stage keeps its versions

This is the one schedule that changes the mathematics: a gradient is of weights that are pp - rank - 1 steps
old. With one microbatch per step() nothing is under way, and it is the single process again. The pipe drains
at the end of a step(), so give it many microbatches. There is no gradient norm of the whole model, hence no
clipping.
"""

import torch
import torch.nn.functional as F
from common import GPT, Batch, batches, on_ranks, same, say

import pycomm.parallel as par

RANKS = 2


def make() -> tuple[GPT, torch.optim.SGD]:
    """SGD on a model without tied weights, whose stages would update them at different times."""
    torch.manual_seed(0)
    model = GPT().double()
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def data() -> list[Batch]:
    return [next(batches(1))] * 8  # one batch again and again, so that the loss has somewhere to go


def train_alone(microbatches: int) -> list[float]:
    """Each microbatch is a step of its own, with the latest weights: PipeDream without its delay."""
    model, optimizer = make()
    losses = []
    for inputs, targets in data():
        mean = 0.0
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean += loss.item() / microbatches
        losses.append(mean)
    return losses


def train(microbatches: int) -> list[float]:
    model, optimizer = par.parallelize(*make(), par.Plan(pp=RANKS, schedule="pipedream"))
    return [par.step(model, optimizer, batch, microbatches=microbatches).item() for batch in data()]


def main() -> None:
    difference = same(train(1), train_alone(1))
    delayed, latest = train(4), train_alone(4)
    assert delayed[0] != latest[0] and delayed[-1] < delayed[0]
    assert abs(delayed[-1] - latest[-1]) < 0.02 * latest[-1]
    say(par.pipeline.make_schedule("pipedream", RANKS, 4).text())
    say(
        f"4 microbatches under way: loss {delayed[0]:.5f} -> {delayed[-1]:.5f}; without delay "
        f"{latest[0]:.5f} -> {latest[-1]:.5f}"
    )
    what = f"PipeDream on {RANKS} ranks with one microbatch equals one process"
    say(f"{what}: losses differ by {difference:.0e}")


if __name__ == "__main__":
    on_ranks(RANKS, main)
