"""Sequence parallelism of models: attention is taken over by a mode, the model is unchanged."""

import pytest
import tolerance
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sequence_cases import check, make, mesh
from tiers import tier
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_ranks import spawn

from pycomm.groups import ALONE, as_group
from pycomm.parallel.sequence import attention, split

ROUNDINGS = 32  # of a model of two layers, see tolerance.py


class Attention(nn.Module):
    def __init__(self, hidden, heads, k_heads):
        super().__init__()
        self.size = hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * k_heads) * self.size)
        self.out = nn.Linear(hidden, hidden)
        self.heads, self.k_heads = heads, k_heads

    def forward(self, x):
        q, k, v = (
            self.qkv(x)
            .unflatten(2, (-1, self.size))
            .transpose(1, 2)
            .split([self.heads, self.k_heads, self.k_heads], 1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.k_heads)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Stock(nn.Module):
    """torch's own layer, whose attention is one call of F.multi_head_attention_forward."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(hidden, heads, 2 * hidden, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(
            x,
            src_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype),
            is_causal=True,
        )


def layers(kind):
    torch.manual_seed(0)
    made = [Stock(16, 4) if kind == "stock" else Attention(16, 4, 2) for _ in range(2)]
    return nn.ModuleList(made).double()


def run(model, x, how, mode=None):
    for layer in model:
        if how == "plain":
            x = layer(x)
        else:
            options = {"context_fn": mode.context_fn} if how == "context_fn" else {}
            x = checkpoint(layer, x, use_reentrant=how == "reentrant", **options)
    return x


def model_body(rank, world_size, ring_size, kind, expected):
    groups = mesh(world_size, ring_size)
    zigzag = ring_size > 1
    for how in ("plain", "context_fn", "inside", "reentrant", "both"):
        model = layers(kind)
        mode = attention.SequenceAttention(*groups, zigzag)
        outs, parts = [], []
        for x, grad, _ in expected[
            "batches"
        ]:  # both forwards first, as in a pipeline: lengths differ in the recomputations
            held = split.spans(x.shape[1], *groups, zigzag)
            mode.length = x.shape[1]
            with mode:
                outs.append(
                    run(
                        model,
                        split.cut(x, 1, held).clone().requires_grad_(),
                        "context_fn" if how == "both" else how,
                        mode,
                    )
                )
            parts.append((held, split.cut(grad, 1, held)))
            if how in ("inside", "reentrant", "both"):
                with mode:
                    outs[-1].backward(parts[-1][1])
        if how in ("plain", "context_fn"):
            torch.autograd.backward(outs, [grad for _, grad in parts])
        assert mode.calls == (4 if how == "plain" else 8)
        for out, (held, _), (_, _, whole) in zip(outs, parts, expected["batches"], strict=True):
            piece = split.cut(whole, 1, held)
            tolerance.near(f"{how} out", out.detach(), piece, whole, ROUNDINGS)
        for parameter, (whole, size) in zip(model.parameters(), expected["grads"], strict=True):
            dist.all_reduce(parameter.grad)
            tolerance.near(f"{how} gradient", parameter.grad, whole, size, ROUNDINGS)
    with torch.no_grad(), mode:  # torch's fast path for inference must not go past the mode
        x, _, whole = expected["batches"][-1]
        out = run(model.eval(), split.cut(x, 1, held), "plain")
        tolerance.near("inference", out, split.cut(whole, 1, held), whole, ROUNDINGS)


@tier(quick=1 / 2)
@pytest.mark.parametrize("kind", ["own", "stock"])
@pytest.mark.parametrize("world_size, ring_size", [(1, 1), (3, 1), (3, 3), (4, 2)])
def test_model_under_the_mode(kind, world_size, ring_size):
    model = layers(kind)
    generator = torch.Generator().manual_seed(1)
    batches = []
    with tolerance.gradient_sizes(model) as sizes:
        for length in (11, 14):
            x, grad = (torch.randn(2, length, 16, generator=generator, dtype=torch.float64) for _ in range(2))
            out = run(model, x, "plain")
            out.backward(grad)
            batches.append((x, grad, out.detach()))
    grads = [(parameter.grad, sizes.get(id(parameter), parameter.grad)) for parameter in model.parameters()]
    expected = {"batches": batches, "grads": grads}
    spawn(world_size, model_body, ring_size, kind, expected)


def bare_checkpoint_body(rank, world_size, data):
    group = as_group(name="ulysses")
    mode = attention.SequenceAttention(ALONE, group, False)
    mode.length = 9

    def function(q, k, v):
        with mode:
            return checkpoint(
                F.scaled_dot_product_attention, q, k, v, use_reentrant=False, context_fn=mode.context_fn
            )

    check(data, split.spans(9, ALONE, group, False), function, "checkpointed")


def test_checkpoint_of_nothing_but_attention():
    """Rank 2 has no heads and saves nothing in attention itself: it must not end the recomputation before the
    exchanges.
    """
    spawn(3, bare_checkpoint_body, make((1, 2, 2, 9, 4, 4), torch.float64, False))


def autocast_body(rank, world_size, data):
    group = as_group(name="ring")
    mode = attention.SequenceAttention(group, ALONE, True)
    mode.length = 13
    held = split.ring_spans(13, world_size, rank, True)
    q, k, v, _ = (split.cut(x, 2, held) for x in data.inputs)
    with mode, torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(q, k.bfloat16(), v, is_causal=True)
        low = F.scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True)
    assert out.dtype == low.dtype == torch.bfloat16 and torch.equal(out[0], low)
    # two roundings: the inputs are rounded to bf16 as well
    tolerance.near("autocast", out, split.cut(data.expected[0], 2, held), data.sizes[0], 2)


def test_autocast_and_three_dimensions():
    spawn(2, autocast_body, make((2, 3, 3, 13, 4, 4), torch.float32, True))


def test_the_mode_refuses_what_it_cannot_split():
    mode = attention.SequenceAttention(ALONE, ALONE, False)
    x = torch.zeros(1, 4, 6, 2)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    y = torch.zeros(1, 6, 8)
    cases = [
        (lambda: F.scaled_dot_product_attention(x, x, x), "not known"),
        (
            lambda: F.scaled_dot_product_attention(x, x, x, torch.ones(6, 5, dtype=torch.bool)),
            r"attn_mask of shape \(6, 5\)",
        ),
        (lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), "dropout_p=0.1"),
        (lambda: F.scaled_dot_product_attention(x, x[:, :, :4], x[:, :, :4]), "lengths differ"),
        (lambda: F.scaled_dot_product_attention(x, x[:, :2], x[:, :2]), "enable_gqa=True"),
        (lambda: F.scaled_dot_product_attention(x[:, :, :3], x[:, :, :3], x[:, :, :3]), "has 3 positions"),
        (lambda: F.scaled_dot_product_attention(x[0, 0], x[0, 0], x[0, 0]), "must be"),
        (lambda: layer(y, y, y), "need_weights=False"),
    ]
    with mode:
        for number, (call, words) in enumerate(cases):
            with pytest.raises(ValueError, match=words) as error:
                call()
            assert "rank 0/1" in str(error.value)
            mode.length = 6 if number == 0 else mode.length
        assert F.scaled_dot_product_attention(x, x, x).shape == x.shape
    assert mode.calls == 3  # refused by shape after it was counted, twice, and the last
