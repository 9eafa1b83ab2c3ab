"""Tensor parallelism of transformers' GPT-2 and Llama, unchanged, against one process.

GPT-2: fused Conv1D projections with transposed weights, tied head, 5 heads. Llama: grouped queries, rotary
positions that come from outside of the blocks, SwiGLU. Both with torch's attention and with the eager one,
which reads other attributes.
"""

import pytest
import torch
from tensor_models import batch, compare, make, single, tensor_step
from torch_ranks import spawn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from pycomm.groups import as_group
from pycomm.parallel.tensor import parallelize_tensor

GPT2 = {
    "vocab_size": 19,
    "n_positions": 16,
    "n_embd": 20,
    "n_layer": 2,
    "n_head": 5,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {
    "vocab_size": 17,
    "hidden_size": 24,
    "intermediate_size": 21,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}


def gpt2(attention):
    config = GPT2Config(
        **GPT2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation=attention, use_cache=False
    )
    return GPT2LMHeadModel(config)


def llama(attention, kv_heads, tied):
    config = LlamaConfig(
        **LLAMA,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        attn_implementation=attention,
        use_cache=False,
        attention_bias=True,
    )
    return LlamaForCausalLM(config)


CASES = [
    (gpt2, {"attention": "sdpa"}, {"vocab": 19, "blocks": "transformer.h", "sharded": True}),
    (gpt2, {"attention": "eager"}, {"vocab": 19, "blocks": "transformer.h"}),
    (
        llama,
        {"attention": "sdpa", "kv_heads": 2, "tied": False},
        {"vocab": 17, "blocks": "model.layers", "sharded": True},
    ),
    (
        llama,
        {"attention": "sdpa", "kv_heads": 3, "tied": True},
        {"vocab": 17, "blocks": "model.layers", "sequence": True},
    ),
    (
        llama,
        {"attention": "eager", "kv_heads": 1, "tied": True},
        {"vocab": 17, "blocks": "model.layers", "sequence": True, "sharded": True},
    ),
]


def many_steps(rank, world_size):
    return [tensor_step(rank, world_size, *case) for case in CASES]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_transformers_models_equal_one_process(world_size):
    results = spawn(world_size, many_steps)
    for index, (build, kwargs, options) in enumerate(CASES):
        rules = {line.rule for line in results[0][index]["found"]}
        assert rules == {"attention", "mlp", "vocab"}, f"{build.__name__}: {results[0][index]['found']}"
        compare(
            [of_rank[index] for of_rank in results], single(make(build, kwargs), *batch(options["vocab"]))
        )


def generation_body(rank, world_size):
    """The cache of keys and values holds this rank's heads."""
    with torch.device("cpu"):
        model = make(llama, {"attention": "sdpa", "kv_heads": 2, "tied": True}).eval()
    ids, _ = batch(17)
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    parallelize_tensor(model, as_group(None, "tp"), blocks="model.layers")
    assert torch.equal(model.generate(ids, **options), expected)


def test_generation_with_a_cache():
    spawn(2, generation_body)
