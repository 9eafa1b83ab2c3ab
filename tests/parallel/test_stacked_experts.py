"""Experts of transformers, stacked in a few parameters, dealt over ranks: models as they are against one
process, with the gradient of the router, and what a rank holds, saves, loads and generates.
"""

import equality
import foreign_models as foreign
import pytest
import torch
from halves import quick
from tiers import tier
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.parts import parts_of

ROWS = 9  # over 4 data ranks and 2 microbatches
LIMITS = {"gpt-oss": 1e-13}  # the others' routers have their softmax, and its gradient, in fp32
CASES = {  # model, plans of one number of ranks
    "mixtral 2": ["ep=2", "ep=2,zero=3,checkpoint", "ep=2,zero=1"],
    "qwen2-moe 2": ["ep=2", "ep=2,zero=2"],
    "gpt-oss 2": ["ep=2", "ep=2,zero=3"],
    "LoRA of mixtral 2": ["ep=2", "ep=2,zero=3"],
    "mixtral 3": ["ep=3"],
    "mixtral 4": ["dp=2,ep=2", "dp=2,ep=2,zero=3", "ep=2,tp=2", "ep=2,tp=2,megatron_sp", "ep=2,pp=2"],
    "qwen2-moe 4": ["ep=2,pp=2,schedule=zb-h1,zero=2", "ep=2,ring=2", "ep=2,ulysses=2,zero=3", "ep=4"],
    "gpt-oss 4": ["dp=2,ep=2,zero=2", "ep=2,pp=2,checkpoint"],
}


@pytest.fixture(autouse=True)
def more_rows(monkeypatch):
    monkeypatch.setattr(foreign, "ROWS", ROWS)


def stacked(parts):
    """{name: shape here} of the experts' parameters."""
    return {info.name: info.shape for info in parts.infos if ".experts." in info.name}


def train(rank, world_size, kind, texts):
    found = []
    for text in texts:
        model, opt = foreign.planned(kind, text)
        losses = [foreign.step(model, opt, number) for number in range(foreign.STEPS)]
        found.append((losses, par.full_state_dict(model), stacked(parts_of(model))))
    return found


DEEP = ("mixtral 3", "mixtral 4", "qwen2-moe 4", "gpt-oss 4")


@tier(quick=1 / 3)
@pytest.mark.parametrize("name", quick(CASES, "mixtral 2", "qwen2-moe 2", "gpt-oss 2", deep=DEEP))
def test_equal_to_one_process(name):
    kind, texts = name.rpartition(" ")[0], CASES[name]
    losses, parameters = foreign.alone(kind)
    limit = LIMITS.get(kind, 1e-9)
    for rank, found in enumerate(spawn(int(name[-1]), train, kind, texts)):
        for text, (its_losses, state, held) in zip(texts, found, strict=True):
            assert equality.relative(its_losses, losses) < limit, text
            for key, value in parameters.items():
                assert equality.relative(state[key], value) < limit, (text, key)
            check_held(rank, par.Plan.parse(text), parameters, held)


def check_held(rank, plan, parameters, held):
    """A rank of ep has its share of the experts, whole; stages have those of their blocks."""
    place = rank // (plan.tp * plan.ring * plan.ulysses) % plan.ep
    names = [name for name in parameters if ".experts." in name]
    assert len(held) == len(names) // plan.pp and held
    for name, shape in held.items():
        experts, *rest = parameters[name].shape
        assert shape == (experts // plan.ep + (place < experts % plan.ep), *rest)


def between_plans(rank, world_size, folder):
    """Saved under ep, read under others; written for the hub, and read from there on meta."""
    model, opt = foreign.planned("mixtral", "ep=2,zero=1")
    foreign.step(model, opt, 0)
    par.save(model, opt, f"{folder}/plan")
    model.save_pretrained(f"{folder}/hub")
    right, expected = par.full_state_dict(model), foreign.step(model, opt, 1)
    wrong = []
    for text in ("tp=2", "dp=2,zero=3", "ep=2"):
        other, its_opt = foreign.planned("mixtral", text)
        par.load(other, its_opt, f"{folder}/plan")
        mine = par.full_state_dict(other)
        wrong += [(text, name) for name in right if not torch.equal(mine[name], right[name])]
        if abs(foreign.step(other, its_opt, 1) - expected) > 1e-12 * expected:
            wrong.append((text, "the next loss"))
    from transformers import MixtralForCausalLM

    loaded = MixtralForCausalLM.from_pretrained(f"{folder}/hub", dtype=torch.float64).state_dict()
    wrong += [("hub", name) for name in loaded if not torch.equal(loaded[name], right[name])]
    return wrong


@tier(slow=1)
def test_saved_and_loaded(tmp_path):
    assert spawn(2, between_plans, str(tmp_path)) == [[], []]


def on_meta(rank, world_size, text):
    """Initialised: the same values under every plan."""
    with torch.device("meta"):
        model = foreign.mixtral()
    model, _ = par.parallelize(model, None, par.Plan.parse(text))
    return par.full_state_dict(model), stacked(parts_of(model))


def test_on_meta():
    (right, _), *_ = spawn(2, on_meta, "dp=2")
    for state, held in spawn(2, on_meta, "ep=2"):
        assert all(torch.equal(state[name], value) for name, value in right.items())
        assert {shape[0] for shape in held.values()} <= {2, 3}


def as_users(rank, world_size):
    """generate, predict, evaluate, describe and verify."""
    model = foreign.make("mixtral").eval()
    ids = foreign.batch(0)[0]["input_ids"]
    expected = model.generate(ids, max_new_tokens=3, do_sample=False), model(ids).logits.detach()
    found = par.verify(foreign.make("qwen2-moe"), foreign.batch(0), par.Plan(ep=2), foreign.loss_fn)
    par.parallelize(model, None, par.Plan(ep=2))
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected[0])
    torch.testing.assert_close(par.predict(model, ids), expected[1], rtol=1e-9, atol=1e-9)
    assert "experts of 2 layers" in str(par.describe(model))
    return found.equal


def test_as_users_have_it():
    assert spawn(2, as_users) == [True, True]


def refused(rank, world_size):
    few = foreign.make("mixtral")
    for layer in few.model.layers:
        experts = layer.mlp.experts
        experts.num_experts = 1
        for name in ("gate_up_proj", "down_proj"):
            setattr(experts, name, nn.Parameter(getattr(experts, name)[:1].detach()))
    with pytest.raises(ValueError, match="left whole: it has 1 experts, fewer than the 2 ranks of ep"):
        par.parallelize(few, None, par.Plan(ep=2))
    other = foreign.make("mixtral")
    for layer in other.model.layers:  # what an expert gives is not multiplied by its weight
        layer.mlp.experts.__class__ = Squared
    with pytest.raises(ValueError, match="computes something else by its experts"):
        par.parallelize(other, None, par.Plan(ep=2))
    whole = foreign.make("mixtral")  # of the size of an update Adafactor takes the mean over a parameter
    with pytest.raises(ValueError, match="Adafactor looks at whole parameters, and in 'model.layers.0"):
        par.parallelize(whole, torch.optim.Adafactor(whole.parameters()), par.Plan(ep=2))
    model, opt = foreign.planned("mixtral", "ep=2")

    def penalised(output, targets):
        weight = model.model.layers[0].mlp.experts.down_proj
        assert weight.shape[0] == 5  # as in one process
        return foreign.loss_fn(output, targets) + weight.square().sum()

    with pytest.raises(ValueError, match="reads .*experts.down_proj', an expert that this rank of ep alone"):
        par.step(model, opt, foreign.batch(0), penalised)
    return True


class Squared(nn.Module):
    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for choice in range(chosen.shape[1]):
            up = torch.einsum("th,tfh->tf", x, self.gate_up_proj[chosen[:, choice]])
            gate, up = up.chunk(2, -1)
            down = self.down_proj[chosen[:, choice]]
            out = out + torch.einsum("tf,thf->th", gate * up, down) * weights[:, choice, None].square()
        return out


def test_what_is_refused():
    assert spawn(2, refused) == [True, True]
