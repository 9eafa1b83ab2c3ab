"""Plans that nobody would take first, explained: numbers that are finite and not below 0. And foreign models
that need more than their inputs.
"""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1])]

from torch_ranks import spawn  # noqa: E402

import pycomm.parallel as par  # noqa: E402
from pycomm.parallel.planning.costs import sent  # noqa: E402

ODD = [
    ("gpt3-125m", "dp=3,tp=5,pp=11", 512, 5),
    ("gpt3-125m", "tp=12", 1, 1),
    ("gpt-1t", "single process", 1, 1),
    ("llama-3-8b", "tp=3,ring=5,ulysses=2,zero=3,megatron_sp", 7, 2),
    ("llama-3-8b", "dp=7,zero=2,offload=optimizer,checkpoint", 4096, 1),
    ("mixtral-8x7b", "ep=5,tp=3,dp=2,zero=1", 513, 16),
    ("mixtral-8x7b", "ep=8,pp=5,schedule=zbv,megatron_sp,tp=2", 64, 3),
    ("mixtral-8x22b", "dp=64,ep=3,schedule=interleaved,pp=3,chunks=4,zero=3", 4096, 16),
    ("qwen-2.5-72b", "ring=8,ulysses=4,pp=80", 5, 5),
    ("gpt3-175b", "pp=24,schedule=gpipe,compression=int8", 1000, 1000),
    ("gpt3-175b", "tp=96,schedule=pipedream,pp=2", 64, 64),
]


@pytest.mark.parametrize("machine", ["h100", "cpu"])
@pytest.mark.parametrize("case", ODD, ids=lambda case: f"{case[0]}:{case[1]}")
def test_odd_plans_are_explained(case, machine):
    model, text, batch, microbatches = case
    plan = par.Plan() if text == "single process" else par.Plan.parse(text)
    told = par.explain(plan, model, batch=batch, microbatches=microbatches, machine=machine)
    found = told.prediction
    numbers = [*found.time.parts().values(), *found.memory.parts().values(), found.mfu, found.tokens]
    numbers += [number for pair in sent(found.job).values() for number in pair]
    assert all(math.isfinite(number) and number >= -1e-12 * found.seconds for number in numbers), numbers
    assert found.seconds > 0 and found.memory.peak > 0 and "nan" not in str(told)


def encoder_decoder(kind):
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "t5":
        sizes = {"vocab_size": 41, "d_model": 24, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        config = hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
        return hf.T5ForConditionalGeneration(config)
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": 16, "max_target_positions": 32, "num_mel_bins": 8}
    config = hf.WhisperConfig(vocab_size=41, d_model=24, dropout=0.0, **heads, **sizes, **tokens, **lengths)
    return hf.WhisperForConditionalGeneration(config)


def batch_of(kind):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, 41, (8, 16), generator=generator)
    if kind == "t5":
        return {"input_ids": labels, "labels": labels}
    return {"input_features": torch.randn(8, 8, 32, generator=generator), "labels": labels}


BLOCKS = {
    "t5": ("encoder.block", "decoder.block"),
    "whisper": ("model.encoder.layers", "model.decoder.layers"),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_an_encoder_decoder_is_given_labels_alone(kind):
    """Its decoder's inputs are made of the labels, as par.step makes them."""
    with torch.device("meta"):
        model = encoder_decoder(kind)
    plan = par.auto(model, torch.optim.SGD, batch=batch_of(kind), world=2, fixed={"blocks": BLOCKS[kind]})

    def body(rank, world_size):
        model = encoder_decoder(kind)
        model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.05), plan)
        return [par.step(model, opt, batch_of(kind), microbatches=plan.microbatches).item() for _ in range(3)]

    one, other = spawn(2, body)
    assert one == other and one[-1] < one[0]
