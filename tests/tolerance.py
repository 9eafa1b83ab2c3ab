"""How far a computed result may be from the exact one.

[Note: what an error is measured against]
A computed sum of products x*y is off by a few eps * sum |x*y|, and not by a share of its own value: where the
terms cancel, the value can be zero while the error is not. The gradient of the queries of an attention over a
single key is exactly zero, for example, and a processor with another order of summing finds 1e-8. An error
relative to the value then says nothing, and a smallest value that counts ("at least 1e-3") only hides this.

So an error is counted in roundings: one is eps of the dtype times the size of the result, and the size is the
result of the same computation with the absolute values of its terms: of the inputs and of the gradients that
come from above. Where no terms cancel the size is the value, and nothing changes.

Source of the bound: Higham, Accuracy and Stability of Numerical Algorithms, section 3.1.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

SLOPE = 1.13  # no activation here is steeper: that of gelu


def near(what, actual, expected, size, roundings):
    """expected: the exact result in fp64, or a piece of it. size: of the whole result (the note above), a
    tensor or a number.
    """
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    if expected.numel() == 0:
        return
    largest = torch.as_tensor(size, dtype=torch.float64).abs().max().item()
    error = (actual.double() - expected.double()).abs().max().item()
    unit = torch.finfo(actual.dtype).eps * largest
    found = error / unit if unit else torch.inf
    assert error <= roundings * unit, (
        f"{what}: error {error:.2e}, {found:.3g} roundings of values of {largest:.3g}; allowed {roundings:g}"
    )


def product(a, b, bias=None):
    """Size of a @ b + bias."""
    size = a.double().abs() @ b.double().abs()
    return size if bias is None else size + bias.double().abs()


def activated(name, z, size):
    """Size of an activation of z, where that of z is `size`."""
    if name is None:
        return size
    if name != "swiglu":
        return SLOPE * size
    (gate, up), (gate_size, up_size) = z.double().chunk(2, -1), size.chunk(2, -1)
    return SLOPE * gate_size * up.abs() + F.silu(gate).abs() * up_size


def attention(q, k, v, grad, causal):
    """Sizes of out, dq, dk, dv of scaled_dot_product_attention; tensors of (batch, heads, length, size)."""
    q, k, v, grad = (x.double() for x in (q, k, v, grad))
    heads = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(heads, 1) for x in (k, v))
    scale = q.shape[3] ** -0.5
    scores = scale * q @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    weights = scores.softmax(-1)
    q, k, v, grad = (x.abs() for x in (q, k, v, grad))
    out = weights @ v
    # The gradient of the scores is weights * (grad @ v - sum(grad * out)): with one key both are equal.
    of_scores = scale * weights * (grad @ v.mT + (grad * out).sum(-1, keepdim=True))
    dk, dv = (x.unflatten(1, (-1, heads)).sum(2) for x in (of_scores.mT @ q, weights.mT @ grad))
    return out, of_scores @ k, dk, dv


def linear(x, weight, bias, grad):
    """Sizes of what y = F.linear(x, weight, bias) computes: (y, gradients of x, weight, bias)."""
    rows, above = x.double().flatten(0, -2).abs(), grad.double().flatten(0, -2).abs()
    return product(x, weight.mT, bias), product(grad, weight), above.mT @ rows, above.sum(0)


@contextlib.contextmanager
def gradient_sizes(model):
    """Collects sizes of gradients of nn.Linear and nn.Embedding, by id of the parameter, from the backward
    passes inside. A weight that is used twice has the sum.
    """
    sizes, handles = {}, []

    def add(parameter, size):
        if parameter is not None:
            sizes[id(parameter)] = sizes.get(id(parameter), 0) + size

    def forward(module, args, out):
        x = args[0].detach()
        if out.requires_grad:
            out.register_hook(lambda grad: backward(module, x, grad.detach()))

    def backward(module, x, grad):
        if isinstance(module, nn.Linear):
            _, _, of_weight, of_bias = linear(x, module.weight.detach(), None, grad)
            add(module.weight, of_weight)
            add(module.bias, of_bias)
        else:
            rows = torch.zeros(module.weight.shape, dtype=torch.float64)
            add(module.weight, rows.index_add_(0, x.flatten(), grad.double().flatten(0, -2).abs()))

    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            handles.append(module.register_forward_hook(forward))
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()
