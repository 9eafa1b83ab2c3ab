"""Compressed gradients: fewer bytes for an approximate sum; what was left out is kept and sent later (error
feedback).

    python examples/17_compression.py
    torchrun --nproc-per-node 2 examples/17_compression.py

    gradient + error of last time --compress--> sent, summed --> new gradient
                    ^                   |
                    +---- what was left out, stays on this rank

    bf16, fp16   half of the bytes of fp32           int8        a quarter, with a scale per 1024 elements
    powersgd     a matrix as P Q^T of low rank       topk        the largest elements and their places

Unlike everything before it, this is not the computation of a single process; how near it stays is what this
script prints. Use it where the network is slow, and not before a profile says so.
"""

import torch
import torch.nn.functional as F
from common import GPT, Batch, batches, on_ranks, say

import pycomm.parallel as par
from pycomm.parallel.data.compression import make_compression

RANKS, STEPS = 2, 20


def make() -> tuple[GPT, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = GPT()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data() -> list[Batch]:
    """One batch again and again, so that the loss has somewhere to go."""
    return [next(batches(1))] * STEPS


def train_alone() -> float:
    model, optimizer = make()
    for inputs, targets in data():
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def train(plan: par.Plan) -> tuple[float, int]:
    """The loss after the last step, and the bytes that this rank sends in a step."""
    model, optimizer = par.parallelize(*make(), plan)
    for batch in data():
        with par.count_traffic() as traffic:
            loss = par.step(model, optimizer, batch)
    return loss.item(), traffic.nbytes(group="dp")


def main() -> None:
    expected = train_alone()
    _, whole = train(par.Plan(dp=RANKS))
    plans = {
        "bf16": par.Plan(dp=RANKS, compression="bf16"),
        "int8": par.Plan(dp=RANKS, compression="int8"),
        "powersgd": par.Plan(dp=RANKS, compression=make_compression("powersgd", rank=4)),
        "topk": par.Plan(dp=RANKS, compression=make_compression("topk", ratio=0.05)),
    }
    for name, plan in plans.items():
        loss, nbytes = train(plan)
        assert abs(loss - expected) < 0.2 * expected, f"{name}: loss {loss} and not {expected}"
        say(
            f"{name:9} {nbytes:8,} bytes per step and rank, 1/{whole / nbytes:.1f} of fp32; loss {loss:.3f} "
            f"after {STEPS} steps"
        )
    say(f"compression on {RANKS} ranks stays near one process, whose loss is {expected:.3f}")


if __name__ == "__main__":
    on_ranks(RANKS, main)
