"""generate() of transformers' encoder-decoders under plans: the tokens of one process."""

import pytest
import torch
from halves import quick
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par

transformers = pytest.importorskip("transformers")
VOCABULARY = 41
ENDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
T5 = {"d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 4, "num_heads": 4, "initializer_factor": 6.0}
SIZES = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 4, "max_position_embeddings": 32}
SIZES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32}
SIZES |= {"decoder_ffn_dim": 32, "init_std": 0.6, "bos_token_id": 1, "forced_eos_token_id": None}
SOUND = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32}
MODELS = {
    "t5": ("T5Config", "T5ForConditionalGeneration", T5, "decoder.block", "encoder.block+decoder.block"),
    "bart": (
        "BartConfig", "BartForConditionalGeneration", SIZES,
        "model.decoder.layers", "model.encoder.layers+model.decoder.layers",
    ),
    "marian": ("MarianConfig", "MarianMTModel", SIZES, "model.decoder.layers", None),
    "whisper": (
        "WhisperConfig", "WhisperForConditionalGeneration", {**SIZES, **SOUND}, "model.decoder.layers", None,
    ),
}  # fmt: skip


def make(kind):
    torch.manual_seed(0)
    config, model, sizes, *_ = MODELS[kind]
    sizes = {**sizes, **ENDS}
    if kind == "whisper":
        sizes.pop("max_position_embeddings"), sizes.pop("forced_eos_token_id")
        sizes |= {"begin_suppress_tokens": None, "suppress_tokens": None}
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes)).double().eval()
    with torch.no_grad():  # so that tokens differ from each other
        made.get_output_embeddings().weight.add_(torch.randn(VOCABULARY, 24, dtype=torch.float64))
    return made


def prompts(kind):
    generator = torch.Generator().manual_seed(3)
    if kind == "whisper":
        sound = torch.randn(3, 8, 16, generator=generator, dtype=torch.float64)
        return {"input_features": sound, "attention_mask": torch.ones(3, 16, dtype=torch.long)}
    ids = torch.randint(3, VOCABULARY, (3, 6), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, 4:] = mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


WAYS = {
    "greedy": {"max_new_tokens": 5, "do_sample": False},
    "sampling": {"max_new_tokens": 4, "do_sample": True, "temperature": 1.5, "num_return_sequences": 2},
    "beams": {"max_new_tokens": 4, "num_beams": 3, "do_sample": False, "num_return_sequences": 2},
}


def texts_of(model, kind, ways):
    found = []
    for way in ways:
        torch.manual_seed(7)
        found.append(model.generate(**prompts(kind), **WAYS[way]))
    return found


def generated(rank, world_size, kind, texts, ways):
    found = []
    for text in texts:
        name, _, both = text.partition(" ")
        blocks = MODELS[kind][4 if both else 3]
        model, _ = par.parallelize(make(kind), None, par.Plan.parse(f"{name},blocks={blocks}"))
        found.append(texts_of(model, kind, ways))
    return found


CASES = {  # `both`: the encoder's blocks are in stages, too
    "bart 2 quick": ("dp=2,zero=3", "pp=2 both"),
    "t5 2": ("dp=2,zero=3", "pp=2", "pp=2 both", "tp=2"),
    "bart 2": ("dp=2,zero=3", "pp=2", "pp=2,zero=3 both", "pp=2,schedule=zbv"),
    "marian 2": ("dp=2,zero=3", "pp=2"),
    "whisper 2": ("dp=2,zero=3", "pp=2"),
    "bart 4": ("dp=2,pp=2,zero=3", "pp=2,tp=2"),
}


@tier(slow=1 / 3)
@pytest.mark.parametrize("name", quick(CASES, "bart 2 quick"))
def test_tokens_of_one_process(name):
    kind, size = name.split()[:2]
    ways = list(WAYS) if name in ("t5 2", "bart 2", "marian 2") else ["greedy", "beams"]
    expected = texts_of(make(kind), kind, ways)
    assert all(len({tuple(row) for row in tokens.tolist()}) > 1 for tokens in expected), expected
    for found in spawn(int(size), generated, kind, CASES[name], ways):
        for text, tokens in zip(CASES[name], found, strict=True):
            for way, mine, value in zip(ways, tokens, expected, strict=True):
                assert torch.equal(mine, value), (text, way)


def refused(rank, world_size):
    model, _ = par.parallelize(make("t5"), None, par.Plan.parse("tp=2,megatron_sp,blocks=decoder.block"))
    with pytest.raises(ValueError, match="its sequences have two lengths, of which the plan cuts one"):
        model.generate(**prompts("t5"))
    model = make("t5")
    known = model.get_encoder()(**prompts("t5"))
    par.parallelize(model, None, par.Plan.parse("pp=2,blocks=decoder.block"))
    with pytest.raises(ValueError, match=r"generate\(encoder_outputs=\.\.\.\) under Plan\(pp=2"):
        model.generate(encoder_outputs=known, max_new_tokens=2)
    return True


@tier(slow=1)
def test_what_is_refused():
    assert spawn(2, refused) == [True, True]
