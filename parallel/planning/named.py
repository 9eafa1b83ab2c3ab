"""Models by name, and from a config of transformers.

    named("gpt3-175b")      named("llama-3-8b", sequence=8192)      from_config(AutoConfig...)

Sizes: GPT-3 (Brown et al. 2020, table 2.1), the 1.7B to 1T models of Narayanan et al. 2021 (table 1), Llama
2 and 3 (their papers' tables), Mixtral (Jiang et al. 2024), Qwen 2.5 (its configs on the hub).
"""

import difflib

from pycomm.parallel.planning.model import gpt, llama

__all__ = ["NAMES", "from_config", "named"]

# (layers, hidden, heads); vocabulary 50257 padded to 51200, 2048 positions, as Megatron-LM trains them
_GPT = {
    "gpt2-1.5b": (48, 1600, 25),
    "gpt3-125m": (12, 768, 12),
    "gpt3-1.3b": (24, 2048, 16),
    "gpt3-6.7b": (32, 4096, 32),
    "gpt3-13b": (40, 5120, 40),
    "gpt3-175b": (96, 12288, 96),
    "gpt-1.7b": (24, 2304, 24),
    "gpt-3.6b": (30, 3072, 32),
    "gpt-7.5b": (36, 4096, 32),
    "gpt-18b": (40, 6144, 48),
    "gpt-22b": (48, 6144, 64),
    "gpt-39b": (48, 8192, 64),
    "gpt-76b": (60, 10240, 80),
    "gpt-145b": (80, 12288, 96),
    "gpt-310b": (96, 16384, 128),
    "gpt-530b": (105, 20480, 128),
    "gpt-1t": (128, 25600, 160),
}
# layers, hidden, heads, kv_heads, ffn, vocab, sequence, others
_LLAMA = {
    "llama-2-7b": (32, 4096, 32, 32, 11008, 32000, 4096, {}),
    "llama-2-13b": (40, 5120, 40, 40, 13824, 32000, 4096, {}),
    "llama-2-70b": (80, 8192, 64, 8, 28672, 32000, 4096, {}),
    "llama-3-8b": (32, 4096, 32, 8, 14336, 128256, 8192, {}),
    "llama-3-70b": (80, 8192, 64, 8, 28672, 128256, 8192, {}),
    "llama-3-405b": (126, 16384, 128, 8, 53248, 128256, 8192, {}),
    "qwen-2.5-72b": (80, 8192, 64, 8, 29568, 152064, 32768, {}),
    "mixtral-8x7b": (32, 4096, 32, 8, 14336, 32000, 4096, {"experts": (8, 2)}),
    "mixtral-8x22b": (56, 6144, 48, 8, 16384, 32768, 4096, {"experts": (8, 2)}),
}
NAMES = (*_GPT, *_LLAMA)


def named(name, *, sequence=None, fused=True):
    """The Model `name`. sequence: positions, else those it was trained with; fused: attention keeps no
    scores.
    """
    if name in _GPT:
        return gpt(name, *_GPT[name], sequence=sequence or 2048, fused=fused)
    if name in _LLAMA:
        layers, hidden, heads, kv_heads, ffn, vocab, positions, more = _LLAMA[name]
        sizes = {"vocab": vocab, "sequence": sequence or positions}
        return llama(name, layers, hidden, heads, kv_heads, ffn, **sizes, **more)._replace(fused=fused)
    near = difflib.get_close_matches(str(name), NAMES, 3, 0.3)
    raise ValueError(
        f"there is no model {name!r}{'; near: ' + ', '.join(near) if near else ''}. Known: "
        f"{', '.join(NAMES)}; or a "
        "config.json of transformers, or a torch model on meta"
    )


def from_config(config, *, sequence=None):
    """Model of a config of transformers: an object, or what its config.json holds.

    Families: those with the fields of Llama (Mistral, Qwen, Gemma without its second norms, Mixtral) and of
    GPT-2. Raises ValueError for others, and names the fields that are missing.
    """
    get = config.get if isinstance(config, dict) else lambda key, default=None: getattr(config, key, default)
    kind = get("model_type") or "?"
    if get("n_embd"):
        h = get("n_embd")
        return gpt(
            kind,
            get("n_layer"),
            h,
            get("n_head"),
            vocab=get("vocab_size"),
            sequence=sequence or get("n_positions"),
            ffn=get("n_inner") or 4 * h,
        )
    wanted = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [key for key in wanted if not get(key)]
    if missing:
        raise ValueError(
            f"a config of {kind!r} has no {', '.join(missing)}: give the model itself, built on meta "
            "(torch.device('meta')), which is then traced"
        )
    count = get("num_local_experts") or get("num_experts")
    experts = (count, get("num_experts_per_tok") or 2) if count else None
    heads = get("num_attention_heads")
    return llama(
        kind,
        get("num_hidden_layers"),
        get("hidden_size"),
        heads,
        get("num_key_value_heads") or heads,
        (get("moe_intermediate_size") if experts else None) or get("intermediate_size"),
        vocab=get("vocab_size"),
        sequence=sequence or get("max_position_embeddings") or 2048,
        head_dim=get("head_dim"),
        tied=bool(get("tie_word_embeddings")),
        experts=experts,
    )
