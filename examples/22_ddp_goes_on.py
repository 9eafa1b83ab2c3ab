"""Plain DDP goes on after one of its ranks was killed: no restart, no checkpoint.

    python examples/22_ddp_goes_on.py

    step      0        1        2                       2        3
    rank 0    rows 0-2 rows 0-2 PeerError  -- shrink -> rows 0-3 rows 0-3    rank 0
    rank 1    rows 3-5 rows 3-5 killed
    rank 2    rows 6-8 rows 6-8 PeerError  -- shrink -> rows 4-7 rows 4-7    rank 1
    rank 3    rows 9.. rows 9.. PeerError  -- shrink -> rows 8.. rows 8..    rank 2

The rows of a step are dealt among those that are there, so the losses stay those of one process. A rank may
have finished a step that another has not when the third dies: all go on from the state of the furthest.
"""

import os
import signal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import STEPS, batches, make, same, say, train_alone
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.testing import run_ranks

RANKS, VICTIM, AT_STEP = 4, 1, 2


def catch_up(model: torch.nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> list[float]:
    """All take the state of the rank that has finished most steps."""
    done = [0] * dist.get_world_size()
    dist.all_gather_object(done, len(losses))
    state = [(model.state_dict(), optimizer.state_dict(), losses)]
    dist.broadcast_object_list(state, done.index(max(done)))
    model.load_state_dict(state[0][0])
    optimizer.load_state_dict(state[0][1])
    return state[0][2]


def train() -> list[float]:
    model, optimizer = make()
    ddp = DistributedDataParallel(model)
    data = list(batches())
    losses: list[float] = []
    while len(losses) < STEPS:
        if len(losses) == AT_STEP and dist.get_rank() == VICTIM and dist.get_world_size() == RANKS:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        inputs, targets = (x.tensor_split(dist.get_world_size())[dist.get_rank()] for x in data[len(losses)])
        try:
            loss = F.cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            dist.all_reduce(loss.detach_(), dist.ReduceOp.AVG)
        except dist.DistBackendError as error:  # PeerError is one; DDP raises the plain one
            say(f"step {len(losses)}: {error}")
            pycomm.shrink_group()
            losses = catch_up(model, optimizer, losses)
            ddp = DistributedDataParallel(model)
            say(f"step {len(losses)} again on {dist.get_world_size()} ranks")
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports what an optimizer needs, once for all ranks
    results = run_ranks(RANKS, lambda rank: train(), mode="processes", backend="pycomm", fail=False)
    survivors = [losses for losses in results if isinstance(losses, list)]
    assert len(survivors) == RANKS - 1 and all(losses == survivors[0] for losses in survivors), results
    difference = same(survivors[0], train_alone())
    text = "ranks end with the losses of one process: they differ by"
    print(f"{len(survivors)} of {RANKS} {text} {difference:.0e}")


if __name__ == "__main__":
    main()
