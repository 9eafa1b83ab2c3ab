"""Pipelines whose stages hand on more than the hidden state: encoder outputs, biases that one block makes for
all, connections that every block is given, and what a model does between two blocks. Equal to one process.
"""

import re

import against_one
import pytest
import torch
from halves import quick
from models import Block
from odd_models import Plain, cross, tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

import pycomm.parallel as par
from pycomm.parallel.models.trunk import find_trunk

LAYERS = 4
PLANS = ["pp=2", "pp=2,schedule=gpipe,checkpoint", "pp=2,schedule=zb-h1", "pp=2,schedule=interleaved"]


class Base(Plain):
    def __init__(self, block=Block):
        super().__init__(block, LAYERS)


class Changed(Base):
    """Before every block, so also exactly where a stage ends."""

    def run_blocks(self, x):
        for index, block in enumerate(self.blocks):
            x = block(torch.tanh(x) * (0.5 + index))
        return x


class SkipBlock(Block):
    def forward(self, x, first):
        return super().forward(x) + first


class Skip(Base):
    """Every block gets the embedding again, the first one twice the same tensor."""

    def __init__(self):
        super().__init__(SkipBlock)

    def run_blocks(self, x):
        first = x
        for block in self.blocks:
            x = block(x, first)
        return x


class SkipByName(Skip):
    def run_blocks(self, x):
        first = x * 2
        for block in self.blocks:
            x = block(x, first=first)
        return x


class SkipToTheEnd(Skip):
    """What the blocks were given is used behind them, too."""

    def run_blocks(self, x):
        return super().run_blocks(x) + 0.3 * x


class MemoryBlock(Block):
    """Adds what it reads from a memory, with a bias that the first one makes for all."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.key, self.bias = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x, memory, scale, bias=None):
        values, kinds = memory
        if bias is None:
            bias = self.bias(values).transpose(1, 2)
        weights = (self.key(x) @ values.transpose(1, 2) * scale + bias).softmax(-1)
        x = super().forward(x + weights @ values)
        return x + 0.1 * (kinds % 3)[..., None], bias


class Memory(Base):
    """A memory in a tuple with whole numbers made of it, a scale from a parameter beside the blocks, a frozen
    encoder layer, and a bias.
    """

    def __init__(self):
        super().__init__(MemoryBlock)
        self.scale = nn.Parameter(torch.ones(16, 1))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self._modules["blocks"] = self._modules.pop("blocks")
        for name in ("norm", "head"):
            self._modules[name] = self._modules.pop(name)

    def run_blocks(self, x):
        values = self.frozen(x).tanh()
        memory, bias, scale = (
            (values, values.argmax(-1)),
            None,
            self.scale.mean() + x.mean((1, 2), keepdim=True),
        )
        for block in self.blocks:
            x, bias = block(x, memory, scale, bias)
        return x


class Translator(nn.Module):
    """torch's encoder and decoder; the blocks are the decoder's."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(29, 16)
        self.transformer = nn.Transformer(16, 2, LAYERS, LAYERS, 20, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 29)

    def forward(self, idx):
        return self.head(self.transformer(self.tok(idx), self.tok(idx.flip(1))))


@tier(slow=1)
@pytest.mark.parametrize(
    "make",
    [Changed, SkipByName, *(pytest.param(m, marks=pytest.mark.deep) for m in (Skip, SkipToTheEnd, Memory))],
    ids=lambda m: m.__name__,
)
def test_equal_to_one_process(make):
    against_one.check_equal(make, *PLANS)


@tier(slow=1 / 2)
@pytest.mark.parametrize("text", ["pp=4,schedule=zb-h1", "dp=2,pp=2,zero=3,checkpoint"])
def test_passed_on_by_stages_between(text):
    against_one.check_equal(Memory, text)


def test_two_stages_of_one_rank_that_follow_each_other():
    against_one.check_equal(Skip, "pp=2,schedule=zbv")


class TiedBlocks(Base):
    """One weight in blocks of all stages, of which a rank may have several."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.mlp[0].weight = self.blocks[0].mlp[0].weight


@tier(slow=1 / 2)
@pytest.mark.parametrize(
    "texts", [("pp=2,schedule=interleaved", "pp=2,schedule=zbv"), ("dp=2,pp=4",)], ids=lambda texts: texts[0]
)
def test_a_weight_of_several_stages(texts):
    against_one.check_equal(TiedBlocks, *texts)


def t5():
    sizes = {"d_model": 16, "d_kv": 6, "d_ff": 20, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 2}
    ends = {"vocab_size": 29, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(**sizes, **ends, dropout_rate=0.0, tie_word_embeddings=True))


def bart():
    sizes = {f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in BART.items()}
    ends = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    rest = {
        "vocab_size": 29,
        "d_model": 16,
        "dropout": 0.0,
        "max_position_embeddings": 16,
        "use_cache": False,
    }
    model = BartForConditionalGeneration(BartConfig(**sizes, **ends, **rest))
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):  # which have no gradient but for rounding
            nn.init.normal_(parameter)
    return model


BART = {"layers": 3, "attention_heads": 2, "ffn_dim": 20}
LISTS = {t5: ("encoder.block", "decoder.block"), bart: ("model.encoder.layers", "model.decoder.layers")}
LISTS[Translator] = ("transformer.encoder.layers", "transformer.decoder.layers")


def pairs(step):
    """Sources that are shorter than the targets, with masks."""
    x, y = tokens(step, 7)
    mask = torch.arange(5) < 2 + torch.arange(7)[:, None] % 4
    return {"input_ids": x[:, :5], "attention_mask": mask.long(), "decoder_input_ids": x.flip(1)}, y


def of_logits(out, y):
    return cross(out.logits, y)


def check_lists(make, blocks, *texts):
    """blocks: how many of the lists are named; the last."""
    named = "+".join(LISTS[make][-blocks:])
    batch, loss = (tokens, cross) if make is Translator else (pairs, of_logits)
    texts = [f"{text},blocks={named}" for text in texts]
    against_one.check_equal(make, *texts, batch=batch, loss_fn=loss, limit=3e-7)  # parts compute in fp32


ALL = ["pp=2,schedule=gpipe", *PLANS[2:], "pp=2,schedule=zbv,checkpoint"]


@tier(slow=1 / 3)
@pytest.mark.parametrize(
    ("make", "texts"), [(t5, ALL), pytest.param(bart, ALL, marks=pytest.mark.slow), (Translator, ALL[:2])]
)
def test_encoder_and_decoder_make_one_trunk(make, texts):
    check_lists(make, 2, *texts)


@tier(slow=1 / 3)
@pytest.mark.parametrize("make", LISTS)
def test_an_encoder_in_front_of_the_blocks(make):
    check_lists(make, 1, "pp=2", "pp=2,schedule=zb-h1")


@tier(slow=1 / 4)
@pytest.mark.parametrize(
    "text",
    quick(
        ["pp=4,stages=2:2:1:1", "dp=2,pp=2,zero=1", "tp=2,pp=2", "pp=3,schedule=interleaved"],
        "pp=4,stages=2:2:1:1",
    ),
)
def test_an_embedding_of_three_stages(text):
    check_lists(t5, 2, text)


def saved(rank, world_size, folder):
    both, last = LISTS[t5], LISTS[t5][-1]
    torch.manual_seed(0)
    model = t5().double()
    model, opt = par.parallelize(model, against_one.sgd(model), par.Plan(pp=2, blocks=both))
    before = par.evaluate(model, pairs(1), of_logits).item()
    par.step(model, opt, pairs(0), of_logits, microbatches=2)
    after = par.evaluate(model, pairs(1), of_logits, microbatches=3).item()
    par.save(model, opt, f"{folder}/checkpoint")
    model.save_pretrained(f"{folder}/pretrained")
    state, kept = par.full_state_dict(model), t5().double()
    kept, kept_opt = par.parallelize(
        kept, against_one.sgd(kept), par.Plan(pp=2, schedule="gpipe", blocks=last)
    )
    par.load(kept, kept_opt, f"{folder}/checkpoint")
    right = par.full_state_dict(kept)
    assert all(torch.equal(state[name], right[name]) for name in state)
    assert par.evaluate(kept, pairs(1), of_logits).item() == pytest.approx(after, rel=1e-6)
    own = T5ForConditionalGeneration.from_pretrained(f"{folder}/pretrained", dtype=torch.float64)
    assert all(torch.equal(own.state_dict()[name], state[name]) for name in state)
    losses = [par.step(each, o, pairs(2), of_logits).item() for each, o in ((model, opt), (kept, kept_opt))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    return before, after


@tier(slow=1)
def test_evaluate_save_and_load(tmp_path):
    torch.manual_seed(0)
    x, y = pairs(1)
    right = of_logits(t5().double()(**x), y).item()
    for before, after in spawn(2, saved, str(tmp_path)):
        assert before == pytest.approx(right, rel=1e-6) and after < before


class TwoNorms(Translator):
    """Calls what is registered in front of the blocks between them, too: its first stage has it."""

    def forward(self, idx):
        memory = self.transformer.encoder(self.tok(idx))
        return self.head(self.transformer.decoder(self.tok(idx.flip(1)), memory))


class Late(Translator):
    """Calls between the lists what is registered behind them."""

    def __init__(self):
        super().__init__()
        self.late = nn.LayerNorm(16)

    def forward(self, idx):
        target = self.tok(idx.flip(1))
        return self.head(self.transformer.decoder(target, self.late(self.transformer.encoder(self.tok(idx)))))


NOT_HANDED = "block 4, of the next pipeline stage, is given a tensor .* that comes from 'tok'"
REFUSED = {
    "target first": (Translator, "pp=4", NOT_HANDED),
    "called twice": (TwoNorms, "pp=4", NOT_HANDED),
    "late": (Late, "pp=2", "'late' is registered after the blocks .* but called (between|before) them"),
    "both, cut": (Translator, "tp=2,megatron_sp", "megatron_sp cuts the sequence at one list of blocks"),
}


def refused(rank, world_size, name):
    make, text, _ = REFUSED[name]
    model = make()
    plan = par.Plan.parse(f"{text},blocks={'+'.join(LISTS[Translator])}")
    with pytest.raises((ValueError, Exception)) as caught:
        par.parallelize(model, opt := against_one.sgd(model), plan)
        par.step(model, opt, tokens(0), cross)
    return f"{type(caught.value).__name__}: {caught.value}"


@tier(quick=1 / 4)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    messages = spawn(par.Plan.parse(REFUSED[name][1]).world_size, refused, name, timeout=10.0)
    caught = [text for text in messages if text.startswith("ValueError")]
    assert caught, messages
    for text in caught:
        assert re.search(REFUSED[name][2], text, re.DOTALL), text


def cut_and_several(rank, world_size):
    model = Skip().double()
    model, opt = par.parallelize(model, against_one.sgd(model), par.Plan(pp=2, ring=2))
    with pytest.raises((ValueError, Exception)) as caught:
        par.step(model, opt, tokens(0), cross)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_several_tensors_where_the_sequence_is_cut_are_refused():
    messages = spawn(4, cut_and_several, timeout=10.0)
    assert any("which can be done where the hidden state is the only one" in text for text in messages), (
        messages
    )


def test_plans_of_two_lists():
    plan = par.Plan.parse("pp=2,blocks=encoder.block+decoder.block")
    assert plan == par.Plan(pp=2, blocks=["encoder.block", "decoder.block"])
    assert par.Plan.parse(str(plan)) == plan
    for blocks, match in {
        ("encoder.block", "encoder"): "'encoder' is a T5Stack",
        ("encoder.block", "nothing"): "'nothing' is not in the model",
        ("encoder.block", "encoder.block.0.layer"): "none of them inside of the other",
    }.items():
        with pytest.raises(ValueError, match=match):
            find_trunk(t5(), blocks)
