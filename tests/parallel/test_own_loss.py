"""Models that compute their loss themselves, from targets among their inputs, as nanoGPT does. Where the
sequence is cut they see logits of this rank's positions and targets of all: equal to one process, or refused.
"""

import pytest
import torch
import torch.nn.functional as F
from against_one import check_equal, planned
from models import Block
from odd_models import tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn


class NanoGPT(nn.Module):
    """Its forward is that of nanoGPT, line by line."""

    block_size = 8

    def __init__(self):
        super().__init__()
        parts = {
            "wte": nn.Embedding(29, 16),
            "wpe": nn.Embedding(self.block_size, 16),
            "drop": nn.Dropout(0.0),
        }
        blocks = nn.ModuleList(Block(16, 2, 20) for _ in range(2))
        self.transformer = nn.ModuleDict({**parts, "h": blocks, "ln_f": nn.LayerNorm(16)})
        self.lm_head = nn.Linear(16, 29, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def loss(self, logits, targets):
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def forward(self, idx, targets=None):
        b, t = idx.size()
        assert t <= self.block_size, f"{t} positions, block size {self.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, self.loss(logits, targets)


class Unflattened(NanoGPT):
    def loss(self, logits, targets):
        return nn.CrossEntropyLoss()(logits.transpose(1, 2), target=targets)


class Shifting(NanoGPT):
    """Compares each position with the next one's target, which may lie on another rank."""

    def loss(self, logits, targets):
        logits, targets = logits[:, :-1].contiguous(), targets[:, 1:].contiguous()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class ShiftingTheTargets(NanoGPT):
    def loss(self, logits, targets):
        return super().loss(logits, F.pad(targets[:, 1:], (0, 1), value=-1))


class Transposed(NanoGPT):
    """Targets in another order than that of the input, and logits too."""

    def loss(self, logits, targets):
        return F.cross_entropy(logits.transpose(0, 1).reshape(-1, 29), targets.t().reshape(-1))


def batch(step):
    x, _ = tokens(step)
    return {"idx": x, "targets": x.roll(-1, 1)}, x.roll(-1, 1)


def own(out, y):
    return out[1]


PLANS = ["ring=2", "ulysses=2", "ring=2,checkpoint", "ring=2,zigzag=false", "dp=2,zero=3", "tp=2", "pp=2"]


@tier(slow=1)
@pytest.mark.parametrize("make", [NanoGPT, Unflattened])
def test_equal_to_one_process(make):
    check_equal(make, *PLANS, batch=batch, loss_fn=own)


@tier(slow=1)
def test_with_another_axis():
    texts = "ring=2,pp=2", "ring=2,ulysses=2", "ring=2,tp=2,megatron_sp", "dp=2,ring=2,zero=3"
    check_equal(NanoGPT, *texts, batch=batch, loss_fn=own)


def refused(rank, world_size, make):
    with pytest.raises(ValueError, match="which are not an input of it as it was given. Compute the loss in"):
        planned(rank, world_size, make, ["ring=2"], batch, own)


@pytest.mark.parametrize("make", [Shifting, ShiftingTheTargets, Transposed])
def test_targets_in_another_order_are_refused(make):
    spawn(2, refused, make, timeout=10.0)
