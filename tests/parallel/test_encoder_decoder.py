"""Pipelines whose stages hand on more than the hidden state: encoder outputs, biases that one block makes for
all, connections that every block is given, and what a model does between two blocks. Equal to one process.
"""

import against_one
import pytest
import torch
from models import Block
from odd_models import Plain
from torch import nn

LAYERS = 4
PLANS = ["pp=2", "pp=2,schedule=gpipe,checkpoint", "pp=2,schedule=zb-h1", "pp=2,schedule=interleaved"]


class Base(Plain):
    def __init__(self, block=Block):
        super().__init__(block, LAYERS)


class Changed(Base):
    """Before every block, so also exactly where a stage ends."""

    def run_blocks(self, x):
        for index, block in enumerate(self.blocks):
            x = block(torch.tanh(x) * (0.5 + index))
        return x


class SkipBlock(Block):
    def forward(self, x, first):
        return super().forward(x) + first


class Skip(Base):
    """Every block gets the embedding again, the first one twice the same tensor."""

    def __init__(self):
        super().__init__(SkipBlock)

    def run_blocks(self, x):
        first = x
        for block in self.blocks:
            x = block(x, first)
        return x


class SkipByName(Skip):
    def run_blocks(self, x):
        first = x * 2
        for block in self.blocks:
            x = block(x, first=first)
        return x


class SkipToTheEnd(Skip):
    """What the blocks were given is used behind them, too."""

    def run_blocks(self, x):
        return super().run_blocks(x) + 0.3 * x


class MemoryBlock(Block):
    """Adds what it reads from a memory, with a bias that the first one makes for all."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.key, self.bias = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x, memory, scale, bias=None):
        values, kinds = memory
        if bias is None:
            bias = self.bias(values).transpose(1, 2)
        weights = (self.key(x) @ values.transpose(1, 2) * scale + bias).softmax(-1)
        x = super().forward(x + weights @ values)
        return x + 0.1 * (kinds % 3)[..., None], bias


class Memory(Base):
    """A memory in a tuple with whole numbers made of it, a scale from a parameter beside the blocks, a frozen
    encoder layer, and a bias.
    """

    def __init__(self):
        super().__init__(MemoryBlock)
        self.scale = nn.Parameter(torch.ones(16, 1))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self._modules["blocks"] = self._modules.pop("blocks")
        for name in ("norm", "head"):
            self._modules[name] = self._modules.pop(name)

    def run_blocks(self, x):
        values = self.frozen(x).tanh()
        memory, bias, scale = (
            (values, values.argmax(-1)),
            None,
            self.scale.mean() + x.mean((1, 2), keepdim=True),
        )
        for block in self.blocks:
            x, bias = block(x, memory, scale, bias)
        return x


class Translator(nn.Module):
    """torch's encoder and decoder; the blocks are the decoder's."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(29, 16)
        self.transformer = nn.Transformer(16, 2, LAYERS, LAYERS, 20, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 29)

    def forward(self, idx):
        return self.head(self.transformer(self.tok(idx), self.tok(idx.flip(1))))


@pytest.mark.parametrize("make", [Changed, Skip, SkipByName, SkipToTheEnd, Memory], ids=lambda m: m.__name__)
def test_equal_to_one_process(make):
    against_one.check_equal(make, *PLANS)


@pytest.mark.parametrize("text", ["pp=4,schedule=zb-h1", "dp=2,pp=2,zero=3,checkpoint"])
def test_passed_on_by_stages_between(text):
    against_one.check_equal(Memory, text)


def test_two_stages_of_one_rank_that_follow_each_other():
    against_one.check_equal(Skip, "pp=2,schedule=zbv")
