"""Models that are built on meta: initialised by parallelize() as by Plan(), or with values from safetensors
in the hub's layout as by from_pretrained(), under every plan.
"""

import functools
import re

import equality
import pytest
import torch
import torch.nn.functional as F
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par

hf = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
hf.utils.logging.disable_progress_bar()

STEPS, LIMIT = 3, 1e-12
SIZES = {
    **{"vocab_size": 41, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False},
}
LOADED = [  # plans of one number of ranks, and whether the embedding is tied
    (["dp=2", "dp=2,zero=3", "tp=2", "pp=2"], True),
    (["dp=2,zero=1", "ulysses=2,zero=3", "pp=2,schedule=zbv"], False),
    (["tp=2,pp=2", "dp=2,pp=2,zero=1"], True),
]
INITIALISED = [["dp=2,zero=1", "dp=2,zero=3", "tp=2,megatron_sp", "pp=2"], ["tp=2,pp=2", "tp=2,dp=2,zero=3"]]


def llama(dtype=torch.float64, **more):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **more)).to(dtype)


def on_meta(make):
    with torch.device("meta"):
        return make()


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, 41, (7, 8), generator=generator)
        yield {"input_ids": tokens, "labels": tokens}


def trained(model, text, weights=None, make_opt=adamw, **options):
    """(losses, parameters and persistent buffers at the end) of three steps."""
    torch.manual_seed(3)  # which initialised models start from
    model, opt = par.parallelize(model, make_opt(model), par.Plan.parse(text), weights=weights)
    losses = [par.step(model, opt, batch, clip=0.5, **options).item() for batch in batches()]
    return losses, par.full_state_dict(model)


def under(rank, world_size, texts, make, weights, options):
    return [trained(on_meta(make), text, weights, microbatches=2, **options) for text in texts]


def check_equal(reference, make, plans, weights=None, limit=LIMIT, **options):
    losses, state = reference
    for found in spawn(par.Plan.parse(plans[0]).world_size, under, plans, make, weights, options):
        for text, (its_losses, its_state) in zip(plans, found, strict=True):
            assert equality.relative(its_losses, losses) <= limit, text
            assert its_state.keys() == state.keys(), text
            for name, value in state.items():
                assert equality.relative(its_state[name], value) <= limit, (text, name)


def saved(folder, model, shards="20KB"):
    """The model's folder. Several files, but for shards=None."""
    model.save_pretrained(folder, **({} if shards is None else {"max_shard_size": shards}))
    return folder


@tier(slow=1 / 3)
@pytest.mark.parametrize(("plans", "tied"), LOADED, ids=[plans[0] for plans, _ in LOADED])
def test_loaded_is_as_from_pretrained(tmp_path, plans, tied):
    make = functools.partial(llama, tie_word_embeddings=tied)
    torch.manual_seed(0)
    folder = saved(tmp_path, make())
    reference = trained(hf.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64), "", microbatches=2)
    check_equal(reference, make, plans, folder)


@tier(slow=1)
@pytest.mark.parametrize("plans", INITIALISED, ids=[plans[0] for plans in INITIALISED])
def test_initialised_is_the_same_under_every_plan(plans):
    make = functools.partial(llama, tie_word_embeddings=True)
    check_equal(trained(on_meta(make), "", microbatches=2), make, plans)


BF16 = ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2"]


@tier(quick=1 / 2)
@pytest.mark.parametrize("built", [torch.float32, torch.bfloat16])
def test_master_copies_are_what_from_pretrained_gives(tmp_path, built):
    """Of one plan with and without meta, to the bit. Values are rounded to the dtype of the model."""
    torch.manual_seed(0)
    folder = saved(tmp_path, llama(torch.float32))

    def of_dtype():  # .to(bfloat16) would round the rotary tables too
        return hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**SIZES), dtype=built)

    def started(model, text, weights):
        plan = par.Plan.parse(f"{text},precision=bf16")
        model, opt = par.parallelize(model, adamw(model), plan, weights=weights)
        state = {name: value.clone() for name, value in par.full_state_dict(model).items()}
        return state, par.step(model, opt, next(batches())).item(), par.full_state_dict(model)

    def body(rank, world_size):
        for text in BF16:
            whole = started(hf.LlamaForCausalLM.from_pretrained(folder, dtype=built), text, None)
            mine = started(on_meta(of_dtype), text, folder)
            assert mine[1] == whole[1], text
            for name, value in whole[0].items():
                assert value.dtype == mine[0][name].dtype and torch.equal(value, mine[0][name]), (text, name)
                assert torch.equal(whole[2][name], mine[2][name]), (text, name)

    spawn(2, body)


def test_a_tie_may_be_saved_twice(tmp_path):
    from safetensors.torch import save_file

    make = functools.partial(llama, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = make()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    check_equal(trained(model, "", microbatches=2), make, ["tp=2"], tmp_path)
    state["lm_head.weight"][3, 5] += 1
    save_file(state, tmp_path / "model.safetensors")
    refused(make, tmp_path, "dp=2", "'lm_head.weight' differ in .*tie_word_embeddings=False")


def test_files_of_the_base_model(tmp_path):
    """The keys have no 'model.', or one too many, as from_pretrained takes them."""
    make = functools.partial(llama, tie_word_embeddings=True)
    torch.manual_seed(0)
    whole = make()
    folder = saved(tmp_path / "base", whole.model)
    check_equal(trained(whole, "", microbatches=2), make, ["dp=2,zero=3"], folder)

    torch.manual_seed(0)
    folder = saved(tmp_path / "whole", make())
    base = on_meta(lambda: hf.LlamaModel(hf.LlamaConfig(**SIZES)).double())
    base, _ = par.parallelize(base, None, par.Plan(), weights=folder)
    right = make().model.from_pretrained(folder, dtype=torch.float64).state_dict()
    assert all(torch.equal(value, right[name]) for name, value in base.state_dict().items())


def lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"])).double()


@tier(slow=1)
def test_adapters_on_files_of_the_model_without_them(tmp_path):
    torch.manual_seed(0)
    folder = saved(tmp_path, llama())
    torch.manual_seed(3)  # as trained() does
    first, _ = par.parallelize(on_meta(lambda: lora(llama())), None, par.Plan(), weights=folder)
    state = {name: value.clone() for name, value in first.state_dict().items()}
    plain = lora(hf.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64))
    for name, value in plain.state_dict().items():
        if "lora_A" not in name:  # zeros of lora_B, and all that is in the files
            assert torch.equal(value, state[name]), name
        else:
            assert state[name].std().item() == pytest.approx(value.std().item(), rel=0.4)
    plain.load_state_dict(state)
    reference = trained(plain, "", microbatches=2)
    check_equal(reference, lambda: lora(llama()), ["dp=2,zero=3", "tp=2", "pp=2"], folder)


def test_what_the_class_computes_may_be_missing(tmp_path):
    """Positions of Marian are sines, which are not saved."""
    sizes = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 16, "vocab_size": 41}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    config = hf.MarianConfig(**sizes, **layers, pad_token_id=0, decoder_start_token_id=0)
    model = hf.MarianMTModel(config)
    folder = saved(tmp_path, model)
    mine, _ = par.parallelize(on_meta(lambda: hf.MarianMTModel(config)), None, par.Plan(), weights=folder)
    assert all(torch.equal(mine.state_dict()[name], value) for name, value in model.state_dict().items())


# What is refused ----------------------------------------------------------


def refusals(rank, world_size, make, weights, text):
    weights = weights[rank] if isinstance(weights, list) else weights
    model = on_meta(make)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        par.parallelize(model, adamw(model), par.Plan.parse(text), weights=weights)
    return type(caught.value), str(caught.value), all(p.is_meta for p in model.parameters())


def refused(make, weights, text, match):
    found = spawn(2, refusals, make, weights, text)
    for kind, message, _ in found:
        assert kind is ValueError and re.search(match, message, re.DOTALL), message
    return [untouched for *_, untouched in found]


def drop(state, folder):
    del state["model.layers.1.mlp.up_proj.weight"]


def add(state, folder):
    state["model.layers.1.mlp.other.weight"] = torch.zeros(2)


def widen(state, folder):
    state["model.norm.weight"] = torch.ones(25)


def count(state, folder):
    state["model.norm.weight"] = torch.ones(24, dtype=torch.int32)


def rename(state, folder):
    for name in list(state):
        state[name.replace("mlp", "ffn")] = state.pop(name)


WRONG = [
    (drop, "'model.layers.1.mlp.up_proj.weight' of the model is not there"),
    (add, r"'model.layers.1.mlp.other.weight' is there \(in model.safetensors\), which the model has not"),
    (widen, r"'model.norm.weight' has shape \(25,\) in .* has shape \(24,\) in the model"),
    (count, "'model.norm.weight' is I32 in .* is torch.float64 in the model"),
    (rename, "'model.layers.0.mlp.gate_proj.weight', .*and 9 more.*ffn.*the model of from_pretrained"),
]


@pytest.mark.parametrize(("spoil", "match"), WRONG, ids=[spoil.__name__ for spoil, _ in WRONG])
def test_files_that_are_not_of_this_model(tmp_path, spoil, match):
    from safetensors.torch import save_file

    state = dict(llama().state_dict())
    spoil(state, tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    assert refused(llama, tmp_path, "dp=2,zero=3", match) == [True, True]


def test_folders_that_cannot_be_read(tmp_path):
    refused(llama, tmp_path / "none", "dp=2", "is no folder")
    refused(llama, tmp_path, "dp=2", "neither model.safetensors nor model.safetensors.index.json")
    folder = saved(tmp_path / "sharded", llama())
    refused(llama, [None, folder], "dp=2", "different weights")
    refused(llama, [tmp_path, folder], "dp=2", "different weights")
    file = sorted(folder.glob("*.safetensors"))[1]
    bits = file.read_bytes()
    file.write_bytes(bits[: len(bits) // 2])
    refused(llama, folder, "pp=2", f"{file.name} cannot be read")
    file.unlink()
    refused(llama, folder, "pp=2", f"{file.name} cannot be read")


class Bare(torch.nn.Module):
    """A parameter and a buffer that are made in __init__ and nowhere else."""

    def __init__(self, what):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        if what == "parameter":
            self.blocks[1].scale = torch.nn.Parameter(torch.ones(4))
        elif what == "buffer":
            self.blocks[1].register_buffer("table", torch.arange(4), persistent=False)
        elif what == "attribute":
            self.blocks[1].table = torch.arange(4)
        else:
            self.blocks[1].reset_parameters = self.fails

    def fails(self):
        raise KeyError("size")

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


BARE = [
    ("parameter", "pp=2", r"'blocks.1.scale' is on meta, and nothing computes its value: Linear"),
    ("buffer", "pp=2", r"'blocks.1.table' is on meta, and nothing computes its value"),
    ("attribute", "dp=2", r"'blocks.1.table' is a tensor on meta that is neither"),
    (
        "function",
        "dp=2,zero=3",
        r"'blocks.1.* on meta, and its initialisation fails \(KeyError: 'size'",
    ),
]


@pytest.mark.parametrize(("what", "text", "match"), BARE, ids=[case[0] for case in BARE])
def test_what_nothing_initialises_is_refused_on_all_ranks(what, text, match):
    refused(functools.partial(Bare, what), None, text, match)


def test_not_under_meta_and_not_for_verify():
    model = on_meta(llama)
    with torch.device("meta"), pytest.raises(ValueError, match="parallelize it outside"):
        par.parallelize(model, None, par.Plan())
    with pytest.raises(ValueError, match="none on meta"):
        par.verify(model, next(batches()), par.Plan())


# Initialisation -------------------------------------------------------------


def test_values_are_of_the_kind_of_the_models_own(tmp_path):
    """Deviations of GPT-2, which scales the projections into the residual stream; the rotary tables."""
    config = hf.GPT2Config(vocab_size=64, n_embd=64, n_layer=8, n_head=4)
    mine, _ = par.parallelize(on_meta(lambda: hf.GPT2LMHeadModel(config)), None, par.Plan())
    for name, value in hf.GPT2LMHeadModel(config).named_parameters():
        here = mine.get_parameter(name)
        assert here.dtype == value.dtype and here.requires_grad == value.requires_grad
        assert here.std().item() == pytest.approx(value.std().item(), rel=0.1), name
    mine, _ = par.parallelize(on_meta(llama), None, par.Plan())
    for name, value in llama().named_buffers():
        assert torch.equal(mine.get_buffer(name), value), name


def test_random_numbers_of_the_user_go_on(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    par.parallelize(on_meta(llama), None, par.Plan())
    assert torch.equal(torch.rand(3), expected)


def frozen(rank, world_size, text, folder):
    """All but one block frozen, and one module with values of its own, which the files have not."""
    model = on_meta(lambda: llama(torch.float64, tie_word_embeddings=True))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    torch.manual_seed(rank)  # rank 0's values count
    model.extra = torch.nn.Linear(3, 2).double()
    losses, state = trained(model, text, folder)
    return losses, state, state["extra.weight"].sum().item()


@tier(quick=1 / 3)
@pytest.mark.parametrize("text", ["dp=2,zero=1", "dp=2,zero=3", "dp=2"])
def test_frozen_parameters_and_modules_with_values(tmp_path, text):
    torch.manual_seed(0)
    folder = saved(tmp_path, llama(tie_word_embeddings=True), None)
    losses, state, extra = spawn(1, frozen, "", folder)[0]
    for its_losses, its_state, its_extra in spawn(2, frozen, text, folder):
        assert equality.relative(its_losses, losses) < LIMIT and extra == its_extra
        assert all(equality.relative(its_state[name], value) < LIMIT for name, value in state.items())


def linear():
    return torch.nn.Linear(12, 12, bias=False)


class Normed(torch.nn.Module):
    """BatchNorm has buffers that are saved; an Embedding is no model of transformers."""

    def __init__(self):
        super().__init__()
        self.tok = torch.nn.Embedding(41, 12)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {"lin": torch.nn.Linear(12, 12, bias=False), "norm": torch.nn.BatchNorm1d(12)}
            )
            for _ in range(2)
        )
        self.moe = par.MoE(12, linear, 3, aux_loss=0.0)
        self.head = torch.nn.Linear(12, 41)

    def forward(self, input_ids):
        x = self.tok(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block["norm"](block["lin"](x).transpose(1, 2)).transpose(1, 2))
        return self.head(x + self.moe(x))


def cross(out, labels):
    return F.cross_entropy(out.flatten(0, -2), labels.flatten())


def normed():
    return Normed().double()


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1)


def muon_like(model):
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


@tier(quick=1 / 6)
@pytest.mark.parametrize("make_opt", [adamw, adagrad, muon_like])
@pytest.mark.parametrize("loaded", [False, True], ids=["", "loaded"])
def test_plain_modules_with_buffers_and_experts(tmp_path, loaded, make_opt):
    from safetensors.torch import save_model

    torch.manual_seed(0)
    model, weights = on_meta(normed), None
    if loaded:
        model, weights = normed(), tmp_path
        model.blocks[1]["norm"].running_mean += 1
        save_model(model, str(tmp_path / "model.safetensors"))
    options = {"loss_fn": cross, "make_opt": make_opt}
    reference = trained(model, "", microbatches=2, **options)
    check_equal(reference, normed, ["dp=2,zero=1", "ep=2,zero=3"], weights, **options)


def kept(rank, world_size, folder, text):
    model = on_meta(llama)
    model, opt = par.parallelize(model, adamw(model), par.Plan.parse(text), weights=folder)
    par.step(model, opt, next(batches()))
    par.save(model, opt, folder / "checkpoint")
    model.save_pretrained(folder / "hub")
    right = par.full_state_dict(model)
    again = on_meta(llama)
    again, opt = par.parallelize(again, adamw(again), par.Plan.parse(text))
    par.load(again, opt, folder / "checkpoint")
    mine, loaded = (
        par.full_state_dict(again),
        hf.LlamaForCausalLM.from_pretrained(folder / "hub").state_dict(),
    )
    return all(torch.equal(v, right[k]) and torch.equal(loaded[k].double(), v) for k, v in mine.items())


@tier(slow=1)
def test_saved_and_loaded_afterwards(tmp_path):
    assert spawn(4, kept, saved(tmp_path, llama()), "tp=2,pp=2") == [True] * 4
