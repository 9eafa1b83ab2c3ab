"""What the tests of sequence parallelism share: attention on a rank's piece against
F.scaled_dot_product_attention on the whole sequence, in fp64, in one process.
"""

import itertools
from typing import NamedTuple

import tolerance
import torch
import torch._dynamo  # noqa: F401  (checkpoint imports it at its first use; once here, not in every rank)
import torch.distributed as dist
import torch.nn.functional as F

from pycomm.groups import as_group
from pycomm.parallel.sequence import split

# Roundings that attention may have (tolerance.py), those of exp among them: up to 3.5 in fp32 and 0.7 in bf16
# were seen. What is expected is itself computed in fp64.
ROUNDINGS = {torch.float64: 32, torch.float32: 8, torch.bfloat16: 1}

# (batch, query heads, key heads, length, head size, value head size)
SHAPES = [
    (2, 4, 4, 16, 8, 8),
    (1, 3, 3, 23, 5, 5),
    (2, 6, 2, 13, 4, 4),
    (1, 6, 3, 17, 8, 3),
    (1, 1, 1, 9, 4, 4),
    (2, 5, 1, 7, 2, 2),
    (1, 2, 2, 3, 4, 4),
    (1, 2, 1, 1, 4, 4),
]


class Data(NamedTuple):
    """Of the whole sequence. inputs: q, k, v and the gradient of out. expected, in fp64, and its sizes
    (tolerance.py): out, dq, dk, dv.
    """

    inputs: list
    expected: tuple
    sizes: tuple


def make(shape, dtype, causal, factor=1.0):
    """factor: of q and k."""
    batch, q_heads, k_heads, length, size, v_size = shape
    generator = torch.Generator().manual_seed(0)
    shapes = [(q_heads, size), (k_heads, size), (k_heads, v_size), (q_heads, v_size)]
    q, k, v, grad = (
        torch.randn(batch, heads, length, width, generator=generator, dtype=torch.float64)
        for heads, width in shapes
    )
    inputs = [x.to(dtype) for x in (q * factor, k * factor, v, grad)]
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    expected = (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].double()))
    return Data(inputs, expected, tolerance.attention(*inputs, causal))


def close(actual, data, name, held=None, roundings=None):
    """actual: (out, dq, dk, dv), of the positions `held` or of all."""
    roundings = ROUNDINGS[actual[0].dtype] if roundings is None else roundings
    for what, value, whole, size in zip(
        ("out", "dq", "dk", "dv"), actual, data.expected, data.sizes, strict=True
    ):
        piece = whole if held is None else split.cut(whole, 2, held)
        # the gradient of the scores is a difference of two terms, and `size` counts both
        allowed = roundings / 2 if what in ("dq", "dk") else roundings
        tolerance.near(f"{name} {what}", value.detach(), piece, size, allowed)


def check(data, held, function, name, roundings=None):
    """Runs function(q, k, v) on this rank's piece, forward and backward."""
    q, k, v, grad = (split.cut(x, 2, held) for x in data.inputs)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = function(q, k, v)
    results = (out, *torch.autograd.grad(out, (q, k, v), grad))
    close(results, data, name, held, roundings)
    return results


def table(dtypes):
    cases = itertools.product(SHAPES, dtypes, (False, True))
    return [
        (f"{shape} {str(dtype)[6:]} causal={causal}", causal, make(shape, dtype, causal))
        for shape, dtype, causal in cases
    ]


def mesh(world_size, ring_size):
    """(ring, ulysses) with ulysses inside, each with a process group."""
    ulysses_size = world_size // ring_size
    device_mesh = dist.device_mesh.init_device_mesh(
        "cpu", (ring_size, ulysses_size), mesh_dim_names=("ring", "ulysses")
    )
    return tuple(as_group(device_mesh.get_group(name), name) for name in ("ring", "ulysses"))
