"""Tensor parallelism: every matrix is cut over the ranks, and all ranks work on the same tokens.

    python examples/08_tensor_parallel.py
    torchrun --nproc-per-node 2 examples/08_tensor_parallel.py

    x on all ranks --> | columns of W1 | --> | rows of W2 | --> sum over ranks (all_reduce) --> y on all ranks
    rank 0               h0 = f(x A0)         h0 B0  ---+
    rank 1               h1 = f(x A1)         h1 B1  ---+--> y = h0 B0 + h1 B1

Attention is cut by heads; three heads over two ranks are two and one. Embedding and head are cut by
vocabulary, and the loss is computed without ever joining the logits. A plain model is cut in place: no layer
has to be written for it.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import batches, make, on_ranks, same, say, train_alone
from torch import nn

import pycomm.parallel as par
from pycomm.parallel.ground.comm import Traffic
from pycomm.parallel.tensor import parallelize_tensor

RANKS = 2


class Trained(NamedTuple):
    difference: float  # of the losses from those of one process
    traffic: Traffic  # of the last step
    parameters: int  # that this rank holds


def layers_alone() -> float:
    """Two layers in the conventions of torch.nn.Linear; 33 hidden features over 2 ranks are 17 and 16."""
    torch.manual_seed(0)
    first, second = nn.Linear(16, 33).double(), nn.Linear(33, 16).double()
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    expected = second(F.gelu(first(x)))
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    column = par.tensor.ColumnParallelLinear.from_module(first, gather_output=False)
    row = par.tensor.RowParallelLinear.from_module(second, input_is_parallel=True)
    y = row(F.gelu(column(x)))
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    return max(same(y, expected), same(grad, expected_grad))


def by_a_plan(expected: list[float]) -> Trained:
    model, optimizer = par.parallelize(*make(), par.Plan(tp=RANKS))
    losses = []
    for batch in batches():
        with par.count_traffic() as traffic:
            losses.append(par.step(model, optimizer, batch, clip=1.0).item())
    return Trained(same(losses, expected), traffic, sum(p.numel() for p in model.parameters()))


def main() -> None:
    expected = train_alone()
    whole = make()[0]
    say(f"What is found in the model:\n{parallelize_tensor(make()[0], dist.group.WORLD)}\n")
    difference, traffic, parameters = by_a_plan(expected)
    difference = max(difference, layers_alone())
    say(
        f"per step: {traffic.calls('all_reduce', 'tp')} all_reduce over tp, "
        f"{traffic.nbytes('all_reduce', 'tp'):,} bytes per rank"
    )
    say(f"rank 0 holds {parameters:,} of {sum(p.numel() for p in whole.parameters()):,} parameters")
    say(f"tensor parallel on {RANKS} ranks equals one process: losses differ by {difference:.0e}")


if __name__ == "__main__":
    on_ranks(RANKS, main)
