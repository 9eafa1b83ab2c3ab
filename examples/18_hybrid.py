"""Hybrids: any product of the strategies, by one plan. The training loop is the same line for all of them.

    python examples/18_hybrid.py
    torchrun --nproc-per-node 8 examples/18_hybrid.py --plan dp=2,tp=2,pp=2,zero=3

    axes, outer to inner: pp dp ep ring ulysses tp        pp=2, dp=2, tp=2 on 8 ranks

                  stage 0            stage 1
    dp 0     tp: rank 0 rank 1   tp: rank 4 rank 5        tp talks most, so its ranks are neighbours;
    dp 1     tp: rank 2 rank 3   tp: rank 6 rank 7        pp talks least

The gradient norm is of the whole model, each parameter counted once; the loss is the mean over all tokens of
the batch.
"""

import argparse
from collections.abc import Sequence

from common import batches, make, on_ranks, same, say, train_alone

import pycomm.parallel as par

PLANS = (
    "dp=2,tp=2,pp=2,zero=1",
    "dp=2,tp=2,pp=2,zero=3,schedule=zbv,checkpoint",
    "pp=2,tp=2,dp=2,zero=2,megatron_sp,schedule=interleaved",
    "dp=2,ring=2,ulysses=2,zero=3",
)


def main(plans: Sequence[str]) -> None:
    expected = train_alone(steps=2)
    difference = 0.0
    for plan in map(par.Plan.parse, plans):
        model, optimizer = par.parallelize(*make(), plan)
        losses = []
        for batch in batches(2):
            with par.count_traffic() as traffic:
                losses.append(par.step(model, optimizer, batch, microbatches=3, clip=1.0).item())
        error = same(losses, expected)
        difference = max(difference, error)
        say(f"{plan!s:65} rank 0 sends {traffic.nbytes():10,} bytes per step; differs by {error:.0e}")
    say(
        f"{len(plans)} hybrids on {plan.world_size} ranks equal one process: losses differ by "
        f"{difference:.0e}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plan", action="append", help="instead of the plans in this file; may be given several times"
    )
    plans = parser.parse_args().plan or PLANS
    on_ranks(par.Plan.parse(plans[0]).world_size, main, plans)
