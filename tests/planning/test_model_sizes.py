"""Sizes of models against what their papers print, and against torch."""

import pytest
from published import SC21

from pycomm.parallel.planning import named
from pycomm.parallel.planning.named import NAMES, from_config


@pytest.mark.parametrize("row", SC21, ids=lambda row: row.model)
def test_parameters_of_sc21(row):
    assert round(named(row.model).parameters / 1e9, 1) == row.billions


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("gpt3-175b", 174.6), ("gpt3-6.7b", 6.7), ("llama-2-7b", 6.74), ("llama-2-13b", 13.02)),
        *(("llama-2-70b", 68.98), ("llama-3-8b", 8.03), ("llama-3-70b", 70.55), ("llama-3-405b", 405.85)),
        *(("qwen-2.5-72b", 72.71), ("mixtral-8x7b", 46.70), ("mixtral-8x22b", 140.63)),
    ],
)
def test_parameters_of_named_models(name, billions):
    assert named(name).parameters / 1e9 == pytest.approx(billions, abs=0.05 if "gpt" in name else 0.02)


@pytest.mark.parametrize("name", NAMES)
def test_modules_add_up(name):
    model = named(name)
    rows = model.modules()
    inside = [row for row in rows if row[0].startswith("block.")]
    outside = [row for row in rows if not row[0].startswith("block.")]
    assert model.layers * sum(r[1] for r in inside) + sum(r[1] for r in outside) == model.parameters
    forward = model.layers * sum(r[2] for r in inside) + sum(r[2] for r in outside)
    assert 3 * forward == pytest.approx(model.flops(1))
    assert sum(r[3] for r in inside) == sum(model.kept())


@pytest.mark.parametrize("row", SC21, ids=lambda row: row.model)
def test_flops_are_the_papers(row):
    """72 B L s h^2 (1 + s/6h + V/12hL), Korthikanti et al. 2022, equation 7."""
    model = named(row.model)
    h, l, s, v = model.hidden, model.layers, model.sequence, model.vocab
    expected = 72 * row.rows * l * s * h * h * (1 + s / (6 * h) + v / (12 * h * l))
    assert model.flops(row.rows * s) == pytest.approx(expected)


def test_kept_bytes_are_table_2():
    model = named("gpt3-175b", fused=False)
    h, a, s = model.hidden, model.heads, model.sequence
    assert model.kept() == (10 * h, 24 * h, 5 * a * s)


CONFIGS = {
    "LlamaConfig": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "MistralConfig": {"num_key_value_heads": 4},
    "MixtralConfig": {"num_key_value_heads": 2, "num_local_experts": 4},
}


@pytest.mark.parametrize("kind", [*CONFIGS, "GPT2Config"])
def test_config_has_as_many_parameters_as_the_model(kind):
    """Of transformers, built on meta."""
    hf = pytest.importorskip("transformers")
    import torch

    if kind == "GPT2Config":
        config = hf.GPT2Config(n_embd=48, n_head=4, n_layer=3, vocab_size=71, n_positions=32)
    else:
        sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = getattr(hf, kind)(vocab_size=71, **sizes, **CONFIGS[kind])
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    assert from_config(config).parameters == sum(p.numel() for p in model.parameters())
    assert from_config(config.to_dict()).parameters == from_config(config).parameters


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match="no model 'gpt3-175'; near: gpt3-175b"):
        named("gpt3-175")
    with pytest.raises(ValueError, match="has no num_hidden_layers, .*traced"):
        from_config({"model_type": "t5", "hidden_size": 3, "vocab_size": 3})
