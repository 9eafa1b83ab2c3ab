"""The reference results that all tests share, a line or two for each operation: reductions, collectives,
products with an activation. tests/gpu uses them too, for tensors of a GPU."""

import functools

import numpy as np
import torch
import torch.nn.functional as F

# --- collectives --------------------


def reduced(op, v, factor=1.0):
    """The reduction of the rows of v from left to right: 16-bit floats in f32, rounded once; integers wrap,
    and avg truncates. factor: of premul_sum."""
    if v.dtype.is_floating_point or v.dtype.is_complex:
        rows = list(v.float() if v.dtype in (torch.float16, torch.bfloat16) else v)
        rows = [row * factor for row in rows] if op == "premul_sum" else rows
        fold = {"product": _product, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
        result = functools.reduce(fold, rows)
        if op == "avg":
            parts = torch.view_as_real(result) if v.is_complex() else result
            result = torch.view_as_complex(parts / len(rows)) if v.is_complex() else parts / len(rows)
        return result.to(v.dtype)
    rows = list(v.numpy())
    folds = {"product": np.multiply, "min": np.minimum, "max": np.maximum}
    folds |= {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
    with np.errstate(over="ignore"):
        result = functools.reduce(folds.get(op, np.add), rows)
    if op == "avg" and result.dtype.kind == "i":
        return torch.from_numpy(result).div(len(rows), rounding_mode="trunc")
    result = result // len(rows) if op == "avg" else result
    return torch.from_numpy(np.asarray(result, dtype=v.numpy().dtype))


def over_hosts(op, v, hosts, factor=1.0):
    """reduced() as two levels do it: within each host, then over hosts in their order, each rounded once;
    16-bit floats are divided within the host. hosts: of each row.
    """
    if len(set(hosts)) == 1 or not (v.dtype.is_floating_point or v.dtype.is_complex):
        return reduced(op, v, factor)
    narrow, n = v.dtype.itemsize == 2, len(v)
    rows = [v[[r for r in range(n) if hosts[r] == host]] for host in dict.fromkeys(hosts)]
    inside = "sum" if op == "avg" else op
    if narrow and op == "avg":
        sums = [(reduced("sum", row.float()) / n).to(v.dtype) for row in rows]
    else:
        sums = [reduced(inside, row, factor) for row in rows]
    total = reduced("sum" if op in ("avg", "premul_sum") else op, torch.stack(sums))
    if op != "avg" or narrow:
        return total
    return torch.view_as_complex(torch.view_as_real(total) / n) if total.is_complex() else total / n


def _product(a, b):
    """Of complex numbers by parts, as the runtime multiplies them."""
    if not a.is_complex():
        return a * b
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)


def collective(op, rank, inputs, reduction=None, root=0):
    """What `rank` holds afterwards; None: it gets nothing. inputs: those of all ranks, flat; reduction: of
    their whole length."""
    part = lambda x: x.tensor_split(len(inputs))[rank]  # noqa: E731
    match op:
        case "all_reduce":
            return reduction
        case "reduce":
            return reduction if rank == root else None
        case "reduce_scatter":
            return part(reduction)
        case "broadcast":
            return inputs[root]
        case "all_gather":
            return torch.cat(list(inputs))
        case "all_to_all":
            return torch.cat([part(x) for x in inputs])
        case "gather":
            return torch.cat(list(inputs)) if rank == root else None
        case "scatter":
            return part(inputs[root])
        case "send_recv":  # every rank sends to the next one
            return inputs[rank - 1]
    raise AssertionError(op)


# --- products, as pycomm.fused computes them --------------------

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
    """Asserts that actual, in its own dtype, is close to expected, in float64."""
    tolerance = TOLERANCE[dtype or actual.dtype]
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    worst = (actual.double() - expected).abs().max().item() if expected.numel() else 0.0
    assert worst <= tolerance * max(1.0, expected.abs().max().item() if expected.numel() else 0.0), (
        f"differs by {worst}"
    )
