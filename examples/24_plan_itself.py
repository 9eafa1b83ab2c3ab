"""A plan that chooses itself: par.auto predicts what plans take and takes the best, which then trains.

    python examples/24_plan_itself.py                   on two CPU ranks
    python -m pycomm.plan --model gpt3-175b --gpus 1024 --machine h100 --batch 1536

The model is traced on fake tensors, so choosing takes no memory. What a plan sends is known exactly before it
runs: dry_run runs the step of one rank without the others.
"""

import torch
from common import GPT, Batch, batches, make, on_ranks, same, say, train_alone

import pycomm.parallel as par
from pycomm.parallel.planning import dry_run
from pycomm.parallel.planning.planner import ChosenPlan

RANKS = 2


def choose(model: GPT, optimizer: torch.optim.Optimizer, batch: Batch) -> ChosenPlan:
    """Two data ranks at least, so that there is something to send."""
    return par.auto(model, optimizer, batch=batch, world=RANKS, fixed={"dp": RANKS})


def main(predicted: int) -> None:
    expected = train_alone(steps=2)
    model, optimizer = make()
    plan = choose(model, optimizer, next(batches()))
    say(f"chosen: Plan({plan}), {plan.microbatches} microbatches")
    say(par.explain(plan, model, batch=next(batches()), microbatches=plan.microbatches, opt=optimizer))
    model, optimizer = par.parallelize(model, optimizer, plan)
    losses = []
    for batch in batches(2):
        with par.count_traffic() as traffic:
            losses.append(par.step(model, optimizer, batch, microbatches=plan.microbatches, clip=1.0).item())
    say(f"rank 0 sends {traffic.nbytes():,} bytes in a step; dry_run said {predicted:,}")
    say(f"the chosen plan equals one process: losses differ by {same(losses, expected):.0e}")


def sent_by_rank_0() -> int:
    """Before there is any process group."""
    model, optimizer = make()
    plan = choose(model, optimizer, next(batches()))
    (run,) = dry_run(
        model, type(optimizer), next(batches()), plan, ranks=[0], microbatches=plan.microbatches, clip=1.0
    )
    return sum(call.nbytes for call in run.calls)


if __name__ == "__main__":
    torch.set_num_threads(1)
    on_ranks(RANKS, main, sent_by_rank_0())
