"""requires_grad_() between steps, after parallelize: as in one process.

What is frozen is passed over by the optimizer and keeps its state; what is unfrozen is trained from then on,
also where it was frozen at parallelize and has no bucket yet.
"""

import functools

import equality
import pytest
import torch
import torch.distributed as dist
from models import GPT
from odd_models import Plain, cross, tokens
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.parts import parts_of
from pycomm.testing import run_ranks

STEPS, CLIP, BIAS = 5, 0.3, "blocks.1.mlp.2.bias"


def make(dtype=torch.float64):
    torch.manual_seed(0)
    return GPT(dim=16, heads=2, hidden=20).to(dtype)


def set_trained(model, flag, *parts):
    """Of the parameters with one of these in their names."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in parts):
            parameter.requires_grad_(flag)


def gradually(model, step):
    """From above to below, a part of a block first; what comes first in its bucket is frozen again."""
    if step == 0:
        set_trained(model, False, "tok", "pos", "blocks.0", "blocks.1", "blocks.2.ln")
    if step == 1:
        set_trained(model, True, "blocks.2.ln_1.weight", "blocks.1.mlp")
    if step == 2:
        set_trained(model, False, "norm", "blocks.3.mlp.2")
    if step == 3:
        set_trained(model, True, "tok", "blocks.0.attn", "norm")


def in_turn(model, step):
    """As the two sides of a GAN are."""
    set_trained(model, step % 2 == 0, "blocks.0", "blocks.2", "norm")
    set_trained(model, step % 2 == 1, "blocks.1", "tok", "pos")


def first_few(model, step):
    """As with adapters that are trained before all else is."""
    set_trained(model, step > 1, ".")
    set_trained(model, True, "attn.c_proj")


def two_groups(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "lr": 0.01}, {"params": rest, "lr": 0.03, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, weight_decay=0.1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.1)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1)


class Normalized(torch.optim.Optimizer):
    """It looks at whole parameters."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("kept", torch.zeros_like(p))
                    kept.mul_(0.9).add_(p.grad)
                    p.sub_(group["lr"] * kept / (1 + kept.norm()))


def normalized(model):
    return Normalized(model.parameters())


# name: change, optimizer, clip, calls for one update, whether the loss is scaled
CASES = {
    "gradually": (gradually, two_groups, CLIP, 1, False),
    "gradually, whole parameters": (gradually, normalized, None, 1, False),
    "in turn": (in_turn, sgd, None, 1, False),
    "in turn, clipped and scaled": (in_turn, two_groups, CLIP, 1, True),
    "first a few": (first_few, adagrad, CLIP, 1, False),
    "gradually, in the middle of a sum": (gradually, sgd, CLIP, 2, False),
    "in turn, in the middle of a sum": (in_turn, two_groups, None, 2, False),
}


def loop(name, prepare, call):
    """One training. prepare(model, optimizer) -> (model, optimizer); call(model, opt, batches, last): see
    below. Freezes between the calls of an update too.
    """
    change, optimizer, clip, calls, scaled = CASES[name]
    model = make()
    opt = optimizer(model)
    change(model, 0)
    model, opt = prepare(model, opt)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) if scaled else None
    for step in range(STEPS):
        for number in range(calls):
            if step or number:
                change(model, step + number)
            call(model, opt, step, number, (number == calls - 1, clip, scaler))
        scheduler.step()
    return model


@functools.cache
def alone(name):
    calls = CASES[name][3]

    def call(model, opt, step, number, options):
        update, clip, scaler = options
        if number == 0:
            opt.zero_grad()
        targets = sum(float((tokens(step + 50 * n)[1] != -100).sum()) for n in range(calls))
        x, y = tokens(step + 50 * number)
        loss = cross(model(x), y) * (float((y != -100).sum()) / targets)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if update:
            if scaler is not None:
                scaler.unscale_(opt)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scaler is None:
                opt.step()
            else:
                scaler.step(opt)
                scaler.update()

    return loop(name, lambda model, opt: (model, opt), call).state_dict()


def planned(rank, world_size, name, texts):
    def call(model, opt, step, number, options):
        update, clip, scaler = options
        batch = tokens(step + 50 * number)
        clip = clip if update else None
        par.step(model, opt, batch, cross, microbatches=2, clip=clip, update=update, scaler=scaler)

    return [
        par.full_state_dict(loop(name, lambda m, o, text=text: par.parallelize(m, o, text), call))
        for text in texts
    ]


PLANS = {
    2: (
        *("dp=2", "dp=2,bucket_mb=0.002", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2"),
        *("tp=2,megatron_sp", "pp=2", "pp=2,schedule=zb-h1", "pp=2,schedule=zbv", "ring=2", "ulysses=2"),
    ),
    4: ("dp=2,tp=2", "dp=2,tp=2,zero=3,megatron_sp", "dp=2,pp=2,zero=2", "dp=2,pp=2,zero=3,schedule=zbv"),
}


# A spawn has a time limit; so those of two ranks come in thirds.
GROUPS = [*(PLANS[2][first::3] for first in range(3)), PLANS[4]]


@tier(quick=1 / 28, slow=1 / 6)
@pytest.mark.parametrize("group", GROUPS, ids=["first", "second", "third", "4 ranks"])
@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name, group):
    expected = alone(name)
    assert any(not torch.equal(value, make().state_dict()[key]) for key, value in expected.items())
    # tp cuts parameters that an optimizer wants to see whole, and refuses it.
    texts = [text for text in group if "tp=" not in text or CASES[name][1] is not normalized]
    for found in spawn(par.Plan.parse(texts[0]).world_size, planned, name, texts):
        for text, state in zip(texts, found, strict=True):
            for key, value in expected.items():
                assert equality.relative(state[key], value) < 1e-10, (text, key)


class OfTheHead(Plain):
    """Its embedding is the head's weight, which gets its gradient there alone."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.tok.weight

    def run_blocks(self, x):
        return super().run_blocks(x.detach())


def tied_and_frozen(rank, world_size, text):
    """The weight is frozen between two calls that wait for one update."""
    torch.manual_seed(0)
    model = OfTheHead().double()
    model, opt = par.parallelize(model, sgd(model), text)
    for step in range(2):
        for number in range(2):
            model.tok.weight.requires_grad_(not number)
            par.step(model, opt, tokens(step + 5 * number), cross, update=number == 1)
    return par.full_state_dict(model)


def test_a_tied_weight_that_is_frozen_between_calls_that_wait():
    """What it has got until then is updated with, by the stage too that has no gradient of it."""
    expected = tied_and_frozen(0, 1, "")
    for state in spawn(2, tied_and_frozen, "pp=2"):
        for key, value in expected.items():
            assert equality.relative(state[key], value) < 1e-10, key


def on_one_rank(rank, world_size, texts):
    """A bias, so that no rank waits for another in the passes."""
    batch = tokens(0)
    for text in texts:
        for flag in (False, True):
            model = make()
            set_trained(model, not flag, BIAS)
            model, opt = par.parallelize(model, sgd(model), text)
            par.step(model, opt, batch, cross)
            before = par.full_state_dict(model)
            if rank == 1:
                set_trained(model, flag, BIAS)
            with pytest.raises(ValueError, match=rf"requires_grad of '{BIAS}' is .* on rank 1"):
                par.step(model, opt, batch, cross)
            after = par.full_state_dict(model)
            assert all(torch.equal(value, after[key]) for key, value in before.items()), text
            set_trained(model, flag, BIAS)
            par.step(model, opt, batch, cross)
            after = par.full_state_dict(model)
            assert torch.equal(after[BIAS], before[BIAS]) != flag, text


def test_ranks_that_differ_are_told():
    spawn(2, on_one_rank, ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2"))


def sizes(rank, world_size, texts):
    found = {}
    for text in texts:
        model = make()
        set_trained(model, False, "blocks", "tok", "pos")
        model, opt = par.parallelize(model, two_groups(model), text)
        seen = []
        for step in range(3):
            if step == 1:
                set_trained(model, True, "blocks.3.mlp.0.weight")
            par.step(model, opt, tokens(step), cross)
            buckets = [bucket for reducer in parts_of(model).reducers.values() for bucket in reducer.buckets]
            names = {info.name for bucket in buckets for info in bucket.infos}
            owned = sum(p.numel() for group in opt.param_groups for p in group["params"])
            state = sum(s["exp_avg"].numel() for s in opt.state.values())
            seen.append((names, owned, state))
        found[text] = seen
    return found


def test_what_stays_frozen_costs_nothing():
    """No gradient, master copy or state; and of a block no more than what is trained."""
    first, more = {"norm.weight", "norm.bias"}, "blocks.3.mlp.0.weight"
    shapes = {name: p.numel() for name, p in make().named_parameters()}
    texts = ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2")
    ranks = spawn(2, sizes, texts)
    for text in texts:
        for step, expected in enumerate((first, first | {more}, first | {more})):
            names = set().union(*(rank[text][step][0] for rank in ranks))
            assert names == expected, (text, step)
            copies = 2 if text == "dp=2" else 1
            total = copies * sum(shapes[name] for name in expected)
            assert [sum(rank[text][step][n] for rank in ranks) for n in (1, 2)] == [total, total], (
                text,
                step,
            )


def saved(rank, world_size, text, path):
    model = make()
    gradually(model, 0)
    model, opt = par.parallelize(model, two_groups(model), text)
    for step in range(STEPS):
        if step:
            gradually(model, step)
        par.step(model, opt, tokens(step), cross, clip=CLIP)
        if step == 2:
            par.save(model, opt, path)
    return par.full_state_dict(model)


def loaded(rank, world_size, texts, path):
    """Frozen as at the beginning; the flags of step 2 are set before or after it is read."""
    found = []
    for text in texts:
        for before in (True, False):
            model = make()
            gradually(model, 0)
            model, opt = par.parallelize(model, two_groups(model), text)
            for step in (1, 2) if before else ():
                gradually(model, step)
            par.load(model, opt, path)
            for step in () if before else (1, 2):
                gradually(model, step)
            for step in range(3, STEPS):
                gradually(model, step)
                par.step(model, opt, tokens(step), cross, clip=CLIP)
            found.append(par.full_state_dict(model))
    return found


@tier(slow=1)
@pytest.mark.parametrize("text", ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2"])
def test_checkpoints_have_what_was_unfrozen(text, tmp_path):
    expected = spawn(2, saved, text, str(tmp_path / "saved"))[0]
    for state in spawn(2, loaded, ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2"), str(tmp_path / "saved"))[0]:
        for key, value in expected.items():
            assert equality.relative(state[key], value) < 1e-10, key


class Changing(torch.nn.Module):
    """It unfreezes in its forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unfreezes = torch.nn.Linear(9, 9), torch.nn.Linear(9, 9), False

    def forward(self, x):
        if self.unfreezes:
            self.first.requires_grad_(True)
        return self.second(self.first(x))


def unfreezing_inside(rank, world_size):
    batch = torch.ones(4, 9), torch.ones(4, 9)
    for text in ("dp=2", "dp=2,zero=3"):
        torch.manual_seed(0)
        model = Changing()
        model.first.requires_grad_(False)
        model, opt = par.parallelize(model, sgd(model), text)
        par.step(model, opt, batch, torch.nn.functional.mse_loss)
        model.unfreezes = True
        with pytest.raises(ValueError, match="between two steps, and not in the forward"):
            par.step(model, opt, batch, torch.nn.functional.mse_loss)
        par.step(model, opt, batch, torch.nn.functional.mse_loss)  # now it was unfrozen before the step
        assert len(parts_of(model).reducers[0].places) == 4


def test_unfreezing_in_a_forward_is_refused():
    spawn(2, unfreezing_inside)


def in_pipedream(rank, world_size):
    """Weight decay moves what has a gradient of zero, not what has none."""
    names = "blocks.0.ln_1.weight", "blocks.3.ln_1.weight"
    torch.manual_seed(0)
    model = GPT(dim=16, heads=2, hidden=20, tied=False).double()
    set_trained(model, False, names[0])
    model, opt = par.parallelize(model, sgd(model), "dp=2,pp=2,schedule=pipedream")
    states = [par.full_state_dict(model)]
    for step in range(3):
        if step == 1:
            set_trained(model, True, names[0])
            set_trained(model, False, names[1])
        if step == 2:
            set_trained(model, False, names[0])
        par.step(model, opt, tokens(step), cross, microbatches=3)
        states.append(par.full_state_dict(model))
    pairs = list(zip(states, states[1:], strict=False))
    return [[not torch.equal(one[name], two[name]) for one, two in pairs] for name in names]


@tier(slow=1)
def test_stages_that_step_one_by_one():
    assert spawn(4, in_pipedream) == [[[False, True, False], [True, False, False]]] * 4


def recovered(rank, text):
    """In the last step the ranks go back to a snapshot, and repeat steps that had other flags."""
    model = make()
    in_turn(model, 0)
    run = par.resilient(model, sgd(model), text, snapshot_every=3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.opt, 0.8)
    for step in run.steps(STEPS):
        if step:
            in_turn(model, step)
        if step == STEPS - 1 and rank == 0:
            dist.group.WORLD.abort()
        run.step(tokens(step), cross)
        scheduler.step()
    assert run.recoveries == 1 and run.repeated > 0
    return par.full_state_dict(model)


@tier(quick=1 / 4, slow=1 / 3)
@pytest.mark.parametrize("text", ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2"])
def test_a_recovery_repeats_steps_with_their_flags(text):
    expected = alone("in turn")
    states = run_ranks(2, recovered, text, mode="processes", backend="pycomm", timeout=60.0)
    for state in states:
        for key, value in expected.items():
            assert equality.relative(state[key], value) < 1e-10, key


def growing(text, clip):
    """A group is added: of what was frozen and in no group, then of what was trained and in none."""
    model = make()
    set_trained(model, False, "blocks.0", "blocks.1", "tok", "pos")
    named = dict(model.named_parameters())
    first = [p for name, p in named.items() if p.requires_grad and "norm" not in name]
    opt = torch.optim.AdamW(first, lr=0.01)
    if text is not None:
        model, opt = par.parallelize(model, opt, text)
    named = dict(model.named_parameters())
    for step in range(STEPS):
        if step == 1:
            set_trained(model, True, "blocks.1", "tok")
            added = [p for name, p in named.items() if "blocks.1" in name or "tok" in name]
            opt.add_param_group({"params": added, "lr": 0.02})
        if step == 3:
            opt.add_param_group({"params": [p for name, p in named.items() if "norm" in name], "lr": 0.03})
        if text is not None:
            par.step(model, opt, tokens(step), cross, clip=clip, microbatches=2)
            continue
        model.zero_grad()
        x, y = tokens(step)
        cross(model(x), y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
    assert len(opt.param_groups) == 3
    return model.state_dict() if text is None else par.full_state_dict(model)


def grown(rank, world_size, texts, clip):
    return [growing(text, clip) for text in texts]


GROWN = {
    "2": ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2,megatron_sp", "pp=2"),
    "2 more": ("dp=2,zero=2", "tp=2", "ring=2", "ulysses=2", "pp=2,schedule=zbv"),
    "4": ("dp=2,tp=2", "dp=2,pp=2,zero=3"),
}


@tier(quick=1 / 3, slow=1)
@pytest.mark.parametrize("texts", GROWN.values(), ids=GROWN)
def test_add_param_group(texts):
    clip = CLIP if "ring=2" in texts else None
    expected = growing(None, clip)
    for found in spawn(par.Plan.parse(texts[0]).world_size, grown, texts, clip):
        for text, state in zip(texts, found, strict=True):
            for key, value in expected.items():
                assert equality.relative(state[key], value) < 1e-10, (text, key)


def refused_groups(rank, world_size):
    for text in ("dp=2", "dp=2,zero=3", "pp=2"):
        model = make()
        set_trained(model, False, "pos", "norm")
        model, opt = par.parallelize(model, sgd(model), text)
        lone = make().pos.weight
        for params in ([lone], [model.pos.weight], [model.blocks[0].ln_1.bias, lone]):
            with pytest.raises(ValueError, match="add_param_group: .*|more than one parameter group"):
                opt.add_param_group({"params": params})
        assert len(opt.param_groups) == 1
    model = make()
    opt = torch.optim.SGD([model.pos.weight], lr=0.1)
    model, opt = par.parallelize(model, opt, "dp=2")
    params = model.blocks[rank].parameters()
    opt.add_param_group({"params": list(params), "lr": 0.2})
    with pytest.raises(ValueError, match=r"parameter group of 'blocks.0.* is 1 on rank 0"):
        par.step(model, opt, tokens(0), cross)


def test_groups_that_cannot_be_added():
    spawn(2, refused_groups)
