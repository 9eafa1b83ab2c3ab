"""The user's optimizer over the shards of several buckets, in one process: which step is taken, what it sees,
and where its values go when it raises. What writes between calls would be lost.
"""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pycomm.parallel as par
from pycomm.groups import ALONE
from pycomm.parallel.data.bucket import ParamInfo
from pycomm.parallel.ground.layout import whole
from pycomm.parallel.zero.kinds import kind_of
from pycomm.parallel.zero.optimizer import (
    _plain_step_of,
    check_fresh,
    is_elementwise,
    is_stepping,
    replace_parameters,
    step_optimizer,
)
from pycomm.parallel.zero.shards import MasterOptions
from pycomm.parallel.zero.writes import Writes

SHAPES = [(3, 2), (4,), (2, 2), (), (5,), (1,)]


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]


def gradients(step):
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]


def adamw(params):
    params = list(params)
    return torch.optim.AdamW(
        [{"params": params[::2]}, {"params": params[1::2], "lr": 0.3}], 0.1, weight_decay=0.2
    )


def sharded(zero, make=adamw):
    """(parameters, buckets of two of them with copies in fp32, their shards, the optimizer)"""
    params, kind = parameters(), kind_of(par.Plan(zero=zero))
    opt = make(params)
    infos = [
        ParamInfo(f"p{i}", p, whole(p), ALONE, option=i % len(opt.param_groups), number=i)
        for i, p in enumerate(params)
    ]
    buckets = [kind.make_bucket(infos[first : first + 2]) for first in (0, 2, 4)]
    values = {p: p.detach().clone() for p in params}
    shards = [kind.shards(bucket, values, MasterOptions(dtype=torch.float32)) for bucket in buckets]
    replace_parameters(opt, shards)
    return infos, buckets, shards, opt


def fill(infos, buckets, step):
    for bucket in buckets:
        bucket.zero_grad()
    for number, (info, grad) in enumerate(zip(infos, gradients(step), strict=True)):
        bucket = buckets[number // 2]
        bucket.accumulate(info.param, grad.clone())
        if info.param.grad is not None:
            bucket.collect(info.param)
    for bucket in buckets:
        bucket.launch()
        bucket.wait()


def values_of(shards):
    for each in shards:
        if hasattr(each, "start_gather"):
            each.start_gather()
            each.finish_gather()
    found = [info.param.detach().clone() for each in shards for info in each.bucket.infos]
    for each in shards:
        if hasattr(each, "start_gather"):
            each.free()
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("watched", [False, True], ids=["bucket by bucket", "all at once"])
def test_equal_to_a_step_over_whole_parameters(zero, watched):
    """The gradients are scaled, and one parameter was not used: it is not decayed."""
    infos, buckets, shards, opt = sharded(zero)
    plain = [torch.nn.Parameter(p.detach().float()) for p in parameters()]
    expected, seen = adamw(plain), []
    groups = [list(group["params"]) for group in opt.param_groups]
    if watched:  # a hook of the user's may look at all gradients
        opt.register_step_pre_hook(
            lambda *_: seen.append(sum(p.grad is not None for g in opt.param_groups for p in g["params"]))
        )
    for step in range(3):
        unused = {"p3"} if step == 1 else set()
        fill(infos, buckets, step)
        step_optimizer(opt, shards, torch.tensor(0.5), unused)
        for number, (parameter, grad) in enumerate(zip(plain, gradients(step), strict=True)):
            parameter.grad = None if f"p{number}" in unused else grad.float() * 0.5
        expected.step()
        for found, parameter in zip(values_of(shards), plain, strict=True):
            assert torch.equal(found, parameter.detach().bfloat16()), step
        now = [list(group["params"]) for group in opt.param_groups]
        assert [[id(p) for p in group] for group in now] == [[id(p) for p in group] for group in groups]
        assert all(shard.param.grad is None for each in shards for shard in each.owned) and not is_stepping()
    assert seen == ([6, 5, 6] if watched else [])


class Failing(torch.optim.SGD):
    """Updates its first group, and raises before the second."""

    def step(self, closure=None):
        for group in self.param_groups[:1]:
            for p in group["params"]:
                p.data.sub_(p.grad)
        raise ArithmeticError("half")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_was_updated_before_an_error_holds(zero):
    def make(params):
        return Failing([{"params": params[::2]}, {"params": params[1::2]}], lr=1.0)

    infos, buckets, shards, opt = sharded(zero, make)
    fill(infos, buckets, 0)
    with pytest.raises(ArithmeticError, match="half"):
        step_optimizer(opt, shards)
    assert not is_stepping()
    for number, (found, before) in enumerate(zip(values_of(shards), parameters(), strict=True)):
        wanted = before.detach().float() - (gradients(0)[number].float() if number % 2 == 0 else 0.0)
        assert torch.equal(found, wanted.bfloat16())


def test_steps_of_the_users_own_are_taken_whole():
    """Only torch's own step of an element-wise optimizer without hooks is taken by buckets."""

    def sgd(kind=torch.optim.SGD):
        return kind([torch.nn.Parameter(torch.ones(2))], lr=0.1)

    assert _plain_step_of(sgd()) is torch.optim.SGD.step.__wrapped__
    scheduled = sgd()
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert _plain_step_of(scheduled) is torch.optim.SGD.step.__wrapped__
    own, hooked, after = sgd(type("Mine", (torch.optim.SGD,), {})), sgd(), sgd()
    hooked.register_step_pre_hook(lambda *_: None)
    after.register_step_post_hook(lambda *_: None)
    patched = sgd()
    patched.step = lambda closure=None: None
    for opt in (own, hooked, after, patched, torch.optim.Adafactor([torch.nn.Parameter(torch.ones(2, 2))])):
        assert _plain_step_of(opt) is None, opt
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert _plain_step_of(sgd()) is None
    handle.remove()
    assert _plain_step_of(sgd()) is not None and is_elementwise(sgd()) and not is_elementwise(own)


def test_an_optimizer_that_has_taken_steps_is_refused():
    for kind, more in ((torch.optim.Adagrad, {"initial_accumulator_value": 0.5}), (torch.optim.Adam, {})):
        parameter = torch.nn.Parameter(torch.ones(2))
        opt = kind([parameter], lr=0.1, **more)
        check_fresh(opt)
        parameter.grad = torch.ones(2)
        opt.step()
        with pytest.raises(ValueError, match="has taken steps already"):
            check_fresh(opt)


def test_adagrad_begins_with_the_sums_of_its_groups():
    def make(params):
        groups = [{"params": params[::2]}, {"params": params[1::2], "initial_accumulator_value": 0.25}]
        return torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=2.0)

    *_, opt = sharded(1, make)
    for group, start in zip(opt.param_groups, (2.0, 0.25), strict=True):
        assert len(group["params"]) == 3
        for parameter in group["params"]:
            state = opt.state[parameter]
            assert state["step"] == 0 and torch.equal(state["sum"], torch.full_like(parameter, start))
            assert not state["sum"].requires_grad


def test_a_step_by_another_way_is_refused():
    *_, opt = sharded(1)
    with pytest.raises(ValueError, match="call opt.step of the object that parallelize returned"):
        opt.step()


# --- writes --------------------------------------------------------------------------------------


def test_a_write_that_is_lost_on_some_ranks():
    """On which, and what; nothing where there is none."""
    writes = Writes(torch.nn.Linear(2, 2), [], "dp=3", lambda problem: [problem])
    writes.shards = []
    writes.refuse_told("step", 1, [None, None, None])
    for told, who in (
        ([None, "a was written"], "on rank 1 a was written"),
        (["a was written", None], "on rank 0 a was written"),
        ([None, "b is gone", "a was written"], "on 2 ranks, the first of which is 1, b is gone"),
    ):
        with pytest.raises(ValueError, match=rf"^\[rank 2\] save: {who}. No parameter was changed$"):
            writes.refuse_told("save", 2, told)


def freezing(module, args):
    module.weight.requires_grad_(False)


def test_calls_of_a_model_in_one_process():
    """A parameter may be frozen in a forward; opt.step takes a closure and no more."""
    for text in ("", "zero=1", "zero=3"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), text)
        batch = torch.randn(5, 3), torch.randn(5, 1)
        before = par.step(model, opt, batch, torch.nn.functional.mse_loss)
        handle = model[2].register_forward_pre_hook(freezing)
        assert par.step(model, opt, batch, torch.nn.functional.mse_loss) < before, text
        handle.remove()
        with pytest.raises(ValueError, match=r"opt.step\(mine\): under a plan it takes a closure alone"):
            opt.step(mine=3)
