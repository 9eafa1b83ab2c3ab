"""The comparison of results (tolerance.py) passes what is rounding and sees the smallest real faults."""

import pytest
import tolerance
import torch
import torch.nn.functional as F
from torch import nn

ROUNDINGS = 8


def draw(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def draw_four(*shape, dtype=torch.float64):
    """q, k, v and the gradient of out."""
    return [draw(*shape, dtype=dtype, seed=seed) for seed in range(4)]


def attention(inputs, causal=False):
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def test_a_sum_that_cancels():
    """Two orders of a sum whose value is zero: rounding, which no share of the value allows."""
    x = draw(1000, dtype=torch.float32)
    a, b = torch.cat([x, -x]), torch.ones(2000)
    for order in (
        torch.arange(2000),
        torch.arange(2000).flip(0),
        torch.arange(2000).view(2, 1000).T.flatten(),
    ):
        total = torch.zeros(1)
        for value in a[order]:
            total += value
        tolerance.near("sum", total, torch.zeros(1), tolerance.product(a[None], b[:, None]), ROUNDINGS)
    with pytest.raises(AssertionError, match="roundings of values of"):
        tolerance.near("sum", total + 1e-2, torch.zeros(1), tolerance.product(a[None], b[:, None]), ROUNDINGS)


def test_attention_over_one_key():
    """The gradients of q and k are exactly zero; what is computed is the rounding of values of about 1."""
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(1, 2, 1, 4, generator=generator) for _ in range(4)]
        q, k, v, grad = inputs
        computed = (grad @ v.mT - (grad * v).sum(-1, keepdim=True)) / 2
        dq, dk = computed @ k, computed.mT @ q
        sizes = tolerance.attention(*inputs, False)
        tolerance.near("dq", dq, torch.zeros_like(q, dtype=torch.float64), sizes[1], ROUNDINGS / 2)
        tolerance.near("dk", dk, torch.zeros_like(k, dtype=torch.float64), sizes[2], ROUNDINGS / 2)


@pytest.mark.parametrize("causal", [False, True])
def test_the_size_is_never_below_the_value(causal):
    inputs = draw_four(2, 3, 9, 4)
    for value, size in zip(attention(inputs, causal), tolerance.attention(*inputs, causal), strict=True):
        assert (value.abs() <= size * (1 + 1e-12)).all() and size.max() <= 30 * value.abs().max()


# What is computed wrongly, and by how much of the largest value: the smallest that a test is to see.
FAULTS = {
    "one element of fp32, by 1e-5": (torch.float32, lambda x, i: x.flatten()[i].mul_(1 + 1e-5)),
    "one element of fp64, by 1e-13": (torch.float64, lambda x, i: x.flatten()[i].mul_(1 + 1e-13)),
    "one element, rounded to bf16": (
        torch.float32,
        lambda x, i: x.flatten()[i].copy_(x.flatten()[i].bfloat16()),
    ),
    "one element of fp64, rounded to fp32": (
        torch.float64,
        lambda x, i: x.flatten()[i].copy_(x.flatten()[i].float()),
    ),
    "one element of bf16, eight of its roundings": (
        torch.bfloat16,
        lambda x, i: x.flatten()[i].mul_(1 + 8 * 2**-7),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_smallest_faults_of_attention_are_seen(fault):
    """In the largest element of each result; the allowed roundings are those of test_sequence.py."""
    dtype, spoil = FAULTS[fault]
    roundings = {torch.float64: 32, torch.float32: 8, torch.bfloat16: 1}[dtype]
    inputs = draw_four(1, 2, 9, 4, dtype=dtype)
    exact, sizes = attention([x.double() for x in inputs]), tolerance.attention(*inputs, False)
    for what, value, size in zip(("out", "dq", "dk", "dv"), exact, sizes, strict=True):
        allowed = roundings / 2 if what in ("dq", "dk") else roundings
        wrong = value.to(dtype, memory_format=torch.contiguous_format, copy=True)
        tolerance.near(what, wrong, value, size, allowed)
        spoil(wrong, value.abs().argmax().item())
        with pytest.raises(AssertionError, match=what):
            tolerance.near(what, wrong, value, size, allowed)


def test_a_missing_term_is_seen():
    """One key of nine is left out, and one product of k = 200."""
    inputs = draw_four(1, 1, 9, 4)
    q, k, v, grad = inputs
    for value, other, size in zip(
        attention(inputs),
        attention([q, k[:, :, 1:], v[:, :, 1:], grad]),
        tolerance.attention(*inputs, False),
        strict=True,
    ):
        other = other if other.shape == value.shape else F.pad(other, (0, 0, 1, 0))
        with pytest.raises(AssertionError):
            tolerance.near("key", other.float(), value, size, ROUNDINGS)
    a, b = draw(5, 200), draw(200, 7)
    for k in range(200):
        with pytest.raises(AssertionError):
            tolerance.near(
                "product",
                (a @ b - a[:, k : k + 1] @ b[k : k + 1]).float(),
                a @ b,
                tolerance.product(a, b),
                ROUNDINGS,
            )


def test_sizes_of_layers():
    """The bias of the keys has a gradient of zero, since softmax takes no notice of it: its size is that of
    what is summed.
    """
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(6, 6) for name in "qkv"} | {"tokens": nn.Embedding(5, 6)}).double()
    ids = torch.tensor([[0, 3, 3, 1]])
    with tolerance.gradient_sizes(model) as sizes:
        x = model["tokens"](ids)
        out = F.scaled_dot_product_attention(*(model[name](x)[:, None] for name in "qkv"))
        out.square().sum().backward()
    assert not any(module._forward_hooks for module in model.modules())
    for name, parameter in model.named_parameters():
        assert (parameter.grad.abs() <= sizes[id(parameter)] * (1 + 1e-12) + 1e-18).all(), name
    bias, size = model["k"].bias.grad, sizes[id(model["k"].bias)]
    assert bias.abs().max() < 1e-15 < 1e-6 < size.max()
    assert (sizes[id(model["tokens"].weight)][[2, 4]] == 0).all()  # rows that no token has


def test_empty_and_not_finite():
    tolerance.near("empty", torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, 3), 1)
    tolerance.near("zero", torch.zeros(2), torch.zeros(2), 0.0, 1)
    for bad in (torch.nan, torch.inf, 1e-30):
        with pytest.raises(AssertionError):
            tolerance.near("bad", torch.tensor([bad, 0.0]), torch.zeros(2), 0.0 if bad == 1e-30 else 1.0, 1)
    with pytest.raises(AssertionError, match="shape"):
        tolerance.near("shape", torch.zeros(2), torch.zeros(2, 1), 1.0, 1)
