"""par.verify names the first module or parameter that a planted fault makes wrong, and fails on all ranks
alike.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from odd_models import Plain, cross, tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn
from verify_cases import error_of, make, verify

import pycomm.parallel as par
from pycomm.parallel.ground.layout import Layout
from pycomm.parallel.verification.pieces import Rows, part_like
from pycomm.parallel.verification.report import first_module, first_parameter, off

FAULTS = [  # model, plan, microbatches, first module, first parameter of backward
    ("centred", "dp=2", 1, "blocks.2.centre", "head.bias"),
    ("centred", "dp=2,zero=3", 1, "blocks.2.centre", "head.bias"),
    ("centred", "pp=2,schedule=zbv", 2, "blocks.2.centre", "head.bias"),
    ("centred", "tp=2", 2, "blocks.2.centre", "head.bias"),
    ("rows", "pp=2", 2, "blocks.1", "head.bias"),  # the last block of its stage
    ("rows", "pp=2,dp=2", 1, "blocks.1", "head.bias"),
    ("drifting", "dp=2", 1, "norm", "head.bias"),
    ("columns", "tp=2", 1, "blocks.1.mlp.0", "head.bias"),
    ("columns", "tp=2,megatron_sp", 2, "blocks.1.mlp.0", "head.bias"),
    ("scaled", "dp=2", 1, None, "blocks.1.mlp.2.bias"),
    ("scaled", "pp=2,zero=1", 3, None, "blocks.1.mlp.2.bias"),
]
# Each kind and each axis is in others, too.
DEEP = [("centred", "dp=2"), ("rows", "pp=2,dp=2"), ("columns", "tp=2"), ("scaled", "pp=2,zero=1")]


@tier(quick=1 / 12)
@pytest.mark.parametrize(
    ("kind", "plan", "microbatches", "module", "parameter"),
    [pytest.param(*fault, marks=[pytest.mark.deep] * (fault[:2] in DEEP)) for fault in FAULTS],
)
def test_planted_fault(kind, plan, microbatches, module, parameter):
    results = spawn(par.Plan.parse(plan).world_size, verify, kind, plan, microbatches)
    assert len(set(results)) == 1
    found = results[0]
    assert not found and not found.equal, str(found)
    assert (found.module and found.module.name, found.parameter.name) == (module, parameter), str(found)
    assert found.difference is (found.module or found.parameter)
    assert found.difference.absolute > 1e-4 and found.difference.relative > 1e-6
    assert "NOT equal" in str(found) and repr(module or parameter) in str(found)
    if kind in ("drifting", "columns"):
        assert found.module.rank == 1 and found.module.absolute == pytest.approx(1e-3)
    if module is None:  # what comes after the fault in the forward is right
        assert "blocks.0.ln_1.weight" in found.parameters and "all outputs are equal" in str(found)
        assert not any(name.startswith(("blocks.2", "blocks.3", "head")) for name in found.parameters)


def summed(out, y):
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="sum")


@pytest.mark.parametrize("plan", ["dp=2", "ulysses=2"])
def test_loss_that_is_a_sum(plan):
    for found in spawn(2, summed_loss, plan):
        assert found.module is None and found.difference.name == "loss" and found.loss != found.loss_alone
        assert found.parameter.name == "head.bias" and found.parameter.what == "gradient"
        assert "loss_fn must be the mean" in str(found)


def summed_loss(rank, world_size, plan):
    return verify(rank, world_size, "gpt", plan, 1, loss_fn=summed)


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)


def noise(rank, world_size):
    model = make("gpt")
    model.norm = Noise()
    return par.verify(model, tokens(0), par.Plan(dp=2), cross, show=False)


def test_random_numbers_are_told():
    for found in spawn(2, noise):
        assert found.module.name == "norm" and "random numbers" in str(found)


def wrong_update(rank, world_size):
    """An optimizer's step that goes wrong on one rank, with gradients that are right."""
    step = torch.optim.SGD.step
    torch.optim.SGD.step = lambda self, *args: None if rank == 1 else step(self, *args)
    return verify(rank, world_size, "gpt", "pp=2", 1)


def test_wrong_update():
    for found in spawn(2, wrong_update):
        assert found.module is None and found.difference is found.parameter
        assert found.parameter.what == "value after the step" and found.parameter.name == "head.bias"


# Refusals and failures ------------------------------------------------------------


def refused(rank, world_size, plan):
    plan = par.Plan.parse(plan)
    model = make("gpt")
    found = error_of(par.verify, model, tokens(0), plan, cross)
    groups = len(dist.distributed_c10d._world.pg_map)
    return found, error_of(par.parallelize, copy.deepcopy(model), None, plan), groups


@pytest.mark.parametrize(
    ("plan", "ranks", "words"),
    [
        ("pp=8", 2, "8 pipeline stages for 4 blocks"),
        ("dp=4", 2, "the plan is for 4 ranks"),
        ("tp=3", 3, "2 query heads cannot be split over 3 ranks"),
        ("ep=2,tp=2", 4, "no parallel.MoE layer"),  # after groups were made
    ],
)
def test_refusal_is_that_of_the_plan(plan, ranks, words):
    for found, right, groups in spawn(ranks, refused, plan):
        assert found == right and found[0] == "ValueError" and words in found[1]
        assert groups == 1  # torch's default group; parallelize leaves none either


def failing(rank, world_size, kind, plan):
    """What verify raises, and whether the ranks can go on afterwards."""
    batch, plan = tokens(0), par.Plan.parse(plan)
    found = error_of(par.verify, make(kind), batch, plan, cross, microbatches=2)
    model = make("gpt")
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    return found, par.step(model, opt, batch, cross, microbatches=2).item()


@tier(quick=1 / 6, slow=3 / 5)
@pytest.mark.parametrize("plan", ["dp=2", "pp=2", "dp=2,zero=3"])
@pytest.mark.parametrize(("kind", "error"), [("raising", "RuntimeError"), ("refusing", "ValueError")])
def test_failure_of_one_rank(kind, error, plan):
    """All learn of it, nobody waits for long, and torch's default group is not touched."""
    (first, loss), (second, other) = spawn(2, failing, kind, plan)
    assert second == (error, "no such rows") and first[0] == error
    assert first[1] == "[rank 0] rank 1 failed: no such rows" and loss == other


def not_alone(rank, world_size):
    def model():
        if rank == 1:
            raise OSError("no file")
        return make("gpt")

    return error_of(par.verify, model, tokens(0), par.Plan(dp=2), cross)


def test_model_that_one_rank_cannot_make():
    assert spawn(2, not_alone) == [
        ("RuntimeError", "[rank 0] rank 1 failed: no file"),
        ("OSError", "no file"),
    ]


def other_batch(rank, world_size):
    return error_of(par.verify, make("gpt"), tokens(rank), par.Plan(dp=2), cross)


def test_batches_that_differ():
    for kind, words in spawn(2, other_batch):
        assert kind == "ValueError" and "the ranks were given different batches" in words


class Uncopyable(Plain):
    def __deepcopy__(self, memo):
        raise RuntimeError("not me")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Uncopyable, "cannot be copied (RuntimeError: not me): give verify a function"),
        (lambda: lambda: None, "a function that makes a new one at each call"),
        (lambda: par.parallelize(Plain())[0], "as it was before parallelize()"),
    ],
)
def test_model_that_is_none(model, words):
    with pytest.raises(ValueError) as caught:
        par.verify(model(), tokens(0), par.Plan(), cross)
    assert words in str(caught.value)


# The comparison ------------------------------------------------------------


@pytest.mark.parametrize(
    ("whole", "found", "right"),
    [
        ((6, 5, 4), (2, 5, 4), lambda x: x[2:4]),
        ((5, 6, 4), (5, 2, 4), lambda x: x[:, 2:4]),  # rows as dim 1
        ((30, 4), (10, 4), lambda x: x[10:20]),  # rows and positions in one
        ((6, 5, 8), (2, 5, 3), lambda x: x[2:4][..., [1, 2, 6]]),
        ((6, 5, 4), (2, 5, 3), None),
        ((5, 4), (5, 4), None),  # no rows in it
        ((6,), (2,), lambda x: x[2:4]),
        ((), (), None),
    ],
)
def test_part_like(whole, found, right):
    """Rows 2 and 3 of 6, and columns 1, 2 and 6 of 8."""
    layout = Layout((8, 7), dim=0, ranges=((1, 3), (6, 7)))
    whole = torch.randn(whole)
    part = part_like(whole, torch.empty(found), Rows(0, 6, 2, 2), None, layout)
    assert part is None if right is None else torch.equal(part, right(whole))


def test_off():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([1.0, -inf, nan, -4.0])
    assert off(x, x) == (0.0, 4.0)
    assert off(torch.tensor([1.0, -inf, nan, -4.5]), x) == (0.5, 4.0)
    assert off(torch.tensor([nan, -inf, nan, -4.0]), x).absolute == inf
    assert off(torch.tensor([1.0, inf, nan, -4.0]), x).absolute == inf
    assert off(torch.empty(0, 3), torch.empty(0, 3)) == (0.0, 0.0)


def test_difference_that_does_not_leave_its_module():
    """Experts with their tokens in another order; beside it one that does."""
    order = ["a.expert", "a", "b.inner", "b.first", "b", ""]
    told = [{name: off(torch.ones(1), torch.ones(1)) for name in order}]
    told[0]["a.expert"] = off(torch.ones(1), torch.zeros(1) + 2)
    assert first_module(told, order, 1e-6)[:2] == (None, ())
    told += [{"b.first": off(torch.zeros(1), torch.ones(1)), "b": off(torch.ones(1), torch.zeros(1) + 3)}]
    told[1][""] = told[1]["b"]
    first, names, _ = first_module(told, order, 1e-6)
    assert (first.name, first.rank) == ("b.first", 1) and names == ("b.first", "b", "")


def test_gradient_that_is_rounding():
    tiny = off(torch.tensor([1e-17]), torch.tensor([-1e-17], dtype=torch.float64))
    one = off(torch.ones(1), torch.ones(1))
    assert (
        first_parameter({"k.bias": tiny, "a": one, "b": one}, ["k.bias", "a", "b"], 1e-6, "gradient")[0]
        is None
    )
    wrong = off(torch.tensor([2e-8]), torch.tensor([1e-8]))
    found = first_parameter({"k.bias": wrong, "a": one, "b": one}, ["k.bias", "a", "b"], 1e-6, "gradient")
    assert found[0].name == "k.bias"
