"""The loss that mixtures of experts of transformers add for their routers: as the class computes it in one
process, under plans. That is no mean over tokens; and it is in fp32 there.
"""

import equality
import pytest
import torch
import torch.nn.functional as F
from foreign_models import GROUPED, VOCABULARY, optimizer
from halves import quick
from torch_ranks import spawn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import pycomm.parallel as par

ROWS, LENGTH, STEPS, MICROBATCHES, LIMIT = 8, 7, 3, 2, 1e-6
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 2.0, "experts_implementation": "eager"}


def make(kind):
    torch.manual_seed(0)
    if kind == "mixtral":
        experts = {"num_local_experts": 5, "num_experts_per_tok": 2}
        model = MixtralForCausalLM(MixtralConfig(**GROUPED, **experts, **ROUTERS))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 9, "head_dim": 4}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**GROUPED, **experts, **ROUTERS))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(10)  # else all experts are nearly as likely
    return model.double().train()


def batch(step):
    """Padded, with targets that are uneven over rows; in the last microbatch none of rank 1's counts."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ROWS, LENGTH, generator=generator) < 0.3, -100)
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1), generator=generator)).long()
    labels[mask == 0] = -100
    labels[6:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def alone(kind):
    """(losses, parameters) of plain torch."""
    model = make(kind)
    opt, losses = optimizer(model), []
    for whole in map(batch, range(STEPS)):
        opt.zero_grad()
        total, losses = (whole["labels"][:, 1:] != -100).sum(), [*losses, 0.0]
        for part in range(MICROBATCHES):
            rows = {key: value.chunk(MICROBATCHES)[part] for key, value in whole.items()}
            out = model(**rows)
            logits, labels = out.logits[:, :-1].flatten(0, 1), rows["labels"][:, 1:].flatten()
            routers = 2.0 * out.aux_loss
            assert abs(F.cross_entropy(logits, labels) + routers - out.loss) < 1e-5 * out.loss
            loss = F.cross_entropy(logits, labels, reduction="sum") / total + routers / MICROBATCHES
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(rank, world_size, kind, texts):
    found = []
    for text in texts:
        model = make(kind)
        model, opt = par.parallelize(model, optimizer(model), par.Plan.parse(text))
        losses = [
            par.step(model, opt, batch(step), microbatches=MICROBATCHES, clip=0.5).item()
            for step in range(STEPS)
        ]
        found.append((losses, par.full_state_dict(model)))
    return found


CASES = {
    "mixtral 2": ["dp=2", "ep=2,zero=3", "tp=2", "dp=2,checkpoint"],
    "qwen3-moe 2": ["dp=2,zero=2", "ep=2"],
    "mixtral 4": ["dp=2,ep=2", "dp=2,tp=2,zero=1"],
}


@pytest.mark.parametrize("name", quick(CASES, "mixtral 2"))
def test_equal_to_one_process(name):
    kind, size = name.split()
    losses, parameters = alone(kind)
    before = dict(make(kind).named_parameters())
    for found in spawn(int(size), train, kind, CASES[name]):
        for text, (its_losses, state) in zip(CASES[name], found, strict=True):
            assert equality.relative(its_losses, losses) < LIMIT, text
            for key, value in parameters.items():
                off, change = (state[key] - value).norm(), (value - before[key]).norm()
                assert off <= LIMIT * (change + 1e-5 * value.norm()), (text, key, off / change)


def evaluated(rank, world_size):
    model = make("mixtral").eval()
    right = model(**batch(0)).loss.item()
    found = par.verify(make("mixtral"), batch(0), par.Plan(ep=2), microbatches=2)
    par.parallelize(model, None, par.Plan(dp=2))
    assert abs(par.evaluate(model, batch(0)).item() - right) < 1e-5 * right
    return found.equal


def test_evaluation_and_verify():
    assert spawn(2, evaluated) == [True, True]


def padding_alone(rank, world_size, text):
    model = make("mixtral")
    model, opt = par.parallelize(model, optimizer(model), par.Plan.parse(text))
    loss = par.step(model, opt, half_of_padding(), clip=0.5).item()
    return loss, par.full_state_dict(model)


def half_of_padding():
    """A batch of which the second data rank has padding alone."""
    whole = batch(0)
    whole["attention_mask"][ROWS // 2 :] = 0
    whole["labels"][ROWS // 2 :] = -100
    return whole


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("text", ["dp=2", "ep=2,zero=2"])
def test_rank_with_padding_alone(text):
    model = make("mixtral")
    opt, out = optimizer(model), model(**half_of_padding())
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    for loss, state in spawn(2, padding_alone, text):
        assert abs(loss - out.loss.item()) < 1e-5 * loss
        for key, value in model.named_parameters():
            assert equality.relative(state[key], value.detach()) < 1e-5, key


def refused(rank, world_size):
    for text in ("pp=2", "ring=2", "tp=2,megatron_sp"):
        model = make("mixtral")
        model, opt = par.parallelize(model, optimizer(model), par.Plan.parse(text))
        axis = text.partition(",")[2] or text[:-2]
        with pytest.raises(ValueError, match=f"a loss of its routers .* a rank of {axis} has some only"):
            par.step(model, opt, batch(0), microbatches=2)
    model = make("mixtral")
    model, opt = par.parallelize(model, optimizer(model), par.Plan(dp=2))
    own = type(model).forward

    def doubled(*args, **kwargs):
        out = own(model, *args, **kwargs)
        out.aux_loss = 2 * out.aux_loss
        return out

    model.forward = doubled
    with pytest.raises(ValueError, match="is not the one known here: it is"):
        par.step(model, opt, batch(0))
    return True


def test_what_is_refused():
    assert spawn(2, refused) == [True, True]
