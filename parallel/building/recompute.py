"""Recomputation of activations, block by block: Plan(checkpoint=True), and models of transformers that do it
themselves (gradient_checkpointing_enable()).

What a forward depends on has to be there again when backward repeats it: random numbers, attention over the
whole sequence, weight gradients that wait (`contexts`). A model's own checkpoints know nothing of these, so
where the model is cut at its blocks theirs become ours:

    a block of the trunk         recomputed as with Plan(checkpoint=True)
    layers outside of the trunk  by the function that their class calls for it, which is ours from then on
"""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["forget_keys", "recompute_blocks"]


def recompute_blocks(model, trunk, plan, contexts):
    """contexts: as torch.utils.checkpoint's context_fn; called in each forward."""
    own = [module for module in model.modules() if hasattr(module, "_gradient_checkpointing_func")]
    inside = {id(module) for block in trunk.blocks for module in block.modules()}
    around = [module for module in own if id(module) not in inside and _contains(module, trunk)]
    of_blocks = [module for module in [*trunk.blocks, *around] if module in own]
    if plan.checkpoint or any(getattr(module, "gradient_checkpointing", False) for module in of_blocks):
        for block in trunk.blocks:
            block.forward = functools.partial(_recomputed, contexts, block.forward)
        forget_keys(model)
    blocks = {id(block) for block in trunk.blocks}
    for module in own:
        module._gradient_checkpointing_func = functools.partial(_outside, blocks, contexts)


def forget_keys(model):
    """A model of transformers keeps the keys of its forward (use_cache), to which a recomputation, or a run
    for shapes or for a proof, would add them once more. Its own checkpoints switch that off, too.
    """
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", None) is True:
            module.config.use_cache = False


def _contains(module, trunk):
    parts = set(module.modules())
    return any(block in parts for block in trunk.blocks)


def _recomputed(contexts, forward, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _outside(blocks, contexts, function, *args, **kwargs):
    """What transformers calls with a layer's forward, or its __call__. Blocks see to themselves."""
    if id(_layer_of(function)) in blocks:
        return function(*args, **kwargs)
    return _recomputed(contexts, function, *args, **kwargs)


def _layer_of(function):
    while isinstance(function, functools.partial):
        if function.args and isinstance(function.args[0], nn.Module):
            return function.args[0]
        function = function.func
    return getattr(function, "__self__", None)
