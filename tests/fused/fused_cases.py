"""What the tests of pycomm.fused share: a one-line oracle per function, and the data of a rank."""

import torch
import torch.nn.functional as F

ACTIVATIONS = {
    None: lambda z: z,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "swiglu": lambda z: F.silu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
}
# Relative to the largest entry. Partial sums travel in the dtype, so every rank adds a rounding.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def matmul(a, b, bias=None, activation=None):
    z = a @ b
    return ACTIVATIONS[activation](z if bias is None else z + bias)


def all_gather_matmul(pieces, b, dim=0, bias=None, activation=None):
    return matmul(torch.cat(pieces, dim), b, bias, activation)


def matmul_all_reduce(a_parts, b_parts, bias=None, activation=None):
    return matmul(torch.cat(a_parts, -1), torch.cat(b_parts, 0), bias, activation)


def matmul_reduce_scatter(a_parts, b_parts, sizes, dim=0, bias=None, activation=None):
    return matmul_all_reduce(a_parts, b_parts, bias, activation).split(sizes, dim)


def draw(seed, *shape, dtype=torch.float64):
    """Values around 1; drawn in float64 so that they are the same numbers, rounded, in each dtype."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(actual, expected, dtype=None):
    """actual, in its own dtype, against expected in float64."""
    tolerance = TOLERANCE[dtype or actual.dtype]
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    worst = (actual.double() - expected).abs().max().item() if expected.numel() else 0.0
    assert worst <= tolerance * max(1.0, expected.abs().max().item() if expected.numel() else 0.0), f"differs by {worst}"
