"""Models of Hugging Face's transformers, unchanged, under plans, against a single process."""

import equality
import pytest
import torch
import torch.nn.functional as F
from tiers import tier
from torch_ranks import spawn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import pycomm.parallel as par

ROWS, LENGTH, STEPS = 6, 9, 3


def make(kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        rates = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        config = GPT2Config(
            vocab_size=41,
            n_positions=16,
            n_embd=24,
            n_layer=4,
            n_head=3,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            **rates,
        )
        return GPT2LMHeadModel(config).double()
    sizes = {
        "vocab_size": 41,
        "hidden_size": 24,
        "intermediate_size": 28,
        "num_hidden_layers": 4,
        "use_cache": False,
    }
    config = LlamaConfig(
        num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=kind == "llama-tied", **sizes
    )
    return LlamaForCausalLM(config).double()


def make_optimizer(model):
    """Not Adam: GPT-2's key bias has a gradient of zero but for rounding, which Adam would scale up to a step
    like any other.
    """
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def batches():
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        inputs, labels = (torch.randint(0, 41, (ROWS, LENGTH), generator=generator) for _ in range(2))
        labels[torch.rand(ROWS, LENGTH, generator=generator) < 0.3] = -100
        yield {"input_ids": inputs, "labels": labels}


def train_alone(kind):
    model = make(kind)
    opt, losses = make_optimizer(model), []
    for batch in batches():
        opt.zero_grad()
        logits, labels = model(batch["input_ids"]).logits, batch["labels"]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        assert loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)  # which computes in fp32
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(rank, world_size, kind, text):
    model = make(kind)
    model, opt = par.parallelize(model, make_optimizer(model), par.Plan.parse(text))
    losses = [par.step(model, opt, batch, microbatches=2, clip=0.5).item() for batch in batches()]
    return losses, par.full_state_dict(model)


CASES = [
    ("gpt2", "dp=2,zero=3"),
    ("gpt2", "tp=2"),
    ("gpt2", "pp=2,schedule=zbv"),
    ("gpt2", "tp=3,megatron_sp"),
    ("gpt2", "ring=2,ulysses=2"),
    ("gpt2", "dp=2,tp=2,pp=2,zero=1,checkpoint"),
    ("llama", "tp=2,pp=2,schedule=zb-h1"),
    ("llama", "tp=4,megatron_sp,zero=1"),
    ("llama", "dp=2,ulysses=2,zero=3"),
    ("llama-tied", "pp=2,ring=2"),
    ("llama-tied", "dp=2,tp=2,pp=2,zero=2"),
]
_alone = {}


@tier(quick=1 / 12, slow=1 / 4)
@pytest.mark.parametrize("kind, text", CASES, ids=lambda value: value)
def test_transformers_model(kind, text):
    if kind not in _alone:
        _alone[kind] = train_alone(kind)
    losses, parameters = _alone[kind]
    for found, state in spawn(par.Plan.parse(text).world_size, train, kind, text)[
        :: par.Plan.parse(text).world_size - 1
    ]:
        assert equality.relative(found, losses) < 1e-12
        for name, value in parameters.items():
            assert equality.relative(state[name], value) < 1e-12, name


def save_and_load(rank, world_size, kind, text, folder):
    model = make(kind)
    model, opt = par.parallelize(model, make_optimizer(model), par.Plan.parse(text))
    for batch in batches():
        par.step(model, opt, batch, microbatches=2, clip=0.5)
    model.save_pretrained(folder, max_shard_size="20KB")
    right, loaded = par.full_state_dict(model), type(model).from_pretrained(folder, dtype=torch.float64)
    own = loaded.state_dict()
    assert own.keys() == right.keys()
    return [name for name in own if not torch.equal(own[name], right[name])]


@tier(quick=1 / 4, slow=1 / 2)
@pytest.mark.parametrize(
    ("kind", "plan"),
    [("llama", "tp=2"), ("llama-tied", "pp=2"), ("gpt2", "dp=2,zero=3"), ("llama", "dp=2,pp=2,zero=2")],
)
def test_save_pretrained(tmp_path, kind, plan):
    """Under each plan it writes files that one process loads, bit by bit what the ranks had."""
    plan = par.Plan.parse(plan)
    assert spawn(plan.world_size, save_and_load, kind, str(plan), str(tmp_path)) == [[]] * plan.world_size
    assert len(list(tmp_path.glob("*.safetensors"))) > 1


def save_otherwise(rank, world_size, folder):
    """Arguments by name and by place, and a model inside of the one that has the plan."""
    model = torch.nn.ModuleDict({"lm": make("llama")})
    par.parallelize(model, None, par.Plan(tp=2, blocks="lm.model.layers"))
    right = par.full_state_dict(model)
    model["lm"].save_pretrained(save_directory=f"{folder}/name")
    state = {name.removeprefix("lm."): value for name, value in right.items()}
    model["lm"].save_pretrained(f"{folder}/place", True, state)
    model["lm"].model.save_pretrained(f"{folder}/inner")
    kinds = {"name": LlamaForCausalLM, "place": LlamaForCausalLM, "inner": type(model["lm"].model)}
    prefixes = {"name": "lm.", "place": "lm.", "inner": "lm.model."}
    wrong = []
    for kind, loader in kinds.items():
        own = loader.from_pretrained(f"{folder}/{kind}", dtype=torch.float64).state_dict()
        wrong += [name for name in own if not torch.equal(own[name], right[prefixes[kind] + name])]
    return wrong


def test_save_pretrained_otherwise(tmp_path):
    assert spawn(2, save_otherwise, str(tmp_path)) == [[], []]


def save_bf16(rank, world_size, folder):
    model = make("llama").float()
    par.parallelize(model, None, par.Plan(dp=2, precision="bf16"))
    model.save_pretrained(folder)
    right, loaded = par.full_state_dict(model), type(model).from_pretrained(folder).state_dict()
    return [name for name in loaded if not torch.equal(loaded[name], right[name])]


def test_save_pretrained_keeps_the_precise_values(tmp_path):
    assert spawn(2, save_bf16, str(tmp_path)) == [[], []]


def with_cache(rank, world_size, plan):
    model = make("llama")
    model.config.use_cache = True
    par.parallelize(model, opt := make_optimizer(model), plan)
    return [par.step(model, opt, batch).item() for batch in batches()]


def test_recomputation_of_a_model_that_keeps_its_keys():
    plain, again = (spawn(2, with_cache, par.Plan(dp=2, checkpoint=value)) for value in (False, True))
    assert again == [pytest.approx(plain[0], rel=1e-12)] * 2


def save_nowhere(rank, world_size, folder):
    model = make("gpt2")
    par.parallelize(model, None, par.Plan(tp=2))
    with pytest.raises((OSError, RuntimeError)) as caught:
        model.save_pretrained(f"{folder}/a file/below")
    return type(caught.value).__name__, "a file" in str(caught.value), "rank 0 failed" in str(caught.value)


def test_save_pretrained_that_fails_is_told_to_all(tmp_path):
    (tmp_path / "a file").write_text("")
    found = spawn(2, save_nowhere, str(tmp_path))
    assert found == [("NotADirectoryError", True, False), ("RuntimeError", True, True)]
