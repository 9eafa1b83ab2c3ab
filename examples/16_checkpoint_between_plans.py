"""Checkpoints: saved under one plan, loaded under any other, bit-exactly, and trained on as if nothing had
happened.

    python examples/16_checkpoint_between_plans.py
    torchrun --nproc-per-node 2 examples/16_checkpoint_between_plans.py

    2 steps: dp=2, zero=1  --save-->  folder  --load-->  2 steps: tp=2     (or pp=2, or dp=2 with zero=3 ...)

What lies in the folder is the original model: parameters by name and in their whole shapes, the optimizer's
state by parameter. Every rank writes what it owns and reads what it needs, so no rank ever holds the whole.
`extra` keeps what else a run needs.
"""

import tempfile
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from common import GPT, batches, make, on_ranks, same, say, train_alone

import pycomm.parallel as par

RANKS = 2


class Run(NamedTuple):
    model: GPT
    optimizer: torch.optim.Optimizer
    train: Callable[[], list[float]]


def shared_folder() -> str:
    """A folder of rank 0's choice, whose name all ranks know."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    return names[0]


def run(plan: par.Plan, steps: slice) -> Run:
    """A model under a plan and a function that trains it with those of the batches that `steps` names."""
    model, optimizer = par.parallelize(*make(), plan)

    def train() -> list[float]:
        return [par.step(model, optimizer, batch, clip=1.0).item() for batch in list(batches())[steps]]

    return Run(model, optimizer, train)


def main() -> None:
    expected, path = train_alone(), shared_folder()
    model, optimizer, train = run(par.Plan(dp=RANKS, zero=1), slice(0, 2))
    first = train()
    par.save(model, optimizer, f"{path}/checkpoint", extra={"step": 2})
    saved = par.full_state_dict(model)
    difference = 0.0
    for plan in (par.Plan(tp=RANKS), par.Plan(pp=RANKS, schedule="zb-h1"), par.Plan(dp=RANKS, zero=3)):
        model, optimizer, train = run(plan, slice(2, None))
        extra = par.load(model, optimizer, f"{path}/checkpoint")
        loaded = par.full_state_dict(model)
        assert extra == {"step": 2} and all(loaded[name].equal(value) for name, value in saved.items())
        losses = first + train()
        difference = max(difference, same(losses, expected))
        say(
            f"saved under dp=2,zero=1, loaded under {plan!s:22} the same bits; losses {losses[1]:.4f} -> "
            f"{losses[-1]:.4f}"
        )
    say(f"checkpoints between plans on {RANKS} ranks equal one process: losses differ by {difference:.0e}")


if __name__ == "__main__":
    on_ranks(RANKS, main)
