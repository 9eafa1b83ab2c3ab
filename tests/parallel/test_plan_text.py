"""Every public function that takes a Plan takes its text, too, and refuses anything else with a sentence."""

import typing

import pytest
import torch
from torch import nn

import pycomm.parallel as par
from pycomm.parallel.ground.plan import Schedule, ScheduleName
from pycomm.parallel.recovery.smaller import plan_for

WRONG = [{"dp": 2}, 2, ["dp=2"], ("dp", 2), b"dp=2"]


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch():
    return torch.ones(4, 4), torch.zeros(4, 4)


def mean(output, targets):
    return ((output - targets) ** 2).mean()


def parallelize(plan):
    model, opt = par.parallelize(*made(), plan)
    assert par.step(model, opt, batch(), mean) > 0
    return par.describe(model).plan


def resilient(plan):
    run = par.resilient(*made(), plan)
    run.close()
    return run.plan


def dry_run(plan):
    (run,) = par.planning.dry_run(
        made()[0], lambda p: torch.optim.SGD(p, lr=1.0), batch(), plan, loss_fn=mean
    )
    assert run.rank == 0
    return par.Plan.of(plan)


def trainer(plan):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    from pycomm.parallel.trainers.transformers import PlanTrainer

    args = TrainingArguments("unused", use_cpu=True, report_to=[], label_names=["labels"])
    return PlanTrainer(made()[0], args, plan=plan).plan


def strategy(plan):
    pytest.importorskip("lightning")
    from pycomm.parallel.trainers.lightning import PlanStrategy

    return PlanStrategy(plan).plan


TAKE = {
    "of": par.Plan.of,
    "parallelize": parallelize,
    "verify": lambda plan: par.Plan.parse(par.verify(made()[0], batch(), plan, mean, show=False).plan[5:-1]),
    "resilient": resilient,
    "dry_run": dry_run,
    "simulate": lambda plan: par.planning.simulate(plan, "gpt3-1.3b", batch=16, machine="h100").plan,
    "explain": lambda plan: par.explain(plan, "gpt3-1.3b", batch=16, machine="h100").prediction.plan,
    "PlanTrainer": trainer,
    "PlanStrategy": strategy,
}


@pytest.mark.parametrize("name", TAKE)
def test_the_text_is_as_good_as_the_plan(name):
    expected = par.Plan(zero=1)
    assert TAKE[name]("zero=1") == expected
    assert TAKE[name](expected) == expected


@pytest.mark.parametrize("name", TAKE)
def test_what_is_no_plan_is_refused(name):
    with pytest.raises(ValueError, match=r"plan=\{'dp': 2\}: must be a Plan, such as .* not dict"):
        TAKE[name]({"dp": 2})
    with pytest.raises(ValueError, match="there is no 'ddp'; known: dp, tp"):
        TAKE[name]("ddp=2")


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_what_is_given_is_named(wrong):
    with pytest.raises(ValueError, match=type(wrong).__name__):
        par.Plan.of(wrong)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("", par.Plan()),
        ("single process", par.Plan()),
        ("dp=2, tp = 2", par.Plan(dp=2, tp=2)),
        ("megatron_sp,tp=2", par.Plan(tp=2, megatron_sp=True)),
    ],
)
def test_texts(text, plan):
    assert par.Plan.of(text) == plan == par.Plan.parse(str(plan))


def test_no_plan_is_a_single_process():
    assert par.Plan.of(None) == par.Plan()


def test_a_function_of_resilient_may_give_a_text():
    assert plan_for(lambda ranks: f"dp={ranks}", 3) == par.Plan(dp=3)
    for given in (None, "dp=4", par.Plan(dp=4)):
        with pytest.raises(ValueError, match="the function for plans gave"):
            plan_for(lambda ranks, given=given: given, 3)


def test_a_schedule_is_typed_by_its_text():
    assert typing.get_args(Schedule) == tuple(map(str, ScheduleName))
