"""HSDP: zero divides the model inside each host, and every host has a whole copy of it.

    python examples/21_hsdp.py                                2 simulated hosts with 2 ranks each
    torchrun --nnodes 2 --nproc-per-node 2 ... 21_hsdp.py     2 hosts

    zero=3 on 4 ranks              host0                      host1
                                   rank 0       rank 1        rank 2       rank 3
    zero_group="all"    holds      [##......]   [..##....]    [....##..]   [......##]
                        values     <-------------- gathered over the link, block by block, twice a microbatch
    zero_group="host"   holds      [####....]   [....####]    [####....]   [....####]
                        values     <-- shared memory -->      <-- shared memory -->
                        gradients  summed inside in every microbatch, then once a step
                                   rank 0 with rank 2, rank 1 with rank 3 over the link

The link carries 2 (H-1)/H P per step and host, for any number of microbatches, instead of 3 M (H-1)/H P. The
price is memory: a rank holds P/2 here and not P/4. The result is the same.
"""

from typing import NamedTuple

from common import batches, make, on_ranks, same, say, train_alone

import pycomm.parallel as par

RANKS, HOSTS, MICROBATCHES = 4, "2x2", 3


class Trained(NamedTuple):
    losses: list[float]
    crossing: float  # bytes that cross hosts in the last step, from both ranks of a host
    text: str  # what describe() says


def train(plan: par.Plan) -> Trained:
    model, optimizer = par.parallelize(*make(), plan)
    losses = []
    for batch in batches():
        with par.count_traffic() as traffic:
            losses.append(par.step(model, optimizer, batch, microbatches=MICROBATCHES, clip=1.0).item())
    if plan.zero_group == "all":  # of what a group over both hosts sends, (H-1)/H of (n-1)/n crosses
        crossing = traffic.nbytes(group="dp") * RANKS / (RANKS - 1) / 2
    else:
        crossing = traffic.nbytes(group="dp across hosts") * RANKS / 2
    return Trained(losses, crossing, str(par.describe(model)))


def main() -> None:
    expected = train_alone()
    size = sum(p.numel() * p.element_size() for p in make()[0].parameters())
    difference = 0.0
    for plan in (par.Plan(dp=RANKS, zero=3), par.Plan(dp=RANKS, zero=3, zero_group="host")):
        losses, crossing, text = train(plan)
        difference = max(difference, same(losses, expected))
        say(f"zero_group={plan.zero_group!r}: {crossing / size:.2f} P over the link per step and host")
        say(text)
    say(f"HSDP on {RANKS} ranks equals one process: losses differ by {difference:.0e}")


if __name__ == "__main__":
    on_ranks(RANKS, main, hosts=HOSTS)
