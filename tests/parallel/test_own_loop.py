"""Loops that users write themselves, over parallelized models: model(x), loss.backward(), opt.step(). Each
use (own_loops.py) equals one process, or is refused with a sentence.
"""

import contextlib
import itertools

import equality
import own_loops as uses
import pytest
import torch
from odd_models import cross
from own_loops import STEPS, World, adamw, gpt, sgd, words
from tiers import tier
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_ranks import spawn

import pycomm.parallel as par

USES = (
    *(uses.plain, uses.clipped, uses.clipped_by_torch, uses.read_gradients, uses.scaled_gradients),
    *(uses.set_gradients, uses.dropped_gradients, uses.gradients_of_autograd, uses.scaler, uses.accumulated),
    *(uses.never_cleared, uses.two_forwards, uses.unused, uses.raising, uses.by_closure, uses.recomputed),
    *(uses.part_of_the_model, uses.penalty, uses.with_steps, uses.gan, uses.gan_of_steps, uses.distillation),
    *(uses.preferences, uses.freezing),
)
CHUNKS, PARTS, SHARDED = {"zero=2", "zero=3"}, {"tp=2", "megatron_sp"}, {"zero=3"}
# use -> (of which plans it is refused, what the error says)
REFUSED = {
    uses.clipped_by_torch: (CHUNKS | PARTS, "Clip with parallel.clip_grad_norm_"),
    uses.read_gradients: (CHUNKS | PARTS, "read with parallel.full_gradients"),
    uses.scaled_gradients: (CHUNKS, "is not whole"),
    uses.set_gradients: (CHUNKS | PARTS, "is not whole"),
    uses.gradients_of_autograd: ({"dp=2"}, "the ranks differ in it|in the ranks' chunks|empty"),
    uses.scaler: ({"zero=1"} | CHUNKS | PARTS, "use parallel.step.scaler="),
    uses.part_of_the_model: (SHARDED | {"megatron_sp"}, "is called by itself"),
    uses.penalty: (SHARDED | PARTS, "outside of the model's forward|is sharded under zero=3"),
}
# They have no blocks, whose positions would be cut.
WITHOUT_BLOCKS = {
    uses.unused,
    uses.gan,
    uses.gan_of_steps,
    uses.gradients_of_autograd,
    uses.part_of_the_model,
}


def is_refused(use, text):
    plans, words = REFUSED.get(use, ((), None))
    return words if set(plans) & set(text.split(",")) else None


def ranks(rank, world_size, texts, chosen=USES):
    found = {}
    for text, use in itertools.product(texts, chosen):
        if "megatron_sp" in text and use in WITHOUT_BLOCKS:
            continue
        words = is_refused(use, text)
        if use is uses.gradients_of_autograd and "zero=3" in text:
            continue  # torch itself takes no whole gradient for an empty parameter
        with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
            found[text, use.__name__] = use(World(text))
    return found


GROUPS = [
    ("dp=2", "dp=2,zero=3", "tp=2"),
    ("dp=2,zero=1", "dp=2,zero=2", "tp=2,megatron_sp"),
    ("dp=2,tp=2", "dp=2,tp=2,zero=3"),
]


@pytest.mark.parametrize(
    "texts",
    [
        GROUPS[0],
        pytest.param(GROUPS[1], marks=pytest.mark.slow),
        pytest.param(GROUPS[2], marks=pytest.mark.deep),
    ],
)
def test_equal_to_one_process_or_refused(texts):
    alone = {}
    for found in spawn(par.Plan.parse(texts[0]).world_size, ranks, texts):
        assert len(found) > len(texts) * (len(USES) - len(REFUSED) - len(WITHOUT_BLOCKS))
        for (text, name), state in found.items():
            expected = alone.get(name) or alone.setdefault(name, getattr(uses, name)(World()))
            for key, value in expected.items():
                assert equality.relative(state[key], value) < 1e-10, (text, name, key)


@tier(deep=1)
@pytest.mark.parametrize("text", ["dp=2,zero=3", "tp=2", "tp=2,megatron_sp"])
def test_a_compiled_model(text):
    expected = uses.plain(World())
    for found in spawn(2, ranks, (text,), (uses.compiled,)):
        for key, value in found[text, "compiled"].items():
            assert equality.relative(value, expected[key]) < 1e-10, key


def elsewhere(rank, world_size):
    """Under plans where a rank has a part of the model's blocks or of the positions."""
    for text in ("pp=2", "ring=2", "ulysses=2"):
        model = gpt()
        model, opt = par.parallelize(model, adamw(model.parameters()), text)
        before = par.full_state_dict(model)
        x, y = words(0)
        for graph in (True, False):
            with torch.set_grad_enabled(graph), pytest.raises(ValueError, match="parallel.step"):
                model(x)
        with pytest.raises(ValueError, match="parallel.step"):
            opt.step()
        with pytest.raises(ValueError, match="parallel.step"):
            here = (p for p in model.parameters() if type(p) is nn.Parameter and not p.is_meta)
            next(here).square().sum().backward()
        opt.zero_grad()
        assert all(torch.equal(value, before[name]) for name, value in par.full_state_dict(model).items())
        assert torch.isfinite(par.step(model, opt, (x, y), cross))


def test_refused_plans():
    spawn(2, elsewhere)


def mistakes(rank, world_size):
    model = gpt()
    model, opt = par.parallelize(model, adamw(model.parameters()), "dp=2")
    (x, y), mine = words(0), World("dp=2").rows(*words(0))
    par.step(model, opt, (x, y), cross, update=False)
    with pytest.raises(ValueError, match=r"parallel.step\(update=False\) wait"):
        cross(model(mine[0]), mine[1]).backward()
    opt.zero_grad()
    cross(model(mine[0]), mine[1]).backward()
    opt.param_groups[0]["lr"] = 0.01 + rank
    with pytest.raises(ValueError, match="the optimizer's lr of group 0 differs between ranks"):
        opt.step()
    opt.param_groups[0]["lr"] = 0.01
    with pytest.raises(ValueError, match="0 or more"):
        par.clip_grad_norm_(model, -1.0)
    with pytest.raises(ValueError, match="its class"):
        type(opt).step(opt)
    opt.step()

    model = gpt()
    model, opt = par.parallelize(model, adamw(model.parameters()), "tp=2")
    with pytest.raises(ValueError, match="other inputs than on other ranks of tp"):
        model(mine[0])
    cross(model(x), y).backward()
    with pytest.raises(ValueError, match="is called in a backward"):
        checkpoint(model, x, use_reentrant=False).sum().backward()


def test_mistakes():
    spawn(2, mistakes)


def with_create_graph(rank, world_size):
    """It is refused before a parameter changes, and training goes on."""
    for text in ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=2,megatron_sp"):
        model = gpt()
        model, opt = par.parallelize(model, adamw(model.parameters()), text)
        before = par.full_state_dict(model)
        x, y = World(text).rows(*words(0))
        loss = cross(model(x), y)
        with pytest.raises(ValueError, match=r"create_graph=True"):
            loss.backward(create_graph=True)
        opt.zero_grad()
        assert all(torch.equal(value, before[name]) for name, value in par.full_state_dict(model).items())
        cross(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        after = par.full_state_dict(model)
        assert not any(torch.equal(value, before[name]) for name, value in after.items()), text


def test_a_backward_with_a_graph():
    spawn(2, with_create_graph)


def with_gradient_penalty(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    model, opt = world.parallelize(model, sgd)
    for _ in range(STEPS):
        (x, _) = world.rows(*torch.randn(2, 8, 6, dtype=torch.float64))
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        opt.step()
        opt.zero_grad()
    return world.state(model)


def penalties(rank, world_size, texts):
    return [with_gradient_penalty(World(text)) for text in texts]


def test_a_gradient_penalty_equals_one_process():
    expected = with_gradient_penalty(World())
    for found in spawn(2, penalties, ("dp=2", "dp=2,zero=1", "dp=2,zero=2")):
        for state in found:
            assert all(equality.relative(value, expected[name]) < 1e-10 for name, value in state.items())


def in_bf16(rank, world_size, texts):
    """Under autocast, and with the plan's own precision: as parallel.step."""
    for text in texts:
        states = []
        for own in (True, False):
            model = gpt().float()
            model, opt = par.parallelize(model, sgd(model.parameters()), text)
            for step in range(STEPS):
                x, y = World(text).rows(*words(step))
                with torch.autocast("cpu", torch.bfloat16, enabled="precision" not in text):
                    if own:
                        loss = cross(model(x), y)
                        assert loss.dtype == torch.float32
                        loss.backward()
                        opt.step()
                        opt.zero_grad()
                    else:
                        par.step(model, opt, (x, y), cross, sharded=True)
            states.append(par.full_state_dict(model))
        for name, value in states[0].items():
            assert equality.relative(value, states[1][name]) < 0.02, (text, name)


@tier(slow=1)
def test_bf16():
    spawn(2, in_bf16, ("dp=2", "dp=2,zero=3", "tp=2", "dp=2,zero=1,precision=bf16", "tp=2,precision=bf16"))
