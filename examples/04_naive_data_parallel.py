"""Naive data parallelism: every rank computes gradients of its own rows; rank 0 gathers, adds and broadcasts
them.

    python examples/04_naive_data_parallel.py

    rank 0   rows 0..3  -> g0 <- gather -- g1, g2      (g0 + g1 + g2) / 3 -- broadcast -> all
    rank 1   rows 4..7  -> g1
    rank 2   rows 8..11 -> g2

Read this first: it is the whole idea of data parallelism, and it shows why nobody stops here: the time of
rank 0 grows with the number of ranks. 05_ddp.py does the same sum by an all-reduce, while backward is still
running.
"""

import torch.distributed as dist
import torch.nn.functional as F
from common import batches, make, on_ranks, same, say, train_alone
from torch import nn

import pycomm.parallel as par

RANKS = 3


def alone_as_a_class() -> list[float]:
    """A plain training loop: only the wrapper and sync_gradients() are new."""
    model, optimizer = make()
    naive = par.data.NaiveDataParallel(model)
    losses = []
    for inputs, targets in batches():
        inputs, targets = (x.chunk(RANKS)[dist.get_rank()] for x in (inputs, targets))
        loss = F.cross_entropy(naive(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        naive.sync_gradients()  # gradients := their mean over the ranks
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / RANKS)
    return losses


def by_a_plan() -> list[float]:
    model, optimizer = par.parallelize(*make(), par.Plan(dp=RANKS, grad_sync="naive"))
    return [par.step(model, optimizer, batch, clip=1.0).item() for batch in batches()]


def main() -> None:
    expected = train_alone()
    with par.count_traffic() as traffic:
        losses = alone_as_a_class()
    difference = max(same(losses, expected), same(by_a_plan(), expected))
    into_rank_0 = [0] * RANKS
    dist.all_gather_object(into_rank_0, traffic.nbytes("gather") // len(losses))
    say(f"gathered per step: {sum(into_rank_0):,} bytes into rank 0, 0 bytes into each of the others")
    say(f"naive data parallel on {RANKS} ranks equals one process: losses differ by {difference:.0e}")


if __name__ == "__main__":
    on_ranks(RANKS, main)
