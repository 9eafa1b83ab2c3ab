"""Ring attention: queries stay, blocks of keys and values travel around the ring while attention to the last
one is computed.

    python examples/11_ring_attention.py
    torchrun --nproc-per-node 3 examples/11_ring_attention.py

    step          rank 0    rank 1    rank 2
    0 (own)       kv 0      kv 1      kv 2
    1             kv 2      kv 0      kv 1         no rank ever holds the whole sequence
    2             kv 1      kv 2      kv 0

Under a causal mask the first positions see little and the last see all. Zigzag gives every rank an early and
a late chunk, so that all have equal work. There is no limit by the number of heads; 18_hybrid.py joins it
with Ulysses.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import LENGTH, batches, make, on_ranks, same, say, train_alone

import pycomm.parallel as par
from pycomm.parallel.ground import comm
from pycomm.parallel.sequence import positions

RANKS = 3


def attention_alone() -> tuple[float, list[int]]:
    """In place of F.scaled_dot_product_attention, on the positions that `positions` says are this rank's."""
    ring = comm.as_group(None, "ring")
    mine = positions(LENGTH, ring, comm.ALONE, zigzag=True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, LENGTH, 8, generator=generator, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    q, k, v, expected = (x[:, :, mine] for x in (q, k, v, expected))
    return same(par.sequence.ring_attention(q, k, v, ring, is_causal=True), expected), mine.tolist()


def by_a_plan(expected: list[float]) -> tuple[float, comm.Traffic]:
    model, optimizer = par.parallelize(*make(), par.Plan(ring=RANKS))
    losses = []
    for batch in batches():
        with par.count_traffic() as traffic:
            losses.append(par.step(model, optimizer, batch, clip=1.0).item())
    return same(losses, expected), traffic


def main() -> None:
    difference, traffic = by_a_plan(train_alone())
    other, mine = attention_alone()
    held: list[list[int]] = [[]] * RANKS
    dist.all_gather_object(held, mine)
    for rank, places in enumerate(held):
        say(f"rank {rank} holds positions {places}")
    say(
        f"per step: {traffic.calls('send', 'ring')} sends of blocks, {traffic.nbytes('send', 'ring'):,} "
        "bytes per rank"
    )
    say(f"ring attention on {RANKS} ranks equals one process: losses differ by {max(difference, other):.0e}")


if __name__ == "__main__":
    on_ranks(RANKS, main)
