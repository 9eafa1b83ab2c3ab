"""What a stage has instead of values that only other stages compute: a tensor of the right shape without
memory, which carries a mark through every use. Its numbers are NaN, so that what might lose the mark (a view
taken before its base was written, a function that torch cannot see) does not pass for a result.

    stage 1 of 2      x = embed(idx)      absent: embed has no weights here
                      x = x * 8           absent: made of something absent
                      mask = f(idx)       a value: made of the batch, which every rank has
                      zeros_like(x)       a value: only the shape was asked for
                      block 0             absent
                      block 1(x, mask)    gets what the stage before has sent in the place of x

Whatever reaches a present module, or the loss, with the mark on it would have been computed from nothing:
the stage refuses it, and says where it came from. A value that cannot carry a mark (a number, a truth value,
a shape that depends on values) is refused where it is asked for.

The mark is the class of the tensor. torch hands every function of its Python API that meets one to
__torch_function__; what torch itself runs inside of such a function needs no look.
"""

import math

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["Absent", "absent_like", "absent_parameter", "first_absent", "is_absent"]

T = torch.Tensor
# Their results depend on values in a way that no tensor of this shape can stand for.
_DECIDE = {
    *(T.item, T.tolist, T.numpy, T.__array__, T.__bool__, T.__int__, T.__float__, T.__index__, T.__complex__),
    *(T.is_nonzero, torch.is_nonzero, T.equal, torch.equal, T.allclose, torch.allclose, T.__contains__),
    *(T.nonzero, torch.nonzero, torch.argwhere, T.argwhere, T.masked_select, torch.masked_select),
    *(T.unique, torch.unique, T.unique_consecutive, torch.unique_consecutive, T.bincount, torch.bincount),
}
# Their results have the shape, dtype or device of their first argument and none of its values.
_LIKE = {
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like),
    *(torch.randn_like, torch.randint_like, T.new_zeros, T.new_ones, T.new_empty, T.new_full),
}
# Their results have the values of the first argument and the shape, dtype or device of the second.
_AS = {T.type_as, T.expand_as, T.view_as, T.reshape_as, T.to}
# They end with an underscore and write no values.
_KEEP = {
    *(T.requires_grad_, T.retain_grad, T.unsqueeze_, T.squeeze_, T.transpose_, T.t_, T.detach_, T.swapaxes_),
}
_WRITE = {T.__setitem__, T.__iadd__, T.__isub__, T.__imul__, T.__itruediv__}


class Absent(torch.Tensor):
    """A tensor whose values another stage has. `origin`: the module that computes them there."""

    origin = "another stage"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        origin = first_absent((args, kwargs)).origin
        if func in _DECIDE or func is T.__getitem__ and _selects(args[1]):
            raise ValueError(
                f"the model asks for values ({func.__name__}) that come from {origin}, which another "
                "pipeline stage runs. Move that into a block, or use a plan with pp=1"
            )
        writes = func in _WRITE or _in_place(func)
        if writes and isinstance(args[0], Absent):
            return args[0]  # it has no memory of its own to write to
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
            if writes:
                _mark_written(args[0], origin)
            tree_map_only(T, lambda written: _mark_written(written, origin), kwargs.get("out"))
            if func in _LIKE or func in _AS and not isinstance(args[0], Absent):
                return out
            return tree_map_only(T, lambda value: _absent(value, origin), out)


def _in_place(func):
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__") and func not in _KEEP


def _selects(index):
    """Whether an index picks as many elements as it has values that are true."""
    return any(isinstance(leaf, Absent) and leaf.dtype == torch.bool for leaf in tree_leaves(index))


def _absent(value, origin):
    """Whole numbers and truth values are made zero: from NaN they would be no index of anything."""
    if not value.is_floating_point() and not value.is_complex():
        value = torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)
    value = value.as_subclass(Absent)
    value.origin = origin
    return value


def _mark_written(tensor, origin):
    """From now on the tensor is Absent, and what it is a view of."""
    for each in (tensor, tensor._base):
        if each is not None:
            each.__class__ = Absent
            each.origin = origin


def absent_like(value, origin, device):
    """In the place of `value`, of any kind, with tensors on meta: these become Absent."""

    def stand_in(tensor):
        with torch._C.DisableTorchFunctionSubclass():
            nothing = math.nan if tensor.is_floating_point() or tensor.is_complex() else 0
            value = torch.full((), nothing, dtype=tensor.dtype, device=device)
            return _absent(value.expand(tensor.shape), origin)

    return tree_map_only(T, stand_in, value)


def absent_parameter(parameter, name):
    """In the place of a parameter that the forward may use though this stage has it not: it has a device,
    which one on meta has not.
    """
    stand_in = torch.nn.Parameter(absent_like(parameter, name, parameter.device), requires_grad=False)
    stand_in.origin = name
    return stand_in


def is_absent(parameter):
    """Whether a parameter belongs to stages of other ranks."""
    return parameter.is_meta or isinstance(parameter, Absent)


def first_absent(values):
    """The first Absent among values of any kind, or None."""
    if isinstance(values, torch.Tensor):
        return values if isinstance(values, Absent) else None
    return next((leaf for leaf in tree_leaves(values) if isinstance(leaf, Absent)), None)
