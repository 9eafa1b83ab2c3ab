"""step(update=False): several calls, one update, as one process computes it from all their targets."""

import equality
import pytest
import torch
from halves import quick
from models import GPT, Llama
from odd_models import cross
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par

CALLS, LENGTH = (7, 4, 5), 9  # rows of each call of a step
STEPS = 2


def batches(step):
    generator = torch.Generator().manual_seed(step)
    for number, rows in enumerate(CALLS):
        x, y = (torch.randint(0, 29, (rows, LENGTH), generator=generator) for _ in range(2))
        y[torch.rand(rows, LENGTH, generator=generator) < 0.2 + 0.3 * number] = -100
        yield x, y


def make(kind):
    torch.manual_seed(0)
    if kind == "moe":
        return equality.make_model("moe", torch.float64)
    return (GPT() if kind == "gpt" else Llama()).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def objective(model, batch, microbatches=2):
    """The mean loss of a batch by itself, with the load-balance losses that a step has."""
    x, y = batch
    sizes = [len(x) // microbatches + (i < len(x) % microbatches) for i in range(microbatches)]
    parts = zip(x.split(sizes), y.split(sizes), strict=True)
    return sum(cross(model(a), b) * ((b != -100).sum().double() / (y != -100).sum()) for a, b in parts)


def alone(kind, clip):
    """(losses of all calls, norms, parameters) of one process: the gradient of the mean over all targets."""
    model = make(kind)
    opt, losses, norms = sgd(model), [], []
    for step in range(STEPS):
        opt.zero_grad()
        everything = sum((y != -100).sum() for _, y in batches(step))
        for module in model.modules():
            if isinstance(module, par.MoE):
                module.aux_scale = 0.5
        for batch in batches(step):
            share = (batch[1] != -100).sum().double() / everything
            before = [p.grad.clone() if p.grad is not None else 0 for p in model.parameters()]
            opt.zero_grad()
            loss = objective(model, batch)
            loss.backward()
            for p, old in zip(model.parameters(), before, strict=True):
                p.grad = p.grad * share + old
            losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf).item())
        opt.step()
    return losses, norms, model.state_dict()


def planned(rank, world_size, kind, texts, clip):
    found = []
    for text in texts:
        model = make(kind)
        model, opt = par.parallelize(model, sgd(model), par.Plan.parse(text))
        losses, norms = [], []
        for step in range(STEPS):
            for number, batch in enumerate(batches(step)):
                last = number == len(CALLS) - 1
                loss = par.step(model, opt, batch, microbatches=2, clip=clip, update=last)
                losses.append(loss.item())
                assert last or par.grad_norm(model) is None
                if number == 0:
                    par.evaluate(model, batch, microbatches=2)  # is in nobody's way
            norms.append(par.grad_norm(model))
        found.append((losses, norms, par.full_state_dict(model)))
    return found


CASES = {
    "gpt dp": ("dp=2", "dp=2,zero=1", "dp=2,zero=2,bucket_mb=0.004", "dp=2,zero=3", "dp=2,grad_sync=naive"),
    "gpt tp": ("tp=2", "tp=2,megatron_sp", "dp=2,zero=1,offload=optimizer"),
    "gpt pp": (
        "pp=2,schedule=gpipe",
        "pp=2,schedule=1f1b",
        "pp=2,schedule=interleaved",
        "pp=2,schedule=zb-h1",
        "pp=2,schedule=zbv",
    ),
    "llama sequence": ("ulysses=2", "ring=2"),
    "moe ep": ("ep=2", "dp=2,zero=1", "dp=2,zero=3"),
    "gpt hybrids": (
        "dp=2,tp=2",
        "dp=2,pp=2,zero=2,schedule=zb-h1",
        "dp=2,pp=2,zero=3,schedule=zbv",
        "tp=2,pp=2,megatron_sp,checkpoint",
    ),
    "llama hybrids": ("dp=2,ring=2,zero=3", "ulysses=2,pp=2", "ring=2,tp=2"),
}


@tier(quick=1 / 8, slow=1 / 3)
@pytest.mark.parametrize("name", quick(CASES, "gpt dp", "gpt tp", "gpt pp", "llama sequence"))
def test_calls_are_one_batch(name):
    kind, texts = name.split()[0], CASES[name]
    clip = None if name in ("gpt pp", "moe ep", "llama hybrids") else 0.5
    losses, norms, state = alone(kind, clip)
    for found in spawn(par.Plan.parse(texts[0]).world_size, planned, kind, texts, clip):
        for text, (its_losses, its_norms, its_state) in zip(texts, found, strict=True):
            assert equality.relative(its_losses, losses) < 1e-12, text
            if clip is not None:
                assert equality.relative(its_norms, norms) < 1e-12, text
            for key, value in state.items():
                assert equality.relative(its_state[key], value) < 1e-11, (text, key)


def test_one_process_too():
    losses, norms, state = alone("gpt", 0.5)
    ((its_losses, its_norms, its_state),) = planned(0, 1, "gpt", [""], 0.5)
    assert equality.relative(its_losses, losses) < 1e-12 and equality.relative(its_norms, norms) < 1e-12
    assert all(equality.relative(its_state[key], value) < 1e-11 for key, value in state.items())


def drop(how, model, opt, path):
    """Leaves no gradient of the call before."""
    if how == "zero_grad":
        opt.zero_grad()
    elif how == "load":
        par.load(model, opt, path)
    else:
        x, y = next(batches(5))
        with pytest.raises(ValueError, match="a batch of 0 rows"):
            par.step(model, opt, (x[:0], y[:0]), microbatches=9)


def dropped(rank, world_size, texts, path):
    found = []
    for text in texts:
        for how in (None, "zero_grad", "load", "an error"):
            model = make("gpt")
            model, opt = par.parallelize(model, sgd(model), par.Plan.parse(text))
            par.save(model, opt, path)
            if how is not None:
                par.step(model, opt, next(batches(3)), update=False)
                with pytest.raises(ValueError, match="of 1 calls with update=False wait"):
                    par.full_gradients(model)
                drop(how, model, opt, path)
            par.step(model, opt, next(batches(4)))
            found.append((text, how, par.full_gradients(model)))
    return found


@tier(slow=1)
def test_what_waits_can_be_dropped(tmp_path):
    texts = ("dp=2", "dp=2,zero=3")
    for found in spawn(2, dropped, texts, tmp_path / "saved"):
        for text, how, gradients in found:
            if how is None:
                expected = gradients
            for name, value in gradients.items():
                assert torch.equal(value, expected[name]), (text, how, name)


def refused(rank, world_size):
    model = make("llama")
    model, opt = par.parallelize(model, sgd(model), par.Plan(pp=2, schedule="pipedream"))
    with pytest.raises(ValueError, match=r"update=False.*every microbatch is an update of its own"):
        par.step(model, opt, next(batches(0)), update=False)
    for text in ("pp=2", "dp=2,zero=3"):
        model = make("gpt")
        model, opt = par.parallelize(model, sgd(model), par.Plan.parse(text))
        before = par.full_state_dict(model)
        with pytest.raises(
            (ValueError, RuntimeError), match=r"1 of 2 ranks were called|different|does not match"
        ):
            par.step(model, opt, next(batches(0)), update=rank == 0)
        after = par.full_state_dict(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())


def test_refusals():
    spawn(2, refused)


def sent(rank, world_size, zero):
    model = make("gpt")
    model, opt = par.parallelize(model, sgd(model), par.Plan(dp=2, zero=zero))
    counts = []
    for update in (False, False, True):
        with par.count_traffic() as traffic:
            par.step(model, opt, next(batches(0)), update=update)
        counts.append(traffic.nbytes() // 1000)
    return counts


def test_gradients_are_sent_once():
    """A call that waits sends some numbers, not gradients."""
    for zero in (0, 1):
        for first, second, last in spawn(2, sent, zero):
            assert first == second == 0 < 100 < last
