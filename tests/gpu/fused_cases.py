"""The cases of pycomm.fused, their tensors, and the results in float64 by torch on the host. Pure, so it is
tested without a GPU.

A case is one call of a form: form.py's, so rows are flattened and z and the gathered input can be asked
for. Tensors are drawn by rank and turn, the same numbers rounded in each dtype; every rank computes what all
have.
"""

from typing import NamedTuple

import torch
from oracle import ACTIVATIONS

from pycomm.fused.problem import Problem

COLLECTIVES = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
# Of the largest entry: partial sums travel in the dtype, so up to 8 roundings of parts of it. A tile that is
# missing, or elsewhere, is wrong by about 1.
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


class Case(NamedTuple):
    """sizes: the pieces of all ranks; (rows,) where nothing is cut. configs: of the kernel, by name
    (fused.py); on the CPU they do not apply."""

    op: str
    sizes: tuple
    n: int
    k: int
    dtype: str = "bfloat16"
    activation: str | None = None
    bias: bool = False
    outer: int = 1
    inner: int = 1
    save: bool = False  # the preactivation
    keep: bool = False  # the gathered input
    dense: bool = False  # b has dense rows; else it is the transpose of a weight
    configs: tuple = ("small",)

    def __str__(self):
        parts = [
            self.op,
            "+".join(map(str, self.sizes)),
            f"n={self.n} k={self.k}",
            self.dtype,
            self.activation or "no activation",
        ]
        parts += [f"outer={self.outer} inner={self.inner}"] * (self.outer * self.inner > 1)
        return " ".join(parts + [name for name in ("bias", "save", "keep", "dense") if getattr(self, name)])

    @property
    def columns(self):
        return 2 * self.n if self.activation == "swiglu" else self.n

    def problem(self, world_size, rank):
        m = self.outer * sum(self.sizes) * self.inner
        pieces = self.sizes if self.op in COLLECTIVES[:2] else ()
        dtype = getattr(torch, self.dtype)
        product = (self.op, m, self.n, self.k, dtype, world_size, rank)
        return Problem(*product, self.activation, self.bias, self.outer, self.inner, pieces)


def ragged(n):
    """Uneven, none a multiple of a tile, and one of them empty."""
    return tuple((61 * rank + 37) % 150 if rank != 1 else 0 for rank in range(n))


def matmul_cases():
    make = lambda *args, **more: Case("matmul", *args, **more)  # noqa: E731
    everything = [make((150,), 72, 40, "float16", name, bias=True, save=True) for name in ACTIVATIONS]
    return [
        make((512,), 512, 256, configs=("default", "pointers", "small")),
        make(
            (512,), 512, 256, activation="gelu_tanh", bias=True, dense=True, configs=("default", "pointers")
        ),
        make((1,), 1, 1, "float32", bias=True),
        make((300,), 264, 136, activation="swiglu", bias=True, configs=("default", "pointers")),
        make((131,), 65, 33, "float32", "silu", bias=True, save=True),
        make((97,), 50, 200, "bfloat16", dense=True),
        *everything,
    ]


def collective_cases(op, n):
    """For n ranks."""
    gathers, cut = op == "all_gather_matmul", op != "matmul_all_reduce"
    even, uneven = ((256,) * n, ragged(n)) if cut else ((256 * n,), (sum(ragged(n)),))
    shots = ("one_shot", "two_shot") if op == "matmul_all_reduce" else ("small",)
    make = lambda *args, **more: Case(op, *args, **more)  # noqa: E731
    found = [
        make(even, 264, 128, configs=("default", "pointers", "crowded")),
        make(uneven, 72, 40, activation="gelu_tanh", bias=True, save=True, keep=gathers, configs=shots),
        make(uneven, 72, 40, "float16", "swiglu", bias=True, save=True, dense=True, configs=shots),
        make(uneven, 65, 33, "float32", "silu", bias=True, keep=gathers, configs=shots),
        make(uneven, 72, 40, "float16", "relu", configs=shots),
        make(even, 1, 8, "bfloat16", bias=True, configs=shots),
    ]
    if cut:
        found += [
            make(
                tuple(size // 5 for size in uneven),
                72,
                40,
                "bfloat16",
                "gelu",
                bias=True,
                outer=2,
                inner=3,
                keep=gathers,
            ),
            make((70, *[0] * (n - 1)), 72, 40),
        ]
    return found


def draw(case, world_size, turn):
    """[(a, b, bias)] of all ranks, on the host. a: rows (outer, piece or whole, inner) of k."""
    generator = torch.Generator().manual_seed(7 + turn)
    dtype, cut_here = getattr(torch, case.dtype), case.op == "all_gather_matmul"

    def values(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    bias = values(case.columns)
    found = []
    for rank in range(world_size):
        rows = case.outer * (case.sizes[rank] if cut_here else sum(case.sizes)) * case.inner
        b = values(case.columns, case.k, scale=case.k**-0.5).t()
        if cut_here:  # every rank has columns, and a bias, of its own
            bias = values(case.columns)
        found.append((values(rows, case.k), b.contiguous() if case.dense else b, bias if case.bias else None))
    return found


def expected(case, tensors, rank):
    """(result, preactivation, gathered input or None) of a rank, in float64. tensors: of all ranks."""
    wide = [tuple(None if x is None else x.double() for x in own) for own in tensors]
    a, b, bias = wide[rank]
    if case.op == "all_gather_matmul":
        pieces = [
            own[0].view(case.outer, size, case.inner, case.k)
            for own, size in zip(wide, case.sizes, strict=True)
        ]
        a = torch.cat(pieces, 1).reshape(-1, case.k)
        z = a @ b
    else:
        z = sum(own[0] @ own[1] for own in wide)
        if case.op == "matmul_reduce_scatter":
            whole = z.view(case.outer, sum(case.sizes), case.inner, case.columns)
            z = whole.split(case.sizes, 1)[rank].reshape(-1, case.columns)
    z = z if bias is None else z + bias
    return ACTIVATIONS[case.activation](z), z, a if case.op == "all_gather_matmul" else None


def wrong(case, got, want):
    """What differs between (result, preactivation or None, gathered or None) and what was expected; "" if
    nothing.
    """
    for name, mine, theirs in zip(("result", "preactivation", "gathered input"), got, want, strict=True):
        asked = {
            "result": True,
            "preactivation": case.save and case.activation is not None,
            "gathered input": case.keep,
        }[name]
        if not asked:
            continue
        if mine is None or mine.shape != theirs.shape:
            return (
                f"{name}: {None if mine is None else tuple(mine.shape)}, expected shape {tuple(theirs.shape)}"
            )
        if theirs.numel() == 0:
            continue
        difference = (mine.cpu().double() - theirs).abs().nan_to_num(float("inf"))
        allowed = (
            0.0 if name == "gathered input" else TOLERANCES[case.dtype] * max(1.0, theirs.abs().max().item())
        )
        worst = int(difference.argmax())
        if difference.flatten()[worst] > allowed:
            at = divmod(worst, theirs.shape[1])
            found, right = mine[at].item(), theirs[at].item()
            return f"{name} at {at} is {found:.6g}, expected {right:.6g} within {allowed:.2g}"
    return ""
