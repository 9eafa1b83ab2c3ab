"""Distributed data parallelism: gradients are summed in buckets, by all-reduce, while backward is still
running.

    python examples/05_ddp.py
    torchrun --nproc-per-node 2 examples/05_ddp.py

    backward      block 3 ... block 2 ... block 1 ... block 0
    bucket 0      full: all_reduce -----> done
    bucket 1                      full: all_reduce -----> done
    bucket 2                                           full: all_reduce -> waited for

Each rank sends 2 (n-1)/n of the size of the gradients, however many ranks there are.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import batches, make, on_ranks, same, say, train_alone
from torch import nn

import pycomm.parallel as par

RANKS = 2


def alone_as_a_class() -> list[float]:
    """As with torch's class of the same name. Two backward passes per step: the first accumulates without
    communication.
    """
    model, optimizer = make()
    ddp = par.data.DistributedDataParallel(model, bucket_mb=0.05)
    losses = []
    for inputs, targets in batches():
        total = torch.zeros(())
        for part in range(2):
            x, y = (t.chunk(2)[part].chunk(RANKS)[dist.get_rank()] for t in (inputs, targets))
            with ddp.no_sync() if part == 0 else contextlib.nullcontext():
                loss = F.cross_entropy(ddp(x).flatten(0, 1), y.flatten()) / 2
                loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / RANKS)
    return losses


def by_a_plan() -> list[float]:
    model, optimizer = par.parallelize(*make(), par.Plan(dp=RANKS, bucket_mb=0.05))
    return [par.step(model, optimizer, batch, microbatches=2, clip=1.0).item() for batch in batches()]


def main() -> None:
    expected = train_alone()
    with par.count_traffic() as traffic:
        losses = alone_as_a_class()
    difference = max(same(losses, expected), same(by_a_plan(), expected))
    gradients = sum(p.numel() * p.element_size() for p in make()[0].parameters())
    buckets, nbytes = traffic.calls("all_reduce") // len(losses), traffic.nbytes("all_reduce") // len(losses)
    say(
        f"per step and rank: {buckets} buckets, {nbytes:,} bytes sent = {nbytes / gradients:.2f} x the "
        "gradients"
    )
    say(f"DDP on {RANKS} ranks equals one process: losses differ by {difference:.0e}")


if __name__ == "__main__":
    on_ranks(RANKS, main)
