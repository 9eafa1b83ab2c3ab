"""The loss of one microbatch, as its part of the mean over the whole batch."""

import contextlib

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pycomm.parallel.run.router_loss import RouterLoss, plain_loss
from pycomm.parallel.tensor import cross_entropy

__all__ = ["microbatch_loss", "sharded_logits"]


@contextlib.contextmanager
def sharded_logits(head, loss_fn):
    """Inside, a head that tensor parallelism has cut leaves its logits cut, for our cross_entropy only.

    head: tensor.Head or None.
    """
    if head is not None:
        head.sharded_output = plain_loss(loss_fn) is cross_entropy
    try:
        yield
    finally:
        if head is not None:
            head.sharded_output = False


def microbatch_loss(parts, output, microbatch, loss_fn):
    """The microbatch's part of the global mean, a 0-dim tensor that requires grad."""
    value = _of_targets(parts, output, microbatch, plain_loss(loss_fn))
    if isinstance(loss_fn, RouterLoss):
        value = value + microbatch.share * loss_fn.of_routers(output, microbatch.inputs, parts.mesh.data)
    return value


def _of_targets(parts, output, microbatch, loss_fn):
    targets = microbatch.targets if parts.split is None else parts.split.cut_targets(microbatch.targets)
    count = int(microbatch.count_of(targets))
    if count == 0:
        return _zero_of(output)
    if parts.compute_dtype is not None:
        output = tree_map(lambda leaf: _precise(leaf, parts.compute_dtype), output)
    if loss_fn is cross_entropy:
        logits = output if isinstance(output, torch.Tensor) else output.logits
        value = loss_fn(logits, targets, head=parts.tensor.head)
    else:
        value = loss_fn(output, targets)
    if not isinstance(value, torch.Tensor) or value.dim() > 0:
        raise ValueError(f"loss_fn must return a mean, a tensor without dimensions; got {_describe(value)}")
    if parts.stage_model is not None:
        parts.stage_model.check_loss(value)
    return value * (count / microbatch.total)


def _zero_of(output):
    """A zero with a graph, whatever values the output has."""
    leaves = (x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point())
    first = next(leaves, None)
    if first is None:
        raise ValueError(
            "the model must return a floating tensor, or a tuple, list or dict with one; got "
            f"{_describe(output)}"
        )
    return first.masked_fill(torch.ones_like(first, dtype=torch.bool), 0.0).sum()


def _precise(leaf, compute_dtype):
    """In fp32, where the model computes in less."""
    if not isinstance(leaf, torch.Tensor) or leaf.dtype != compute_dtype:
        return leaf
    return leaf.float()


def _describe(value):
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__
