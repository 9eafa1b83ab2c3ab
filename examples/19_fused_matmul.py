"""Products fused with communication: the MLP of a transformer under Megatron sequence parallelism, by hand.

    python examples/19_fused_matmul.py
    torchrun --nproc-per-node 2 examples/19_fused_matmul.py

    rank 0   0..6  --+               +-- h0 = gelu(x W0), all positions --- h0 V0 --+         +-- 0..6
    positions        | all_gather    |                                              | reduce_ |   positions
    rank 1   7..12 --+ inside matmul +-- h1 = gelu(x W1), all positions --- h1 V1 --+ scatter +-- 7..12

Each line of mlp() is a product, a collective, bias and activation; its backward pass is the other one of the
two. The same lines run on CPUs and on GPUs, where the four can be one kernel. Whether they are, and why, says
pycomm.explain; PYCOMM_FUSED forces it.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import on_ranks, same, say
from torch import Tensor, nn

import pycomm
from pycomm import fused

RANKS, BATCH, LENGTH, WIDTH, HIDDEN = 2, 3, 13, 16, 64


def mlp(x: Tensor, w: Tensor, w_bias: Tensor, v: Tensor, v_bias: Tensor, sizes: list[int]) -> Tensor:
    """x: positions of this rank. w, w_bias: its hidden features; v: their columns; v_bias: whole."""
    h = fused.all_gather_matmul(x, w.t(), dim=1, sizes=sizes, bias=w_bias, activation="gelu")
    return fused.matmul_reduce_scatter(h, v.t(), dim=1, sizes=sizes, bias=v_bias)


def alone(x: Tensor, first: nn.Linear, second: nn.Linear) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The result, and the gradients of x and of the four parameters, in one process."""
    x = x.clone().requires_grad_()
    y = second(F.gelu(first(x)))
    return y, torch.autograd.grad(y.square().sum(), [x, first.weight, first.bias, second.weight, second.bias])


def on_this_rank(x: Tensor, first: nn.Linear, second: nn.Linear) -> float:
    """The largest difference from one process, of this rank's parts of the same."""
    rank = dist.get_rank()
    y, gradients = alone(x, first, second)

    def mine(tensor: Tensor, dim: int) -> Tensor:
        return tensor.detach().tensor_split(RANKS, dim)[rank].clone().requires_grad_()

    bias = second.bias.detach().clone().requires_grad_()
    parts = mine(x, 1), mine(first.weight, 0), mine(first.bias, 0), mine(second.weight, 1), bias
    sizes = [piece.shape[1] for piece in x.tensor_split(RANKS, 1)]  # 13 positions over 2 ranks are 7 and 6
    out = mlp(*parts, sizes)
    found = torch.autograd.grad(out.square().sum(), parts)
    whole = [mine(gradient, dim) for gradient, dim in zip(gradients, (1, 0, 0, 1), strict=False)]
    return max(map(same, [out, *found], [mine(y, 1), *whole, gradients[4]]))


def main() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, HIDDEN).double(), nn.Linear(HIDDEN, WIDTH).double()
    difference = on_this_rank(torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64), first, second)
    say("On 8 GPUs with one rank each, where nothing was measured yet:")
    # the products of an MLP of 8192 x 28672, of which every rank has 3584 hidden features
    explain_on_gpu = functools.partial(pycomm.explain, device="cuda", dtype="bfloat16")
    for rows in (512, 8192):
        say(explain_on_gpu("all_gather_matmul", (rows, 3584, 8192), 8, activation="gelu"))
        say(explain_on_gpu("matmul_reduce_scatter", (rows, 8192, 3584), 8))
    say("Here:")
    rows, hidden = BATCH * LENGTH, HIDDEN // RANKS
    say(pycomm.explain("all_gather_matmul", (rows, hidden, WIDTH), RANKS, dtype="float64", activation="gelu"))
    say(pycomm.explain("matmul_reduce_scatter", (rows, WIDTH, hidden), RANKS, dtype="float64"))
    say(
        f"fused products on {RANKS} ranks equal one process: outputs and gradients differ by {difference:.0e}"
    )


if __name__ == "__main__":
    on_ranks(RANKS, main)
