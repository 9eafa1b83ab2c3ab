"""Blocks that look at other positions, on a split sequence: refused at the first step, whatever the means."""

import functools

import pytest
import torch
import torch.nn.functional as F
from models import Block
from odd_models import Plain, cross, tokens
from positions_models import (
    MODELS,
    OF_TRANSFORMERS,
    Asleep,
    Between,
    Convolution,
    by_length,
    mean,
    shifted,
)
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par


def first_step(rank, world_size, name, text):
    torch.manual_seed(0)
    model = MODELS[name]()
    x, y = tokens(0)
    batch = {"input_ids": x, "labels": y} if name in OF_TRANSFORMERS else (x, y)
    loss = None if isinstance(batch, dict) else cross
    right = model(**batch).loss.item() if isinstance(batch, dict) else cross(model(x), y).item()
    par.parallelize(model, None, par.Plan.parse(text))
    try:
        found = par.evaluate(model, batch, loss).item()
    except ValueError as error:
        return str(error)
    return abs(found - right) < 1e-5 * right or f"{found} for {right}"


PLANS = ("ring=2", "ulysses=2", "tp=2,megatron_sp")


@tier(quick=1 / 21, slow=2 / 5)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "name", [name for name in MODELS if name not in ("llama", "plain", "gpt2", "mixtral")]
)
def test_what_looks_at_other_positions(name, plan):
    """It is refused, or equal where the strategy knows it; never another number."""
    for found in spawn(2, first_step, name, plan):
        assert found is True or "does not compute from pieces" in str(found) or "sequence" in str(found), (
            found
        )


@tier(quick=1 / 8, slow=1 / 2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["convolution", "shift", "positions", "average", "asleep"])
def test_refused(name, plan):
    for found in spawn(2, first_step, name, plan):
        assert "the model does not compute from pieces of the sequence" in str(found), found


@tier(quick=1 / 12, slow=1 / 2)
@pytest.mark.parametrize("plan", [*PLANS, "tp=2", "ring=2,zero=3", "pp=2"])
@pytest.mark.parametrize("name", ["llama", "plain"])
def test_plain_blocks_are_right(name, plan):
    assert spawn(2, first_step, name, plan) == [True, True]


@tier(quick=1 / 6, slow=3 / 5)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_blocks_that_keep_keys_and_blocks_that_need_fp32_are_right(name, plan):
    assert spawn(2, first_step, name, plan) == [True, True]


# ---- later blocks, and the model's own code ----


class Around(Plain):
    def run_blocks(self, x):
        return super().run_blocks(x) + x


class Third(Plain):
    def __init__(self, block):
        super().__init__(layers=4)
        self.blocks[2] = block(16, 2, 20)


class Listing(Plain):
    """Blocks leave a loss of their own in a list that the model gives them."""

    class Block(Block):
        def forward(self, x, losses):
            x = super().forward(x)
            losses.append(x.square().mean())
            return x

    def __init__(self):
        super().__init__(self.Block)

    def run_blocks(self, x):
        losses = []
        for block in self.blocks:
            x = block(x, losses)
        return x + sum(losses)


class Flat(Plain):
    """Logits with rows and positions in one dimension."""

    def forward(self, idx):
        return super().forward(idx).flatten(0, 1)


OWN_CODE = {"mean": mean, "shift": shifted, "length": by_length, "roll": lambda x: x.roll(1, 1)}
HARMLESS = {
    "scale": lambda x: x * 0.5,
    "norm": lambda x: F.layer_norm(x, (16,)),
    "first": lambda x: x + 1,
    "in place": lambda x: x.mul_(0.5),
}


def model_step(rank, world_size, cases, texts):
    """{case: equal, or the sentence}. A case that fails leaves the group as it is."""
    found = {}
    for name, make in cases.items():
        for text in texts:
            torch.manual_seed(0)
            model, (x, y) = make(), tokens(0)
            out = model(x)
            right = cross(out.view(*y.shape, -1), y).item()
            par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), par.Plan.parse(text))
            try:
                loss = par.evaluate(model, (x, y), lambda o, t: cross(o.view(*t.shape, -1), t)).item()
                found[name, text] = "equal" if abs(loss - right) < 1e-5 * right else f"{loss} for {right}"
            except ValueError as error:
                found[name, text] = str(error)
    return found


@tier(quick=1 / 6)
@pytest.mark.parametrize("at", [2, 4])
@pytest.mark.parametrize("plan", ["ring=2", "ulysses=2", "tp=2,megatron_sp"])
def test_own_code_between_and_behind_the_blocks(plan, at):
    cases = {kind: functools.partial(Between, do, at) for kind, do in OWN_CODE.items()}
    for found in spawn(2, model_step, cases, [plan]):
        for case, text in found.items():
            assert "does not compute from pieces" in text, (case, text)


@tier(slow=1)
def test_harmless_code_is_right():
    cases = {kind: functools.partial(Between, do, 2) for kind, do in HARMLESS.items()}
    cases = {**cases, "behind": functools.partial(Between, HARMLESS["norm"], 4), "flat": Flat}
    for found in spawn(2, model_step, cases, ["ring=2", "tp=2,megatron_sp"]):
        assert set(found.values()) == {"equal"}, found


@tier(quick=1 / 2)
@pytest.mark.parametrize("plan", ["pp=2,ring=2", "dp=2,ulysses=2,zero=3"])
def test_own_code_with_other_axes(plan):
    cases = {"mean": functools.partial(Between, mean, 3), "plain": functools.partial(Plain, layers=4)}
    for found in spawn(4, model_step, cases, [plan]):
        text = found["mean", plan]
        assert "does not compute from pieces" in text and found["plain", plan] == "equal", found


def test_later_blocks_of_another_kind():
    cases = {"convolution": functools.partial(Third, Convolution), "asleep": functools.partial(Third, Asleep)}
    for found in spawn(2, model_step, cases, ["ulysses=2", "ring=2,zero=3", "tp=2,megatron_sp"]):
        for case, text in found.items():
            assert "does not compute from pieces" in text, (case, text)


def test_a_way_around_the_blocks():
    for found in spawn(2, model_step, {"around": Around}, ["ring=2", "ulysses=2"]):
        for case, text in found.items():
            assert "What it has kept from before the blocks is that of the whole" in text, (case, text)


class OwnHead(Plain):
    """No Linear, so it is not known where the sequence would be gathered. pools: over positions, so that the
    loss would not notice.
    """

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(29, 16))

        def forward(self, x):
            return x @ self.weight.t()

    def __init__(self, pools):
        super().__init__()
        self.head, self.pools = self.Head(), pools

    def forward(self, idx):
        out = super().forward(idx)
        return out.mean(1, keepdim=True).expand(-1, idx.shape[1], -1) if self.pools else out


def test_a_head_that_is_not_known():
    cases = {pools: functools.partial(OwnHead, pools) for pools in (True, False)}
    words = {True: "does not compute from pieces", False: "comes from a piece of the sequence"}
    for found in spawn(2, model_step, cases, ["tp=2,megatron_sp"]):
        for (pools, _), text in found.items():
            assert words[pools] in text, text


def test_a_list_that_blocks_change():
    for found in spawn(2, model_step, {"listing": Listing}, ["ring=2", "ulysses=2", "tp=2,megatron_sp"]):
        for case, text in found.items():
            assert "block 0 of 'blocks' changes a list or dict" in text, (case, text)
