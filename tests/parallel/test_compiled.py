"""Compiled models under plans: as one process, or refused."""

import equality
import pytest
import torch
from models import GPT
from odd_models import cross, tokens
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par


def make():
    torch.manual_seed(0)
    return GPT(layers=2).double()


def blocks_of(model):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")


def in_place(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")


def whole(model):
    model.compile(backend="aot_eager")


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def alone():
    model = make()
    opt, losses = sgd(model), []
    for step in range(2):
        x, y = tokens(step)
        opt.zero_grad()
        loss = cross(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def planned(rank, world_size, text, before, after):
    model = make()
    if before is not None:
        before(model)
    model, opt = par.parallelize(model, sgd(model), par.Plan.parse(text))
    if after is not None:
        after(model)
    return [par.step(model, opt, tokens(step), microbatches=2).item() for step in range(2)]


@tier(slow=1 / 6)
@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("dp=2", blocks_of, None),
        ("dp=2,zero=1", None, in_place),
        ("dp=2,zero=3", blocks_of, None),
        ("pp=2", blocks_of, None),
        ("tp=2", in_place, None),
        ("tp=2,megatron_sp", blocks_of, None),
        ("tp=2", whole, None),
        ("tp=2", None, in_place),
        ("tp=2", None, blocks_of),
        ("tp=2", None, whole),
        ("tp=2,zero=3", None, blocks_of),
        ("dp=2,zero=3", None, in_place),
        ("dp=2,zero=3", in_place, None),
        ("dp=2,zero=3", None, whole),
        ("dp=2,zero=3", whole, None),
        ("pp=2", None, blocks_of),
        ("pp=2,schedule=zb-h1", None, in_place),
        ("pp=2", None, whole),
        ("ring=2", None, blocks_of),
        ("ulysses=2", None, in_place),
        ("ring=2", None, whole),
        ("tp=2,megatron_sp", None, in_place),
        ("tp=2,megatron_sp", None, whole),
        ("dp=2,checkpoint", blocks_of, None),
        ("dp=2,checkpoint", None, blocks_of),
        ("dp=2,checkpoint", whole, None),
        ("tp=2,zero=3,checkpoint", in_place, None),
        ("tp=2,zero=2", in_place, None),
    ],
)
def test_equal_to_one_process(text, before, after):
    for losses in spawn(2, planned, text, before, after):
        assert equality.relative(losses, alone()) < 1e-11


@pytest.mark.parametrize(
    ("text", "compiles", "words"),
    [
        ("ring=2", in_place, "puts attention over ranks into it"),
        ("tp=2,megatron_sp", whole, "Compile its blocks, each by itself"),
        ("ulysses=2", whole, "'the model' is compiled"),
        ("pp=2", whole, "Compile its blocks, each by itself"),
        ("pp=2", in_place, "'blocks.0' is compiled with what the plan changes"),
    ],
)
def test_refusals(text, compiles, words):
    model = make()
    compiles(model)
    with pytest.raises(ValueError, match=words):
        par.parallelize(model, None, par.Plan.parse(text))
