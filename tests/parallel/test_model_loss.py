"""What step and evaluate compute for a model of transformers without loss_fn: its own loss of the labels."""

import pytest
import torch
import transformers as hf
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par

SMALL = {"vocab_size": 41, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEQ = {"vocab_size": 41, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 1}
SEQ.update(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=20, decoder_ffn_dim=20)
T5 = {"vocab_size": 41, "d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_heads": 2}
BERT = {**SMALL, "num_attention_heads": 2, "max_position_embeddings": 16}
GPT2 = {"vocab_size": 41, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
OPT = {"vocab_size": 41, "hidden_size": 16, "ffn_dim": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
OPT.update(word_embed_proj_dim=16, max_position_embeddings=16)
SWITCH = {"vocab_size": 41, "d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_heads": 2}
SWITCH.update(num_experts=2, num_sparse_encoder_layers=1, num_decoder_layers=2, num_sparse_decoder_layers=1)
PROPHET = {"encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "num_encoder_layers": 2, "num_decoder_layers": 2}
PROPHET.update(num_encoder_attention_heads=2, num_decoder_attention_heads=2)

MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **HEADS)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL, **HEADS, head_dim=8)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL, **HEADS, sliding_window=4)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SMALL, **HEADS, head_dim=8)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**SMALL, **HEADS, **IDS)),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL, num_attention_heads=2)),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=41, hidden_size=16, n_layer=2, n_head=2)),
    "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(**OPT, **IDS)),
    "bert-lm": lambda: hf.BertLMHeadModel(hf.BertConfig(**BERT, is_decoder=True)),
    "bert-mlm": lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)),
    "bert-tokens": lambda: hf.BertForTokenClassification(hf.BertConfig(**BERT, num_labels=41)),
    "bert-rows": lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=5)),
    "bart-decoder": lambda: hf.BartForCausalLM(hf.BartConfig(**SEQ, **IDS, max_position_embeddings=16)),
    "xlm-roberta": lambda: hf.XLMRobertaForCausalLM(hf.XLMRobertaConfig(**BERT, is_decoder=True)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0, pad_token_id=0)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**SEQ, **IDS, max_position_embeddings=16)),
    "marian": lambda: hf.MarianMTModel(hf.MarianConfig(**SEQ, **IDS, max_position_embeddings=16)),
}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def batch_of(name, rows=5):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 41, (rows, 9), generator=generator)
    labels = ids.clone()
    if name == "bert-rows":
        return {"input_ids": ids, "labels": labels[:, 0] % 5}
    labels[torch.rand(rows, 9, generator=generator) < 0.3] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("name", MODELS)
def test_loss_is_the_models_own(name):
    model, batch = make(name), batch_of(name)
    right = model(**batch).loss.item()
    par.parallelize(model, None, par.Plan())
    assert par.evaluate(model, batch).item() == pytest.approx(right, rel=1e-5)
    assert par.evaluate(model, batch, microbatches=3).item() == pytest.approx(right, rel=1e-5)


def under(rank, world_size, name, plan):
    model = make(name)
    par.parallelize(model, None, plan)
    return par.evaluate(model, batch_of(name), microbatches=2).item()


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama", "ring=2"),
        ("llama", "tp=2"),
        ("qwen3", "dp=2"),
        ("opt", "tp=2"),
        ("bert-mlm", "dp=2"),
        ("t5", "dp=2"),
        ("marian", "dp=2,zero=2"),
    ],
)
def test_loss_is_the_models_own_under_plans(name, plan):
    right = make(name)(**batch_of(name)).loss.item()
    assert spawn(2, under, name, par.Plan.parse(plan)) == [pytest.approx(right, rel=1e-5)] * 2


def test_any_mapping_is_a_batch():
    model, batch = make("llama"), batch_of("llama")
    right = model(**batch).loss.item()
    par.parallelize(model, None, par.Plan())
    assert par.evaluate(model, hf.BatchEncoding(batch)).item() == pytest.approx(right, rel=1e-5)


def test_a_loss_that_is_named_takes_the_labels_as_they_are():
    model, batch = make("llama"), batch_of("llama")
    logits = model(batch["input_ids"]).logits
    right = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()
    par.parallelize(model, None, par.Plan())
    assert par.evaluate(model, batch, par.cross_entropy).item() == pytest.approx(right, rel=1e-5)


def with_loss(name):
    model = make(name)
    model.loss_function = lambda logits, labels, vocab_size: logits.sum()
    return model


@pytest.mark.parametrize(
    ("model", "batch", "match"),
    [
        (
            lambda: hf.BertForQuestionAnswering(hf.BertConfig(**BERT)),
            lambda: batch_of("llama"),
            "the loss of BertForQuestionAnswering is not known here: pass loss_fn",
        ),
        (lambda: with_loss("llama"), lambda: batch_of("llama"), "was given a loss function: pass it to step"),
        (
            lambda: hf.SwitchTransformersForConditionalGeneration(
                hf.SwitchTransformersConfig(**SWITCH, decoder_start_token_id=0, output_router_logits=True)
            ),
            lambda: batch_of("llama"),
            "adds a loss of its routers .*, which is not known here",
        ),
        (
            lambda: make("bert-rows"),
            lambda: {**batch_of("bert-rows"), "labels": torch.rand(5, 5)},
            "labels of BertForSequenceClassification are real numbers",
        ),
        (
            lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=1)),
            lambda: {**batch_of("llama"), "labels": torch.zeros(5, dtype=torch.int64)},
            "the loss of BertForSequenceClassification is not known here",
        ),
        (
            lambda: hf.ProphetNetForCausalLM(hf.ProphetNetConfig(vocab_size=41, hidden_size=16, **PROPHET)),
            lambda: batch_of("llama"),
            "the loss of ProphetNetForCausalLM is not known here",
        ),
    ],
    ids=["unknown", "given", "routers", "regression", "regression of whole numbers", "of several words"],
)
def test_losses_that_are_not_known_are_refused(model, batch, match):
    model = model()
    par.parallelize(model, None, par.Plan())
    with pytest.raises(ValueError, match=match):
        par.evaluate(model, batch())
