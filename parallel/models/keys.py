"""Models of transformers keep the keys of their forward (use_cache), to which a recomputation, or a run for
shapes or for a proof, would add them once more. So a plan that has such runs lets them keep nothing.

To switch use_cache off would change what some of them compute: their mask of packed documents (position_ids
that begin anew) is made only where there is no cache. So the module that makes the cache gets one of the
same kind that keeps nothing, and takes the same way as in one process:

    use_cache               one process                 here
    True, or the config's   makes a DynamicCache        is given one that returns what it gets; its output
                                                        names no keys
    False                   has none                    has none
    keys are given          goes on from them           goes on from them

Where a model makes its cache otherwise (encoder and decoder, layers with a state of their own) its config
says use_cache=False from then on, and position_ids that begin anew are refused if no mask comes with them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree

    class _Config(Protocol):
        use_cache: bool | None

    class _Caching(Protocol):
        """A module of transformers."""

        config: _Config


__all__ = ["forget_keys"]

_MADE = "past_key_values = DynamicCache(config=self.config)"
_PLAIN = ("DynamicLayer", "DynamicSlidingWindowLayer")
_MARK = "_pycomm_keeps_no_keys"


def forget_keys(model: nn.Module) -> None:
    """May be called again."""
    for module in model.modules():
        if not hasattr(module, _MARK) and _use_cache(module) and _makes_plain_cache(module):
            setattr(module, _MARK, True)
            module.register_forward_pre_hook(_give_cache, with_kwargs=True)
            module.register_forward_hook(_take_cache)
    marked = {id(module) for module in model.modules() if hasattr(module, _MARK)}
    inside = {id(each) for module in model.modules() if id(module) in marked for each in module.modules()}
    others = [
        module
        for module in model.modules()
        if _use_cache(module)
        and id(module) not in inside
        and not any(id(each) in marked for each in module.modules())
    ]
    for module in others:  # before any config changes, which they may share
        if "position_ids" in _names(type(module).forward):
            module.register_forward_pre_hook(_refuse_packed, with_kwargs=True)
    for module in others:
        cast("_Caching", module).config.use_cache = False


def _use_cache(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "use_cache", None) is True


@functools.cache
def _names(forward: Callable[..., Tree]) -> tuple[str, ...]:
    """Of its arguments, without self."""
    return tuple(inspect.signature(forward).parameters)[1:]


@functools.cache
def _makes_cache(forward: Callable[..., Tree]) -> bool:
    try:
        return _MADE in inspect.getsource(forward)
    except (OSError, TypeError):  # without source
        return False


def _makes_plain_cache(module: nn.Module) -> bool:
    """Whether its forward makes a cache of keys and values alone."""
    config = module.config
    if not _makes_cache(type(module).forward) or getattr(config, "is_encoder_decoder", False):
        return False
    if getattr(config, "add_cross_attention", False):
        return False
    return all(type(layer).__name__ in _PLAIN for layer in _no_keys()(config=config).layers)


@functools.cache
def _no_keys() -> type:
    """A class of caches that keep nothing."""

    def update(
        self: object, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    return type("NoKeys", (sys.modules["transformers"].DynamicCache,), {"update": update})


def _by_name(module: nn.Module, args: tuple[Tree, ...], kwargs: Mapping[str, Tree]) -> dict[str, Tree]:
    return {**dict(zip(_names(type(module).forward), args, strict=False)), **kwargs}


def _give_cache(
    module: nn.Module, args: tuple[Tree, ...], kwargs: dict[str, Tree]
) -> tuple[tuple[Tree, ...], dict[str, Tree]] | None:
    given = _by_name(module, args, kwargs)
    use_cache = given.get("use_cache")
    if not (_use_cache(module) if use_cache is None else use_cache):
        return None
    if given.get("past_key_values") is not None:
        return None
    if module.training and getattr(module, "gradient_checkpointing", False):
        return None  # transformers itself makes no cache then
    return (), {**given, "past_key_values": _no_keys()(config=module.config), "use_cache": False}


def _take_cache(module: nn.Module, args: tuple[Tree, ...], output: Tree) -> Tree:
    """The output without the cache, as where there is none."""
    kind = _no_keys()
    if type(output) is tuple:
        return tuple(each for each in output if not isinstance(each, kind))
    if isinstance(output, dict) and any(isinstance(each, kind) for each in output.values()):
        return type(output)(**{name: each for name, each in output.items() if not isinstance(each, kind)})
    return output


def _refuse_packed(module: nn.Module, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> None:
    given = _by_name(module, args, kwargs)
    positions = given.get("position_ids")
    if given.get("use_cache") is False or given.get("attention_mask") is not None:
        return
    if not isinstance(positions, torch.Tensor) or positions.is_meta or positions.dim() != 2:
        return
    if bool((positions.diff(dim=-1) != 1).any()):
        raise ValueError(
            f"position_ids of {type(module).__name__} begin anew, as of packed documents. One process with "
            "use_cache=True makes no mask that keeps documents apart; this plan, which keeps no keys, would "
            "make one. Set model.config.use_cache = False before parallelize: it keeps them apart everywhere"
        )
