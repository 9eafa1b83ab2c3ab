"""What a pipeline's forward does beside the hidden state: buffers that are written outside of the blocks, and
second results of blocks. As in one process, or refused.
"""

import re

import pytest
import torch
from odd_models import LastUsed, OneUsed, Plain, adamw, cross, tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par


class Base(Plain):
    def __init__(self):
        super().__init__(layers=4)  # two in each stage


class Counted(Base):
    """Counts its passes, and uses the count; averages what only the first stage has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(16))
        self.passes = 0

    def forward(self, idx):
        self.count += 1
        self.passes += 1
        x, before = self.tok(idx), self.average.clone()
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return self.head(self.norm(self.run_blocks(x - before))) / (self.count + self.passes)


class Passes(Base):
    """Counts its passes in a number."""

    passes = 0

    def forward(self, idx):
        self.passes += 1
        return super().forward(idx) * self.passes


class Keeping(Base):
    """Uses what its pass before has kept."""

    kept = 0.0

    def forward(self, idx):
        x = self.tok(idx)
        before, self.kept = self.kept, x.detach().mean()
        return self.head(self.norm(self.run_blocks(x + before)))


class Compiled(Base):
    def __init__(self):
        super().__init__()
        self.scale = torch.compile(lambda x: torch.tanh(x) * 2, backend="eager")

    def run_blocks(self, x):
        return super().run_blocks(self.scale(x))


class PlainNorms(Base):
    """BatchNorms without weights on both sides of the blocks."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Sequential(nn.Embedding(29, 16), nn.BatchNorm1d(7, affine=False))
        self.outer = nn.BatchNorm1d(7, affine=False)

    def forward(self, idx):
        return self.outer(super().forward(idx))


def counted(rank, world_size, make, plan):
    torch.manual_seed(0)
    model = make().double()
    opt = adamw(model)
    par.parallelize(model, opt, plan)
    found = [par.step(model, opt, tokens(step), cross, microbatches=2).item() for step in range(2)]
    return found, par.full_state_dict(model)


@tier(quick=1 / 6)
@pytest.mark.parametrize("make", [Counted, Passes, Keeping, Compiled, PlainNorms])
def test_buffers_outside_of_the_blocks(make):
    """They are written once in each microbatch, as in one process."""
    right, state = counted(0, 1, make, None)
    plans = [par.Plan(pp=2)] + [par.Plan(pp=2, dp=2)] * (make is PlainNorms)
    for plan in plans:
        for losses, found in spawn(plan.world_size, counted, make, plan):
            assert losses == pytest.approx(right, rel=1e-10)
            for name, value in state.items():
                assert torch.allclose(found[name], value, rtol=1e-7, atol=1e-9), name


TWICE = {
    Counted: "writes to 'count'",
    Passes: "writes to 'passes'",
    Keeping: "block 0 .* a tensor that the model has kept from the pass of another stage",
}


def counted_twice(rank, world_size, make):
    with pytest.raises((ValueError, Exception)) as caught:
        counted(rank, world_size, make, par.Plan(pp=2, schedule="interleaved"))
    return str(caught.value)


@tier(quick=1 / 3)
@pytest.mark.parametrize("make", TWICE)
def test_what_two_stages_of_a_rank_write_is_refused(make):
    found = spawn(2, counted_twice, make, timeout=10.0)
    assert any(re.search(TWICE[make], text) for text in found), found


@tier(quick=1 / 8, slow=1 / 2)
@pytest.mark.parametrize(
    "plan", ["pp=2", "pp=2,schedule=zb-h1", "pp=2,schedule=interleaved", "pp=2,checkpoint"]
)
@pytest.mark.parametrize("make", [OneUsed, LastUsed])
def test_second_results_of_blocks(make, plan):
    """They stay on their stage; what is computed from them there is right."""
    right, state = counted(0, 1, make, None)
    for losses, found in spawn(2, counted, make, par.Plan.parse(plan)):
        assert losses == pytest.approx(right, rel=1e-12)
        for name, value in state.items():
            assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name
