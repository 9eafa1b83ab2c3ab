"""What users do wrong: an error on all ranks that names the way out, within a bounded time, and a model that
is as it was.
"""

import contextlib
import time

import models
import pytest
import torch
from equality import relative
from odd_models import (
    LENGTH,
    ActivatedNorm,
    Backwards,
    Normed,
    Positions,
    Tangle,
    adamw,
    cross,
    gpt,
    named_optimizer,
    tokens,
)
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par


def boom(out, y):
    raise KeyError("user's bug")


def mistakes(rank, world_size, plan):
    """Each mistake raises on this rank, and afterwards the model is as it was."""
    torch.manual_seed(4)
    model = gpt().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    par.parallelize(model, opt, plan)
    x, y = tokens(0)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)

    def break_off(grad):
        raise ArithmeticError("half of the gradients are there")

    def interrupted():
        handle = model.blocks[1].register_forward_hook(
            lambda module, args, out: out.register_hook(break_off) and None
        )
        try:
            par.step(model, opt, (x, y), cross, microbatches=2)
        finally:
            handle.remove()

    before = par.evaluate(model, (x, y), cross, microbatches=2).item()
    table = [
        (ValueError, "a batch of 0 rows", lambda: par.step(model, opt, (x[:0], y[:0]), cross)),
        (ValueError, "different batches", lambda: par.step(model, opt, tokens(rank), cross)),
        (ValueError, "different batches", lambda: par.step(model, opt, (x, tokens(rank)[1]), cross)),
        (ValueError, "clip=-1", lambda: par.step(model, opt, (x, y), cross, clip=-1)),
        (ValueError, "clip=nan", lambda: par.step(model, opt, (x, y), cross, clip=float("nan"))),
        (ValueError, "not the one", lambda: par.step(model, other, (x, y), cross)),
        (ValueError, "belongs to a model under a plan", opt.step),
        (ValueError, "needs the optimizer", lambda: par.step(model, None, (x, y), cross)),
        (ValueError, "without dimensions", lambda: par.step(model, opt, (x, y), lambda out, y: out)),
        (ValueError, "differ in rows", lambda: par.step(model, opt, (x, y[1:]), cross)),
        (ValueError, "whole number", lambda: par.step(model, opt, (x, y), cross, microbatches=0)),
        (ValueError, "labels", lambda: par.step(model, opt, {"idx": x}, cross)),
        (ValueError, "this model is parallelized already", lambda: par.parallelize(model, opt, plan)),
        (ValueError, "'0' of this model is para", lambda: par.parallelize(nn.Sequential(model), None, plan)),
        (KeyError, "user's bug", lambda: par.step(model, opt, (x, y), boom, microbatches=2)),
        (ArithmeticError, "half", interrupted),
    ]
    if plan.pp > 1:  # there only the last stage calls the loss, and the others can but wait
        table = [entry for entry in table if entry[1] not in ("without dimensions", "user's bug", "half")]
    for kind, match, call in table:
        with pytest.raises(kind, match=match):
            call()
    if plan.pp > 1 or plan.ulysses > 1:
        with pytest.raises(ValueError, match=r"ask with parallel\.evaluate or parallel\.predict"):
            model(x)
    else:
        par.evaluate(model, (x, y))
        assert model(x).shape[-1] == 37
    first = par.step(model, opt, (x, y), cross, microbatches=2).item()
    after = par.evaluate(model, (x, y), cross, microbatches=2).item()
    return before, first, after


def test_mistakes_leave_the_model_alone():
    torch.manual_seed(4)
    model, (x, y) = gpt().double(), tokens(0)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        losses.append(cross(model(x), y))
        losses[-1].backward()
        opt.step()
    for text in (
        "dp=2,bucket_mb=0.004",
        "dp=2,zero=1",
        "dp=2,zero=2,bucket_mb=0.004",
        "dp=2,zero=3",
        "tp=2",
        "pp=2",
        "ulysses=2",
    ):
        for before, first, after in spawn(2, mistakes, par.Plan.parse(text)):
            assert before == pytest.approx(losses[0].item(), rel=1e-12) and first == pytest.approx(
                before, rel=1e-12
            ), text
            assert after == pytest.approx(losses[1].item(), rel=1e-12), text


def one_fails(rank, world_size, plan):
    model = gpt()
    opt = adamw(model)
    par.parallelize(model, opt, plan)
    start = time.monotonic()
    try:
        par.step(model, opt, tokens(0), boom if rank == world_size - 1 else cross, microbatches=2)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing", 0.0


def broken_after_update(rank, world_size, texts):
    """[(values after an error in a hook behind the optimizer's step, and after one more step)]"""

    def break_off(*_):
        raise KeyError("a hook of the user")

    found = []
    for text in texts:
        torch.manual_seed(4)
        model = gpt()
        if "bf16" not in text:
            model.double()
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        if text != "alone":
            par.parallelize(model, opt, text)
        values = []
        for step in range(2):
            hook = opt.register_step_post_hook(break_off) if step == 0 else None
            with pytest.raises(KeyError, match="a hook of the user") if hook else contextlib.nullcontext():
                if text != "alone":
                    par.step(model, opt, tokens(step), cross)
                else:
                    cross(model(tokens(step)[0]), tokens(step)[1]).backward()
                    opt.step()
            if hook is not None:
                hook.remove()
            opt.zero_grad()
            whole = model.state_dict() if text == "alone" else par.full_state_dict(model)
            values.append({name: value.clone() for name, value in whole.items()})
            if text != "alone" and "zero=3" not in text:  # what the model computes with
                shown = model.state_dict()
                assert all(
                    torch.equal(shown[name], value.to(shown[name].dtype)) for name, value in whole.items()
                )
        found.append(values)
    return found


def test_an_error_after_the_update():
    """The update holds on all ranks, as in one process: none computes with a part of it."""
    (expected,) = broken_after_update(0, 1, ["alone"])
    texts = ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,zero=1,precision=bf16"]
    for found in spawn(2, broken_after_update, texts):
        for text, values in zip(texts, found, strict=True):
            for state, right in zip(values, expected, strict=True):
                worst = max(relative(state[name], value) for name, value in right.items())
                assert worst < (0.3 if "bf16" in text else 1e-10), (text, worst)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2"])
def test_one_rank_fails(plan):
    """The others get an error that names a rank and what it raised, within the group's timeout."""
    (other, seconds), (own, _) = spawn(2, one_fails, par.Plan.parse(plan), timeout=2.0)
    assert own == 'KeyError: "user\'s bug"'
    assert other.endswith(f"Rank 1 had raised {own}") and "rank 1" in other and seconds < 5, other


PLAN_ERRORS = [
    ("pp=4", gpt, adamw, "4 pipeline stages for 3 blocks"),
    ("pp=2,stages=1:1", gpt, adamw, "model has 3"),
    ("pp=2", lambda: nn.ModuleList([nn.Linear(2, 2)]), adamw, "no list of blocks"),
    ("checkpoint", Tangle, adamw, r"the model is cut at its blocks \(checkpoint\)"),
    ("dp=1", gpt, lambda model: adamw(gpt()), "not the model's"),
    ("dp=1", gpt, lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS"),
    ("tp=2", gpt, named_optimizer("Adafactor"), "looks at whole parameters"),
    ("dp=2,checkpoint", Normed, adamw, "blocks.0.norm' is a BatchNorm inside a block"),
    ("dp=2", ActivatedNorm, adamw, "'1' is a BatchNorm with a forward of its own"),
    ("ulysses=2", Normed, adamw, "BatchNorm, whose statistics need all positions, and ulysses"),
    ("tp=2,megatron_sp", Normed, adamw, "BatchNorm, whose statistics need all positions, and megatron_sp"),
    ("blocks=nothing", gpt, adamw, "blocks='nothing': is not in the model"),
]


@pytest.mark.parametrize(
    ("plan", "model", "optimizer", "match"), PLAN_ERRORS, ids=[error[3][:20] for error in PLAN_ERRORS]
)
def test_plan_errors(plan, model, optimizer, match):
    """Found before any rank is asked."""
    model = model()
    with pytest.raises(ValueError, match=match):
        par.parallelize(model, optimizer(model), par.Plan.parse(plan))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("dp=2,dp=3", "dp is given twice"),
        ("stages=3:x", "stages='3:x' must be numbers"),
        ("bucket_mb=big", "bucket_mb='big' is not a number"),
        ("chunks=2.5,schedule=interleaved", "chunks='2.5' is not a whole number"),
        ("dp=two", "dp='two' is not a whole number"),
        ("pd=2", "there is no 'pd'; known: dp, tp"),
        ("zero", "zero=True"),
    ],
)
def test_plan_texts(text, match):
    with pytest.raises(ValueError, match=match):
        par.Plan.parse(text)


def late_plan_errors(rank, world_size):
    with pytest.raises(ValueError, match="'pos' lies in 'the model'"):
        model = Positions(layers=4)
        par.parallelize(model, adamw(model), par.Plan(pp=2, schedule="zbv"))
    with pytest.raises(ValueError, match="plan is for 4 ranks.*there are 2"):
        par.parallelize(gpt(), None, par.Plan(dp=4))
    model = nn.Sequential(*[nn.Linear(9, 9) for _ in range(4)])
    with pytest.raises(
        ValueError,
        match="one Linear is part of block 0 of '', in pipeline stage 0, and of block 2, in stage 1",
    ):
        shared = nn.Sequential(*[nn.Sequential(model[0]) for _ in range(4)])
        par.parallelize(shared, adamw(shared), par.Plan(pp=2))
    table = [
        (gpt, "pp=2,schedule=pipedream", LENGTH, 'clip=1.0.*"pipedream"'),
        (Backwards, "pp=2", LENGTH, "block 2 of 'blocks' runs first"),
        (Backwards, "ulysses=2", LENGTH, "block 2 of 'blocks' runs first"),
        (gpt, "ring=2", 1, "a sequence of 1 leaves some without a position"),
    ]
    for make, text, length, match in table:
        model = make() if make is not gpt else models.GPT(dim=16, heads=2, hidden=20, layers=3, tied=False)
        opt = adamw(model)
        par.parallelize(model, opt, par.Plan.parse(text))
        with pytest.raises(ValueError, match=match):
            par.step(model, opt, [part[:, :length] for part in tokens(0)], cross, clip=1.0)


def test_plan_errors_on_all_ranks():
    spawn(2, late_plan_errors)


class Wrapper:
    """An optimizer in another, as libraries have them; torch does not know it."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure=None):
        self.inner.step(closure)


class Scaled(torch.optim.Optimizer):
    """One that torch takes for an optimizer and that has none of its hooks."""

    __init__, step = Wrapper.__init__, Wrapper.step


def wrapped(rank, world_size, wrap):
    torch.manual_seed(4)
    model = gpt().double()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    model, opt = par.parallelize(model, wrap(inner), par.Plan(dp=2))
    before = par.full_state_dict(model)["head.weight"]
    par.step(model, opt, tokens(0), cross)
    with pytest.raises(ValueError, match="belongs to a model under a plan"):
        opt.step()
    return not torch.equal(before, par.full_state_dict(model)["head.weight"])


@pytest.mark.parametrize("wrap", [Wrapper, Scaled])
def test_an_optimizer_in_another(wrap):
    assert spawn(2, wrapped, wrap) == [True, True]
