"""step() with models, optimizers, batches and numbers that are not the plain ones: as a single process.

The oracle is plain torch in the parent process; all cases of one world size share their ranks, one after the
other.
"""

import gc

import models
import pytest
import torch
import torch.nn.functional as F
from odd_models import (
    STEPS,
    Normed,
    Pairs,
    Positions,
    Tangle,
    TiedHead,
    adamw,
    cross,
    gpt,
    lora,
    matrices,
    named,
    named_optimizer,
    numbers,
    pictures,
    scheduled,
    sequential,
    some,
    tokens,
    unused,
)
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.groups import even_sizes
from pycomm.parallel import full_gradients, full_state_dict
from pycomm.parallel.ground.batch import count_targets
from pycomm.parallel.parts import parts_of


class Case:
    def __init__(
        self, plan, model, optimizer=adamw, batch=tokens, loss=cross, *, microbatches=3, clip=0.5, limit=1e-11
    ):
        self.plan, self.model, self.optimizer, self.batch, self.loss = (
            par.Plan.parse(plan),
            model,
            optimizer,
            batch,
            loss,
        )
        self.microbatches, self.clip, self.limit = microbatches, clip, limit

    def __str__(self):
        return f"{self.plan} {self.model.__name__} {self.optimizer.__name__} {self.batch.__name__}"

    def make(self):
        torch.manual_seed(4)
        model = self.model().double()
        return model, self.optimizer(model)


# The plan without ZeRO and the LayerNorms beside tensor parallel layers are what DeepSpeed and torch fail at
# with clipping.
CASES = [
    *[Case(plan, gpt) for plan in ("pp=2", "tp=2", "pp=3", "dp=4", "dp=2,tp=2")],
    *[
        Case(plan, lora)
        for plan in ("dp=2,zero=1", "dp=2,zero=3", "pp=2", "tp=2", "pp=3,schedule=zb-h1", "dp=2,pp=2,zero=3")
    ],
    *[Case(plan, unused) for plan in ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2", "dp=2,pp=2,zero=2")],
    *[Case(plan, gpt, some) for plan in ("dp=2", "dp=2,zero=3", "pp=2", "dp=2,tp=2,zero=1")],
    *[Case(plan, gpt, scheduled) for plan in ("dp=2,zero=1", "tp=2", "dp=2,pp=2,zero=3")],
    *[
        Case(plan, Positions)
        for plan in ("dp=2,zero=3", "pp=2", "tp=2,megatron_sp", "ulysses=2", "dp=2,pp=2,zero=3")
    ],
    *[Case(plan, sequential) for plan in ("pp=2", "pp=2,schedule=zbv", "dp=2,zero=3,checkpoint", "tp=2")],
    *[Case(plan, TiedHead) for plan in ("pp=2,zero=3", "dp=2,zero=3")],
    *[Case(plan, Pairs) for plan in ("pp=3", "dp=2,zero=3,checkpoint")],
    *[Case(f"dp=2,zero={zero}", Tangle, adamw, numbers, F.mse_loss, limit=1e-6) for zero in range(4)],
    *[
        Case(plan, Normed, batch=pictures, loss=F.mse_loss, limit=1e-9)  # far from zero digits are lost
        for plan in ("dp=2", "dp=3,zero=1", "dp=2,zero=2", "dp=2,zero=3", "pp=2", "dp=2,pp=2", "dp=4")
    ],
    *[Case(plan, gpt, batch=named) for plan in ("dp=2", "pp=2")],
    *[
        Case(plan, gpt, microbatches=count)
        for plan, count in (("pp=3", 1), ("pp=3", 2), ("pp=2", 5), ("dp=2,pp=2,zero=3", 1))
    ],
    *[
        Case("dp=2,zero=1", gpt, named_optimizer(name))
        for name in ("Adagrad", "RAdam", "Adafactor", "SGD", "ASGD")
    ],
    *[Case("dp=2,pp=2,zero=3", gpt, named_optimizer(name)) for name in ("Adagrad", "Adafactor")],
    *[Case("dp=3,zero=2", gpt, named_optimizer("Adam", fused=True))],
    *[
        Case(
            "dp=2,zero=3", matrices, named_optimizer("Muon"), numbers, F.mse_loss, microbatches=2, limit=1e-6
        )
    ],
]


def single(case):
    """Losses and state_dict of plain torch."""
    model, opt = case.make()
    losses = []
    for step in range(STEPS):
        model.zero_grad()
        batch = case.batch(step)
        inputs, targets = (batch["idx"], batch["labels"]) if isinstance(batch, dict) else batch
        total, loss = int(count_targets(targets)), 0.0
        sizes = even_sizes(len(targets), case.microbatches)
        for x, y in zip(inputs.split(sizes), targets.split(sizes), strict=True):
            count = int(count_targets(y))
            if count:
                part = case.loss(model(x), y) * (count / total)
                part.backward()
                loss += part.item()
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        opt.step()
        for schedule in getattr(opt, "schedules", []):
            schedule.step()
        losses.append(loss)
    return losses, model.state_dict()


def planned(case):
    model, opt = par.parallelize(*case.make(), case.plan)
    if hasattr(opt, "schedules"):
        late = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
        late.step()
    losses = []
    for step in range(STEPS):
        losses.append(
            par.step(
                model, opt, case.batch(step), case.loss, microbatches=case.microbatches, clip=case.clip
            ).item()
        )
        for schedule in getattr(opt, "schedules", []):
            schedule.step()
    return losses, full_state_dict(model)


def cases_of(world_size, backend):
    return [case for case in CASES if case.plan.world_size == world_size][:: 5 if backend == "gloo" else 1]


def run_cases(rank, world_size, backend):
    return [planned(case) for case in cases_of(world_size, backend)]


def relative(actual, expected):
    return (
        ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
        if expected.numel()
        else 0.0
    )


@tier(quick=1 / 4)
@pytest.mark.parametrize(
    ("world_size", "backend"), [(2, "pycomm"), (3, "pycomm"), (4, "pycomm"), (2, "gloo")]
)
def test_equal_to_one_process(world_size, backend):
    cases, oracles = cases_of(world_size, backend), {}
    wrong = []
    for rank, results in enumerate(spawn(world_size, run_cases, backend, backend=backend)):
        for case, (losses, state) in zip(cases, results, strict=True):
            key = case.model, case.optimizer, case.batch, case.microbatches
            if key not in oracles:
                oracles[key] = single(case)
            expected = oracles[key]
            errors = {"loss": relative(torch.tensor(losses), torch.tensor(expected[0]))}
            errors.update(
                {
                    name: relative(state[name], value)
                    for name, value in expected[1].items()
                    if value.is_floating_point()
                }
            )
            worst = max(errors, key=errors.get)
            if not errors[worst] <= case.limit:
                wrong.append(f"rank {rank}, {case}: {worst} {errors[worst]:.1e}")
    assert not wrong, "\n".join(wrong)


# Random numbers ------------------------------------------------------------


class DropoutAttention(models.Attention):
    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        weights = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.2, self.training)
        return F.dropout(
            self.c_proj((weights @ v).transpose(1, 2).contiguous().view(B, T, C)), 0.3, self.training
        )


def dropout():
    model = models.GPT(dim=24, heads=3, hidden=21, layers=2)
    model.tok = nn.Sequential(model.tok, nn.Dropout(0.1))
    for block in model.blocks:
        block.attn = DropoutAttention(24, 3)
        block.mlp.insert(2, nn.Dropout(0.2))
        block.mlp.append(nn.Dropout(0.2))
    return model


def random_run(rank, world_size, plans):
    out = []
    for plan in plans:
        torch.manual_seed(0)
        model = dropout().double()
        model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
        torch.manual_seed(7)
        state = torch.get_rng_state()
        losses = [par.step(model, opt, tokens(step), cross, microbatches=2).item() for step in range(2)]
        par.evaluate(model, tokens(1), cross)
        untouched = torch.equal(state, torch.get_rng_state())
        whole = {
            info.name: info.param.detach()
            for info in parts_of(model).infos
            if info.layout.dim is None and plan.zero < 3
        }
        out.append((losses, untouched, whole))
    return out


@tier(slow=1)
@pytest.mark.parametrize("world_size", [2, 4])
def test_dropout(world_size):
    """Uneven shares draw unequal numbers, recomputation draws the same again, replicas stay equal, and the
    user's stream is left alone.
    """
    texts = {
        2: ("tp=2", "tp=2,megatron_sp", "dp=2,zero=3", "pp=2"),
        4: ("tp=2,pp=2,megatron_sp", "dp=2,tp=2", "tp=3"),
    }[world_size]
    plans = [
        par.Plan.parse(text + more)
        for text in texts
        for more in ("", ",checkpoint")
        if par.Plan.parse(text).world_size == world_size
    ]
    results = spawn(world_size, random_run, plans)
    for number, plan in enumerate(plans):
        kept = {}
        for rank in results:
            losses, untouched, whole = rank[number]
            assert untouched, plan
            assert losses == results[0][number][0]
            for name, value in whole.items():
                assert relative(value, kept.setdefault(name, value)) < 1e-12, (str(plan), name)
        if plan.checkpoint:
            assert results[0][number][0] == pytest.approx(results[0][number - 1][0], rel=1e-12), plan


# Numbers ------------------------------------------------------------


def mixed(rank, world_size):
    out = []
    for text in (
        "dp=2",
        "dp=2,zero=1",
        "dp=2,zero=2",
        "dp=2,zero=3",
        "pp=2",
        "tp=2,megatron_sp",
        "ulysses=2,zero=3",
    ):
        torch.manual_seed(4)
        model = gpt()
        plan = par.Plan.parse(f"{text},precision=bf16")
        model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.2), plan)
        losses = [
            par.step(model, opt, tokens(step), cross, microbatches=2, clip=0.5).item()
            for step in range(STEPS)
        ]
        out.append((losses, full_state_dict(model)))
    return out


@tier(slow=1)
def test_bf16_against_one_process():
    """The same mixed precision by hand: bf16 copies compute, fp32 masters are updated, the loss is taken in
    fp32.
    """
    torch.manual_seed(4)
    master = gpt()
    opt, losses = torch.optim.SGD(master.parameters(), lr=0.2), []
    start = {name: value.clone() for name, value in master.state_dict().items()}
    for step in range(STEPS):
        copy = gpt().bfloat16()
        copy.load_state_dict(master.state_dict())
        (x, y), losses = tokens(step), [*losses, 0.0]
        for half, target in zip(x.split([7, 6]), y.split([7, 6]), strict=True):
            loss = cross(copy(half).float(), target) * (count_targets(target) / count_targets(y))
            loss.backward()
            losses[-1] += loss.item()
        for parameter, low in zip(master.parameters(), copy.parameters(), strict=True):
            parameter.grad = low.grad.float()
        nn.utils.clip_grad_norm_(master.parameters(), 0.5)
        opt.step()
    for results in spawn(2, mixed):
        for found, state in results:
            assert found == pytest.approx(losses, rel=2e-3)
            for name, value in master.state_dict().items():
                moved = (value - start[name]).norm()
                assert (state[name] - value).norm() < 0.03 * moved, name


def special_gradients(rank, world_size):
    out = []
    for plan in (par.Plan(dp=2), par.Plan(dp=2, zero=3), par.Plan(tp=2)):
        torch.manual_seed(4)
        model = gpt().double()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        par.parallelize(model, opt, plan)
        start = full_state_dict(model)["norm.weight"]
        par.step(model, opt, tokens(0), cross, clip=0.0)
        still = torch.equal(full_state_dict(model)["norm.weight"], start)
        par.step(model, opt, tokens(0), lambda out, y: cross(out, y) * torch.inf, clip=1.0)
        out.append(
            (
                still,
                par.grad_norm(model).isfinite().item(),
                full_state_dict(model)["norm.weight"].isfinite().any().item(),
            )
        )
    return out


def test_clip_of_special_gradients():
    """clip=0 moves nothing; a gradient that is not finite shows in the norm, and in the parameters as with
    torch's clip_grad_norm_.
    """
    for results in spawn(2, special_gradients):
        assert results == [(True, False, False)] * 3


def own_rows(rank, world_size):
    torch.manual_seed(4)
    model = gpt().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    par.parallelize(model, opt, par.Plan(dp=2))
    x, y = tokens(0)
    rows = slice(0, 4) if rank == 0 else slice(4, 13)
    with pytest.raises(ValueError, match="differ in rows" if rank else "1 other ranks could not cut"):
        par.step(model, opt, (x[: 8 if rank else 9], y[:9]), cross, microbatches=2, sharded=True)
    loss = par.step(model, opt, (x[rows], y[rows]), cross, microbatches=2, sharded=True).item()
    return loss, full_gradients(model), len(par.sampler(model, range(10)))


def test_sharded_batches():
    torch.manual_seed(4)
    model, (x, y) = gpt().double(), tokens(0)
    expected = cross(model(x), y)
    expected.backward()
    for loss, gradients, length in spawn(2, own_rows):
        assert loss == pytest.approx(expected.item(), rel=1e-12) and length == 5
        for name, parameter in model.named_parameters():
            assert relative(gradients[name], parameter.grad) < 1e-12, name


def nan_inputs(rank, world_size):
    """A nan among the inputs is the user's affair, and no sign of different batches."""
    torch.manual_seed(4)
    model = matrices().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    par.parallelize(model, opt, par.Plan(dp=2))
    x, y = numbers(0)
    x[0, 0], x[1, 1] = torch.nan, torch.inf
    return par.step(model, opt, (x, y), F.mse_loss).isnan().item()


def test_nan_inputs():
    assert spawn(2, nan_inputs) == [True, True]


# Memory ------------------------------------------------------------


def live(rank, world_size, plans):
    """Counts of tensors after steps of two models that take turns."""
    out = []
    gc.collect()
    gc.freeze()  # what is there already is not looked at
    for plan in plans:
        pairs = []
        for _ in range(2):
            model = gpt()
            pairs.append(par.parallelize(model, adamw(model), plan))
        counts = []
        for step in range(5):
            for model, opt in pairs:
                par.step(model, opt, tokens(step), microbatches=3, clip=1.0)
                par.evaluate(model, tokens(step))
            gc.collect()
            counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
        out.append(counts)
    return out


@tier(slow=1)
def test_no_tensor_stays():
    texts = (
        "dp=2",
        "dp=2,zero=1",
        "dp=2,zero=3,checkpoint",
        "pp=2,schedule=zb-h1",
        "tp=2,megatron_sp",
        "ulysses=2",
    )
    for results in spawn(2, live, [par.Plan.parse(text) for text in texts]):
        for text, counts in zip(texts, results, strict=True):
            assert len(set(counts[2:])) == 1, (text, counts)
