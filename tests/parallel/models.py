"""Small models for the tests of the strategies: plain torch modules that know nothing of ranks, with ugly
sizes.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Fused qkv, written in the way of nanoGPT."""

    def __init__(self, dim, heads):
        super().__init__()
        self.n_head, self.n_embd = heads, dim
        self.c_attn = nn.Linear(dim, 3 * dim, bias=False)
        self.c_proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Learned positions, pre-norm blocks, head tied to the token embedding unless tied=False."""

    def __init__(self, vocab=37, dim=24, heads=3, layers=4, *, hidden=40, length=32, tied=True):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GroupedAttention(nn.Module):
    """Separate q, k, v, o with fewer kv heads, and rotary positions that are given to it."""

    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class GatedMLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self, dim, heads, kv_heads, mlp):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = GroupedAttention(dim, heads, kv_heads)
        self.mlp = mlp

    def forward(self, x, cos, sin):
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Rotary, grouped-query attention, SwiGLU, untied head; `mlp` makes another feed-forward (a mixture of
    experts).
    """

    def __init__(self, vocab=29, dim=24, heads=6, kv_heads=2, layers=3, *, hidden=28, mlp=None):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            LlamaBlock(dim, heads, kv_heads, mlp() if mlp else GatedMLP(dim, hidden)) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.head_dim = dim // heads

    def forward(self, idx):
        x = self.embed(idx)
        positions = torch.arange(idx.shape[1], device=idx.device, dtype=x.dtype)
        angles = positions[:, None] * 50.0 ** (
            -torch.arange(0, self.head_dim, 2, device=idx.device, dtype=x.dtype) / self.head_dim
        )
        cos, sin = (f(angles).repeat(1, 2) for f in (torch.cos, torch.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))
