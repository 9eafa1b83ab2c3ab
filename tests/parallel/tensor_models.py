"""Tiny models in the styles that people write, and the comparison of a tensor-parallel model with one
process; for test_tensor_*.py.
"""

import types
from typing import NamedTuple

import tolerance
import torch
from torch import nn
from torch.nn import functional as F

from pycomm.groups import as_group, even_sizes
from pycomm.parallel import count_traffic
from pycomm.parallel.ground import differentiable
from pycomm.parallel.tensor import cross_entropy, parallelize_tensor

# What is allowed between two orders of computing a model of two blocks; 11 were seen, in fp32 and fp64.
ROUNDINGS = 32


class FusedAttention(nn.Module):
    """As nanoGPT: one projection, split by width; heads from the width of x."""

    def __init__(self, width, heads):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        scores = scores.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")).softmax(-1)
        return self.c_proj((scores @ v).transpose(1, 2).contiguous().view(B, T, C))


class Mlp(nn.Module):
    def __init__(self, width, features):
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(width, features), nn.GELU(), nn.Linear(features, width)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, attn, mlp, norm):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = norm(), attn, norm(), mlp

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    attention = FusedAttention

    def __init__(self, vocab=19, width=20, heads=5, layers=2, tied=True, mlp=22):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(16, width)
        norm = lambda: nn.LayerNorm(width)  # noqa: E731
        self.h = nn.ModuleList(
            Block(self.attention(width, heads), Mlp(width, mlp), norm) for _ in range(layers)
        )
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class GroupedAttention(nn.Module):
    """As Llama: separate projections, fewer kv heads, a norm over each head, and a residual-free forward that
    uses -1 and attributes.
    """

    def __init__(self, width, heads, kv_heads, head_dim):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, head_dim
        self.num_key_value_groups = heads // kv_heads
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=True)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=True)
        self.q_norm = nn.RMSNorm(head_dim)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, heads))

    def forward(self, x):
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, self.num_heads, self.head_dim)).transpose(1, 2)
        k = (
            self.k_proj(x)
            .view(B, T, self.num_key_value_heads, -1)
            .transpose(1, 2)
            .repeat_interleave(self.num_key_value_groups, 1)
        )
        v = (
            self.v_proj(x)
            .view(B, T, self.num_key_value_heads, -1)
            .transpose(1, 2)
            .repeat_interleave(self.num_key_value_groups, 1)
        )
        scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5 + torch.full((T, T), -1e9, dtype=x.dtype).triu(
            1
        )
        sinks = self.sinks.view(1, -1, 1, 1).expand(B, -1, T, 1)
        scores = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.o_proj((scores @ v).transpose(1, 2).reshape(B, T, self.num_heads * self.head_dim))


class FusedGrouped(nn.Module):
    """q, k and v in one projection, with fewer kv heads: all of q, then k, then v; or head by head."""

    def __init__(self, width=18, heads=6, kv_heads=2, head_dim=4, by_head=False):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, head_dim
        self.num_key_value_groups, self.by_head = heads // kv_heads, by_head
        fused = nn.Linear(width, (heads + 2 * kv_heads) * head_dim)
        self.add_module("query_key_value" if by_head else "qkv_proj", fused)
        self.add_module("dense" if by_head else "o_proj", nn.Linear(heads * head_dim, width))

    def forward(self, x):
        kv_heads, shared = self.num_key_value_heads, self.num_key_value_groups
        if self.by_head:
            parts = self.query_key_value(x).unflatten(-1, (kv_heads, shared + 2, self.head_dim))
            q, k, v = (part.flatten(2, 3) for part in parts.split([shared, 1, 1], 3))
        else:
            widths = [heads * self.head_dim for heads in (self.num_heads, kv_heads, kv_heads)]
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(x).split(widths, -1))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        return (self.dense if self.by_head else self.o_proj)(y.flatten(2))


class SwiGlu(nn.Module):
    def __init__(self, width, features):
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(width, features, bias=False),
            nn.Linear(width, features, bias=False),
        )
        self.down_proj = nn.Linear(features, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Scaled(nn.Embedding):
    """As Gemma's: a forward of its own, with a buffer."""

    def __init__(self, rows, width):
        super().__init__(rows, width, padding_idx=3)
        self.register_buffer("scale", torch.tensor(width**0.5))

    def forward(self, ids):
        return super().forward(ids) * self.scale.to(self.weight.dtype)


class GptScaled(Gpt):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        weight, self.wte = self.wte.weight, Scaled(*self.wte.weight.shape)
        self.wte.weight = weight


class Llama(nn.Module):
    def __init__(self, vocab=17, width=18, heads=6, kv_heads=2, head_dim=4, features=21):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width, padding_idx=3)
        norm = lambda: nn.RMSNorm(width)  # noqa: E731
        self.layers = nn.ModuleList(
            Block(GroupedAttention(width, heads, kv_heads, head_dim), SwiGlu(width, features), norm)
            for _ in range(2)
        )
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for block in self.layers:
            x = block(x)
        return self.lm_head(self.norm(x))


class Encoder(nn.Module):
    """torch's own layers."""

    def __init__(self, norm_first, heads=4, bias=True, width=16):
        super().__init__()
        self.embed = nn.Embedding(13, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 23, 0.0, "gelu", batch_first=True, norm_first=norm_first, bias=bias
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 13)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.encoder(self.embed(ids), mask))


class Low(nn.Module):
    """A Linear with an adapter, as peft's."""

    def __init__(self, into, out, bias=False):
        super().__init__()
        self.base_layer = nn.Linear(into, out)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(into, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, out, bias=bias)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Adapted(nn.Module):
    def __init__(self, width=6, features=7):
        super().__init__()
        self.up, self.down = Low(width, features), Low(features, width)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Experts(nn.Module):
    """As transformers' ones."""

    has_gate, is_concatenated, is_transposed, has_bias, has_post_expert_norm = True, True, False, False, False

    def __init__(self, kernel=None, features=7, width=4):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 2 * features, width))
        self.down_proj = nn.Parameter(torch.randn(3, width, features))
        if kernel is not None:
            self.config = types.SimpleNamespace(_experts_implementation=kernel)

    def forward(self, x, chosen, weights):
        out = 0
        for choice in range(chosen.shape[1]):
            gate, up = torch.einsum("th,tfh->tf", x, self.gate_up_proj[chosen[:, choice]]).chunk(2, -1)
            down = torch.einsum("tf,thf->th", gate.tanh() * up, self.down_proj[chosen[:, choice]])
            out = out + down * weights[:, choice, None]
        return out


class Sizes:
    sizes = None


def make(build, kwargs, dtype=torch.float64):
    """The same weights everywhere, none of them zero or one."""
    torch.manual_seed(7)
    model = build(**kwargs).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(vocab, length=7):
    generator = torch.Generator().manual_seed(3)
    ids, targets = (
        torch.randint(0, vocab, (2, length), generator=generator),
        torch.randint(0, vocab, (2, length), generator=generator),
    )
    targets[0, length // 3] = targets[1, -1] = -100
    return ids, targets


def logits_of(out):
    return out if isinstance(out, torch.Tensor) else out.logits


class Expected(NamedTuple):
    """What one process computes; dictionaries are by every name of a parameter."""

    loss: torch.Tensor
    logits: torch.Tensor
    grads: dict
    parameters: dict
    sizes: dict  # of the gradients, see tolerance.py


def single(model, ids, targets):
    with tolerance.gradient_sizes(model) as of_layers:
        logits = logits_of(model(ids))
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        loss.backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    return Expected(
        loss.detach(),
        logits.detach(),
        {name: p.grad for name, p in named.items()},
        {name: p.detach().clone() for name, p in named.items()},
        {name: of_layers.get(id(p), p.grad) for name, p in named.items()},
    )


def tensor_step(rank, world_size, build, kwargs, options):
    """One forward and backward on a rank. options: vocab, dtype, blocks, rules, sequence, sharded, length."""
    group = as_group(None, "tp")
    model = make(build, kwargs, options.get("dtype", torch.float64))
    sequence = Sizes() if options.get("sequence") else None
    with count_traffic() as silent:
        done = parallelize_tensor(
            model, group, rules=options.get("rules"), blocks=options.get("blocks"), sequence=sequence
        )
    assert not silent.log, "construction communicates"
    ids, targets = batch(options["vocab"], options.get("length", 7))
    if sequence is not None:
        sequence.sizes = even_sizes(ids.shape[1], world_size)
        first = next(iter(model.get_submodule(options["blocks"]).children()))
        first.register_forward_pre_hook(
            lambda module, args: (differentiable.scatter_to(args[0], 1, sequence.sizes, group), *args[1:])
        )
    if done.head is not None:
        done.head.sharded_output = options.get("sharded", False)
    with count_traffic() as forward:
        logits = logits_of(model(ids))
    with count_traffic() as of_loss:
        loss = cross_entropy(logits, targets, head=done.head)
    with count_traffic() as backward:
        loss.backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    counts = [[call.op for call in traffic.log] for traffic in (forward, of_loss, backward)]
    return {
        "loss": loss.detach(),
        "logits": None if options.get("sharded") else logits.detach(),
        "grads": {name: p.grad for name, p in named.items()},
        "parameters": {name: p.detach() for name, p in named.items()},
        "layouts": done.layouts,
        "found": done.found,
        "counts": counts,
    }


def put_together(layouts, locals_):
    """The full tensor of every rank's layout and part: partial gradients are summed, else the rank that
    counts an index gives it.
    """
    full = locals_[0].new_zeros(layouts[0].full_shape)
    for layout, local in zip(layouts, locals_, strict=True):
        mask = layout.counted_mask(local)
        summed = layout.partial or layout.overlap
        layout.put(full, local if summed or mask is None else local * mask)
    return full


def compare(results, expected, roundings=ROUNDINGS):
    """All ranks' results against one process: parameters are exact parts, each is counted once, loss and
    gradients agree.
    """
    for result in results:
        tolerance.near("loss", result["loss"], expected.loss, expected.loss, roundings)
        if result["logits"] is not None:
            tolerance.near("logits", result["logits"], expected.logits, expected.logits, roundings)
        assert result["layouts"].keys() == expected.parameters.keys()
    for name, full in expected.parameters.items():
        layouts = [result["layouts"][name] for result in results]
        local = [result["parameters"][name] for result in results]
        for layout, part in zip(layouts, local, strict=True):
            assert layout.full_shape == tuple(full.shape) and torch.equal(layout.take(full), part), name
        counted = torch.zeros_like(full)
        for layout, part in zip(layouts, local, strict=True):
            mask = layout.counted_mask(part)
            layout.put(counted, torch.ones_like(part) if mask is None else mask)
        assert torch.equal(counted, torch.ones_like(full)), f"{name} is not counted exactly once"
        grads, size = [result["grads"][name] for result in results], expected.sizes[name]
        assert all(grad is not None for grad in grads), name
        if layouts[0].dim is None and not layouts[0].partial:
            for grad in grads[1:]:
                tolerance.near(f"gradient of {name} on another rank", grad, grads[0], size, roundings)
        got = put_together(layouts, grads)
        tolerance.near(f"gradient of {name}", got, expected.grads[name], size, roundings)
