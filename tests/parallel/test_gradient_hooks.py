"""Hooks on the gradients of parameters: what is linear is right under every plan, and what is not is refused
on every rank, before the update, wherever a rank is given a part of the gradient.
"""

import re

import equality
import pytest
import torch
from odd_models import cross, gpt, tokens
from own_loops import words
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par

EPS = 1e-10
CUT, WHOLE = "blocks.1.mlp.0.weight", "blocks.1.ln_2.weight"  # by tp
EVERY_SECOND = torch.arange(16).double() % 2
SEEN = []


def clamped(gradient):
    return gradient.clamp(-1e-3, 1e-3)


def of_norm(gradient):
    return gradient / max(1.0, float(gradient.norm()))


def centered(gradient):
    """Linear, but over all rows of a matrix."""
    return gradient - gradient.mean(0, keepdim=True)


def noted(gradient):
    SEEN.append(float(gradient.norm()))


HOOKS = {
    "half": lambda gradient: gradient * 0.5,
    "mask": lambda gradient: gradient * EVERY_SECOND,
    "noted": noted,
    "clamped": clamped,
    "sign": torch.sign,
    "norm": of_norm,
    "shifted": lambda gradient: gradient + 1e-3,
    "centered": centered,
}
LINEAR = ("half", "mask", "noted")
NOT_LINEAR = ("clamped", "norm", "shifted")


def made():
    torch.manual_seed(0)
    model = gpt().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone(hook, name):
    model, opt = made()
    model.get_parameter(name).register_hook(HOOKS[hook])
    for step in range(2):
        x, y = tokens(step)
        opt.zero_grad()
        cross(model(x), y).backward()
        opt.step()
    return model.state_dict()


def hooked(rank, world_size, texts, early):
    """early: the hooks are there before parallelize."""
    found = []
    for text, hook, name, microbatches in texts:
        model, opt = made()
        if early:
            model.get_parameter(name).register_hook(HOOKS[hook])
        par.parallelize(model, opt, text)
        present = dict(model.named_parameters()).get(name)
        if not early and present is not None and present.requires_grad:
            present.register_hook(HOOKS[hook])
        before, said, seen = par.full_state_dict(model), None, len(SEEN)
        try:
            for step in range(2):
                par.step(model, opt, tokens(step), cross, microbatches=microbatches)
        except ValueError as error:
            said = str(error)
        after = par.full_state_dict(model)
        same = all(torch.equal(before[key], after[key]) for key in before)
        found.append((said, same, after, len(SEEN) - seen))
    return found


def judge(cases, early):
    """cases: {(plan, hook, parameter, microbatches): whether it is right}"""
    for rank, found in enumerate(
        spawn(par.Plan.of(next(iter(cases))[0]).world_size, hooked, list(cases), early)
    ):
        for (case, right), (said, same, after, seen) in zip(cases.items(), found, strict=True):
            if right:
                assert said is None, (case, said)
                for key, value in alone(case[1], case[2]).items():
                    assert equality.relative(after[key], value) < EPS, (case, key)
            else:
                assert same and said is not None and "no parameter was changed" in said, (case, said)
                assert case[2] in said or "other ranks refuse it" in said, (case, said)
            if case[1] == "noted":
                assert seen in (0, 2 * case[3]), (case, rank)  # the trial did not call it


DATA = ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "ring=2", "ulysses=2")


@tier(quick=1, slow=1 / 2)
@pytest.mark.parametrize(
    "cases, early",
    [
        pytest.param(
            {
                **{("dp=2", hook, CUT, 1): hook in LINEAR for hook in (*LINEAR, *NOT_LINEAR)},
                **{(text, "clamped", WHOLE, 1): False for text in ("dp=2,zero=3", "ring=2")},
                ("tp=2", "clamped", CUT, 1): True,
                ("tp=2", "norm", CUT, 1): False,
                ("pp=2", "clamped", CUT, 2): False,
                ("pp=2", "clamped", CUT, 1): True,
            },
            False,
            id="after",
        ),
        pytest.param(
            {(text, hook, CUT, 2): hook in LINEAR for text in DATA for hook in ("mask", "sign")},
            True,
            marks=pytest.mark.slow,
            id="before",
        ),
        pytest.param(
            {
                **{("tp=2", hook, WHOLE, 1): True for hook in ("half", "clamped", "norm", "noted")},
                **{("tp=2", hook, CUT, 1): False for hook in ("centered", "norm")},
                ("tp=2", "half", CUT, 2): True,
                ("tp=2", "clamped", CUT, 2): False,
                ("tp=2,megatron_sp", "clamped", WHOLE, 1): False,
                ("tp=2,megatron_sp", "half", WHOLE, 2): True,
                ("pp=2", "norm", "tok.weight", 1): False,  # tied to the head, on another stage
                ("pp=2", "half", "tok.weight", 2): False,
                ("pp=2", "noted", "tok.weight", 2): True,
            },
            False,
            marks=pytest.mark.slow,
            id="tp and pp",
        ),
        pytest.param(
            {("dp=2,tp=2", hook, CUT, 1): hook in LINEAR for hook in ("half", "clamped")},
            False,
            marks=pytest.mark.deep,
            id="four",
        ),
    ],
)
def test_right_or_refused(cases, early):
    judge(cases, early)


# In a loop of the user's own ------------------------------------------------------------


def halved(param):
    param.grad.mul_(0.5)


def stepped(param):
    """The optimizer's step in the backward."""
    with torch.no_grad():
        param.sub_(param.grad, alpha=0.1)
    param.grad = None


LATE = {"halved": halved, "stepped": stepped}


def own_loop(rank, world_size, texts):
    """{(plan, hook): (what a call said or None, the state)}. A refused call changes nothing, and a good step
    follows.
    """
    found = {}
    for text in texts:
        for hook in ("half", "clamped", "taken away", *LATE):
            model, opt = made()
            if text is not None:
                par.parallelize(model, opt, text)
            state = (lambda m: dict(m.state_dict())) if text is None else par.full_state_dict
            before, said, param = (
                {k: v.clone() for k, v in state(model).items()},
                None,
                model.blocks[1].ln_2.weight,
            )
            handle = (
                param.register_post_accumulate_grad_hook(LATE[hook])
                if hook in LATE
                else param.register_hook(HOOKS.get(hook, clamped))
            )
            try:
                for step in range(2):
                    x, y = words(step)
                    if text is not None and "dp" in text:
                        x, y = x.chunk(2)[rank], y.chunk(2)[rank]
                    cross(model(x), y).backward()
                    if hook == "taken away":
                        handle.remove()
                    opt.step()
                    opt.zero_grad()
            except ValueError as error:
                said = str(error)
                handle.remove()
                opt.zero_grad()
                cross(model(x), y).backward()
                assert all(torch.equal(before[name], value) for name, value in state(model).items())
                opt.step()
            found[text, hook] = said, state(model)
    return found


def test_in_a_loop_of_ones_own():
    """The ranks' summands count there, too; a hook that acts in the backward is refused before."""
    texts = ("dp=2", "dp=2,zero=3", "tp=2")
    expected = own_loop(0, 1, (None,))
    for found in spawn(2, own_loop, texts):
        for (text, hook), (said, state) in found.items():
            if hook == "half" or text == "tp=2":
                assert said is None, (text, hook, said)
                for name, value in expected[None, hook][1].items():
                    assert equality.relative(state[name], value) < EPS, (text, hook, name)
            else:
                why = "forward: .* after accumulation" if hook in LATE else "the gradient hook"
                assert said is not None and re.search(why, said) and WHOLE in said, (text, hook, said)


def late(rank, world_size):
    """.grad is None for it where gradients lie in the ranks' chunks."""
    model, opt = made()
    par.parallelize(model, opt, "dp=2,zero=2")
    model.blocks[1].ln_2.weight.register_post_accumulate_grad_hook(halved)
    with pytest.raises(ValueError, match="has a hook after accumulation"):
        par.step(model, opt, tokens(0), cross)


def test_late_where_gradients_are_elsewhere():
    spawn(2, late)


# In one process -----------------------------------------------------------------------


def steps(register, microbatches=2):
    model, opt = made()
    par.parallelize(model, opt, "")
    handle = register(model.get_parameter(CUT))
    return model, handle, lambda: par.step(model, opt, tokens(0), cross, microbatches=microbatches)


@pytest.mark.parametrize("hook", NOT_LINEAR)
def test_microbatches_are_parts(hook):
    _, handle, step = steps(lambda param: param.register_hook(HOOKS[hook]))
    with pytest.raises(ValueError, match=f"the gradient hook .* of '{CUT}' gives for"):
        step()
    handle.remove()
    step()
    _, _, step = steps(lambda param: param.register_hook(HOOKS[hook]), microbatches=1)
    step()


def test_after_accumulation():
    _, handle, step = steps(lambda param: param.register_post_accumulate_grad_hook(lambda p: None))
    with pytest.raises(ValueError, match="register_post_accumulate_grad_hook"):
        step()
    handle.remove()
    step()


def test_the_trial_is_a_copys():
    """What a hook holds, in a closure, a default or a global, stays as it is."""
    state, calls = torch.get_rng_state(), []

    def counting(gradient, more=[]):  # noqa: B006
        calls.append(1)
        more.append(1)
        SEEN.append(0.0)
        return gradient * len(calls) / len(calls)

    seen = len(SEEN)
    _, _, step = steps(lambda param: param.register_hook(counting))
    state = torch.get_rng_state()
    step()
    assert torch.equal(state, torch.get_rng_state())
    assert len(calls) == len(counting.__defaults__[0]) == len(SEEN) - seen == 2


def test_without_a_copy(caplog):
    """A generator has none."""
    factors = iter([0.5] * 10)
    model, _, step = steps(lambda param: param.register_hook(lambda gradient, f=(x for x in "a"): gradient))
    step()
    step()
    assert next(factors) == 0.5
    assert par.describe(model).checks["gradient hooks"].startswith("not tried: a hook of 'blocks.1")
    assert sum("gradient hooks was not tried" in record.message for record in caplog.records) == 1
