"""ZeRO: data parallelism in which no rank keeps what another keeps too.

    python examples/12_zero.py
    torchrun --nproc-per-node 3 examples/12_zero.py

    P = bytes of parameters; what is sent per step is to be multiplied by (n-1)/n

    zero   parameters      gradients   optimizer   sent
                                       state
    0      all             all         all         2 P    all_reduce of gradients
    1      all             all         1/n         2 P    reduce_scatter of gradients, all_gather of values
    2      all             1/n         1/n         2 P    the same, each bucket freed as soon as it is sent
    3      1/n, gathered   1/n         1/n         3 P    all_gather in forward and backward,
           block by block                                 reduce_scatter

The result is the same, so the choice is one of memory. Any torch optimizer works; `model` and `optimizer`
stay the user's objects.
"""

from typing import NamedTuple

from common import batches, make, on_ranks, same, say, train_alone

import pycomm.parallel as par

RANKS = 3


class Trained(NamedTuple):
    losses: list[float]
    sent: int  # bytes, in the last step
    state: int  # bytes of optimizer state on this rank


def train(stage: int) -> Trained:
    model, optimizer = par.parallelize(*make(), f"dp={RANKS},zero={stage},bucket_mb=0.1")
    losses = []
    for batch in batches():
        with par.count_traffic() as traffic:
            losses.append(par.step(model, optimizer, batch, clip=1.0).item())
    states = optimizer.state.values()
    moments = (value for state in states for name, value in state.items() if name != "step")
    state = sum(value.numel() * value.element_size() for value in moments)
    return Trained(losses, traffic.nbytes(group="dp"), state)


def main() -> None:
    expected = train_alone()
    size = sum(p.numel() * p.element_size() for p in make()[0].parameters())
    difference = 0.0
    for stage in range(4):
        losses, sent, state = train(stage)
        difference = max(difference, same(losses, expected))
        unit = size * (RANKS - 1) / RANKS
        say(
            f"zero={stage}: sends {sent:,} bytes = {sent / unit:.2f} P (n-1)/n per step; optimizer state "
            f"{state / size:.2f} P"
        )
    say(f"ZeRO 0 to 3 on {RANKS} ranks equal one process: losses differ by {difference:.0e}")


if __name__ == "__main__":
    on_ranks(RANKS, main)
