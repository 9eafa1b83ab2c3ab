"""Logits of which a rank has some columns, in a model that may do more with them than return them.

    the model's forward            what it gets                 communication
    return logits                  the cut logits themselves    none: three numbers a token in cross_entropy
    logits.float(), * scale,       cut logits again             none
    tanh(logits)
    logits.shape                   the shape of the whole       none
    logits + bias, softmax(...),   a plain tensor, of the       one all_gather, at the first such use
    logits[..., :k], view, ...     whole logits

So whatever the forward does is right, and what only returns them is cheap. All ranks of the group run the
same forward, so they gather together. The tensor is a subclass that torch asks before each of its functions;
what changes it in place is refused, since the whole may have been made from it already.
"""

from typing import NamedTuple

import torch

from pycomm.parallel.ground import comm, differentiable

__all__ = ["CutLogits", "VocabShard"]

T = torch.Tensor
# Each element by itself, whatever its column.
_ALONE = {
    *(T.float, T.double, T.half, T.bfloat16, T.to, T.type, T.clone, T.contiguous, T.detach),
    *(T.tanh, torch.tanh, T.neg, torch.neg, T.__neg__),
}
# The same, where the other operand is a number.
_WITH_NUMBER = {
    *(T.mul, torch.mul, T.__mul__, T.__rmul__, T.div, torch.div, T.__truediv__, T.true_divide),
    *(T.add, torch.add, T.__add__, T.__radd__, T.sub, torch.sub, T.__sub__, T.__rsub__),
}


class VocabShard(NamedTuple):
    """Mark on logits of which this rank has the columns [start, stop) of full_size: attribute `vocab_shard`
    of the tensor.
    """

    group: comm.Group
    start: int
    stop: int
    full_size: int


class CutLogits(torch.Tensor):
    """(..., this rank's columns), which looks like (..., full_size). `cut` is the tensor itself."""

    @classmethod
    def of(cls, cut, shard, sizes):
        """sizes: columns of each rank of shard.group."""
        logits = cut.as_subclass(cls)
        logits.cut, logits.vocab_shard, logits.sizes, logits.gathered = cut, shard, sizes, None
        return logits

    def whole(self):
        """A plain tensor of all columns. Collective at the first call."""
        if self.gathered is None:
            self.gathered = differentiable.gather_from(self.cut, -1, self.sizes, self.vocab_shard.group)
        return self.gathered

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        me = args[0] if args and isinstance(args[0], cls) else None
        if me is not None:
            full = torch.Size((*me.cut.shape[:-1], me.vocab_shard.full_size))
            if func == T.shape.__get__:
                return full
            if func is T.size:
                dim = args[1] if len(args) > 1 else kwargs.get("dim")
                return full if dim is None else full[dim]
            if func is T.numel:
                return full.numel()
            if getattr(func, "__name__", "") in (
                "__get__",
                "dim",
                "is_floating_point",
                "is_complex",
                "get_device",
            ):
                return func(me.cut, *args[1:], **kwargs)  # dtype, device, requires_grad: those of the part
            if func in _ALONE or func in _WITH_NUMBER and not _has_tensor(args[1:], kwargs):
                out = func(me.cut, *args[1:], **kwargs)
                return out if out.shape != me.cut.shape else cls.of(out, me.vocab_shard, me.sizes)
            if func.__name__.endswith("_") and not func.__name__.endswith("__") or func is T.__setitem__:
                raise ValueError(
                    f"the model changes its logits in place ({func.__name__}), of which this rank has some "
                    "columns only: change a copy, or name the head in rules as 'replicate'"
                )
        return func(*_wholes(args), **_wholes(kwargs))


def _has_tensor(args, kwargs):
    return any(isinstance(value, T) for value in [*args, *kwargs.values()])


def _wholes(value):
    """With whole logits in the place of cut ones, in tuples, lists and dicts too."""
    if isinstance(value, CutLogits):
        return value.whole()
    if type(value) in (tuple, list):
        return type(value)(_wholes(item) for item in value)
    if type(value) is dict:
        return {key: _wholes(item) for key, item in value.items()}
    return value
