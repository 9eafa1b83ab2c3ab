"""step(scaler=): the loss scaled, one decision of all ranks to leave a step out, and autocast around it."""

import equality
import pytest
import torch
from halves import quick
from models import GPT, Llama
from odd_models import cross
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.data import make_compression

ROWS, LENGTH, STEPS, BAD = 9, 7, 5, (1, 2)  # steps whose gradients are not finite


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, 29, (ROWS, LENGTH), generator=generator) for _ in range(2))
    y[torch.rand(ROWS, LENGTH, generator=generator) < 0.3] = -100
    return x, y


class Exploding(torch.autograd.Function):
    """What fp16 does to a large gradient: of the last row, so of one data rank."""

    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[-1] = torch.inf
        return grad


def make(kind):
    torch.manual_seed(0)
    return GPT(layers=4) if kind == "gpt" else Llama()


def exploding(step):
    return (lambda out, y: cross(Exploding.apply(out), y)) if step in BAD else cross


def scaler(**options):
    return torch.amp.GradScaler("cpu", growth_interval=2, **options)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone(kind, clip):
    model = make(kind).double()
    opt, scale, seen = sgd(model), scaler(), []
    for step in range(STEPS):
        x, y = batch(step)
        opt.zero_grad()
        scale.scale(exploding(step)(model(x), y)).backward()
        scale.unscale_(opt)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scale.step(opt)
        scale.update()
        seen.append((scale.get_scale(), norm.item()))
    return seen, model.state_dict()


def planned(rank, world_size, kind, texts, clip):
    found = []
    for text in texts:
        model = make(kind).double()
        model, opt = par.parallelize(model, sgd(model), par.Plan.parse(text))
        scale, seen = scaler(), []
        for step in range(STEPS):
            par.step(model, opt, batch(step), exploding(step), microbatches=2, clip=clip, scaler=scale)
            seen.append((scale.get_scale(), par.grad_norm(model).item()))
        found.append((seen, par.full_state_dict(model)))
    return found


CASES = {
    "gpt 2": ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=2,megatron_sp"),
    "gpt pipelines": ("pp=2,schedule=gpipe", "pp=2,schedule=interleaved", "pp=2,schedule=zbv"),
    "llama 2": ("ulysses=2", "ring=2"),
    "gpt 4": ("dp=2,pp=2,zero=2,schedule=zb-h1", "dp=2,tp=2,zero=1"),
}


@tier(slow=1 / 4)
@pytest.mark.parametrize("name", quick(CASES, "gpt 2", "llama 2"))
def test_a_step_is_left_out_on_all_ranks(name):
    kind, texts = name.split()[0], CASES[name]
    seen, state = alone(kind, 0.5)
    assert [scale for scale, _ in seen] == [65536.0, 32768.0, 16384.0, 16384.0, 32768.0]
    for found in spawn(par.Plan.parse(texts[0]).world_size, planned, kind, texts, 0.5):
        for text, (its_seen, its_state) in zip(texts, found, strict=True):
            for step, ((scale, norm), (its_scale, its_norm)) in enumerate(zip(seen, its_seen, strict=True)):
                assert its_scale == scale, (text, step)
                assert step in BAD or equality.relative(its_norm, norm) < 1e-12, (text, step)
            for key, value in state.items():
                assert equality.relative(its_state[key], value) < 1e-11, (text, key)


def waiting(rank, world_size, text, scaled):
    model = make("gpt").double()
    model, opt = par.parallelize(model, sgd(model), par.Plan.parse(text))
    scale = scaler(init_scale=8.0) if scaled else None
    for step in range(4):
        par.step(model, opt, batch(step), clip=0.5, update=step % 2 == 1, scaler=scale)
    return scale.get_scale() if scaled else None, par.full_state_dict(model)


@tier(slow=1)
def test_scaled_calls_that_wait():
    for text in ("dp=2,zero=3", "pp=2"):
        plain, scaled = spawn(2, waiting, text, False)[0][1], spawn(2, waiting, text, True)
        for scale, state in scaled:
            assert scale == 16.0  # two updates, so it has grown once
            assert all(equality.relative(state[key], value) < 1e-12 for key, value in plain.items())


def refused(rank, world_size):
    model = make("gpt")
    model, opt = par.parallelize(model, sgd(model), par.Plan(dp=2))
    before = par.full_state_dict(model)
    with pytest.raises(ValueError, match=r"takes a torch.amp.GradScaler, not a float"):
        par.step(model, opt, batch(0), scaler=65536.0)
    with pytest.raises(ValueError, match="the scaler of this rank has the scale"):
        par.step(model, opt, batch(0), scaler=scaler(init_scale=2.0 ** (8 + rank)))
    with pytest.raises(ValueError, match=f"has the scale {(1.0, 4.0)[rank]}, others have another"):
        par.step(model, opt, batch(0), clip=1.0, scaler=scaler(init_scale=4.0) if rank else None)
    par.step(model, opt, batch(0), update=False, scaler=scaler())
    with pytest.raises(ValueError, match="give all calls of one update the same scaler"):
        par.step(model, opt, batch(0))
    after = par.full_state_dict(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    par.step(model, opt, batch(0), scaler=scaler(enabled=False))
    model = make("llama")
    model, opt = par.parallelize(model, sgd(model), par.Plan(pp=2, schedule="pipedream"))
    with pytest.raises(ValueError, match="cannot leave a step out together"):
        par.step(model, opt, batch(0), scaler=scaler())
    model = make("gpt")
    plan = par.Plan(dp=2, compression=make_compression("int8"))
    model, opt = par.parallelize(model, sgd(model), plan)
    with pytest.raises(ValueError, match="an inf would stay for ever"):
        par.step(model, opt, batch(0), scaler=scaler())


def test_refusals():
    spawn(2, refused)


def stack():
    """Its hidden state is 16 bits wide under autocast: nothing adds fp32 to it."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(29, 16), *blocks, nn.LayerNorm(16), nn.Linear(16, 29))


def make_wide(kind):
    if kind == "moe":
        return equality.make_model("moe", torch.float32)
    return stack() if kind == "stack" else make(kind)


def autocast_steps(kind, dtype, plan):
    """Losses, and the dtype of the output. plan: None for plain torch."""
    model = make_wide(kind)
    opt, losses, scale = sgd(model), [], scaler(enabled=dtype == torch.float16)
    if plan is not None:
        model, opt = par.parallelize(model, opt, plan)
    with torch.autocast(
        "cpu", dtype
    ):  # around several steps, which must not see the weights of the first one
        for step in range(STEPS):
            x, y = batch(step)
            if plan is None:
                torch.clear_autocast_cache()
                opt.zero_grad()
                loss = cross(model(x), y)
                with torch.autocast("cpu", enabled=False):
                    scale.scale(loss).backward()
                    scale.step(opt)
                    scale.update()
            else:
                # the load-balance loss is a mean over microbatches
                loss = par.step(model, opt, (x, y), microbatches=1 if kind == "moe" else 2, scaler=scale)
            losses.append(loss.item())
        torch.clear_autocast_cache()
        out = model(x) if plan is None else par.predict(model, x, microbatches=2)
    return losses, out.dtype, scale.get_scale(), out.detach().float()


def autocast_calls(rank, world_size, texts, calls):
    """[what training has added to each parameter] for each plan: steps of two batches, in one call or two."""
    found = []
    for text in texts:
        model, scale = make("gpt"), scaler(init_scale=8.0)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        model, opt = par.parallelize(model, sgd(model), par.Plan.parse(text))
        for step in range(0, 4, 2):
            pairs = [batch(step), batch(step + 1)]
            if calls == 1:
                pairs = [tuple(torch.cat(both) for both in zip(*pairs, strict=True))]
            with torch.autocast("cpu", torch.float16):
                for number, pair in enumerate(pairs):
                    last = number == len(pairs) - 1
                    options = {"microbatches": 4 // calls, "clip": 0.5, "scaler": scale, "update": last}
                    par.step(model, opt, pair, **options)
        state = par.full_state_dict(model)
        found.append({name: state[name] - value for name, value in before.items()})
    return found


@tier(slow=1)
@pytest.mark.parametrize("texts", [("",), ("dp=2,zero=3", "pp=2", "tp=2")], ids=["one process", "plans"])
def test_calls_that_wait_under_autocast(texts):
    """The microbatches are the same ones, so only the factor of the mean is put elsewhere."""
    size = par.Plan.parse(texts[0]).world_size
    ranks = [spawn(size, autocast_calls, texts, calls) for calls in (1, 2)]
    for at_once, one_by_one in zip(*ranks, strict=True):
        for text, right, found in zip(texts, at_once, one_by_one, strict=True):
            for name, value in right.items():
                assert value.any() and equality.relative(found[name], value) < 5e-3, (text, name)


def under_autocast(rank, world_size, kind, texts):
    return [
        [autocast_steps(kind, dtype, par.Plan.parse(text)) for text in texts]
        for dtype in (torch.bfloat16, torch.float16)
    ]


AUTOCAST = {
    "gpt 2": ("dp=2,zero=3", "tp=2", "tp=2,megatron_sp", "pp=2,schedule=zb-h1", "dp=2,checkpoint"),
    "llama 2": ("ulysses=2", "ring=2"),
    "stack 2": ("pp=2", "dp=2,zero=1"),
    "moe 2": ("ep=2",),
}


@tier(slow=1 / 4)
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name):
    """Sums in other orders round otherwise: 8 bits of bf16, 11 of fp16."""
    kind, texts = name.split()[0], AUTOCAST[name]
    limits = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
    alone_in = {dtype: autocast_steps(kind, dtype, None) for dtype in limits}
    for found in spawn(2, under_autocast, kind, texts):
        for (dtype, limit), of_dtype in zip(limits.items(), found, strict=True):
            losses, out_dtype, scale, out = alone_in[dtype]
            for text, its in zip(texts, of_dtype, strict=True):
                assert its[1] == out_dtype == dtype and its[2] == scale, (text, dtype)
                assert equality.relative(its[0], losses) < limit, (text, dtype)
                # of two experts that are nearly equal, rounding chooses
                assert kind == "moe" or equality.relative(its[3], out) < 10 * limit, (text, dtype)
