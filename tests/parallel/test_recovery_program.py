"""What a program has in snapshots: generators, kept objects, hyperparameters; whose count after a death."""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

import pycomm.parallel as par
from pycomm.parallel.recovery import program
from pycomm.parallel.recovery.program import Followers, Kept, hyperparameters, set_hyperparameters

sys.path.insert(0, str(Path(__file__).parents[1]))
import recovery_kills as kills  # noqa: E402


def drawn():
    return torch.rand(3).tolist(), random.random(), numpy.random.rand(2).tolist()


def test_a_replacement_draws_what_its_place_would_have_drawn():
    _, opt = kills.make()
    kept = Kept(opt)
    kept.add("beside", kills.Beside(opt))
    state, expected = kept.state(), (drawn(), drawn())
    other = Kept(kills.make()[1])
    drawn()
    other.begin_from(state)
    assert (drawn(), drawn()) == expected
    other.begin_from(None)
    assert drawn() != expected[0]


def test_what_is_kept_arrives_before_and_after_it_is_added():
    _, opt = kills.make()
    kept, beside = Kept(opt), kills.Beside(opt)
    for name in ("early", "late"):
        kept.add(name, beside)
    for loss in (1.0, 2.0):
        beside.step(torch.tensor(loss))
    opt.param_groups[0]["weight_decay"] = 0.125
    state, expected = kept.state(), beside.average
    beside.step(torch.tensor(100.0))  # no part of the snapshot
    _, fresh = kills.make()
    other, early, late = Kept(fresh), kills.Beside(fresh), kills.Beside(fresh)
    other.add("early", early)
    other.begin_from(state)
    assert early.average == expected and late.average == 0.0
    assert fresh.param_groups[0]["weight_decay"] == 0.125
    fresh.param_groups[0]["lr"] = 77.0  # as a scheduler that is made then
    other.add("late", late)
    assert late.average == expected and late.scheduler.last_epoch == 2
    assert fresh.param_groups[0]["lr"] == pytest.approx(0.01 / (1 + 2 / 3))
    for name, thing, words in (
        ("late", late, r"run.keep\('late'\): there is one of this name already \(Beside\)"),
        ("loss", 3.0, r"run.keep\('loss', float\): it needs state_dict"),
    ):
        with pytest.raises(ValueError, match=words):
            other.add(name, thing)


def test_hyperparameters_of_all_kinds_come_back():
    """Of each group, tensors in place; modes and frozen parameters by name; copies of what they were."""
    model, _ = kills.make()
    names = dict(model.named_parameters())
    groups = [{"params": [p], "lr": torch.tensor(0.1 * (i + 1))} for i, p in enumerate(names.values())]
    opt = torch.optim.Adam(groups, betas=(0.8, 0.9), fused=False)
    par.parallelize(model, opt)
    rates = [group["lr"] for group in opt.param_groups]
    before = hyperparameters(opt, None, model)
    for group in opt.param_groups:
        group["lr"].mul_(3)
        group["betas"] = (0.1, 0.2)
    model.blocks[1].eval()
    next(model.parameters()).requires_grad_(False)
    changed = hyperparameters(opt, None, model)
    set_hyperparameters(opt, before, None, model)
    assert all(one is group["lr"] for one, group in zip(rates, opt.param_groups, strict=True))
    assert [round(rate.item(), 5) for rate in rates[:3]] == [0.1, 0.2, 0.3]
    assert {group["betas"] for group in opt.param_groups} == {(0.8, 0.9)}
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert program._same(before, hyperparameters(opt, None, model)) and not program._same(before, changed)
    set_hyperparameters(opt, changed, None, model)
    assert not model.blocks[1].training and not next(model.parameters()).requires_grad


EXCHANGED = [  # (follows, strays) of each rank -> the leader
    ([(False, False)] * 3, None),
    ([(True, False), (False, False), (False, False)], 1),
    ([(True, True), (True, False), (False, True)], 2),
    ([(True, True), (True, False), (True, False)], 1),
    ([(False, False), (True, True)], 0),
]


@pytest.mark.parametrize(("told", "leader"), EXCHANGED)
def test_who_leads(told, leader, monkeypatch):
    followers = Followers()
    monkeypatch.setattr(program, "exchange", lambda parts, value: told)
    followers.choose(None)
    assert followers.leader == leader
    monkeypatch.setattr(program, "exchange", lambda parts, value: [(True, True)] * 2)
    with pytest.raises(RuntimeError, match="no rank is left that has the hyperparameters"):
        followers.choose(None)


def test_followers_take_the_leaders_hyperparameters(monkeypatch, caplog):
    """One exchange per step; a difference is reported once; all ranks refuse other names of kept values."""
    parts = SimpleNamespace(mesh=SimpleNamespace(world=SimpleNamespace(rank=1)))
    own, right = [{"lr": 1.0, "eps": 2.0}, {}, {}, {}], [{"lr": 3.0, "eps": 2.0}, {}, {}, {}]
    followers = Followers()
    assert followers.agreed(parts, 1, own, ["b"]) is own  # no follower: no exchange
    followers.leader = 2
    told = [(["a"], None), (["a"], None), (["a"], right)]
    monkeypatch.setattr(program, "exchange", lambda parts, value: told)
    for step in (5, 6):
        assert followers.agreed(parts, step, own, ["a"]) is right
    (warning,) = caplog.messages
    assert followers.strays
    assert "step 5: this rank came later, and its optimizer has lr=1.0, where rank 2 has lr=3.0" in warning
    told[0] = (["a", "b"], None)
    with pytest.raises(ValueError, match=r"\[rank 1\] step 7: rank 2 keeps \['a'\] and rank 0 keeps \['a'"):
        followers.agreed(parts, 7, own, ["a"])


@pytest.mark.parametrize(
    ("place", "mine", "theirs", "words"),
    [
        (0, {"betas": (1, 2)}, {"betas": (1, 3)}, ("optimizer", "betas=(1, 2)", "betas=(1, 3)")),
        (1, {"b": True}, {"b": False}, ("model", "training of 'b'=True", "training of 'b'=False")),
        (2, {"w": True}, {"w": False}, ("model", "requires_grad of 'w'=True", "requires_grad of 'w'=False")),
        (3, {"scale": 1.0}, {"scale": 2.0}, ("GradScaler", "scale=1.0", "scale=2.0")),
    ],
)
def test_the_first_difference_is_named(place, mine, theirs, words):
    own, right = ([{}, {}, {}, {}] for _ in range(2))
    own[place], right[place] = mine, theirs
    assert program._same(own, own) and not program._same(own, right)
    owner, one, leader, other = program._first_difference(own, right, 3)
    assert (owner, one, other) == words and leader == 3
    assert program._equal(torch.tensor(2.0), 2.0) and not program._equal(torch.ones(2), torch.ones(1))
