"""Blocks with names instead of numbers (torchvision: encoder_layer_0), in a Sequential or a ModuleDict."""

from collections import OrderedDict

import pytest
import torch
from against_one import check_equal, sgd
from models import Block
from odd_models import Plain, cross, tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.models.trunk import find_trunk

LAYERS = 3


class Named(Plain):
    """Names that are no numbers, and a number that is not the block's place."""

    def __init__(self):
        super().__init__()
        names = ("encoder_layer_0", "encoder_layer_1", "0")
        self.blocks = nn.Sequential(OrderedDict((name, Block(16, 2, 20)) for name in names))

    def run_blocks(self, x):
        return self.blocks(x)


class Dictionary(Named):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict(self.blocks.named_children())

    def run_blocks(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x


class Nested(Plain):
    """Lists of blocks in a list: they have no forward, so the blocks are those in them."""

    def __init__(self):
        super().__init__()
        lists = [[Block(16, 2, 20) for _ in range(count)] for count in (1, 2)]
        self.blocks = nn.ModuleList(nn.ModuleList(each) for each in lists)

    def run_blocks(self, x):
        for blocks in self.blocks:
            for block in blocks:
                x = block(x)
        return x


def whole():
    """The model itself is the list."""
    model = Named()
    return nn.Sequential(OrderedDict(tok=model.tok, **dict(model.blocks.named_children()), head=model.head))


PLANS = {
    2: ["dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,zero=3,checkpoint", "tp=2", "pp=2", "ulysses=2"]
    + ["tp=2,megatron_sp", "dp=2,checkpoint"],
    4: ["dp=2,pp=2,zero=3", "pp=2,tp=2,schedule=zb-h1"],
}


@tier(quick=1 / 6, slow=1 / 3)
@pytest.mark.parametrize("make", [Named, whole])
@pytest.mark.parametrize("world_size", PLANS)
def test_equal_to_one_process(make, world_size):
    check_equal(make, *PLANS[world_size])


@tier(slow=1)
def test_a_dictionary_of_blocks():
    check_equal(Dictionary, *(f"{text},blocks=blocks" for text in PLANS[2]))


@tier(slow=1)
def test_lists_in_a_list():
    check_equal(Nested, *PLANS[2])


def test_which_block_a_name_is_of():
    trunk = find_trunk(Nested())
    assert trunk.names == ("blocks.0.0", "blocks.1.0", "blocks.1.1")
    assert trunk.block_of("blocks.1.1.ln_1.weight") == 2 and trunk.block_of("blocks.1") is None
    trunk = find_trunk(Named())
    names = {"encoder_layer_1.ln_1.weight": 1, "0.ln_1.weight": 2, "1.ln_1.weight": None}
    assert {name: trunk.block_of(f"blocks.{name}") for name in names} == names
    assert trunk.block_of("tok.weight") is None and len(trunk.blocks) == LAYERS


def make(plan, seed=0):
    torch.manual_seed(seed)
    model = Named().double()
    return par.parallelize(model, sgd(model), par.Plan.parse(plan))


def save(rank, world_size, folder):
    model, opt = make("pp=2")
    par.step(model, opt, tokens(0), cross)
    par.save(model, opt, folder)
    return par.full_state_dict(model)


def load(rank, world_size, plan, folder):
    model, opt = make(plan, seed=1)
    par.load(model, opt, folder)
    return par.full_state_dict(model)


@tier(quick=1 / 3)
@pytest.mark.parametrize("plan", ["dp=2,zero=3", "tp=2", "pp=2"])
def test_checkpoint(tmp_path, plan):
    right = spawn(2, save, str(tmp_path))[0]
    for found in spawn(2, load, plan, str(tmp_path)):
        assert found.keys() == right.keys()
        assert all(torch.equal(found[name], value) for name, value in right.items())


def test_an_entry_without_a_module_is_no_block():
    model = Dictionary()
    model.blocks["left out"] = None
    trunk = find_trunk(model, "blocks")
    assert trunk.names == ("blocks.encoder_layer_0", "blocks.encoder_layer_1", "blocks.0")
    assert all(isinstance(block, Block) for block in trunk.blocks)
