"""Megatron sequence parallelism: what tensor parallelism leaves whole (norms, dropout, residuals) is cut
along the sequence.

    python examples/09_megatron_sequence_parallel.py
    torchrun --nproc-per-node 2 examples/09_megatron_sequence_parallel.py

    rank 0   positions 0..11 --+            +-- heads 0 1, all positions --+              +-- positions 0..11
             norm              | all_gather |                              |reduce_scatter|   + norm
    rank 1   positions 12..23 -+            +-- head 2,    all positions --+              +-- positions 12..23

An all_reduce is a reduce_scatter and an all_gather, so the same bytes travel; activations outside of
attention and MLP take 1/tp of the memory. Use it wherever tp is used on long sequences.
"""

from typing import NamedTuple

import torch
from common import LENGTH, ROWS, batches, make, on_ranks, same, say, train_alone

import pycomm.parallel as par
from pycomm.parallel.ground.comm import Traffic

RANKS, WIDTH, LAYERS = 2, 24, 4


class Trained(NamedTuple):
    losses: list[float]
    traffic: Traffic  # of the last step
    elements: int  # of the hidden state between two blocks on this rank


def train(plan: par.Plan) -> Trained:
    model, optimizer = par.parallelize(*make(), plan)
    seen: list[int] = []
    norm = model.get_submodule("blocks.1.norm1")
    norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].numel()))
    losses = []
    for batch in batches():
        with par.count_traffic() as traffic:
            losses.append(par.step(model, optimizer, batch, clip=1.0).item())
    return Trained(losses, traffic, seen[-1])


def main() -> None:
    expected = train_alone()
    plain, plain_traffic, plain_elements = train(par.Plan(tp=RANKS))
    cut, cut_traffic, cut_elements = train(par.Plan(tp=RANKS, megatron_sp=True))
    difference = max(same(plain, expected), same(cut, expected))
    assert (plain_elements, cut_elements) == (ROWS * LENGTH * WIDTH, ROWS * LENGTH * WIDTH // RANKS)
    hidden = ROWS * LENGTH * WIDTH * torch.float64.itemsize
    say(f"hidden state between blocks: {hidden:,} bytes with tp, {hidden // RANKS:,} with megatron_sp")
    for name, traffic in (("tp", plain_traffic), ("megatron_sp", cut_traffic)):
        calls = {op: traffic.calls(op, "tp") for op in ("all_reduce", "all_gather", "reduce_scatter")}
        say(f"{name:12} calls per step {calls}, {traffic.nbytes(group='tp'):,} bytes per rank")
    say(f"Megatron sequence parallel on {RANKS} ranks equals one process: losses differ by {difference:.0e}")


if __name__ == "__main__":
    on_ranks(RANKS, main)
