"""What tensor parallelism tries before it cuts, where a pipeline stage has not all blocks."""

import pytest
import torch.nn.functional as F
from against_one import check_equal
from models import Block
from odd_models import Plain
from torch import nn


class Interleaved(nn.Module):
    """A fused projection whose rows are q, k, v of one head after the other: not [q | k | v]."""

    def __init__(self, width, heads):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(x).unflatten(2, (self.num_heads, 3, self.head_dim)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Scaled(Interleaved):
    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.register_buffer("scale", self.qkv.weight.new_ones(1))

    def forward(self, x):
        return super().forward(x * self.scale)


@pytest.mark.parametrize("attention", [Interleaved, Scaled])
def test_what_must_not_be_cut_is_cut_on_no_stage(attention):
    def block(*sizes):
        made = Block(*sizes)
        made.attn = attention(16, 2)
        return made

    check_equal(lambda: Plain(block), "tp=2,pp=2")
