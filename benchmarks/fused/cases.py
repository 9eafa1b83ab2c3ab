"""What is measured: an operation, M x N x K, a dtype, what follows the product; and a rank's tensors for it.

M, N, K are those of one rank's product, as in pycomm.explain: all_gather_matmul's M counts the gathered rows,
matmul_reduce_scatter's and matmul_all_reduce's K is a rank's part of the inner dimension, N counts columns of
the result (swiglu has twice as many in b).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch

    from pycomm.fused.problem import Activation, Op

# bare: neither bias nor activation; none: a bias alone
Epilogue: TypeAlias = Literal["bare", "none", "relu", "silu", "gelu", "gelu_tanh", "swiglu"]
DtypeName: TypeAlias = Literal["f32", "f16", "bf16"]
OPS: tuple[Op, ...] = ("matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
BARE: Final = "bare"
EPILOGUES: tuple[Epilogue, ...] = (BARE, "none", "relu", "silu", "gelu", "gelu_tanh", "swiglu")
DTYPES: dict[DtypeName, Literal["float32", "float16", "bfloat16"]] = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
}
# Largest difference from the exact result, over its largest entry. Partial sums travel in the dtype: every
# rank adds a rounding.
TOLERANCES: dict[DtypeName, float] = {"f32": 2e-5, "f16": 5e-3, "bf16": 4e-2}


class Shape(NamedTuple):
    m: int
    n: int
    k: int


class Case(NamedTuple):
    op: Op
    m: int
    n: int
    k: int
    dtype: DtypeName
    epilogue: Epilogue

    @property
    def activation(self) -> Activation | None:
        return None if self.epilogue == BARE or self.epilogue == "none" else self.epilogue

    @property
    def bias(self) -> bool:
        return self.epilogue != BARE

    @property
    def columns(self) -> int:
        """Of b."""
        return 2 * self.n if self.epilogue == "swiglu" else self.n

    @property
    def flops(self) -> int:
        """Of one rank's product."""
        return 2 * self.m * self.columns * self.k

    @property
    def shape(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    def world_size(self, ranks: int) -> int:
        return 1 if self.op == "matmul" else ranks

    def __str__(self) -> str:
        return f"{self.op} {self.shape} {self.dtype} {self.epilogue}"


class Tensors(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    weights: torch.Tensor  # gradient of the result, for the backward pass

    def to(self, dtype: torch.dtype) -> Tensors:
        bias = None if self.bias is None else self.bias.to(dtype)
        return Tensors(self.a.to(dtype), self.b.to(dtype), bias, self.weights.to(dtype))


def parse_shapes(text: str) -> list[Shape]:
    """Of "512x1024x2048,...", M x N x K. Raises ValueError."""
    found: list[Shape] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,7})x(\d{1,7})x(\d{1,7})", part.strip())
        if not match or "0" in match.groups():
            raise ValueError(
                f"--shapes {part!r}: must be MxNxK, whole numbers from 1 on, with commas between shapes"
            )
        found.append(Shape(*map(int, match.groups())))
    return found


def make_tensors(case: Case, world_size: int, rank: int, device: torch.device) -> Tensors:
    """This rank's. Values around 1, the product's too; b is the transpose of a weight (columns, K), as
    torch.nn.Linear has it.
    """
    import torch

    dtype, rows = getattr(torch, DTYPES[case.dtype]), case.m // world_size
    generator = torch.Generator(device).manual_seed(1 + rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    a = draw(rows if case.op == "all_gather_matmul" else case.m, case.k)
    b = (draw(case.columns, case.k) * case.k**-0.5).t()
    own = case.op == "all_gather_matmul"  # the others add it to a sum over ranks: the same bias on all
    generator.manual_seed(1000 + rank * own)
    bias = draw(case.columns) if case.bias else None
    # matmul_all_reduce takes the gradient of its result to be equal on all ranks.
    generator.manual_seed(2000 + rank * (case.op != "matmul_all_reduce"))
    weights = draw(rows if case.op == "matmul_reduce_scatter" else case.m, case.n)
    return Tensors(a, b, bias, weights)
