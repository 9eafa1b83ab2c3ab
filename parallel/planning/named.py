"""Models by name, and from a config of transformers.

    named("gpt3-175b")      named("llama-3-8b", sequence=8192)      from_config(AutoConfig...)

Sizes: GPT-3 (Brown et al. 2020, table 2.1), the 1.7B to 1T models of Narayanan et al. 2021 (table 1), Llama
2 and 3 (their papers' tables), Mixtral (Jiang et al. 2024), Qwen 2.5 (its configs on the hub).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pycomm.parallel.planning.asked import whole
from pycomm.parallel.planning.model import gpt, llama

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from pycomm.parallel.planning.model import Model

__all__ = ["NAMES", "from_config", "named"]

Get: TypeAlias = Callable[..., Any]  # (key, default or None) -> what a config has under the key


class _Gpt(NamedTuple):
    layers: int
    hidden: int
    heads: int


class _Llama(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    experts: tuple[int, int] | None = None


# vocabulary 50257 padded to 51200, 2048 positions, as Megatron-LM trains them
_GPT = {
    "gpt2-1.5b": _Gpt(48, 1600, 25),
    "gpt3-125m": _Gpt(12, 768, 12),
    "gpt3-1.3b": _Gpt(24, 2048, 16),
    "gpt3-6.7b": _Gpt(32, 4096, 32),
    "gpt3-13b": _Gpt(40, 5120, 40),
    "gpt3-175b": _Gpt(96, 12288, 96),
    "gpt-1.7b": _Gpt(24, 2304, 24),
    "gpt-3.6b": _Gpt(30, 3072, 32),
    "gpt-7.5b": _Gpt(36, 4096, 32),
    "gpt-18b": _Gpt(40, 6144, 48),
    "gpt-22b": _Gpt(48, 6144, 64),
    "gpt-39b": _Gpt(48, 8192, 64),
    "gpt-76b": _Gpt(60, 10240, 80),
    "gpt-145b": _Gpt(80, 12288, 96),
    "gpt-310b": _Gpt(96, 16384, 128),
    "gpt-530b": _Gpt(105, 20480, 128),
    "gpt-1t": _Gpt(128, 25600, 160),
}
_LLAMA = {
    "llama-2-7b": _Llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _Llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _Llama(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": _Llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": _Llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama-3-405b": _Llama(126, 16384, 128, 8, 53248, 128256, 8192),
    "qwen-2.5-72b": _Llama(80, 8192, 64, 8, 29568, 152064, 32768),
    "mixtral-8x7b": _Llama(32, 4096, 32, 8, 14336, 32000, 4096, (8, 2)),
    "mixtral-8x22b": _Llama(56, 6144, 48, 8, 16384, 32768, 4096, (8, 2)),
}
NAMES = (*_GPT, *_LLAMA)


def named(name: str, *, sequence: int | None = None, fused: bool = True) -> Model:
    """The Model `name`. sequence: positions, else those it was trained with; fused: attention keeps no
    scores.
    """
    if sequence is not None:
        whole("sequence", sequence)
    if name in _GPT:
        return gpt(name, *_GPT[name], sequence=sequence or 2048, fused=fused)
    if name in _LLAMA:
        *sizes, vocab, positions, experts = _LLAMA[name]
        return llama(name, *sizes, vocab=vocab, sequence=sequence or positions, experts=experts)._replace(
            fused=fused
        )
    near = difflib.get_close_matches(str(name), NAMES, 3, 0.3)
    raise ValueError(
        f"there is no model {name!r}{'; near: ' + ', '.join(near) if near else ''}. Known: "
        f"{', '.join(NAMES)}; or a "
        "config.json of transformers, or a torch model on meta"
    )


# Of transformers. That others have the same fields does not say that they have the same layers.
_LIKE_LLAMA = "llama mistral mixtral gemma granite ernie4_5 qwen2 qwen3 qwen2_moe qwen3_moe".split()
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")


def from_config(config: PretrainedConfig | Mapping[str, object], *, sequence: int | None = None) -> Model:
    """Model of a config of transformers: an object, or what its config.json holds.

    Families: those of Llama (Mistral, Mixtral, Qwen 2 and 3, Gemma 1, Granite) and GPT-2; one without a
    model_type by its fields. Raises ValueError for others, and names the fields that are missing or wrong.
    """
    get: Get = (
        config.get if isinstance(config, dict) else lambda key, default=None: getattr(config, key, default)
    )
    kind = get("model_type") or "?"
    if sequence is not None:
        whole("sequence", sequence)
    if kind == "gpt2" or (kind == "?" and get("n_embd")):
        layers, h, heads, vocab = _sizes(get, kind, ("n_layer", "n_embd", "n_head", "vocab_size"))
        _divided(kind, h, heads, "n_embd", "n_head")
        ffn = _size(get, kind, "n_inner", 4 * h)
        positions = sequence or _size(get, kind, "n_positions", None)
        return gpt(kind, layers, h, heads, vocab=vocab, sequence=positions, ffn=ffn)
    sizes = _sizes(get, kind, _SIZES)
    if kind not in ("?", *_LIKE_LLAMA):
        raise ValueError(
            f"a config of {kind!r} is not known (known are gpt2, {', '.join(_LIKE_LLAMA)}): {BY_TRACING}"
        )
    return _like_llama(get, kind, sizes, sequence)


BY_TRACING = "give the model itself, built on meta (torch.device('meta')), which is then traced"


def _like_llama(get: Get, kind: str, sizes: Sequence[int], sequence: int | None) -> Model:
    layers, hidden, heads, ffn, vocab = sizes
    kv_heads = _size(get, kind, "num_key_value_heads", heads)
    _divided(kind, heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    if not get("head_dim"):
        _divided(kind, hidden, heads, "hidden_size", "num_attention_heads")
    width = _size(get, kind, "head_dim", hidden // heads)
    count = get("num_local_experts") or get("num_experts")
    experts = dense = None
    extra = (0, 0)
    if kind.startswith("qwen2"):
        extra = (0, (heads + 2 * kv_heads) * width)
    elif kind.startswith("qwen3"):
        extra = (2 * width, 0)
    if count:
        if get("mlp_only_layers") or get("decoder_sparse_step") not in (None, 1):
            raise ValueError(f"a config of {kind!r} in which some blocks have no experts: {BY_TRACING}")
        experts = (whole("experts", count), _size(get, kind, "num_experts_per_tok", 2))
        if experts[1] > count:
            raise ValueError(f"a config of {kind!r}: num_experts_per_tok={experts[1]} of {count} experts")
        ffn = _size(get, kind, "moe_intermediate_size", ffn)
        dense = get("shared_expert_intermediate_size") if kind == "qwen2_moe" else None
        extra = (extra[0] + hidden * bool(dense), extra[1])  # the gate of the shared expert
    positions = sequence or _size(get, kind, "max_position_embeddings", 2048)
    tied = bool(get("tie_word_embeddings"))
    return llama(
        kind,
        layers,
        hidden,
        heads,
        kv_heads,
        ffn,
        vocab=vocab,
        sequence=positions,
        head_dim=width,
        tied=tied,
        experts=experts,
        dense=dense,
        extra=extra,
    )


def _sizes(get: Get, kind: str, keys: Sequence[str]) -> list[int]:
    missing = [key for key in keys if not get(key)]
    if missing:
        raise ValueError(f"a config of {kind!r} has no {', '.join(missing)}: {BY_TRACING}")
    return [_size(get, kind, key, None) for key in keys]


def _size(get: Get, kind: str, key: str, default: int | None) -> int:
    value = get(key) or default
    if value is None:
        raise ValueError(f"a config of {kind!r} has no {key}")
    return whole(f"a config of {kind!r}: {key}", value)


def _divided(kind: str, whole_: int, parts: int, name: str, by: str) -> None:
    if whole_ % parts:
        raise ValueError(f"a config of {kind!r}: {by}={parts} does not divide {name}={whole_}")
