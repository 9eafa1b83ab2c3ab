"""Packed documents (position_ids that begin anew) in models of transformers, which make a mask for them only
where they keep no keys: under plans, as in one process, with and without use_cache.
"""

import equality
import pytest
import torch
import transformers as hf
from against_one import STEPS, sgd
from odd_models import cross
from tiers import tier
from torch_ranks import spawn

import pycomm
import pycomm.parallel as par

PLANS = [
    *("dp=2", "dp=2,zero=3", "dp=2,checkpoint", "tp=2", "tp=2,megatron_sp", "pp=2", "ring=2", "ulysses=2"),
    *("ring=2,zigzag=false", "pp=2,checkpoint"),
]
SIZES = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
         "initializer_range": 0.3}  # fmt: skip


def llama(**options):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **options))


def mistral(**options):
    """With windows that documents exceed."""
    return hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=4, **options))


def gpt2(**options):
    rates = {
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "initializer_range": 0.3,
    }
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=29, n_positions=32, n_embd=16, n_layer=2, n_head=4, **rates, **options)
    )


def recomputing(**options):
    model = llama(**options)
    model.gradient_checkpointing_enable()
    return model


MODELS = {make.__name__: make for make in (llama, mistral, gpt2, recomputing)}


def packed(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 29, (3, 12), generator=generator)
    rows = ((5, 7), (4, 3, 5), (12,))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    targets = ids.roll(-1, 1).masked_fill(positions.roll(-1, 1) == 0, -100)
    return {"input_ids": ids, "position_ids": positions}, targets


def logits(out, targets):
    """In fp64, where the models' own loss is in fp32."""
    return cross(out.logits, targets)


def alone(name, options):
    torch.manual_seed(0)
    model = MODELS[name](**options).double()
    opt, losses = sgd(model), []
    for step in range(STEPS):
        opt.zero_grad()
        inputs, targets = packed(step)
        loss = logits(model(**inputs), targets)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        inputs, targets = packed(STEPS)
        losses.append(logits(model.eval()(**inputs), targets).item())
    return losses, state


def planned(rank, world_size, name, options, texts):
    found = []
    for text in texts:
        torch.manual_seed(0)
        model = MODELS[name](**options).double()
        model, opt = par.parallelize(model, sgd(model), text)
        losses = [par.step(model, opt, packed(step), logits).item() for step in range(STEPS)]
        model.eval()
        losses.append(par.evaluate(model, packed(STEPS), logits).item())
        found.append((losses, par.full_state_dict(model)))
    return found


@tier(quick=1 / 16, slow=1 / 5)
@pytest.mark.parametrize(("attention", "limit"), [("sdpa", 1e-10), ("eager", 1e-6)])  # with fp32 inside
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_one_process(name, use_cache, attention, limit):
    options = {"use_cache": use_cache, "attn_implementation": attention}
    losses, state = alone(name, options)
    others, _ = alone(name, options | {"use_cache": not use_cache})
    assert equality.relative(losses, others) > 1e-4  # else the test could not fail
    for found in spawn(2, planned, name, options, PLANS):
        for text, (its_losses, its_state) in zip(PLANS, found, strict=True):
            assert equality.relative(its_losses, losses) < limit, text
            for key, value in state.items():
                assert equality.relative(its_state[key], value) < limit, (text, key)


def jamba(**options):
    """Its cache also has states of layers without attention."""
    config = hf.JambaConfig(
        **{name: SIZES[name] for name in SIZES if name != "max_position_embeddings"}, attn_layer_period=2,
        attn_layer_offset=1, use_mamba_kernels=False, mamba_d_state=4, num_experts=1, **options,
    )  # fmt: skip
    return hf.JambaForCausalLM(config)


def refused(rank, world_size, use_cache):
    model = jamba(use_cache=use_cache).double()
    model, opt = par.parallelize(model, sgd(model), "dp=2,checkpoint")
    try:
        return par.step(model, opt, packed(0), logits).item()
    except (ValueError, pycomm.CommError) as error:  # one rank may get it from another
        return str(error)


@tier(slow=1)
def test_refused_where_the_cache_is_another():
    for found in spawn(2, refused, True):
        assert "Set model.config.use_cache = False before parallelize" in found
    torch.manual_seed(0)
    assert all(isinstance(found, float) for found in spawn(2, refused, False))
