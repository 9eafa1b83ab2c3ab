"""Ulysses: each rank has a piece of the sequence; for attention, an all-to-all gives it all positions of some
heads instead.

    python examples/10_ulysses.py
    torchrun --nproc-per-node 2 examples/10_ulysses.py

                     rank 0              rank 1                          rank 0         rank 1
                positions 0..11    positions 12..23                 positions 0..23    positions 0..23
    head 0            a                   b                               a b
    head 1            c                   d           all_to_all          c d
    head 2            e                   f         ------------->                         e f

What is sent shrinks with the number of ranks. Heads need not divide (three over two here); no more ranks than
heads have work.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import LENGTH, batches, make, on_ranks, same, say, train_alone

import pycomm.parallel as par
from pycomm.parallel.ground.comm import Traffic

RANKS = 2


def attention_alone() -> float:
    """In place of F.scaled_dot_product_attention, on this rank's positions of q, k and v: (batch, heads, T /
    ranks, head size).
    """
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, LENGTH, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(
        2, 2, 3, LENGTH, 8, generator=generator, dtype=torch.float64
    )  # 3 key heads for 6 query heads
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mine = dist.get_rank()
    q, k, v, expected = (x.chunk(RANKS, dim=2)[mine] for x in (q, k, v, expected))
    return same(par.sequence.ulysses_attention(q, k, v, is_causal=True), expected)


def by_a_plan(expected: list[float]) -> tuple[float, Traffic]:
    """The model is as it was: its hidden state is cut before the first block, and its calls of attention are
    exchanged.
    """
    model, optimizer = par.parallelize(*make(), par.Plan(ulysses=RANKS))
    losses = []
    for batch in batches():
        with par.count_traffic() as traffic:
            losses.append(par.step(model, optimizer, batch, clip=1.0).item())
    return same(losses, expected), traffic


def main() -> None:
    difference, traffic = by_a_plan(train_alone())
    difference = max(difference, attention_alone())
    say(
        f"per step: {traffic.calls('all_to_all')} all_to_all (2 forward, 2 backward per layer), "
        f"{traffic.nbytes('all_to_all'):,} bytes"
    )
    say(f"Ulysses on {RANKS} ranks equals one process: losses differ by {difference:.0e}")


if __name__ == "__main__":
    on_ranks(RANKS, main)
