"""One step is one call of opt.step(), as everything that counts or looks at steps sees it: under
precision="bf16" too, where torch's element-wise optimizers step over a bucket at a time.
"""

import pytest
import torch
from models import GPT
from odd_models import cross, tokens
from tiers import tier
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.parts import parts_of
from pycomm.parallel.zero.shards import Shards

STEPS = 3


class Counting(torch.optim.Optimizer):
    """What it does depends on how often it was called, as without a schedule."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / self.calls)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def counting(model):
    return Counting(model.parameters())


class Seen:
    """calls of whatever is counted; gradients: how many parameters had one, in the first."""

    def __init__(self):
        self.calls, self.gradients = 0, None

    def __call__(self, opt, *_):
        self.calls += 1
        with_one = sum(p.grad is not None for group in opt.param_groups for p in group["params"])
        self.gradients = self.gradients if self.calls > 1 else with_one


def before(opt, seen):
    return opt.register_step_pre_hook(seen)


def behind(opt, seen):
    return opt.register_step_post_hook(seen)


def behind_all(opt, seen):
    return register_optimizer_step_post_hook(seen)


def around(opt, seen):
    step = opt.step

    def counted(*args):
        seen(opt)
        return step(*args)

    opt.step = counted


def around_a_scheduler(opt, seen):
    torch.optim.lr_scheduler.StepLR(opt, 1)
    around(opt, seen)


WAYS = before, behind, behind_all, around, around_a_scheduler


def counts(rank, world_size, texts):
    found = {}
    for text in texts:
        for make_opt in (adamw, counting):
            for way in WAYS if make_opt is adamw else (before,):
                torch.manual_seed(0)
                model = GPT(dim=16, heads=2, hidden=20)
                model, opt = par.parallelize(model, make_opt(model), text)
                seen = Seen()
                handle = way(opt, seen)
                for step in range(STEPS):
                    par.step(model, opt, tokens(step), cross, clip=1.0)
                if handle is not None:
                    handle.remove()
                owned = sum(len(group["params"]) for group in opt.param_groups)
                steps = {int(state["step"]) for state in opt.state.values()} or {opt.calls}
                found[text, make_opt.__name__, way.__name__] = seen.calls, steps, seen.gradients == owned
    return found


@tier(quick=1 / 3)
@pytest.mark.parametrize(
    "texts",
    [
        ("dp=2,precision=bf16,bucket_mb=0.002", "pp=2,precision=bf16"),
        ("dp=2,zero=1,precision=bf16", "dp=2,zero=3,precision=bf16"),
        ("dp=2", "dp=2,zero=2,precision=bf16"),
    ],
    ids=["bf16", "zero", "others"],
)
def test_each_step_is_seen_once(texts):
    """By hooks and counters, which see all gradients, and by the optimizer."""
    for rank in spawn(2, counts, texts):
        for what, found in rank.items():
            assert found == (STEPS, {STEPS}, True), what


def at_a_time(rank, world_size, text):
    """The most buckets that had fp32 gradients at one time: without and with a scheduler, with a hook."""
    most = []
    attach, detach = Shards.attach_gradients, Shards.detach_gradients
    alive = set()

    def attached(self, *args):
        attach(self, *args)
        alive.add(self)
        most[-1] = max(most[-1], len(alive))

    def detached(self):
        detach(self)
        alive.discard(self)

    Shards.attach_gradients, Shards.detach_gradients = attached, detached
    for scheduled in (False, True):
        torch.manual_seed(0)
        model = GPT(dim=16, heads=2, hidden=20)
        model, opt = par.parallelize(model, adamw(model), text)
        if scheduled:
            torch.optim.lr_scheduler.StepLR(opt, 1)
        most.append(0)
        par.step(model, opt, tokens(0), cross)
        par.step(model, opt, tokens(1), cross)
        assert {int(state["step"]) for state in opt.state.values()} == {2}
        assert sum(len(group["params"]) for group in opt.param_groups) == len(opt.state)
    return most, len(parts_of(model).all_shards)


def test_gradients_of_one_bucket_exist_in_fp32():
    for most, buckets in spawn(2, at_a_time, "dp=2,zero=1,precision=bf16,bucket_mb=0.002"):
        assert most == [1, 1] and buckets > 3


def raising(rank, world_size):
    """A step that raised in the optimizer leaves the groups as they were."""
    torch.manual_seed(0)
    model = GPT(dim=16, heads=2, hidden=20)
    model, opt = par.parallelize(model, adamw(model), "dp=2,precision=bf16,bucket_mb=0.002")
    before_it = [list(group["params"]) for group in opt.param_groups]
    kept, opt.param_groups[0]["betas"] = opt.param_groups[0]["betas"], None
    with pytest.raises(TypeError):
        par.step(model, opt, tokens(0), cross)
    opt.param_groups[0]["betas"] = kept
    assert all(
        one is other
        for group, params in zip(opt.param_groups, before_it, strict=True)
        for one, other in zip(group["params"], params, strict=True)
    )
    par.step(model, opt, tokens(0), cross)
    assert {int(state["step"]) for state in opt.state.values()} == {1}


def test_a_step_that_raises():
    spawn(2, raising)
