"""What users do with the returned optimizer and model around step(): parameter groups, schedulers of the
learning rate, moving averages, copies.
"""

import copy
import io
import pickle

import equality
import pytest
import torch
from models import GPT
from odd_models import cross, tokens
from tiers import tier
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_ranks import spawn

import pycomm.parallel as par

STEPS, DECAY = 3, 0.7


def make():
    torch.manual_seed(0)
    return GPT().double()


def optimizer_of(model):
    """Two groups that differ in everything."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "lr": 0.01},
            {"params": rest, "lr": 0.03, "weight_decay": 0.0, "betas": (0.8, 0.9)},
        ],
        weight_decay=0.1,
    )


def scheduler_of(opt):
    """It moves the learning rates, each from its own, and the momentum."""
    return torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[0.02, 0.05], total_steps=STEPS + 2)


def alone():
    model = make()
    opt = optimizer_of(model)
    scheduler, average = scheduler_of(opt), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)
    for step in range(STEPS):
        x, y = tokens(step)
        opt.zero_grad()
        cross(model(x), y).backward()
        opt.step()
        scheduler.step()
        average.update_parameters(model)
    return model.state_dict(), average.module.state_dict(), scheduler.get_last_lr()


def swap(average, owned):
    for a, p in zip(average, owned, strict=True):
        kept = p.detach().clone()
        p.detach().copy_(a)
        a.copy_(kept)


def planned(rank, world_size, texts):
    found = []
    for text in texts:
        model = make()
        model, opt = par.parallelize(model, optimizer_of(model), par.Plan.parse(text))
        scheduler = scheduler_of(opt)
        owned = [p for group in opt.param_groups for p in group["params"]]
        average = [p.detach().clone() for p in owned]
        for step in range(STEPS):
            par.step(model, opt, tokens(step), microbatches=2)
            scheduler.step()
            torch._foreach_lerp_(average, [p.detach() for p in owned], 1 - DECAY)
        swap(average, owned)
        averaged = par.full_state_dict(model)
        swap(average, owned)
        found.append((par.full_state_dict(model), averaged, scheduler.get_last_lr()))
    return found


CASES = (
    ("dp=2", "dp=2,zero=1", "dp=2,zero=2,bucket_mb=0.004", "dp=2,zero=3", "tp=2", "pp=2,schedule=zbv"),
    ("dp=2,tp=2,zero=3", "dp=2,pp=2,zero=1", "tp=2,pp=2,megatron_sp", "ring=2,ulysses=2,zero=2"),
)


@tier(slow=1 / 2)
@pytest.mark.parametrize("texts", CASES, ids=["2", "4"])
def test_groups_schedulers_and_averages(texts):
    state, averaged, rates = alone()
    for found in spawn(par.Plan.parse(texts[0]).world_size, planned, texts):
        for text, (its_state, its_averaged, its_rates) in zip(texts, found, strict=True):
            assert its_rates == rates, text
            for name, value in state.items():
                assert equality.relative(its_state[name], value) < 1e-10, (text, name)
                assert equality.relative(its_averaged[name], averaged[name]) < 1e-10, (text, name)


def refused(rank, world_size):
    for text in ("dp=2", "pp=2", "dp=2,zero=3"):
        model = make()
        model, opt = par.parallelize(model, optimizer_of(model), par.Plan.parse(text))
        with pytest.raises(ValueError, match="Give it all groups before parallelize"):
            opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        for copied in (copy.deepcopy, AveragedModel, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(ValueError, match="one rank's part of a model under Plan"):
                copied(model)
        assert torch.isfinite(par.step(model, opt, tokens(0)))


def test_refusals():
    spawn(2, refused)
