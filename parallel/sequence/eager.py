"""The eager attention of transformers on a split sequence.

An attention module of transformers asks for a function by the name that its configuration has, and "eager" is
the one of its own file: products, a softmax and products, which no torch function tells as attention. For
what is in the blocks that name is replaced by one that is registered here, in the module's view of the
configuration alone:

    module.config._attn_implementation = "eager"    ->    NAME    ->    attend()
        a split sequence is under way                 SequenceAttention.attend(), over all ranks
        none (a run on the side, generation)          the eager function of the module's own file

Masks are made from the model's configuration, which is as it was. Known are scale, soft caps (gemma) and
sinks (gpt-oss). What an eager function does beside that shows in the comparison of checks/positions.py, where
it runs on the whole sequence.

What can go wrong: attention weights are not there (None), so a model that is asked for them is refused.
Source: transformers' AttentionInterface, documented for functions of one's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from pycomm.parallel.models.config_view import ConfigView
from pycomm.parallel.sequence.attention import Options, SequenceAttention

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree

__all__ = ["serve_eager"]

NAME = "pycomm_split_sequence"
KEY = "_attn_implementation"


def serve_eager(blocks: Iterable[nn.Module]) -> None:
    """Lets the modules in `blocks` that would call their eager function call attend()."""
    found = [
        module
        for block in blocks
        for module in block.modules()
        if getattr(getattr(module, "config", None), KEY, None) == "eager" and _own_function(module)
    ]
    if not found:
        return
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    for module in found:
        module.__dict__["config"] = ConfigView(module.config, {KEY: NAME})


def _own_function(module: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]] | None:
    """The eager function beside the class of a module of transformers, or beside a class that it is made of;
    None where there is none.
    """
    for kind in type(module).__mro__:
        if kind is nn.Module:
            return None
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    return None


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Tree,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As transformers calls it: query (batch, heads, T, D), and the result (batch, T, heads, D)."""
    modes = _get_current_function_mode_stack()
    mode = next((mode for mode in reversed(modes) if isinstance(mode, SequenceAttention)), None)
    if mode is None:
        own = _own_function(module)
        assert own is not None  # serve_eager() has looked
        return own(module, query, key, value, attention_mask, **given)
    if given.get("output_attentions") or getattr(module.config, "output_attentions", False):
        raise ValueError("attention weights (output_attentions) are in pieces where the sequence is cut")
    if given.get("position_bias") is not None:
        raise ValueError("a learned bias of positions needs a gradient, which would be in pieces")
    options: Options = {
        "dropout_p": given.get("dropout", 0.0) if module.training else 0.0,
        "is_causal": False,  # the eager function knows no mask but the one that it is given
        "enable_gqa": query.shape[1] != key.shape[1],
        "scale": given.get("scaling"),
        "softcap": given.get("softcap"),
        "sinks": getattr(module, "sinks", None),
    }
    out = mode.attend(query, key, value, attention_mask, options)
    return out.transpose(1, 2).contiguous(), None
