"""A gradient that is not whole in a parameter's .grad, in a loop of the user's own.

    zero 2 and 3    the sum lies in the ranks' chunks     .grad is a stand-in without memory
    tp, ep          each rank has its part                .grad is the part, of another class

What reads it would take a part for the whole: torch.nn.utils.clip_grad_norm_ would clip by another norm, a
GradScaler would find an inf on some ranks only. So values are refused, and what asks for none is answered.
Multiplication by a number, which acts on each part alike, is done to a part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree

__all__ = ["Elsewhere", "StandIn", "guarded", "plain", "stand_in"]

T = torch.Tensor
_ATTRIBUTES = (
    *("dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu", "is_meta"),
    *("is_sparse", "is_quantized", "is_nested", "is_mkldnn", "itemsize", "_version", "shape", "ndim", "grad"),
)
_ASKING = {
    *(getattr(T, name).__get__ for name in _ATTRIBUTES),
    *(T.is_floating_point, torch.is_floating_point, T.is_complex, torch.is_complex, T.element_size),
    *(T.size, T.dim, T.numel, T.stride, T.__hash__, T.get_device, T.is_contiguous, T.data_ptr),
}
_CLEARING = {T.zero_, T.detach_, T.requires_grad_, torch._foreach_zero_}
_SCALING = {T.mul_, T.div_, T.__imul__, T.__itruediv__}


class Elsewhere(torch.Tensor):
    """A part of a gradient, or the stand-in for one."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Tree],
        types: Collection[type[torch.Tensor]],
        args: tuple[Tree, ...] = (),
        kwargs: dict[str, Tree] | None = None,
    ) -> Tree:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ASKING:
                return func(*args, **kwargs)
            if not _has_stand_in(args):
                by_number = func in _SCALING and len(args) == 2 and isinstance(args[1], (int, float))
                if by_number or func in _CLEARING:
                    return func(*args, **kwargs)
            if func in (T.__repr__, T.__format__, T.__str__):
                return "<a gradient that is not whole on this rank>"
        raise ValueError(
            f"{getattr(func, '__name__', func)} of a parameter's .grad: under this plan the gradient is not "
            "whole there, and this rank's part alone would give another number. Clip with "
            "parallel.clip_grad_norm_(model, max_norm), read with parallel.full_gradients(model), clear with "
            "opt.zero_grad(); for a GradScaler use parallel.step(scaler=...)"
        )


class StandIn(Elsewhere):
    """Without memory."""


def _has_stand_in(args: Tree) -> bool:
    if isinstance(args, (tuple, list)):
        return any(map(_has_stand_in, args))
    return isinstance(args, StandIn)


def stand_in(parameter: torch.nn.Parameter) -> StandIn:
    """In the shape that the parameter has in memory, which is not the one that zero/sharded.py says."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach().new_zeros(()).expand(parameter.shape).as_subclass(StandIn)


def guarded(grad: torch.Tensor) -> Elsewhere:
    """The same memory."""
    return plain(grad).as_subclass(Elsewhere)


def plain(grad: torch.Tensor) -> torch.Tensor:
    """The same memory, as torch knows it."""
    if not isinstance(grad, Elsewhere):
        return grad
    with torch._C.DisableTorchFunctionSubclass():
        return grad.as_subclass(torch.Tensor)
