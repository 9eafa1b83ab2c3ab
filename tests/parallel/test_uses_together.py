"""Several uses of model and optimizer in one training, as programs have them: a loop of the user's own that
unfreezes gradually, averages, whole parameters and state dicts between its steps.
"""

import equality
import pytest
import torch
from models import GPT
from odd_models import LENGTH, cross
from tiers import tier
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_ranks import spawn

import pycomm.parallel as par

STEPS, DECAY = 5, 0.8


def tokens(step):
    """Every target counts: the mean over all rows equals the mean of the ranks' means."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 29, (4, LENGTH), generator=generator) for _ in range(2)]


def make(dtype=torch.float64):
    torch.manual_seed(0)
    model = GPT(dim=16, heads=2, hidden=20).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.3" in name or "norm" in name)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def between(model, step):
    """requires_grad_ before the step with this number."""
    if step == 1:
        model.blocks[2].requires_grad_(True)
    if step == 2:
        model.blocks[3].requires_grad_(False)
    if step == 3:
        model.tok.requires_grad_(True)
        model.blocks[3].requires_grad_(True)


@torch.no_grad()
def write(model):
    for parameter in model.parameters():
        parameter.clamp_(-0.1, 0.1)


def alone():
    model, opt = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(STEPS):
        between(model, step)
        cross(model(tokens(step)[0]), tokens(step)[1]).backward()
        opt.step()
        opt.zero_grad()
        average.update_parameters(model)
        if step == 2:
            write(model)
    return model.state_dict(), average.module.state_dict()


def together(rank, world_size, plans):
    found = {}
    for text in plans:
        plan = par.Plan.parse(text)
        model, opt = par.parallelize(*make(), plan)
        ema, part = par.ema(model, DECAY), rank * plan.dp // world_size
        for step in range(STEPS):
            between(model, step)
            x, y = (leaf.chunk(plan.dp)[part] for leaf in tokens(step))
            if plan.pp * plan.ring * plan.ulysses > 1:
                par.step(model, opt, tokens(step), cross)
            else:
                cross(model(x), y).backward()
                opt.step()
                opt.zero_grad()
            ema.update()
            if step == 2:
                with par.gathered(model):
                    write(model)
                    state = {name: value.clone() for name, value in model.state_dict().items()}
                whole = par.full_state_dict(model)
                assert all(torch.equal(state[name], value) for name, value in whole.items())
                par.load_state_dict(model, par.state_dict(model, opt), opt)
        with ema.applied():
            averaged = par.full_state_dict(model)
        found[text] = par.full_state_dict(model), averaged
    return found


PLANS = ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2", "ring=2")


def check(world_size, plans):
    expected = alone()
    for found in spawn(world_size, together, plans):
        for text, states in found.items():
            for state, right in zip(states, expected, strict=True):
                worst = max(equality.relative(state[name], value) for name, value in right.items())
                assert worst < 1e-10, (text, worst)


@pytest.mark.parametrize("plans", [PLANS[:4], PLANS[4:]], ids=["data", "model"])
def test_together(plans):
    check(2, plans)


@tier(slow=1 / 2)
@pytest.mark.parametrize("plan", ["dp=2,tp=2", "dp=2,tp=2,zero=3"])
def test_together_on_four(plan):
    check(4, (plan,))


def in_bf16(rank, world_size, plans):
    """No use is taken for a write that is lost, and none loses what is written."""
    for text in plans:
        model, opt = par.parallelize(*make(torch.float32), par.Plan.parse(text))
        ema = par.ema(model, DECAY)
        for step in range(3):
            between(model, step)
            par.step(model, opt, tokens(step), cross)
            ema.update()
            with ema.applied():
                par.evaluate(model, tokens(step), cross)
            par.load_state_dict(model, par.state_dict(model))
            if "zero=3" not in text:
                model.load_state_dict(model.state_dict())
            with par.gathered(model), torch.no_grad():
                model.norm.weight.fill_(0.123456789)
            value = par.full_state_dict(model)["norm.weight"]
            assert value.dtype == torch.float32 and torch.equal(value, torch.full_like(value, 0.123456789))
            before = {name: value.clone() for name, value in par.full_state_dict(model).items()}
        par.step(model, opt, tokens(3), cross)
        after = par.full_state_dict(model)
        moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
        assert any("blocks.2" in name for name in moved), text
        assert not any("blocks.3" in name or "tok" in name for name in moved), text


def test_in_bf16():
    spawn(2, in_bf16, ("dp=2,precision=bf16", "dp=2,zero=1,precision=bf16", "dp=2,zero=3,precision=bf16"))
