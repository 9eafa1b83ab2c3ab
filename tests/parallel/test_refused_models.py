"""Models and losses that a plan would train wrongly without a word: refused, and right where they can be."""

import functools

import pytest
import torch
import torch.nn.functional as F
from odd_models import Plain, tokens
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par

CLASSES = torch.linspace(0.5, 2, 29)


def embedding(**options):
    model = Plain()
    model.tok = nn.Embedding(29, 16, **options)
    return model


def hooked(register):
    model = Plain()
    getattr(model.blocks[1], register)(lambda *given: None)
    return model


def scripted(compile):
    model = Plain()
    model.blocks[1].mlp = compile(model.blocks[1].mlp)
    return model


def weighted(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), weight=CLASSES)


def weighted_by_count(out, y):
    return (
        F.cross_entropy(out.flatten(0, 1), y.flatten(), weight=CLASSES, reduction="sum") / (y != -100).sum()
    )


def plain(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


CASES = {
    "max_norm": (functools.partial(embedding, max_norm=1.0), plain, {"dp=2": "max_norm", "tp=2": None}),
    "frequency": (
        functools.partial(embedding, scale_grad_by_freq=True),
        plain,
        {"dp=2": "scale_grad_by_freq", "ring=2": None},
    ),
    "hook": (
        functools.partial(hooked, "register_full_backward_hook"),
        plain,
        {"pp=2": "'blocks.1' has a backward hook", "dp=2": None},
    ),
    "hook before": (
        functools.partial(hooked, "register_full_backward_pre_hook"),
        plain,
        {"pp=2": "'blocks.1' has a backward hook"},
    ),
    "scripted": (
        functools.partial(scripted, torch.jit.script),
        plain,
        dict.fromkeys(("dp=2", "tp=2", "pp=2", "dp=2,zero=3"), "'blocks.1.mlp' is a module of torch.jit"),
    ),
    "traced": (
        functools.partial(scripted, lambda mlp: torch.jit.trace(mlp, torch.ones(2, mlp[0].in_features))),
        plain,
        {"dp=2": "Use the module as it was before torch.jit.script or torch.jit.trace"},
    ),
    "weights of classes": (Plain, weighted, {"dp=2": "weights of classes", "tp=2": None}),
    "weights, by count": (Plain, weighted_by_count, {"dp=2": None}),
}


def alone(make, loss_fn, batches):
    torch.manual_seed(0)
    model = make()
    opt, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for x, y in batches:
        opt.zero_grad()
        losses.append(loss_fn(model(x), y))
        losses[-1].backward()
        opt.step()
    return [loss.item() for loss in losses]


def steps(rank, world_size, make, loss_fn, text):
    batches = [tokens(seed) for seed in range(2)]
    right = alone(make, loss_fn, batches)
    torch.manual_seed(0)
    model = make()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    try:
        par.parallelize(model, opt, par.Plan.parse(text))
        found = [par.step(model, opt, batch, loss_fn).item() for batch in batches]
    except ValueError as error:
        return str(error)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(right), rtol=1e-4, atol=0)
    return None


@pytest.mark.parametrize("name, plan", [(name, plan) for name, case in CASES.items() for plan in case[2]])
def test_refused_or_right(name, plan):
    make, loss_fn, plans = CASES[name]
    for found in spawn(2, steps, make, loss_fn, plan):
        if plans[plan] is None:
            assert found is None
        else:
            assert plans[plan] in str(found), found
