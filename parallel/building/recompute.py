"""Recomputation of activations, block by block: Plan(checkpoint=True), and models of transformers that do it
themselves (gradient_checkpointing_enable()).

What a forward depends on has to be there again when backward repeats it: random numbers, attention over the
whole sequence, weight gradients that wait (`contexts`). A model's own checkpoints know nothing of these, so
where the model is cut at its blocks theirs become ours:

    a block of the trunk         recomputed as with Plan(checkpoint=True)
    layers outside of the trunk  by the function that their class calls for it, which is ours from then on

Whether they recompute may be changed after parallelize(), too: those methods of theirs turn a switch.
"""

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pycomm.parallel.given import Tree
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.models.keys import forget_keys
from pycomm.parallel.models.modes import uncompiled
from pycomm.parallel.models.trunk import Trunk

__all__ = ["recompute_blocks"]

_FUNCTION = "_gradient_checkpointing_func"
_ENABLE = ("gradient_checkpointing_enable", "activation_checkpointing_enable")
_DISABLE = ("gradient_checkpointing_disable", "activation_checkpointing_disable")


Owned: TypeAlias = Mapping[str, "torch.Tensor | None"]  # a module's own parameters
Forward: TypeAlias = Callable[..., Tree]
# around a forward, and around its recomputation
Contexts: TypeAlias = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]


class _Switch:
    """Whether the blocks of a model are recomputed. always: by the plan."""

    def __init__(self, model: nn.Module, trunk: Trunk, always: bool, contexts: Contexts) -> None:
        self.model, self.trunk, self.always, self.contexts = model, trunk, always, contexts
        self.on = always

    def take_over(self) -> None:
        """After the model's own methods: what they ask for becomes ours."""
        trunk, contexts = self.trunk, self.contexts
        own = [module for module in self.model.modules() if hasattr(module, _FUNCTION)]
        inside = {id(module) for block in trunk.blocks for module in block.modules()}
        around = [module for module in own if id(module) not in inside and _contains(module, trunk)]
        of_blocks = [module for module in [*trunk.blocks, *around] if module in own]
        asked = any(getattr(module, "gradient_checkpointing", False) for module in of_blocks)
        self.on = self.always or asked
        blocks = {id(block) for block in trunk.blocks}
        for module in own:
            setattr(module, _FUNCTION, functools.partial(_outside, blocks, contexts))
        if self.on:
            forget_keys(self.model)

    def turned(self, method: Forward, *args: Tree, **kwargs: Tree) -> Tree:
        """In the place of a method of the model."""
        out = method(*args, **kwargs)
        self.take_over()
        return out


def recompute_blocks(model: nn.Module, trunk: Trunk, plan: Plan, contexts: Contexts) -> None:
    """contexts: as torch.utils.checkpoint's context_fn; called in each forward."""
    switch = _Switch(model, trunk, plan.checkpoint, contexts)
    switch.take_over()
    methods = [
        (module, name)
        for module in model.modules()
        for name in (*_ENABLE, *_DISABLE)
        if hasattr(type(module), name)
    ]
    for module, name in methods:
        setattr(module, name, functools.partial(switch.turned, getattr(module, name)))
    if switch.on or methods:
        for block in trunk.blocks:
            own = [module._parameters for module in block.modules() if module._parameters]
            block.forward = uncompiled(functools.partial(_recomputed, switch, contexts, own, block.forward))


def _contains(module: nn.Module, trunk: Trunk) -> bool:
    parts = set(module.modules())
    return any(block in parts for block in trunk.blocks)


def _recomputed(
    switch: _Switch, contexts: Contexts, own: Sequence[Owned], forward: Forward, *args: Tree, **kwargs: Tree
) -> Tree:
    if not (switch.on and torch.is_grad_enabled()) or _borrowed(own):
        return forward(*args, **kwargs)
    return _checkpointed(contexts, forward, *args, **kwargs)


def _checkpointed(contexts: Contexts, forward: Forward, *args: Tree, **kwargs: Tree) -> Tree:
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _borrowed(own: Sequence[Owned]) -> bool:
    """Whether the block runs with tensors in the place of its parameters (torch.func.functional_call): they
    are gone when it would be recomputed.
    """
    return any(not isinstance(each, nn.Parameter) and each is not None for of in own for each in of.values())


def _outside(
    blocks: Container[int], contexts: Contexts, function: Forward, *args: Tree, **kwargs: Tree
) -> Tree:
    """What transformers calls with a layer's forward, or its __call__. Blocks see to themselves."""
    if id(_layer_of(function)) in blocks:
        return function(*args, **kwargs)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return _checkpointed(contexts, function, *args, **kwargs)


def _layer_of(function: Forward) -> object:
    while isinstance(function, functools.partial):
        if function.args and isinstance(function.args[0], nn.Module):
            return function.args[0]
        function = function.func
    return getattr(function, "__self__", None)
