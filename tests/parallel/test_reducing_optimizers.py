"""Optimizers that take a number over all parameters: refused where a rank's optimizer has some of them only,
before anything is changed; equal to one process where it has all. What is tried is a copy.
"""

import logging

import equality
import pytest
import reducing_optimizers as optimizers
import torch
from odd_models import cross, gpt, tokens
from tiers import tier
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.checks.before import check
from pycomm.parallel.checks.optimizers import try_optimizer
from pycomm.parallel.ground.answers import State
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.models import drawn

STEPS, EPS = 25, 1e-10
REDUCING = ("Prodigy", "DAdaptSGD", "LAMB", "Clipped", "Listed")
PARTS = ("dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "pp=2", "ring=2,zero=1", "dp=2,pp=2", "ep=2")
WHOLE = ("", "dp=2", "ring=2", "ulysses=2", "dp=2,ring=2", "zero=2")


def made(name, wide=True):
    """Two groups with hyperparameters of their own."""
    torch.manual_seed(0)
    model = gpt().double()
    kinds = [[p for p in model.parameters() if (p.dim() > 1) is many] for many in (True, False)]
    make, rate = getattr(optimizers, name), {"Clipped": 0.1, "Locked": 0.1}.get(name)
    groups = [{"params": kinds[0]}, {"params": kinds[1], "weight_decay": 0.1}]
    given = list(model.parameters()) if name == "Listed" else groups
    return model, make(given) if rate is None else make(given, rate)


@pytest.mark.parametrize("name", REDUCING)
def test_refused_where_a_rank_has_a_part(name):
    model, opt = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for text in PARTS:
        with pytest.raises(ValueError, match=rf"{name} computes something from all.*works under plans") as e:
            check(model, opt, Plan.of(text))
        assert f"Plan({Plan.of(text)})" in str(e.value)
    for text in WHOLE:
        check(model, opt, Plan.of(text))
        assert try_optimizer(opt, Plan.of(text)) is None
    assert not opt.state and vars(opt).get("d", 1e-2) == 1e-2
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(ValueError, match="looks at whole parameters"):
        check(model, opt, Plan.of("tp=2"))


@pytest.mark.parametrize("name", ["LARS", "ScheduleFree"])
def test_by_layer_is_enough(name):
    model, opt = made(name)
    for text in PARTS:
        check(model, opt, Plan.of(text))
        assert try_optimizer(opt, Plan.of(text)).state is State.HELD


@pytest.mark.parametrize(
    "name, why", [("Drawing", "draws random"), ("Locked", "raises TypeError"), ("Asking", "NoneType")]
)
def test_not_tried(name, why):
    model, opt = made(name)
    answer = try_optimizer(opt, Plan.of("pp=2"))
    assert answer.state is State.NOT_TRIED and why in answer.why
    check(model, opt, Plan.of("pp=2"))


def test_a_limit_that_does_not_act_is_no_number():
    """The hyperparameters count, as they are when it is asked."""
    _, opt = made("LAMB")
    for most, state in ((torch.inf, State.HELD), (1.0, State.BROKEN), (torch.inf, State.HELD)):
        for group in opt.param_groups:
            group["most"] = most
        assert try_optimizer(opt, Plan.of("pp=2")).state is state


def test_the_users_optimizer_is_not_touched():
    model, opt = made("Clipped")
    calls = []
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    opt.note = calls
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: calls.append("rate") or 1.0)
    calls.clear()
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("all"))
    state = drawn.drawn(torch.device("cpu"))
    held = {key: value for key, value in vars(opt).items()}
    groups = [dict(group) for group in opt.param_groups]
    try:
        assert try_optimizer(opt, Plan.of("pp=2")).state is State.BROKEN
    finally:
        handle.remove()
    assert drawn.same(state, drawn.drawn(torch.device("cpu"))) and calls == [] and not opt.state
    assert all(vars(opt)[key] is value for key, value in held.items()) and list(held) == list(vars(opt))
    assert groups == opt.param_groups and schedule.last_epoch == 0
    assert all(p.grad is None for p in model.parameters())


def test_torchs_own_are_not_tried(monkeypatch):
    model, _ = made("LARS")
    monkeypatch.setattr("pycomm.parallel.checks.optimizers._try", None)
    for make in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor):
        assert try_optimizer(make(model.parameters(), lr=0.1), Plan.of("pp=2")) is None


# On ranks -----------------------------------------------------------------------------


def alone(name):
    model, opt = made(name)
    losses = []
    for step in range(STEPS):
        x, y = tokens(step)
        opt.zero_grad()
        loss = cross(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def planned(rank, world_size, name, texts):
    found = []
    for text in texts:
        model, opt = par.parallelize(*made(name), text)
        losses = [par.step(model, opt, tokens(step), cross, microbatches=2).item() for step in range(STEPS)]
        found.append((losses, par.full_state_dict(model), par.describe(model).checks.get("optimizer")))
    return found


def not_tried(rank, world_size):
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("pycomm.parallel").addHandler(handler)
    model, opt = par.parallelize(*made("Drawing"), "dp=2,zero=1")
    with pytest.raises(ValueError, match="Prodigy computes"):
        par.parallelize(*made("Prodigy"), "pp=2")
    return par.describe(model).checks["optimizer"], [each for each in seen if "optimizer" in each]


@tier(quick=1, slow=1 / 2)
@pytest.mark.parametrize(
    "name, texts",
    [
        pytest.param("Prodigy", ("dp=2",)),
        pytest.param("LARS", ("dp=2,zero=1", "dp=2,zero=3", "pp=2"), marks=pytest.mark.slow),
        pytest.param("LAMB", ("dp=2", "ring=2"), marks=pytest.mark.slow),
        pytest.param("Prodigy", ("ring=2", "ulysses=2"), marks=pytest.mark.slow),
        pytest.param("DAdaptSGD", ("dp=2",), marks=pytest.mark.slow),
    ],
)
def test_equal_to_one_process(name, texts):
    losses, state = alone(name)
    for found in spawn(2, planned, name, texts):
        for text, (its_losses, its_state, told) in zip(texts, found, strict=True):
            assert equality.relative(its_losses, losses) < EPS, text
            for key, value in state.items():
                assert equality.relative(its_state[key], value) < EPS, (text, key)
            assert told == ("held" if name == "LARS" else None)


@tier(slow=1)
def test_what_is_not_tried_is_said_once():
    first, second = spawn(2, not_tried)
    assert first[0] == second[0] == "not tried: it draws random numbers"
    assert len(first[1]) == 1 and "optimizer was not tried" in first[1][0] and second[1] == []
