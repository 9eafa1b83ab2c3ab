"""generate() of transformers' decoders under plans: the tokens of one process."""

import pytest
import torch
from halves import quick
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par

transformers = pytest.importorskip("transformers")


def make(kind):
    torch.manual_seed(0)
    small = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.5,
            **small,
        )
        return transformers.LlamaForCausalLM(config).double().eval()
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=4, n_head=4, initializer_range=0.3, **small
    )
    return transformers.GPT2LMHeadModel(config).double().eval()


def prompts():
    """Of two lengths, padded on the left."""
    ids = torch.randint(3, 61, (3, 5), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[1, :2] = mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


WAYS = {
    "greedy": {"max_new_tokens": 4, "do_sample": False},
    "beams": {"max_new_tokens": 3, "num_beams": 2, "do_sample": False},
    "sampling": {"max_new_tokens": 4, "do_sample": True, "temperature": 2.0, "top_k": 20},  # last: it draws
}


def texts_of(model, ways, seed=7):
    found = []
    for way in ways:
        torch.manual_seed(seed)
        found.append(model.generate(**prompts(), **WAYS[way]))
    return found, torch.rand(())


def generated(rank, world_size, kind, texts, ways):
    found = []
    for text in texts:
        model, _ = par.parallelize(make(kind), None, par.Plan.parse(text))
        found.append(texts_of(model, ways))
    return found


CASES = {
    "llama 2": ("dp=2", "dp=2,zero=3", "tp=2", "tp=2,megatron_sp", "pp=2", "pp=2,schedule=zbv"),
    "gpt2 2": ("tp=2", "pp=2,zero=3", "ulysses=2", "ring=2"),
    "llama 4": ("dp=2,tp=2,zero=3", "pp=2,tp=2", "ring=2,ulysses=2", "dp=2,pp=2,zero=3"),
}


@tier(quick=1 / 2, slow=1 / 2)
@pytest.mark.parametrize("name", quick(CASES, "llama 2", "gpt2 2"))
def test_tokens_of_one_process(name):
    kind, texts = name.split()[0], CASES[name]
    ways = list(WAYS) if name.endswith("2") else ["sampling"]
    expected, number = texts_of(make(kind), ways)
    assert len({tuple(tokens.flatten().tolist()) for tokens in expected}) == len(ways)
    for found in spawn(par.Plan.parse(texts[0]).world_size, generated, kind, texts, ways):
        for text, (tokens, its_number) in zip(texts, found, strict=True):
            for way, mine, value in zip(ways, tokens, expected, strict=True):
                assert torch.equal(mine, value), (text, way)
            assert its_number == number, f"{text}: random numbers go on as in one process"


def ranks_differ(rank, world_size):
    for text in ("tp=2", "dp=2,zero=3", "pp=2"):
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        model, _ = par.parallelize(make("llama"), None, par.Plan.parse(text))
        torch.manual_seed(rank)
        tokens = model.generate(**prompts(), **WAYS["sampling"])  # of rank 0's random numbers
        assert rank == 0 or torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(0)
        assert torch.equal(tokens, model.generate(**prompts(), **WAYS["sampling"]))
        with pytest.raises(ValueError, match="different prompts"):
            model.generate(prompts()["input_ids"] + rank, max_new_tokens=3)
        with pytest.raises(ValueError, match="1 of 2 ranks have ended"):
            model.generate(**prompts(), do_sample=False, max_new_tokens=3 + rank, min_new_tokens=3)
        with pytest.raises(ValueError, match="Use max_new_tokens"):
            model.generate(**prompts(), max_time=1.0)
        with pytest.raises(ValueError):
            model.generate(**prompts(), no_such_argument=1)
        assert torch.equal(
            model.generate(**prompts(), **WAYS["greedy"]), model.generate(**prompts(), **WAYS["greedy"])
        )
    model, _ = par.parallelize(make("llama"), None, par.Plan(dp=2))
    tokens = model.generate(prompts()["input_ids"][: rank + 1], max_new_tokens=2 + rank, do_sample=False)
    assert tokens.shape[0] == rank + 1  # nothing is shared


@tier(slow=1)
def test_ranks_that_differ_are_told():
    spawn(2, ranks_differ)


def after_training(rank, world_size):
    """generate() between steps leaves them as they are."""
    losses = []
    for generates in (False, True):
        model = make("llama")
        model, opt = par.parallelize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), par.Plan(pp=2, zero=3)
        )
        for step in range(2):
            ids = torch.randint(3, 61, (4, 7), generator=torch.Generator().manual_seed(step))
            losses.append(par.step(model, opt, {"input_ids": ids, "labels": ids}, microbatches=2).item())
            if generates:
                model.generate(**prompts(), max_new_tokens=2)
    assert losses[:2] == losses[2:]


@tier(slow=1)
def test_between_steps():
    spawn(2, after_training)
