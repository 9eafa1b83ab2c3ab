"""Modules that are registered on one side of the blocks and called on the other, in models with inputs of
their own to be looked at with (`dummy_inputs`).
"""

import copy

import pytest
import torch
from odd_models import Plain, cross, tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.models.call_order import called_sides
from pycomm.parallel.models.trunk import Side, find_trunk, owners


class Misplaced(Plain):
    """The last norm is registered before the blocks, the norm of the embedding behind them."""

    def __init__(self, looks=False):
        super().__init__(layers=4)
        self.early = nn.LayerNorm(16)
        self._modules["blocks"] = self._modules.pop("blocks")
        for name in ("head", "early"):
            self._modules[name] = self._modules.pop(name)
        self.looks, self.kept = looks, None
        nn.init.normal_(self.early.bias)
        nn.init.normal_(self.norm.bias)

    @property
    def dummy_inputs(self):
        return {"idx": torch.zeros(2, 3, dtype=torch.int64)}

    def forward(self, idx):
        x = self.early(self.tok(idx))
        if self.looks and x.sum() > 1e9:
            raise AssertionError
        self.kept = self.run_blocks(x)
        return self.head(self.norm(self.kept))


def sides(model):
    trunk = find_trunk(model, "blocks")
    return {name: side for name, _, side in owners(model, trunk, called_sides(model, trunk))}


def test_the_sides_are_those_of_the_calls():
    before, after = Side.BEFORE, Side.AFTER
    assert list(dict(Misplaced().named_children())) == ["tok", "norm", "blocks", "head", "early"]
    assert sides(Misplaced()) == {"tok": before, "early": before, "norm": after, "head": after}


class TwoLists(nn.Module):
    """All norms are registered behind the blocks; each is called in another place."""

    dummy_inputs = {"x": torch.zeros(2, 3)}

    def __init__(self):
        super().__init__()
        self.one = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.other = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.last, self.middle, self.first, self.never = (nn.LayerNorm(3) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.one:
            x = block(x)
        x = self.middle(x)
        for block in self.other:
            x = block(x)
        return self.last(x)


def test_sides_of_two_lists():
    model = TwoLists()
    trunk = find_trunk(model, ("one", "other"))
    found = called_sides(model, trunk)
    assert found == {"first": Side.BEFORE, "middle": Side.BETWEEN, "last": Side.AFTER}
    sides_of = {name: side for name, _, side in owners(model, trunk, found)}
    assert sides_of == {**found, "never": Side.AFTER}


def test_what_was_called_before_a_failure_is_known():
    assert sides(Misplaced(looks=True)) == {
        "tok": Side.BEFORE,
        "early": Side.BEFORE,
        "norm": Side.BEFORE,  # not reached: as it is registered
        "head": Side.AFTER,
    }


class TwiceCalled(Misplaced):
    def forward(self, idx):
        return self.head(self.norm(self.run_blocks(self.norm(self.tok(idx)))))


def test_what_is_called_on_both_sides_stays_as_it_is_registered():
    model = TwiceCalled()
    assert called_sides(model, find_trunk(model, "blocks")) == {"tok": Side.BEFORE, "head": Side.AFTER}


def test_the_model_is_not_touched():
    model = Misplaced()
    state = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    called_sides(model, find_trunk(model, "blocks"))
    for name, value in model.state_dict(keep_vars=True).items():
        assert state[name][0] == id(value) and torch.equal(state[name][1], value)
    assert model.kept is None and torch.equal(random, torch.get_rng_state())
    assert not any(module._forward_pre_hooks for module in model.modules())


class Strange(Plain):
    @property
    def dummy_inputs(self):
        raise NotImplementedError("this class has none")


@pytest.mark.parametrize("kind", [Plain, Strange])
def test_a_model_without_inputs_is_left_alone(kind):
    assert called_sides(kind(), find_trunk(kind(), "blocks")) == {}


def train(rank, world_size, plan):
    torch.manual_seed(0)
    model = Misplaced().double()
    alone = copy.deepcopy(model)
    opt, own = (torch.optim.SGD(m.parameters(), lr=0.2) for m in (model, alone))
    par.parallelize(model, opt, plan)
    for step in range(2):
        x, y = tokens(step)
        found = par.step(model, opt, (x, y), par.cross_entropy, microbatches=2).item()
        own.zero_grad()
        loss = cross(alone(x), y)
        loss.backward()
        own.step()
        assert found == pytest.approx(loss.item(), rel=1e-12)
    state = par.full_state_dict(model)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12, msg=name)


PLANS = ["pp=2,schedule=1f1b", "pp=2,schedule=zb-h1", "pp=2,schedule=zbv", "pp=4", "dp=2,pp=2,zero=2"]


@tier(quick=1 / 3, slow=1 / 2)
@pytest.mark.parametrize("plan", [*PLANS, "tp=2,megatron_sp", "tp=2,pp=2,megatron_sp"])
def test_training(plan):
    plan = par.Plan.parse(plan)
    spawn(plan.world_size, train, plan)
