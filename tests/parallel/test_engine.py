"""step() and evaluate() where models, optimizers, batches and users are not the plain ones: as a single process, or an error on all ranks.

The oracle is plain torch in the parent process; all cases of one world size share their ranks, one after the other.
"""

import gc
import time

import models
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel import comm
from pycomm.parallel.batch import count_targets
from pycomm.parallel.build import engine_of
from pycomm.parallel.holdings import full_gradients, full_state_dict

STEPS, LENGTH = 3, 7


def tokens(step, rows=13):
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, 29, (rows, LENGTH), generator=generator) for _ in range(2))
    y[torch.rand(rows, LENGTH, generator=generator) < 0.4] = -100
    y[0] = y[5:8] = -100  # rows, and with them ranks and microbatches, that count nothing
    return x, y


def named(step):
    x, y = tokens(step)
    return {"idx": x, "labels": y}


def numbers(step, rows=7):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(rows, 9, generator=generator, dtype=torch.float64) for _ in range(2))


def cross(out, y):
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


# Models ------------------------------------------------------------


def gpt():
    return models.GPT(dim=16, heads=2, hidden=20, layers=3)


def lora():
    model = gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.1.attn" in name or "blocks.2.mlp" in name)
    return model


def unused():
    model = gpt()
    model.blocks[1].spare, model.spare = nn.Linear(3, 3), nn.Linear(2, 5)
    return model


class Positions(nn.Module):
    """A parameter that lies in the module which holds the blocks."""

    def __init__(self, layers=3):
        super().__init__()
        self.tok, self.pos = nn.Embedding(29, 16), nn.Parameter(torch.randn(1, 12, 16))
        self.blocks = nn.ModuleList(models.Block(16, 2, 20) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 29)

    def forward(self, idx):
        x = self.tok(idx) + self.pos[:, : idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sequential():
    return nn.Sequential(nn.Embedding(29, 16), *[models.Block(16, 2, 20) for _ in range(3)], nn.LayerNorm(16), nn.Linear(16, 29))


class PairBlock(models.Block):
    def forward(self, x):
        return super().forward(x), None


class Pairs(Positions):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(PairBlock(16, 2, 20) for _ in range(3))

    def forward(self, idx):
        x = self.tok(idx) + self.pos[:, : idx.shape[1]]
        for block in self.blocks:
            x = block(x)[0]
        return self.head(self.norm(x))


class Tangle(nn.Module):
    """No list of blocks; a weight in three modules; two dtypes, whole numbers, nothing, and a scalar among the parameters."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.out = nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9)
        self.b.weight = self.c.weight = self.a.weight
        self.single = nn.Linear(9, 9)
        self.whole = nn.Parameter(torch.arange(5), requires_grad=False)
        self.nothing, self.scale = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(1.3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def double(self):
        super().double()
        self.single.float()
        return self

    def forward(self, x):
        self.count += 1
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        x = x + self.single(self.c(x).float()).double()
        return self.out(x) * self.scale


def matrices():
    return nn.Sequential(*[nn.Sequential(nn.Linear(9, 9, bias=False), nn.Tanh()) for _ in range(4)])


# Optimizers ------------------------------------------------------------


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


def some(model):
    return torch.optim.AdamW([p for name, p in model.named_parameters() if "mlp" in name], lr=0.01)


def groups(model):
    kinds = [[p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False)]
    return torch.optim.AdamW([{"params": kinds[0], "weight_decay": 0.2}, {"params": kinds[1], "lr": 0.003}], lr=0.01)


def scheduled(model):
    opt = groups(model)
    opt.schedules = [torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)]
    return opt


def named_optimizer(name, **options):
    def make(model):
        return getattr(torch.optim, name)(model.parameters(), **{"lr": 0.01, **options})

    make.__name__ = name
    return make


class Case:
    def __init__(self, plan, model, optimizer=adamw, batch=tokens, loss=cross, microbatches=3, clip=0.5, limit=1e-11):
        self.plan, self.model, self.optimizer, self.batch, self.loss = par.Plan.parse(plan), model, optimizer, batch, loss
        self.microbatches, self.clip, self.limit = microbatches, clip, limit

    def __str__(self):
        return f"{self.plan} {self.model.__name__} {self.optimizer.__name__} {self.batch.__name__}"

    def make(self):
        torch.manual_seed(4)
        model = self.model().double()
        return model, self.optimizer(model)


# The plan without ZeRO and the LayerNorms beside tensor parallel layers are what DeepSpeed and torch fail at with clipping.
CASES = [
    *[Case(plan, gpt) for plan in ("pp=2", "tp=2", "pp=3", "dp=4", "dp=2,tp=2")],
    *[Case(plan, lora) for plan in ("dp=2,zero=1", "dp=2,zero=3", "pp=2", "tp=2", "pp=3,schedule=zb-h1", "dp=2,pp=2,zero=3")],
    *[Case(plan, unused) for plan in ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2", "dp=2,pp=2,zero=2")],
    *[Case(plan, gpt, some) for plan in ("dp=2", "dp=2,zero=3", "pp=2", "dp=2,tp=2,zero=1")],
    *[Case(plan, gpt, scheduled) for plan in ("dp=2,zero=1", "tp=2", "dp=2,pp=2,zero=3")],
    *[Case(plan, Positions) for plan in ("dp=2,zero=3", "pp=2", "tp=2,megatron_sp", "ulysses=2", "dp=2,pp=2,zero=3")],
    *[Case(plan, sequential) for plan in ("pp=2", "pp=2,schedule=zbv", "dp=2,zero=3,checkpoint", "tp=2")],
    *[Case(plan, Pairs) for plan in ("pp=3", "dp=2,zero=3,checkpoint")],
    *[Case(f"dp=2,zero={zero}", Tangle, adamw, numbers, F.mse_loss, limit=1e-6) for zero in range(4)],
    *[Case(plan, gpt, batch=named) for plan in ("dp=2", "pp=2")],
    *[Case(plan, gpt, microbatches=count) for plan, count in (("pp=3", 1), ("pp=3", 2), ("pp=2", 5), ("dp=2,pp=2,zero=3", 1))],
    *[Case("dp=2,zero=1", gpt, named_optimizer(name)) for name in ("Adagrad", "RAdam", "Adafactor", "SGD", "ASGD")],
    *[Case("dp=2,pp=2,zero=3", gpt, named_optimizer(name)) for name in ("Adagrad", "Adafactor")],
    *[Case("dp=3,zero=2", gpt, named_optimizer("Adam", fused=True))],
    *[Case("dp=2,zero=3", matrices, named_optimizer("Muon"), numbers, F.mse_loss, 2, limit=1e-6)],
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
        sizes = comm.even_sizes(len(targets), case.microbatches)
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
        losses.append(par.step(model, opt, case.batch(step), case.loss, microbatches=case.microbatches, clip=case.clip).item())
        for schedule in getattr(opt, "schedules", []):
            schedule.step()
    return losses, full_state_dict(model)


def run_cases(rank, world_size):
    return [planned(case) for case in CASES if case.plan.world_size == world_size]


def relative(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item() if expected.numel() else 0.0


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equal_to_one_process(world_size):
    cases = [case for case in CASES if case.plan.world_size == world_size]
    oracles = {}
    wrong = []
    for rank, results in enumerate(spawn(world_size, run_cases)):
        for case, (losses, state) in zip(cases, results, strict=True):
            key = case.model, case.optimizer, case.batch, case.microbatches
            if key not in oracles:
                oracles[key] = single(case)
            expected = oracles[key]
            errors = {"loss": relative(torch.tensor(losses), torch.tensor(expected[0]))}
            errors.update({name: relative(state[name], value) for name, value in expected[1].items() if value.is_floating_point()})
            worst = max(errors, key=errors.get)
            if not errors[worst] <= case.limit:
                wrong.append(f"rank {rank}, {case}: {worst} {errors[worst]:.1e}")
    assert not wrong, "\n".join(wrong)


# What users do wrong ------------------------------------------------------------


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
    before = par.evaluate(model, (x, y), cross, microbatches=2).item()
    table = [
        (ValueError, "cannot be cut", lambda: par.step(model, opt, (x[:1], y[:1]), cross, microbatches=2)),
        (ValueError, "different batches", lambda: par.step(model, opt, tokens(rank), cross)),
        (ValueError, "different batches", lambda: par.step(model, opt, (x, tokens(rank)[1]), cross)),
        (ValueError, "clip=-1", lambda: par.step(model, opt, (x, y), cross, clip=-1)),
        (ValueError, "clip=nan", lambda: par.step(model, opt, (x, y), cross, clip=float("nan"))),
        (ValueError, "not the one", lambda: par.step(model, other, (x, y), cross)),
        (ValueError, "needs the optimizer", lambda: par.step(model, None, (x, y), cross)),
        (ValueError, "without dimensions", lambda: par.step(model, opt, (x, y), lambda out, y: out)),
        (ValueError, "differ in rows", lambda: par.step(model, opt, (x, y[1:]), cross)),
        (ValueError, "whole number", lambda: par.step(model, opt, (x, y), cross, microbatches=0)),
        (ValueError, "labels", lambda: par.step(model, opt, {"idx": x}, cross)),
        (ValueError, "parallelized already", lambda: par.parallelize(model, opt, plan)),
        (KeyError, "user's bug", lambda: par.step(model, opt, (x, y), boom, microbatches=2)),
    ]
    if plan.pp > 1:  # there only the last stage calls the loss, and the others can but wait
        table = [entry for entry in table if entry[1] not in ("without dimensions", "user's bug")]
    for kind, match, call in table:
        with pytest.raises(kind, match=match):
            call()
    if plan.zero == 3 or plan.pp > 1 or plan.ulysses > 1:
        with pytest.raises(RuntimeError, match=r"parallel\.step or parallel\.evaluate"):
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
    for text in ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2", "ulysses=2"):
        for before, first, after in spawn(2, mistakes, par.Plan.parse(text)):
            assert before == pytest.approx(losses[0].item(), rel=1e-12) and first == pytest.approx(before, rel=1e-12), text
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


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2"])
def test_one_rank_fails(plan):
    """The others get an error that names a rank, within the group's timeout."""
    (other, seconds), (own, _) = spawn(2, one_fails, par.Plan.parse(plan), timeout=2.0)
    assert "user's bug" in own
    assert "rank 1" in other and seconds < 5, other


PLAN_ERRORS = [
    ("pp=4", gpt, adamw, "4 pipeline stages for 3 blocks"),
    ("pp=2,stages=1:1", gpt, adamw, "model has 3"),
    ("pp=2", lambda: nn.ModuleList([nn.Linear(2, 2)]), adamw, "no list of blocks"),
    ("checkpoint", Tangle, adamw, "checkpoint cut the model at its blocks"),
    ("dp=1", lambda: gpt().to("meta"), adamw, "on meta.*tok"),
    ("dp=1", gpt, lambda model: adamw(gpt()), "not the model's"),
    ("dp=1", gpt, lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS"),
    ("tp=2", gpt, named_optimizer("Adafactor"), "looks at whole parameters"),
    ("blocks=nothing", gpt, adamw, "blocks='nothing': is not in the model"),
]


@pytest.mark.parametrize(("plan", "model", "optimizer", "match"), PLAN_ERRORS, ids=[error[3][:20] for error in PLAN_ERRORS])
def test_plan_errors(plan, model, optimizer, match):
    """Found before any rank is asked."""
    model = model()
    with pytest.raises(ValueError, match=match):
        par.parallelize(model, optimizer(model), par.Plan.parse(plan))


def late_plan_errors(rank, world_size):
    with pytest.raises(ValueError, match="'pos' lies in 'the model'"):
        model = Positions(layers=4)
        par.parallelize(model, adamw(model), par.Plan(pp=2, schedule="zbv"))
    with pytest.raises(ValueError, match="plan is for 4 ranks.*there are 2"):
        par.parallelize(gpt(), None, par.Plan(dp=4))
    model = nn.Sequential(*[nn.Linear(9, 9) for _ in range(4)])
    for layer in model[1:]:
        layer.weight = model[0].weight
    with pytest.raises(ValueError, match=r"'0.weight' is used by pipeline stages \[0, 1, 2, 3\]"):
        par.parallelize(model, adamw(model), par.Plan(pp=2, schedule="interleaved"))
    model = Positions()
    opt = adamw(model)
    par.parallelize(model, opt, par.Plan(pp=2, schedule="pipedream"))
    with pytest.raises(ValueError, match='clip=1.0.*"pipedream"'):
        par.step(model, opt, tokens(0), cross, clip=1.0)


def test_plan_errors_on_all_ranks():
    spawn(2, late_plan_errors)


# Random numbers ------------------------------------------------------------


class DropoutAttention(models.Attention):
    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        weights = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.2, self.training)
        return F.dropout(self.c_proj((weights @ v).transpose(1, 2).contiguous().view(B, T, C)), 0.3, self.training)


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
        whole = {info.name: info.param.detach() for info in engine_of(model).infos if info.layout.dim is None and plan.zero < 3}
        out.append((losses, untouched, whole))
    return out


@pytest.mark.parametrize("world_size", [2, 4])
def test_dropout(world_size):
    """Uneven shares draw unequal numbers, recomputation draws the same again, replicas stay equal, and the user's stream is left alone."""
    texts = {2: ("tp=2", "tp=2,megatron_sp", "dp=2,zero=3", "pp=2"), 4: ("tp=2,pp=2,megatron_sp", "dp=2,tp=2", "tp=3")}[world_size]
    plans = [par.Plan.parse(text + more) for text in texts for more in ("", ",checkpoint") if par.Plan.parse(text).world_size == world_size]
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
    for zero in range(4):
        torch.manual_seed(4)
        model = gpt()
        model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.2), par.Plan(dp=2, zero=zero, precision="bf16"))
        losses = [par.step(model, opt, tokens(step), cross, microbatches=2, clip=0.5).item() for step in range(STEPS)]
        out.append((losses, full_state_dict(model)))
    return out


def test_bf16_against_one_process():
    """The same mixed precision by hand: bf16 copies compute, fp32 masters are updated, the loss is taken in fp32."""
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
        out.append((still, par.grad_norm(model).isfinite().item(), full_state_dict(model)["norm.weight"].isfinite().any().item()))
    return out


def test_clip_of_special_gradients():
    """clip=0 moves nothing; a gradient that is not finite shows in the norm, and in the parameters as with torch's clip_grad_norm_."""
    for results in spawn(2, special_gradients):
        assert results == [(True, False, False)] * 3


def own_rows(rank, world_size):
    torch.manual_seed(4)
    model = gpt().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    par.parallelize(model, opt, par.Plan(dp=2))
    x, y = tokens(0)
    rows = slice(0, 4) if rank == 0 else slice(4, 13)
    with pytest.raises(ValueError, match="cannot be cut" if rank else "1 other ranks could not cut"):
        par.step(model, opt, (x[: 1 if rank else 9], y[: 1 if rank else 9]), cross, microbatches=2, sharded=True)
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


def test_no_tensor_stays():
    texts = ("dp=2", "dp=2,zero=1", "dp=2,zero=3,checkpoint", "pp=2,schedule=zb-h1", "tp=2,megatron_sp", "ulysses=2")
    for results in spawn(2, live, [par.Plan.parse(text) for text in texts]):
        for text, counts in zip(texts, results, strict=True):
            assert len(set(counts[2:])) == 1, (text, counts)
