"""Expert parallelism: the experts of a mixture lie on different ranks, and tokens travel to the experts that
were chosen for them.

    python examples/14_expert_parallel.py
    torchrun --nproc-per-node 2 examples/14_expert_parallel.py

    rank 0   tokens a b c   gate   experts 0 1 2    a>3 b>0 c>1    -- all_to_all -->  experts compute
    rank 1   tokens d e f   gate   experts 3 4      d>2 e>4 f>3   <-- all_to_all --   results go back

Each token goes to its two best experts and gets their weighted sum. No token is dropped; a loss term asks for
balance. In one process the very same module is a plain mixture of experts.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from common import batches, make, on_ranks, same, say, train_alone
from torch import nn

import pycomm.parallel as par
from pycomm.parallel.ground.comm import Traffic

RANKS, EXPERTS, WIDTH = 2, 5, 24


class Trained(NamedTuple):
    losses: list[float]
    traffic: Traffic
    experts: list[int]  # of each layer that this rank holds


def mixture(group: dist.ProcessGroup | None = None) -> par.MoE:
    def expert() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH))

    return par.MoE(WIDTH, expert, EXPERTS, top_k=2, aux_loss=0.01, group=group)


def layer_alone() -> float:
    """The module by itself: with a group, each rank keeps its experts and brings its own tokens."""
    x = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.manual_seed(1)
    expected = mixture().double()(x)
    torch.manual_seed(1)
    layer = mixture(dist.group.WORLD).double()
    mine = dist.get_rank()
    return same(layer(x.chunk(RANKS)[mine]), expected.chunk(RANKS)[mine])


def train(plan: par.Plan) -> Trained:
    model, optimizer = par.parallelize(*make(mlp=mixture), plan)
    with par.count_traffic() as traffic:
        losses = [par.step(model, optimizer, batch, clip=1.0).item() for batch in batches()]
    held = [len(layer.experts) for layer in model.modules() if isinstance(layer, par.MoE)]
    return Trained(losses, traffic, held)


def main() -> None:
    expected = train_alone(mlp=mixture)
    losses, traffic, held = train(par.Plan(ep=RANKS))
    difference = max(same(losses, expected), layer_alone())
    counts = [(0, 0)] * RANKS
    dist.all_gather_object(counts, (held[0], traffic.nbytes("all_to_all") // len(losses)))
    for rank, (experts, nbytes) in enumerate(counts):
        say(
            f"rank {rank}: {experts} of {EXPERTS} experts per layer, {nbytes:,} bytes of tokens sent per step"
        )
    say(f"experts on {RANKS} ranks equal one process: losses differ by {difference:.0e}")


if __name__ == "__main__":
    on_ranks(RANKS, main)
