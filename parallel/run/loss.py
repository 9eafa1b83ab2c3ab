"""The loss of one microbatch, as its part of the mean over the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pycomm.parallel.checks.measures import Unweighted
from pycomm.parallel.checks.positions import check_whole
from pycomm.parallel.data.gather_rows import take_gathered
from pycomm.parallel.ground.batch import Microbatch, count_targets
from pycomm.parallel.pipeline.refused import NoGradients
from pycomm.parallel.run.router_loss import Loss, RouterLoss, plain_loss
from pycomm.parallel.tensor import cross_entropy

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    from pycomm.parallel.given import LossFunction, Tree
    from pycomm.parallel.parts import Parallelized
    from pycomm.parallel.tensor.apply import Head

__all__ = ["microbatch_loss", "sharded_logits"]


@contextlib.contextmanager
def sharded_logits(head: Head | None, loss_fn: Loss | None) -> Iterator[None]:
    """Inside, a head that tensor parallelism has cut leaves its logits cut, for our cross_entropy only."""
    if head is not None:
        head.sharded_output = plain_loss(loss_fn) is cross_entropy
    try:
        yield
    finally:
        if head is not None:
            head.sharded_output = False


def microbatch_loss(parts: Parallelized, output: Tree, microbatch: Microbatch, loss_fn: Loss) -> torch.Tensor:
    """The microbatch's part of the global mean, a 0-dim tensor that requires grad."""
    value = _of_targets(parts, output, microbatch, plain_loss(loss_fn))
    if isinstance(loss_fn, RouterLoss):
        value = value + microbatch.share * loss_fn.of_routers(output, microbatch, parts.mesh.data)
    return value


def _of_targets(
    parts: Parallelized, output: Tree, microbatch: Microbatch, loss_fn: LossFunction
) -> torch.Tensor:
    targets = microbatch.targets if parts.split is None else parts.split.cut_targets(microbatch.targets)
    count = float(microbatch.count_of(targets)) if microbatch.counts else 0.0
    if count == 0 and parts.checks.gathers:
        return _zero_of_gathered(output, targets, loss_fn)
    if count == 0:
        return _zero_of(output, targets, loss_fn, stands_in=not microbatch.counts)
    dtype = parts.compute_dtype
    if dtype is not None:
        output = tree_map(lambda leaf: _precise(leaf, dtype), output)
    if loss_fn is cross_entropy:
        logits = output if isinstance(output, torch.Tensor) else output.logits
        value = loss_fn(logits, targets, head=parts.tensor.head)
    else:
        is_part = count < microbatch.total and microbatch.count_of is count_targets
        with Unweighted() if is_part else contextlib.nullcontext():
            value = _called(parts, loss_fn, output, targets)
    _check_mean(value)
    if parts.stage_model is not None:
        parts.stage_model.check_loss(value)
    return value * (count / microbatch.total)


def _check_mean(value: object) -> None:
    if not isinstance(value, torch.Tensor) or value.dim() > 0:
        raise ValueError(f"loss_fn must return a mean, a tensor without dimensions; got {_describe(value)}")


def _called(parts: Parallelized, loss_fn: LossFunction, output: Tree, targets: Tree) -> torch.Tensor:
    try:
        with NoGradients() if parts.stages.last else contextlib.nullcontext():
            return loss_fn(output, targets)
    except (ValueError, RuntimeError, IndexError):
        check_whole(parts.split, output)
        raise


def _zero_of(output: Tree, targets: Tree, loss_fn: LossFunction, stands_in: bool = False) -> torch.Tensor:
    """A zero where no target counts. Its graph is that of the loss on other ranks: backward goes through the
    same modules, which may wait for each other there, and all gradients in it are zero.

    stands_in: output and targets are those of a row that counts elsewhere, for which the loss raises what it
    raises there; and it is called without gradients too, as it may gather rows.
    """
    if loss_fn is cross_entropy and not isinstance(output, torch.Tensor):
        output = output.logits
    elif loss_fn is not cross_entropy and (stands_in or torch.is_grad_enabled()):
        take_gathered()
        value, error = None, None
        try:
            value = loss_fn(tree_map(_without_gradient if stands_in else _without_values, output), targets)
        except Exception as raised:  # a mean over nothing, in whatever way it says so
            error = raised
        if given := take_gathered():
            return sum(_without_values(each).sum() for each in given if each.is_floating_point())
        if stands_in:
            if error is not None:
                raise error
            _check_mean(value)
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.requires_grad:
            return _Zero.apply(value)
    leaves = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not leaves:
        raise ValueError(
            "the model must return a floating tensor, or a tuple, list or dict with one; got "
            f"{_describe(output)}"
        )
    return sum(_without_values(leaf).sum() for leaf in leaves)  # what the loss uses is among them


def _zero_of_gathered(output: Tree, targets: Tree, loss_fn: LossFunction) -> torch.Tensor:
    """The same for a loss that needs the rows of this rank on the others: they are given, and what comes back
    in backward are the gradients of the others alone.
    """
    take_gathered()
    with contextlib.suppress(Exception):  # a mean over nothing, in whatever way it says so
        loss_fn(output, targets)
    given = take_gathered() or [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return sum(_without_values(each).sum() for each in given if each.is_floating_point())


def _without_values(leaf: Tree) -> Tree:
    """Zeros, to which any gradient, NaN too, is zero."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.masked_fill(torch.ones_like(leaf, dtype=torch.bool), 0.0)


def _without_gradient(leaf: Tree) -> Tree:
    """As it is; any gradient, NaN too, is zero."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return _Uncounted.apply(leaf)


class _Uncounted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)


class _Zero(torch.autograd.Function):
    """value -> 0, whatever it is."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(value)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _precise(leaf: Tree, compute_dtype: torch.dtype) -> Tree:
    """In fp32, where the model computes in less."""
    if not isinstance(leaf, torch.Tensor) or leaf.dtype != compute_dtype:
        return leaf
    return leaf.float()


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__
