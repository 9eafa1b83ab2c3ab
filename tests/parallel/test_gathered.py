"""par.gathered(): whole parameters, to be read and written in every way, and trained on as in one process."""

import pytest
import torch
import torch.nn.functional as F
from equality import make_model, relative
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par

PLANS = ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=2,megatron_sp", "pp=2", "ring=2")
PLANS += ("ulysses=2",)
OF_FOUR = ("dp=2,tp=2", "dp=2,tp=2,zero=3", "pp=2,tp=2,zero=2", "dp=2,pp=2,zero=3,schedule=interleaved")


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(0, 29, (4, 8), generator=generator) for _ in range(2))


def start(kind="gpt", dtype=torch.float64):
    model = make_model(kind, dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@torch.no_grad()
def write(model, seed):
    """In place, by .data, by torch.nn.init, by a module's own initialisation, by sizes, by norms, in ties."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.clamp_(-0.05, 0.05)
        else:
            parameter.data.mul_(0.9)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
        if isinstance(module, nn.Embedding):
            module.reset_parameters()
    weight = next(p for name, p in model.named_parameters() if p.dim() > 1)
    weight.data = weight / weight.norm()
    bias = [p for p in model.parameters() if p.dim() == 1][-1]
    bias.data = torch.stack([bias + 1, bias], 1)[:, 0]  # not contiguous
    named = dict(model.named_parameters(remove_duplicate=False))
    named[max(named)].copy_(torch.full_like(named[max(named)], 1 / sum(p.numel() for p in named.values())))


def alone(kind, steps=2):
    model, opt = start(kind)
    for number in range(steps):
        opt.zero_grad()
        inputs, targets = batch(number)
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        opt.step()
        write(model, number)
    return {name: value.detach() for name, value in model.state_dict().items()}


def train(rank, world_size, kind, plans):
    found = {}
    for plan in plans:
        model, opt = par.parallelize(*start(kind), plan)
        params = {id(p) for p in model.parameters()}
        for number in range(2):
            par.step(model, opt, batch(number), par.cross_entropy)
            with par.gathered(model):
                write(model, number + 100 * rank)  # rank 0's hold
        assert params == {id(p) for p in model.parameters()}
        found[plan] = par.full_state_dict(model)
    return found


def check(world_size, kind, plans):
    expected = alone(kind)
    for found in spawn(world_size, train, kind, plans):
        for plan, values in found.items():
            worst = max(relative(values[name], value) for name, value in expected.items())
            assert worst < 1e-10, (plan, worst)


def test_one_of_each():
    check(2, "gpt", ("dp=2,zero=3", "tp=2"))


@tier(slow=1)
def test_plans_of_two():
    check(2, "gpt", PLANS)


@tier(slow=0)
@pytest.mark.parametrize("plan", OF_FOUR)
def test_plans_of_four(plan):
    check(4, "gpt", (plan,))


@tier(slow=0)
@pytest.mark.parametrize("kind", ["llama", "sequential"])
def test_models(kind):
    check(2, kind, ("dp=2,zero=3", "tp=2", "pp=2"))


def experts(rank, world_size):
    """Experts of other ranks come back, in their order, and leave."""
    found = {}
    for plan in ("ep=2", "ep=2,zero=3"):
        model, opt = par.parallelize(*start("moe"), plan)
        names = [name for name, _ in make_model("moe", torch.float64).named_parameters()]
        here = [name for name, _ in model.named_parameters()]
        with par.gathered(model):
            assert [name for name, _ in model.named_parameters()] == names
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    parameter.fill_(number / 100)
        assert [name for name, _ in model.named_parameters()] == here != names
        par.step(model, opt, batch(0), par.cross_entropy)
        with par.gathered(model):
            state = {name: p.detach().clone() for name, p in model.named_parameters()}
        whole = par.full_state_dict(model)
        assert list(state) == names and all(torch.equal(state[name], whole[name]) for name in names)
        found[plan] = {name: value.flatten()[0].item() for name, value in state.items()}
    assert found["ep=2"] == pytest.approx(found["ep=2,zero=3"])


@tier(slow=1)
def test_experts():
    spawn(2, experts)


def one_module(rank, world_size):
    for plan in ("tp=2", "dp=2,zero=3"):
        model, _ = par.parallelize(*start(), plan)
        whole = par.full_state_dict(model)
        block, weight = model.blocks[1], model.blocks[0].mlp[0].weight
        with par.gathered(model, [block.mlp, model.norm]):
            assert type(model.blocks[1].mlp[0]) is nn.Linear
            for name, parameter in block.mlp.named_parameters(prefix="blocks.1.mlp"):
                assert torch.equal(parameter, whole[name])
            assert model.blocks[0].mlp[0].weight is weight and weight.shape != whole["tok.weight"].shape
            if plan == "dp=2,zero=3":
                with pytest.raises(ValueError, match=r"mlp\.0\.weight.*par\.gathered"):
                    model.blocks[0].mlp[0].weight.sum()
            nn.init.ones_(model.norm.weight)
            nn.init.constant_(model.norm.bias, 7.0)
        after = par.full_state_dict(model)
        changed = {name for name in whole if not torch.equal(whole[name], after[name])}
        assert changed == {"norm.bias"} and after["norm.bias"].eq(7).all()


def test_modules():
    spawn(2, one_module)


def precise(rank, world_size):
    """Values are those of the copies in full precision, and these take what is written."""
    for plan in ("dp=2,precision=bf16", "dp=2,zero=1,precision=bf16", "dp=2,zero=3,precision=bf16"):
        model, opt = par.parallelize(*start(dtype=torch.float32), plan)
        with par.gathered(model), torch.no_grad():
            for parameter in model.parameters():
                assert parameter.dtype == torch.float32
                parameter.mul_(1 + 1e-4)  # nothing in bfloat16
        single = make_model("gpt", torch.float32)
        whole = par.full_state_dict(model)
        for name, parameter in single.named_parameters():
            assert torch.equal(whole[name], parameter.detach() * (1 + 1e-4)), (plan, name)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        par.step(model, opt, batch(0), par.cross_entropy)
        with pytest.raises(KeyError), par.gathered(model), torch.no_grad():
            model.norm.weight.zero_()
            raise KeyError
        par.evaluate(model, batch(0), par.cross_entropy)


@tier(slow=1)
def test_master_copies():
    spawn(2, precise)


def errors(rank, world_size, plans):
    for plan in plans:
        refuse(rank, *par.parallelize(*start(), plan))


def refuse(rank, model, opt):
    before = {name: value.clone() for name, value in par.full_state_dict(model).items()}
    kept = {name: (p.dtype, p.device, type(p), id(p)) for name, p in model.named_parameters()}

    def raises(match, action, kind=ValueError):
        with pytest.raises(kind, match=match), par.gathered(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            action()

    def on_one():
        if rank == 1:
            raise KeyError("mine")

    def exchange():
        model.norm.weight = nn.Parameter(torch.zeros_like(model.norm.weight))

    def give(data):
        model.norm.weight.data = data

    own = rank == 1
    raises("mine" if own else "rank 1 raised KeyError.*Nothing was", on_one, KeyError if own else ValueError)
    raises("has exchanged the Parameter 'norm.weight'", exchange)
    raises(r"has made 'norm.weight' \(3,\)", lambda: give(torch.zeros(3, dtype=torch.float64)))
    raises("torch.float16", lambda: give(torch.zeros(24, dtype=torch.float16)))
    raises("step within par.gathered", lambda: par.step(model, opt, batch(0), par.cross_entropy))
    raises("evaluate within", lambda: par.evaluate(model, batch(0), par.cross_entropy))
    raises("save within", lambda: par.save(model, opt, "/nowhere"))
    raises("full_state_dict within", lambda: par.full_state_dict(model))
    raises("gathered within", lambda: par.gathered(model).__enter__())
    raises("forward within par.gathered", lambda: model(batch(0)[0]))
    raises("a call of LayerNorm within", lambda: model.norm(torch.zeros(1, 24, dtype=torch.float64)))
    with pytest.raises(ValueError, match="not a module of this model"), par.gathered(model, nn.Linear(1, 1)):
        pass
    chosen = model.norm if rank else model.blocks
    with pytest.raises(ValueError, match="name other modules"), par.gathered(model, chosen):
        pass
    after = par.full_state_dict(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {name: (p.dtype, p.device, type(p), id(p)) for name, p in model.named_parameters()} == kept
    par.step(model, opt, batch(0), par.cross_entropy)


def test_errors():
    spawn(2, errors, ("dp=2,zero=3", "tp=2"))


@tier(slow=0)
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "pp=2", "tp=2,megatron_sp"])
def test_errors_under_plans(plan):
    spawn(2, errors, (plan,))


def waiting(rank, world_size):
    """Gradients of calls without an update wait through it."""
    model, opt = start()
    inputs, targets = batch(0)
    F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).div(2).backward()
    with torch.no_grad():
        model.norm.weight.mul_(2)
    inputs, targets = batch(1)
    F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).div(2).backward()
    opt.step()
    expected = {name: value.detach() for name, value in model.named_parameters()}
    for plan in ("dp=2", "dp=2,zero=3", "tp=2"):
        model, opt = par.parallelize(*start(), plan)
        par.step(model, opt, batch(0), par.cross_entropy, update=False)
        with par.gathered(model, model.norm), torch.no_grad():
            model.norm.weight.mul_(2)
        par.step(model, opt, batch(1), par.cross_entropy)
        whole = par.full_state_dict(model)
        assert max(relative(whole[name], value) for name, value in expected.items()) < 1e-10


@tier(slow=0)
@pytest.mark.parametrize("world_size", [2])
def test_gradients_that_wait(world_size):
    spawn(world_size, waiting)
