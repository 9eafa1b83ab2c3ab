"""A training under a plan goes on when a rank is killed: no restart of those that live, nothing on disk.

    python examples/23_train_through_kills.py                            the others go on as three
    python -m pycomm.run --nproc 4 examples/23_train_through_kills.py    a new process takes its place

    step      0    1    2    3                                 2    3    4 ...
    rank 0    .    .  snapshot  PeerError   from the snapshot, repeats
    rank 1    .    .  snapshot  killed      (replaced: a new process)
    rank 2    .    .  snapshot  PeerError   from the snapshot, repeats
    rank 3    .    .  snapshot  PeerError   from the snapshot, repeats

What the killed rank had under zero=1, its part of the optimizer's state, is in memory that outlives it.
"""

import os
import signal

import torch
import torch.distributed as dist
from common import batches, make, same, say, train_alone

import pycomm.parallel as par
from pycomm.testing import run_ranks

RANKS, VICTIM, AT_STEP, STEPS = 4, 1, 3, 8


def train() -> dict[int, float]:
    """The losses of the steps that this process has taken part in, by their numbers."""
    model, optimizer = make()
    plan = par.Plan(dp=RANKS, zero=1)
    run = par.resilient(
        model, optimizer, plan, snapshot_every=2, wait=120
    )  # for a replacement, if there can be
    data = list(batches(STEPS))
    losses: dict[int, float] = {}
    for number in run.steps(STEPS):
        if number == AT_STEP and dist.get_rank() == VICTIM and run.recoveries == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = run.step(data[number], clip=1.0)
        assert loss is not None  # each rank has a part
        losses[number] = loss.item()
    alone = train_alone(steps=STEPS)
    difference = same(list(losses.values()), [alone[number] for number in losses])
    again = f"Plan({run.plan}) at the end, {run.repeated} step taken again"
    say(f"{again}; losses differ from those of one process by {difference:.0e}")
    return losses


def main() -> None:
    if dist.is_torchelastic_launched():
        train()
        return
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports what an optimizer needs, once for all ranks
    results = run_ranks(RANKS, lambda rank: train(), mode="processes", backend="pycomm", fail=False)
    survivors = [losses for losses in results if isinstance(losses, dict)]
    assert len(survivors) == RANKS - 1 and all(losses == survivors[0] for losses in survivors), results
    print(f"{len(survivors)} of {RANKS} ranks went on")


if __name__ == "__main__":
    main()
