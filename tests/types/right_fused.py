"""Products with a collective in them, and strategies as classes."""

import torch
from typing_extensions import assert_type

import pycomm
import pycomm.parallel as par


def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = pycomm.fused.all_gather_matmul(a, b, activation="gelu")
    assert_type(y, torch.Tensor)
    return pycomm.fused.matmul_reduce_scatter(y, b, dim=0)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = par.tensor.ColumnParallelLinear(16, 64)
        self.down = par.tensor.RowParallelLinear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x).relu())
        return y
