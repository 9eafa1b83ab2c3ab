"""A training that goes on under other plans by one checkpoint after the other: all that a run has of states
comes through, bit for bit, and nothing of what the model had before the load stays.
"""

import pytest
import torch
from checkpoint_cases import batch, make, quiet, same, two_groups  # noqa: F401
from models import Llama
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par

SIZES = {"vocab": 11, "dim": 12, "heads": 6, "kv_heads": 2, "layers": 2, "hidden": 7}


def dense(seed, dtype):
    """Tied, with a frozen parameter and a buffer."""
    torch.manual_seed(seed)
    model = Llama(**SIZES)
    model.lm_head.weight = model.embed.weight
    model.layers[0].norm1.weight.requires_grad_(False)
    model.register_buffer("mark", torch.randn(3))
    return model.to(dtype)


def experts(seed, dtype):
    torch.manual_seed(seed)
    return Llama(**SIZES, mlp=lambda: par.MoE(12, lambda: nn.Linear(12, 12), 3, top_k=2)).to(dtype)


def optimizer_of(model):
    """Of the second with fewer states, as each key costs a millisecond."""
    has_experts = any(isinstance(module, par.MoE) for module in model.modules())
    kind = (torch.optim.SGD, {"momentum": 0.9}) if has_experts else (torch.optim.AdamW, {"weight_decay": 0.1})
    return two_groups(model, *kind)


def scheduler_of(opt):
    return torch.optim.lr_scheduler.LambdaLR(opt, [lambda n: 0.9**n, lambda n: 0.5**n])


def whole(tree):
    from torch.distributed.tensor import DTensor

    return torch.utils._pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def states(model, opt):
    """All that a rank can ask for: values, the optimizer's state, its groups, averages."""
    found = whole(par.state_dict(model, opt))
    return [(str(path), value) for path, value in torch.utils._pytree.tree_leaves_with_path(found)]


def equal(found, expected):
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (path, value), (_, other) in zip(found, expected, strict=True):
        if isinstance(value, torch.Tensor):
            same(value, other)
        else:
            assert value == other, path


def step(model, opt, scheduler, number):
    par.step(model, opt, batch(number), par.cross_entropy, clip=0.5)
    scheduler.step()


def chain(rank, world_size, build, plans, root):
    """One step under each plan. Each model has its own states and gradients before it loads."""
    path, before, name = root / "run", None, "average"
    for number, plan in enumerate(plans):
        model, opt = make(plan, number, build, optimizer_of)
        scheduler = scheduler_of(opt)
        for place, group in enumerate(opt.param_groups):
            group["mine"] = f"kept {place}"
        average = par.ema(model, 0.5, name=name)
        if before is not None:
            step(model, opt, scheduler, 90)
            average.update()
            par.step(model, opt, batch(91), par.cross_entropy, update=False)
            for group in opt.param_groups:
                group.update(initial_lr=7.0, mine="other")
            scheduler.load_state_dict(par.load(model, opt, path))
            equal(states(model, opt), before)  # the groups' hyperparameters, too
            assert scheduler.last_epoch == number == average.updates
        step(model, opt, scheduler, number)
        average.update()
        if number == 1:  # what was saved first is replaced, by a save that is still written when load begins
            before = states(model, opt)
            par.save(model, opt, path, extra=scheduler.state_dict(), asynchronous=True)
            scheduler.load_state_dict(par.load(model, opt, path))
            equal(states(model, opt), before)
        else:
            par.save(model, opt, path, extra=scheduler.state_dict())
        before = states(model, opt)
    with average.applied():
        averaged = par.full_state_dict(model)
    return par.full_state_dict(model), averaged


def alone(build, steps):
    model = build(0, torch.float64)
    opt = optimizer_of(model)
    scheduler, averaged = scheduler_of(opt), None
    for number in range(steps):
        idx, targets = batch(number)
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(idx).flatten(0, 1), targets.flatten())
        (loss + sum(m.last_aux for m in model.modules() if isinstance(m, par.MoE))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        scheduler.step()
        now = {name: value.clone() for name, value in model.state_dict().items()}
        averaged = now if averaged is None else {k: (v + now[k]) / 2 for k, v in averaged.items()}
    return now, averaged


@pytest.mark.parametrize(
    ("build", "plans"),
    [
        (dense, ("dp=2,zero=2,bucket_mb=0.002", "tp=2")),
        (experts, ("ep=2", "dp=2,zero=3")),
        pytest.param(dense, ("dp=2", "pp=2", "dp=2,zero=1"), marks=pytest.mark.slow),
    ],
    ids=["dense", "experts", "stages"],
)
def test_one_training_under_plan_after_plan(build, plans, tmp_path):
    expected = alone(build, len(plans))
    for found in spawn(2, chain, build, plans, tmp_path):
        for state, right in zip(found, expected, strict=True):
            for name, value in right.items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10, msg=name)
