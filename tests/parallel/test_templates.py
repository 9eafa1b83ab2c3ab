"""Pipelines of blocks whose code depends on values (experts that look up their tokens), so that it cannot run
for shapes alone: equal to one process where shapes are kept, else refused.
"""

import functools
import re

import pytest
import torch
from against_one import check_equal, planned
from models import Block
from odd_models import Plain, cross, tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn

LAYERS = 4


class Experts(nn.Module):
    """Each token goes to one of them."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, where):
        out = torch.zeros_like(x)
        for number in where.unique().tolist():
            rows = (where == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, self.experts[number](x[rows]))
        return out


class RoutedBlock(Block):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gate, self.routed = nn.Linear(16, 3), Experts()

    def forward(self, x):
        x = super().forward(x)
        weight, where = self.gate(x).flatten(0, 1).softmax(-1).max(-1)
        return x + (self.routed(x.flatten(0, 1), where) * weight[:, None]).view_as(x)


class OwnCodeBlock(Block):
    """The block's own code asks; a module inside of it that cannot run either is not the whole reason."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.count = Counter()

    def forward(self, x):
        many = self.count(x > 0)
        return super().forward(x) * (1.0 + int(many > -1) / 1000)


class Counter(nn.Module):
    def forward(self, mask):
        return mask.nonzero().shape[0]


class Narrow(nn.Module):
    def forward(self, x):
        return x[..., :1].masked_fill(x[..., :1] > float(x.max()), 0.0)


class NarrowBlock(Block):
    """Inside of it, what asks for values does not return what is like its input."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.narrow = Narrow()

    def forward(self, x):
        return super().forward(x) + self.narrow(x)


class ShortBlock(Block):
    """Leaves positions out, by values, and so do the targets."""

    def forward(self, x):
        x = super().forward(x)
        return x[:, : x.shape[1] - int(x.max() > -1e9)] if x.shape[1] == 7 else x


@functools.lru_cache
def table(length, dtype):
    return 1 + torch.arange(length, dtype=dtype)[:, None] / 10


class TableBlock(Block):
    """Multiplies by a table that is remembered, by its length."""

    def forward(self, x):
        return super().forward(x) * table(x.shape[1], x.dtype)


class BoxBlock(Block):
    """Adds its loss to a list."""

    def forward(self, x, box):
        x = super().forward(x)
        box.append(x.mean())
        return x


class KeepingBlock(Block):
    """Leaves its loss on itself."""

    loss = 0.0

    def forward(self, x):
        x = super().forward(x)
        self.loss = x.mean()
        return x


class RoutedKeepingBlock(RoutedBlock):
    """The same, of code that cannot run for shapes."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.loss = torch.zeros(())

    def forward(self, x):
        x = super().forward(x)
        self.loss = x.mean() * (x > 0).nonzero().shape[0]
        return x


class Routed(Plain):
    def __init__(self, block=RoutedBlock):
        super().__init__(block, LAYERS)


class OwnCode(Routed):
    def __init__(self):
        super().__init__(OwnCodeBlock)


class Narrowing(Routed):
    def __init__(self):
        super().__init__(NarrowBlock)


class Shortening(Routed):
    def __init__(self):
        super().__init__(ShortBlock)


class Tables(Routed):
    def __init__(self):
        super().__init__(TableBlock)
        table.cache_clear()


class Boxed(Routed):
    def __init__(self):
        super().__init__(BoxBlock)

    def forward(self, idx):
        x, box = self.tok(idx), []
        for block in self.blocks:
            x = block(x, box)
        return self.head(self.norm(x)) * (1 + sum(box))


class Keeping(Routed):
    kind = KeepingBlock

    def __init__(self):
        super().__init__(self.kind)

    def forward(self, idx):
        return super().forward(idx) * (1 + sum(block.loss for block in self.blocks))


class RoutedKeeping(Keeping):
    kind = RoutedKeepingBlock


SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv")


@tier(slow=1)
def test_experts_that_look_up_their_tokens():
    check_equal(Routed, *(f"pp=2,schedule={name}" for name in SCHEDULES), "pp=2,checkpoint")


@tier(slow=1)
def test_experts_in_pipelines_with_another_axis():
    check_equal(Routed, "pp=2,ulysses=2", "pp=2,tp=2", "pp=2,dp=2,zero=1", "pp=4")


def moved(step):
    """A batch without whose values the shapes would be the same, and others."""
    return tokens(step, rows=13 + step)


@tier(slow=1)
def test_a_block_that_asks_itself():
    check_equal(OwnCode, *(f"pp=2,schedule={name}" for name in SCHEDULES[:3]), batch=moved)


@tier(slow=1)
def test_tables_that_are_remembered():
    """None of the meta device remains for the blocks, and those of the blocks do no harm there."""
    check_equal(Tables, "pp=2", "pp=2,schedule=interleaved", batch=moved)


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=29, hidden_size=16, intermediate_size=20, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.config._experts_implementation = "eager"
    return model


def named(step):
    x, y = tokens(step)
    return {"input_ids": x}, y


def logits(out, y):
    return cross(out.logits, y)


@tier(slow=1)
def test_mixtral():
    """With keys and values kept, as is its default."""
    texts = [f"pp=2,schedule={name}" for name in SCHEDULES]
    check_equal(mixtral, *texts, "pp=2,checkpoint", batch=named, loss_fn=logits)


def refused(rank, world_size, make):
    with pytest.raises((ValueError, Exception)) as caught:
        planned(rank, world_size, make, ["pp=2"], tokens, cross)
    return f"{type(caught.value).__name__}: {caught.value}"


@tier(quick=1 / 5)
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Narrowing, "'narrow' of block 0 of 'blocks' depends on values.*(7, 16).*it is (7, 7, 1)"),
        (Shortening, "block 0 of 'blocks' depends on values.*7, 16.*it is .*, 6, 16"),
        (Boxed, "block 0 changes a list or dict that it is given"),
        (Keeping, "the loss is computed with a tensor of shape .* that comes from block 0 .'loss'"),
        (RoutedKeeping, "the loss is computed with a tensor of shape .* that comes from block 0 .'loss'"),
    ],
)
def test_what_would_be_lost_between_stages_is_refused(make, match):
    found = [text for text in spawn(2, refused, make, timeout=10.0) if text.startswith("ValueError")]
    assert found and all(re.search(match.replace("(", ".").replace(")", "."), text) for text in found), found
