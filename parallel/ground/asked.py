"""Functions and attributes of a tensor that do not ask for its values: for classes of parameters whose values
are not (all) here, tensor/reads.py and zero/sharded.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from pycomm.parallel.given import Tree

__all__ = ["ASKING", "LIKE_ITS_DTYPE", "first_of", "size_asked"]

T = torch.Tensor
ParameterT = TypeVar("ParameterT", bound=torch.nn.Parameter)
_ATTRIBUTES = (
    *("dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu", "is_meta"),
    *("is_sparse", "is_quantized", "is_nested", "is_mkldnn", "itemsize", "_version", "output_nr"),
    *("retains_grad", "name"),
)
# Not by what it holds.
ASKING: set[Callable[..., Tree]] = {
    *(getattr(T, name).__get__ for name in _ATTRIBUTES),
    *(T.is_floating_point, torch.is_floating_point, T.is_complex, torch.is_complex, T.element_size),
    *(T.get_device, T.is_inference, torch.is_inference, T.is_contiguous, T.data_ptr, T.register_hook),
    *(T.register_post_accumulate_grad_hook, T.__hash__, T.requires_grad_),
    *(T.new_zeros, T.new_ones, T.new_empty, T.new_full, T.new_tensor),
}
LIKE_ITS_DTYPE: set[Callable[..., Tree]] = {T.to, T.type_as}  # as their second argument
# New objects at each access, which are equal.
_SHAPE, _NDIM = (getattr(T, name).__get__ for name in ("shape", "ndim"))


def size_asked(
    func: Callable[..., Tree], shape: torch.Size, args: Sequence[Tree], kwargs: Mapping[str, Tree]
) -> torch.Size | int | None:
    """What `func` asks for, a size, of a tensor of this shape; None: it does something else."""
    if func == _SHAPE:
        return shape
    if func is T.size:
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return shape if dim is None else shape[dim]
    if func in (T.numel, T.nelement, torch.numel):
        return shape.numel()
    if func is T.dim or func == _NDIM:
        return len(shape)
    return shape[0] if func is T.__len__ else None


def first_of(kind: type[ParameterT], value: Tree) -> ParameterT | None:
    """The first of a class among arguments."""
    if isinstance(value, kind):
        return value
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, (list, tuple, type({}.values()))):
        return next((found for each in value if (found := first_of(kind, each)) is not None), None)
    return None
