"""Odd things that models do, under plans: as in one process, or refused with a reason."""

import dataclasses
import re
import threading

import pytest
import torch
from against_one import check_equal, sgd
from models import Block
from odd_models import Plain, cross, tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par


def shared_module():
    model = Plain(layers=4)
    model.blocks[3].mlp = model.blocks[0].mlp
    return model


def shared_weight():
    model = Plain(layers=4)
    model.blocks[3].mlp[0].weight = model.blocks[0].mlp[0].weight
    return model


def shared_norm():
    model = Plain(layers=4)
    model.blocks[0].ln_1 = model.norm
    return model


@tier(slow=1)
def test_what_blocks_share():
    """Modules in one stage, weights in several."""
    check_equal(shared_module, "tp=2", "dp=2,zero=3", "ulysses=2", "tp=2,megatron_sp")
    check_equal(shared_weight, "pp=2", "pp=2,schedule=zb-h1", "pp=2,schedule=zbv")


@pytest.mark.parametrize(
    ("make", "plan", "words"),
    [
        (shared_module, "pp=2", "one Linear is part of block 0 of .* and of block 3, in stage"),
        (shared_module, "pp=2,schedule=zbv", "one Linear is part of block 0 of .* and of block 3, in stage"),
        (shared_norm, "pp=2", "one LayerNorm is part of block 0 .* and of 'norm'"),
    ],
)
def test_what_blocks_of_two_stages_cannot_share(make, plan, words):
    spawn(2, refused, make, plan, words)


def refused(rank, world_size, make, plan, words):
    with pytest.raises(ValueError, match=words):
        par.parallelize(make(), None, par.Plan.parse(plan))


# In a step ------------------------------------------------------------


class Averaging(Block):
    """Subtracts a running average of the batches before, that it makes itself."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x):
        before = self.average.clone()
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return super().forward(x - before)


def penalty(model):
    return lambda out, y: cross(out, y) + 0.01 * sum(p.square().sum() for p in model.parameters())


def weight_norm():
    model = Plain(layers=4)
    for block in model.blocks:
        nn.utils.weight_norm(block.mlp[0])
    return model


class Locked(Block):
    """Holds what has no copy; `again` makes it anew in copies."""

    again = False

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.state = {"locks": [threading.Lock()]}

    def __getstate__(self):
        return {key: value for key, value in vars(self).items() if not (self.again and key == "state")}

    def __setstate__(self, state):
        super().__setstate__({"state": {"locks": [threading.Lock()]}, **state})

    def forward(self, x):
        with self.state["locks"][0]:
            return super().forward(x)


class LockedAgain(Locked):
    again = True


class MadeLate(Block):
    """Makes a part of it in its first forward."""

    def forward(self, x):
        if not hasattr(self, "extra"):
            self.extra = nn.Linear(16, 16)
        return x + self.extra(super().forward(x))


def run_before():
    model = Plain(MadeLate, layers=4)
    model(tokens(0)[0])
    return model


class Towers(Plain):
    """Two lists of blocks with an input each, as in CLIP."""

    def __init__(self):
        super().__init__(layers=3)
        self.right = nn.ModuleList(Block(16, 2, 20) for _ in range(3))

    def forward(self, idx):
        left, right = self.tok(idx), self.tok(idx.flip(1))
        for block in self.blocks:
            left = block(left)
        for block in self.right:
            right = block(right)
        return self.head(self.norm(left) * self.norm(right))


def with_hook():
    model = Plain(layers=4)
    model.blocks[1].mlp[0].weight.register_hook(lambda gradient: gradient * 0.5)
    return model


@dataclasses.dataclass
class Out:
    hidden: torch.Tensor


class DataBlock(Block):
    def forward(self, x):
        return Out(super().forward(x))


class Data(Plain):
    def run_blocks(self, x):
        for block in self.blocks:
            x = block(x).hidden
        return x


class DictBlock(Block):
    def forward(self, x):
        return {"hidden": super().forward(x), "extra": None}


class Dicts(Plain):
    def run_blocks(self, x):
        for block in self.blocks:
            x = block(x)["hidden"]
        return x


class Skipping(Plain):
    """Leaves out the last block of the first stage."""

    def run_blocks(self, x):
        return self.blocks[3](self.blocks[2](self.blocks[0](x)))


REFUSED = [
    (lambda: Data(DataBlock, 4), None, "pp=2", "a block returned a Out"),
    (lambda: Data(DataBlock, 4), None, "dp=2,zero=3", "returns a Out, whose tensors are not seen"),
    (lambda: Skipping(layers=4), None, "pp=2", "need the blocks to run once each|changes the hidden state"),
    (lambda: Plain(Averaging, 4), None, "dp=2", r"writes a buffer \(one of 'blocks.0.average'"),
    (lambda: Plain(Averaging, 4), None, "ulysses=2,zero=3", "writes a buffer"),
    (lambda: Plain(layers=4), penalty, "pp=2", "which another pipeline stage has|comes from"),
    (lambda: Plain(layers=4), penalty, "pp=2,schedule=zbv", "which another pipeline stage has"),
    (weight_norm, None, "pp=2", "a Block cannot be copied"),
    (
        lambda: Plain(Locked, 4),
        None,
        "pp=2",
        r"its 'state', a dict \(TypeError: .*lock.* a __setstate__ that",
    ),
    (
        lambda: Plain(MadeLate, 4),
        None,
        "pp=2",
        "makes its module 'extra' in its forward, .* Make it in __init__",
    ),
    (Towers, None, "pp=2", "(?s)Two towers with an input each .* use a plan with pp=1, such as tp=2,blocks="),
    (with_hook, None, "tp=2", "has a gradient hook"),
]


def two_steps(rank, world_size, make, loss, text):
    torch.manual_seed(0)
    model = make().double()
    with pytest.raises(Exception) as caught:
        model, opt = par.parallelize(model, sgd(model), par.Plan.parse(text))
        for step in range(2):
            par.step(model, opt, tokens(step), loss(model) if loss else cross)
    return type(caught.value).__name__, str(caught.value)


@tier(quick=1 / 5)
@pytest.mark.parametrize(("make", "loss", "text", "words"), REFUSED)
def test_refused(make, loss, text, words):
    """With a ValueError on the ranks that see it; the others' error has its text."""
    found = spawn(2, two_steps, make, loss, text, timeout=10.0)
    assert any(kind == "ValueError" for kind, _ in found), found
    for _, text in found:
        assert re.search(words, text), text


@tier(slow=1)
def test_right():
    check_equal(lambda: Dicts(DictBlock, 4), "pp=2", "dp=2,zero=3", "tp=2,megatron_sp")
    check_equal(weight_norm, "dp=2,zero=1", "tp=2", "ulysses=2")
    check_equal(with_hook, "dp=2,zero=2", "pp=2,schedule=zb-h1", "pp=2,schedule=zbv")


@tier(slow=1)
def test_what_the_refusals_say_would_do():
    check_equal(lambda: Plain(LockedAgain, 4), "pp=2", "ring=2")
    check_equal(lambda: Plain(Locked, 4), "dp=2,zero=3", "tp=2", "ring=2")
    check_equal(Towers, "tp=2,blocks=blocks", "dp=2,zero=3,blocks=right", "dp=2,zero=1")
    check_equal(run_before, "pp=2", "pp=2,schedule=zbv", "dp=2,zero=3")


class Counting(Plain):
    """Writes what all ranks have alike: a count of its calls and an average of the weights."""

    def __init__(self):
        super().__init__(layers=4)
        self.register_buffer("count", torch.tensor(5_000_000))
        self.register_buffer("average", torch.rand(16))

    def forward(self, idx):
        self.count += 1
        self.average.mul_(0.9)
        return super().forward(idx)


def counted(rank, world_size, text):
    torch.manual_seed(0)
    model = Counting().double()
    model, opt = par.parallelize(model, sgd(model), par.Plan.parse(text))
    for step, update in enumerate((False, True, True)):
        par.step(model, opt, tokens(step), cross, microbatches=2, clip=0.5, update=update)
    return int(par.full_state_dict(model)["count"])


@tier(quick=1 / 3)
@pytest.mark.parametrize("text", ["dp=2", "tp=2", "pp=2"])
def test_buffers_that_all_ranks_write_alike_are_taken(text):
    """Also where the square of the mark is more than fp32 holds."""
    assert spawn(2, counted, text) == [5_000_006] * 2
