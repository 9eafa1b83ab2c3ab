"""The model and the batches that every variant trains on: a GPT written as one writes it for one process.

Attention has q, k, v and o as separate layers and takes its number of heads from what they return, head_dim
apart, since torch's parallelize_module can cut it in no other form. The head is not tied to the embedding,
since torch's pipelines cannot have that. Both are limits of the peers and not of pycomm.parallel.
"""

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

HEAD_DIM = 32
LEARNING_RATE = 1e-3
Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # (inputs, targets), (rows, length) each


class Size(NamedTuple):
    """dim: width, a multiple of 32. rows x length tokens make the batch of all ranks together."""

    dim: int = 256
    layers: int = 4
    vocab: int = 1024
    rows: int = 8
    length: int = 32
    microbatches: int = 4  # of pipelines; all others take their rows at once


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))
        self.num_heads, self.head_dim = dim // HEAD_DIM, HEAD_DIM

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            f(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Embedding(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(size.vocab, size.dim), nn.Embedding(size.length, size.dim)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        return self.tok(idx) + self.pos(torch.arange(idx.shape[1], device=idx.device))


class GPT(nn.Module):
    """(rows, length) token numbers -> (rows, length, vocab) logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = Embedding(size)
        self.blocks = nn.ModuleList(Block(size.dim) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.dim), nn.Linear(size.dim, size.vocab, bias=False)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(size: Size) -> GPT:
    """The same weights on every rank and for every variant."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return GPT(size)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, LEARNING_RATE)


def make_batch(size: Size, number: int) -> Batch:
    """Of step `number`: a fixed successor for each token, with one in
    eight at random, so that there is something to learn and the loss moves."""
    generator = torch.Generator().manual_seed(1000 + number)
    tokens = torch.randint(size.vocab, (size.rows, size.length + 1), generator=generator)
    for place in range(1, size.length + 1):
        keep = torch.rand(size.rows, generator=generator) < 1 / 8
        tokens[:, place] = torch.where(keep, tokens[:, place], (tokens[:, place - 1] * 5 + 7) % size.vocab)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
