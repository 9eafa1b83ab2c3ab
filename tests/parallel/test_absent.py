"""Pipelines of models in which values of earlier stages would be used where they were not handed on: refused.
Nothing is computed from stand-ins.
"""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from models import Block
from odd_models import OneUsed, Plain, adamw, cross, tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.pipeline.absent import Absent, absent_like, absent_parameter

LAYERS = 4  # two in each stage


class Base(Plain):
    def __init__(self, block=Block):
        super().__init__(block, LAYERS)


class SkipOver(Base):
    """A connection around all blocks, in front of the head."""

    def run_blocks(self, x):
        return super().run_blocks(x) + x


class SkipToTheEnd(Base):
    """The same behind the last module."""

    def forward(self, idx):
        x = self.tok(idx)
        return self.head(self.norm(self.run_blocks(x))) + x.sum(-1, keepdim=True)


class TiedByHand(Base):
    """The head is the weight of a module that only the first stage has."""

    def forward(self, idx):
        return F.linear(self.norm(self.run_blocks(self.tok(idx))), self.tok.weight)


class ReadEarly(Base):
    """Reads, before the blocks, the weight of a module that only the last stage has."""

    def run_blocks(self, x):
        return super().run_blocks(x + self.norm.weight)


class BothUsed(OneUsed):
    """The second tensors of all blocks are part of the output."""

    def forward(self, idx):
        return super().forward(idx) + sum(self.sums)


class Hidden:
    """Where a block finds what nobody gave to it."""

    value = None


class ReachingBlock(Block):
    def forward(self, x):
        return super().forward(x) + Hidden.value


class Reaching(Base):
    def __init__(self):
        super().__init__(ReachingBlock)

    def run_blocks(self, x):
        Hidden.value = x.mean(1, keepdim=True)
        return super().run_blocks(x)


class LateBlock(Block):
    def forward(self, x):
        return super().forward(x) + (0 if x.is_meta else Hidden.value)


class ReachingLate(Reaching):
    def __init__(self):
        Base.__init__(self, LateBlock)


class Deciding(Base):
    def run_blocks(self, x):
        return super().run_blocks(x if x.abs().max() < 1e9 else x / 2)


REFUSED = {
    "skip over": (SkipOver, "'norm' is given a tensor .* that comes from 'tok'"),
    "skip to the end": (SkipToTheEnd, "the loss is computed with a tensor .* that comes from 'tok'"),
    "second results": (BothUsed, "the loss is computed with a tensor .* that comes from block 0"),
    "tied by hand": (TiedByHand, "the loss is computed with a tensor .* that comes from 'tok.weight'"),
    "read early": (ReadEarly, "'norm.weight', which is registered after the blocks of 'blocks' but"),
    "reaching": (Reaching, "block 0 cannot be run for the shape of its output alone"),
    "reaching late": (ReachingLate, "block 2 of 'blocks' computes with a tensor .* comes from 'tok'"),
    "deciding": (Deciding, "asks for values .__bool__. that come from 'tok'"),
}


def refused(rank, world_size, name):
    torch.manual_seed(0)
    model = REFUSED[name][0]()
    opt = adamw(model)
    par.parallelize(model, opt, par.Plan(pp=2))
    with pytest.raises((ValueError, Exception)) as caught:
        par.step(model, opt, tokens(0), cross)
    return f"{type(caught.value).__name__}: {caught.value}"


@tier(quick=1 / 4)
@pytest.mark.parametrize("name", REFUSED)
def test_values_of_other_stages_are_refused(name):
    messages = spawn(2, refused, name, timeout=10.0)
    caught = [text for text in messages if text.startswith("ValueError")]
    assert caught, messages
    for text in caught:
        assert re.search(REFUSED[name][1], text, re.DOTALL), text


class InPlace(Base):
    """Makes the hidden state by writing into memory, masks and scales by its shape, and reads the weight of a
    module that it does not call.
    """

    def __init__(self):
        super().__init__()
        self.tok = nn.ModuleDict({"tok": self.tok, "pos": nn.Embedding(12, 16)})
        self.cls = nn.Parameter(torch.randn(16, dtype=torch.float64))

    def forward(self, idx):
        tok = self.tok["tok"](idx)
        x = tok.new_zeros(tok.shape[0], tok.shape[1] + 1, 16)
        x[:, 0] = self.cls
        x[:, 1:] = tok
        x = x * 1.5 + self.tok["pos"].weight[: x.shape[1]]
        x += torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.ones_like(x)
        return self.head(self.norm(self.run_blocks(x)))[:, 1:]


def losses(rank, world_size, plan):
    torch.manual_seed(0)
    model = InPlace().double()
    opt = adamw(model)
    if plan is not None:
        par.parallelize(model, opt, plan)
        return [par.step(model, opt, tokens(step), cross).item() for step in range(3)]
    found = []
    for step in range(3):
        x, y = tokens(step)
        loss = cross(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("plan", [par.Plan(pp=2), par.Plan(pp=2, schedule="interleaved")], ids=str)
def test_a_hidden_state_that_is_written_in_place(plan):
    right = losses(0, 1, None)
    for found in spawn(2, losses, plan):
        assert found == pytest.approx(right, rel=1e-10)


X = torch.empty(2, 3, device="meta")


@torch.jit.script
def scripted(x):
    return torch.where(x > 0, 1.0, 0.5)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: torch.ones(3) * x,
        lambda x: F.linear(torch.ones(2, 3), torch.ones(4, 3), x[0, 0].expand(4)),
        lambda x: torch.cat([torch.ones(2, 3), x])[0],
        lambda x: x.chunk(3, -1)[2],
        lambda x: torch.max(x, -1).indices,
        lambda x: torch.where(torch.ones(2, 3) > 0, 0.0, x),
        lambda x: x.to(torch.int64),
        lambda x: x.type_as(torch.ones(3).double()),
        lambda x: torch.zeros(2, 3).copy_(x),
        lambda x: torch.zeros(4, 3).index_copy_(0, torch.tensor([1, 3]), x),
        lambda x: torch.add(x, 1, out=torch.zeros(2, 3)),
        lambda x: nn.LayerNorm(3)(x),
        lambda x: nn.MultiheadAttention(3, 1, batch_first=True)(x[None], x[None], x[None])[0],
        lambda x: torch.ones(5)[x.to(torch.int64)],
        lambda x: x.mul_(2),
        lambda x: F.relu(x, inplace=True),
        lambda x: torch.view_as_complex(x.repeat(1, 2).view(2, 3, 2)),
        lambda x: torch.bernoulli(x),
        lambda x: torch.linalg.svd(x).S,
        lambda x: scripted(x),
        lambda x: torch.vmap(lambda row: (row > 0).float())(x),
        lambda x: torch.full((2,), 3).new_tensor(x.to(torch.int64)),
        lambda x: copy.deepcopy(x),
    ],
)
def test_the_mark_goes_on(use):
    out = use(absent_like(X, "here", "cpu"))
    assert isinstance(out, Absent) and out.origin == "here"


def test_the_mark_goes_on_through_writes():
    x, whole, part = absent_like(X, "here", "cpu"), torch.zeros(4, 3), torch.zeros(4, 3)
    whole[:2] = x
    part[1:3].add_(x)
    scaled = x
    scaled *= 2
    assert all(isinstance(value, Absent) for value in (whole, part, scaled))
    mask = same = torch.ones(2, 3, dtype=torch.bool)
    mask &= x > 0
    assert isinstance(same, Absent)
    buffer = torch.zeros(4, 3)
    view, (first, _) = buffer.view(-1), buffer.chunk(2)
    first.copy_(x > 0)
    assert view[:6].isnan().all()  # it has no mark
    assert x.unsqueeze_(0).shape == x.shape == (1, 2, 3)


def test_what_has_no_value_of_it_is_a_value():
    x = absent_like(X, "here", "cpu")
    for value in (
        torch.zeros_like(x),
        x.new_ones(3),
        torch.ones(3).type_as(x),
        torch.ones(3).expand_as(x),
        torch.arange(x.shape[1], device=x.device, dtype=x.dtype),
    ):
        assert type(value) is torch.Tensor and not value.isnan().any()


@pytest.mark.parametrize(
    "use",
    [
        lambda x: bool(x.sum()),
        lambda x: x.tolist(),
        lambda x: float(x[0, 0]),
        lambda x: x[0, 0].item(),
        lambda x: torch.ones(2, 3)[x > 0],
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: torch.masked_select(torch.ones(2, 3), x > 0),
        lambda x: torch.where(x > 0),
        lambda x: F.one_hot(x.to(torch.int64)),
        lambda x: torch.repeat_interleave(torch.ones(2), x[:, 0].to(torch.int64)),
        lambda x: torch.full((2,), x[0, 0].to(torch.int64)),
        lambda x: torch.arange(x[0, 0].to(torch.int64)),
    ],
)
def test_decisions_are_refused(use):
    with pytest.raises(ValueError, match="asks for values .* that come from here"):
        use(absent_like(X, "here", "cpu"))


def test_it_can_be_shown():
    x = absent_like(X, "here", "cpu")
    assert repr(x) == f"{x}" == "Absent(shape=(2, 3), dtype=torch.float32, origin=here)"


def test_a_parameter_in_the_place_of_another():
    stand_in = absent_parameter(nn.Parameter(torch.ones(2, 3)), "'pos'", "cpu")
    assert isinstance(stand_in, nn.Parameter) and not stand_in.requires_grad
    assert stand_in.untyped_storage().nbytes() == 4
    out = torch.ones(3) + stand_in[:1]
    assert isinstance(out, Absent) and out.origin == "'pos'"
