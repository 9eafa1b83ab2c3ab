"""What a stage has instead of values that only other stages compute: a tensor of the right shape without
memory, which carries a mark through every use. Its numbers are NaN, so that what might lose the mark (a view
taken before its base was written, a function that torch cannot see) does not pass for a result.

    stage 1 of 2      x = embed(idx)      absent: embed has no weights here
                      x = x * 8           absent: made of something absent
                      mask = f(idx)       a value: made of the batch, which every rank has
                      zeros_like(x)       a value: only the shape was asked for
                      block 0             absent
                      block 1(x, mask)    gets what the stage before has sent in the place of x

What was sent is delivered to its stand-in (handover.py), which counts as that tensor until the pass ends.
Whatever else reaches a present module, or the loss, with the mark on it would have been computed from
nothing: the stage refuses it, and says where it came from. A value that cannot carry a mark (a number, a
truth value, a shape that depends on values) is refused where it is asked for.

The mark is the class of the tensor. It goes on at two levels:

    __torch_function__    functions of torch's Python API, also with tensors that became Absent when something
                          was written into them
    __torch_dispatch__    the operations below, whoever calls them: scripted code, torch.vmap, a tensor taken
                          for a number; operations in place leave an Absent as it is
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch.utils._pytree import tree_map_only

from pycomm.parallel.given import Tree
from pycomm.parallel.ground.leaves import leaves

__all__ = ["Absent", "Delivery", "absent_like", "absent_parameter", "first_absent", "is_absent"]

T = torch.Tensor
# Their results depend on values in a way that no tensor of this shape can stand for.
_DECIDE = {
    *(T.item, T.tolist, T.numpy, T.__array__, T.__bool__, T.__int__, T.__float__, T.__index__, T.__complex__),
    *(T.is_nonzero, torch.is_nonzero, T.equal, torch.equal, T.allclose, torch.allclose, T.__contains__),
    *(T.nonzero, torch.nonzero, torch.argwhere, T.argwhere, T.masked_select, torch.masked_select),
    *(T.unique, torch.unique, T.unique_consecutive, torch.unique_consecutive, T.bincount, torch.bincount),
}
# The same, of operations.
_DECIDING_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
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
_WRITE = {
    *(T.__setitem__, T.__iadd__, T.__isub__, T.__imul__, T.__itruediv__, T.__ifloordiv__, T.__imod__),
    *(T.__iand__, T.__ior__, T.__ixor__, T.__ilshift__, T.__irshift__, T.__ipow__),
}
_LIKE_NAMES = {func.__name__ for func in _LIKE}
_IN_MEMORY = {"view_as_complex", "as_strided"}  # they ask how their argument lies in memory


class Delivery:
    """What has come in the place of a stand-in; tensor: None when the pass is over."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor

    def end(self) -> None:
        self.tensor = None


class Absent(torch.Tensor):
    """A tensor whose values another stage has. `origin`: the module that computes them there."""

    origin = "another stage"
    delivery: Delivery | None = None

    @property
    def delivered(self) -> bool:
        """Whether its values have come."""
        return self.delivery is not None and self.delivery.tensor is not None

    def deliver(self, tensor: torch.Tensor) -> Delivery:
        """From now on, until the Delivery ends, this stands for a tensor that has come."""
        self.delivery = Delivery(tensor)
        return self.delivery

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Tree],
        types: Sequence[type],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree:
        args, kwargs, absent = _with_deliveries(args, kwargs or {})
        if absent is None:
            return func(*args, **kwargs)
        origin = absent.origin
        if func in _DECIDE or func is T.__getitem__ and _selects(args[1]):
            raise _decides(func.__name__, origin)
        if func is T.__deepcopy__:
            return args[0]
        if func in (T.__repr__, T.__format__):
            return f"Absent(shape={tuple(args[0].shape)}, dtype={args[0].dtype}, origin={origin})"
        writes = func in _WRITE or _in_place(func)
        if writes and isinstance(args[0], Absent):
            return args[0]  # it has no memory of its own to write to
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
            if writes:
                _mark_written(args[0], origin)
            if "out" in kwargs:
                tree_map_only(T, lambda written: _mark_written(written, origin), kwargs["out"])
            if func in _LIKE or func in _AS and not isinstance(args[0], Absent):
                return out
            if isinstance(out, T):
                return _absent(out, origin)
            return tree_map_only(T, lambda value: _absent(value, origin), out)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an object that cannot be called so
        cls,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree:
        kwargs = kwargs or {}
        absent = first_absent((args, kwargs))
        assert absent is not None  # torch calls this for nothing else
        name, origin = func.overloadpacket.__name__, absent.origin
        if _depends_on_values(func, name, args):
            raise _decides(name, origin)
        written = [] if torch.Tag.inplace_view in func.tags else _written(func, args, kwargs)
        if written and all(isinstance(tensor, Absent) for tensor in written):
            return written[0] if len(written) == 1 else tuple(written)
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
            if name in _IN_MEMORY:
                args = (args[0].contiguous(), *args[1:])
            out = _call(func, args, kwargs)
            if written:
                for tensor in written:
                    _mark_written(tensor, origin)
                    if tensor.is_floating_point():
                        tensor.fill_(math.nan)  # for views of the same memory, which have no mark
                return out
            if name in _LIKE_NAMES:
                return out
            if torch.Tag.inplace_view in func.tags:
                return out  # another shape of the same tensor
            views = any(result.alias_info is not None for result in func._schema.returns)
            return tree_map_only(T, lambda value: _mark(value, origin, views), out)


class _Given(NamedTuple):
    """What a function is called with."""

    args: Sequence[Tree]
    kwargs: Mapping[str, Tree]
    absent: Absent | None  # the first that has not come


def _with_deliveries(args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> _Given:
    """With what was delivered in its place."""
    found = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Absent)]
    absent = found[0] if found else None
    if any(leaf.delivered for leaf in found):
        args, kwargs = tree_map_only(
            Absent, lambda leaf: leaf.delivery.tensor if leaf.delivered else leaf, (args, kwargs)
        )
        absent = first_absent((args, kwargs))
    return _Given(args, kwargs, absent)


def _decides(name: str, origin: str) -> ValueError:
    return ValueError(
        f"the model asks for values ({name}) that come from {origin}, which another pipeline stage runs. "
        "Move that into a block, or use a plan with pp=1"
    )


def _depends_on_values(func: torch._ops.OpOverload, name: str, args: Sequence[Tree]) -> bool:
    """Whether an operation's result is a number, or has a shape, that depends on values."""
    if name == "index":
        return _selects(args[1])
    return any(tag in func.tags for tag in _DECIDING_TAGS)


def _call(func: torch._ops.OpOverload, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> Tree:
    """An operation's result for NaN; where it does not take that, the result's shape alone."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        found: list[torch.Tensor] = []

        def to_meta(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor.to("meta")

        try:
            out = func(*tree_map_only(T, to_meta, args), **tree_map_only(T, to_meta, kwargs))
        except Exception:
            raise error from None
        if any(tensor.is_meta for tensor in found):
            raise  # two devices, which the shape alone would hide
        return tree_map_only(T, lambda value: _nothing(value, found[0].device), out)


def _nothing(value: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """In the shape of a tensor on meta, without memory: NaN, or zero where that is no number."""
    nothing = math.nan if value.is_floating_point() or value.is_complex() else 0
    return torch.full((), nothing, dtype=value.dtype, device=device).expand(value.shape)


def _written(
    func: torch._ops.OpOverload, args: Sequence[Tree], kwargs: Mapping[str, Tree]
) -> list[torch.Tensor]:
    """The tensors that an operation writes into."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in leaves(value) if isinstance(leaf, T)]
    return found


def _mark(value: torch.Tensor, origin: str, view: bool) -> Absent:
    whole = not value.is_floating_point() and not value.is_complex()
    if whole and not view and 0 not in value.stride():
        value.zero_()
    marked = T._make_subclass(Absent, value)
    marked.origin = origin
    return marked


def _in_place(func: Callable[..., Tree]) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__") and func not in _KEEP


def _selects(index: Tree) -> bool:
    """Whether an index picks as many elements as it has values that are true."""
    return any(isinstance(leaf, Absent) and leaf.dtype == torch.bool for leaf in leaves(index))


def _absent(value: torch.Tensor, origin: str) -> Absent:
    """Whole numbers and truth values are made zero: from NaN they would be no index of anything."""
    if not value.is_floating_point() and not value.is_complex():
        value = torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)
    marked = value.as_subclass(Absent)
    marked.origin = origin
    return marked


def _mark_written(tensor: torch.Tensor, origin: str) -> None:
    """From now on the tensor is Absent, and what it is a view of."""
    for each in (tensor, tensor._base):
        if each is not None:
            each.__class__ = Absent
            cast(Absent, each).origin = origin


def absent_like(value: Tree, origin: str, device: torch.device | str) -> Tree:
    """In the place of `value`, of any kind, with tensors on meta: these become Absent."""

    def stand_in(tensor: torch.Tensor) -> Absent:
        with torch._C.DisableTorchFunctionSubclass():
            return _absent(_nothing(tensor, device), origin)

    return stand_in(value) if isinstance(value, T) else tree_map_only(T, stand_in, value)


def absent_parameter(parameter: torch.Tensor, name: str, device: torch.device | str) -> torch.nn.Parameter:
    """In the place of a parameter that the forward may use though this stage has it not: it has a device,
    which one on meta has not.
    """
    stand_in = torch.nn.Parameter(absent_like(parameter, name, device), requires_grad=False)
    cast(Absent, stand_in).origin = name  # it is both
    return stand_in


def is_absent(parameter: torch.Tensor) -> bool:
    """Whether a parameter belongs to stages of other ranks."""
    return parameter.is_meta or isinstance(parameter, Absent)


def first_absent(values: Tree) -> Absent | None:
    """The first Absent among values of any kind, or None."""
    if isinstance(values, torch.Tensor):
        return values if isinstance(values, Absent) else None
    return next((leaf for leaf in leaves(values) if isinstance(leaf, Absent)), None)
