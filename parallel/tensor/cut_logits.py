"""Logits of which a rank has some columns, in a model that may do more with them than return them.

    the model's forward            what it gets                 communication
    return logits                  the cut logits themselves    none: three numbers a token in cross_entropy
    logits.float(), * scale,       cut logits again             none
    tanh(logits)
    logits.shape                   the shape of the whole       none
    logits + bias, softmax(...),   a plain tensor, of the       one all_gather, at the first such use
    logits[..., :k], view, ...     whole logits

So whatever the forward does is right, and what only returns them is cheap. All ranks of the group run the
same forward, so they gather together. From then on the whole is what counts, for the loss too: a view of it
may be written to, and hooks may stand on it. It belongs to the graph also where it is first asked for without
one (a measure under no_grad).

The tensor is a subclass that torch asks before each of its functions. Code that does not ask (scripted
functions, torch.vmap, an autograd.Function) would take the part for the whole: what asks at none of its
operations comes to __torch_dispatch__, which refuses.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

import torch

from pycomm.parallel.ground import comm, differentiable

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree

__all__ = ["CutLogits", "VocabShard"]

T = torch.Tensor
K = TypeVar("K", bound="CutLogits")
_SHAPE = operator.attrgetter("shape.__get__")(T)  # a new object at each access, which is equal


def _asked(names: str) -> list[Callable[..., Tree]]:
    """What torch hands to __torch_function__ for attributes."""
    return [getattr(T, name).__get__ for name in names.split()]


# Each element by itself, whatever its column. Not detach, which shares memory with what it is taken from.
_ALONE = {
    *(T.float, T.double, T.half, T.bfloat16, T.to, T.type, T.clone, T.contiguous),
    *(T.tanh, torch.tanh, T.neg, torch.neg, T.__neg__),
    # the same, where the other operand is a number
    *(T.mul, torch.mul, T.__mul__, T.__rmul__, T.div, torch.div, T.__truediv__, T.true_divide),
    *(T.add, torch.add, T.__add__, T.__radd__, T.sub, torch.sub, T.__sub__, T.__rsub__),
}
# The same of a part and of the whole.
_ALIKE = {
    *_asked("dtype device layout requires_grad is_leaf is_cuda is_cpu is_meta is_sparse is_quantized ndim"),
    *(T.dim, T.get_device, T.is_floating_point, torch.is_floating_point),
    *(T.is_complex, torch.is_complex, T.element_size),
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

    cut: torch.Tensor
    vocab_shard: VocabShard
    sizes: list[int]
    gathered: torch.Tensor | None

    @classmethod
    def of(cls: type[K], cut: torch.Tensor, shard: VocabShard, sizes: list[int]) -> K:
        """sizes: columns of each rank of shard.group."""
        logits = cut.as_subclass(cls)
        logits.cut, logits.vocab_shard, logits.sizes, logits.gathered = cut, shard, sizes, None
        return logits

    def whole(self) -> torch.Tensor:
        """A plain tensor of all columns. Collective at the first call."""
        if self.gathered is None:
            cut = self._checked()
            with torch.inference_mode(cut.is_inference()), torch.set_grad_enabled(cut.requires_grad):
                self.gathered = differentiable.gather_from(cut, -1, self.sizes, self.vocab_shard.group)
        return self.gathered

    def for_loss(self) -> tuple[torch.Tensor, VocabShard | None]:
        """(this rank's columns, their VocabShard), or (the whole, None) where that has been asked for."""
        return (self._checked(), self.vocab_shard) if self.gathered is None else (self.gathered, None)

    def _checked(self) -> torch.Tensor:
        """`cut`, unless an autograd.Function has made these logits: then its graph is not that of `cut`."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.requires_grad and not self.cut.requires_grad:
                raise _unseen("an autograd.Function")
        return self.cut

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Tree],
        types: Collection[type[torch.Tensor]],
        args: tuple[Tree, ...] = (),
        kwargs: dict[str, Tree] | None = None,
    ) -> Tree:
        kwargs = kwargs or {}
        me = args[0] if args and isinstance(args[0], cls) else None
        if me is not None:
            full = torch.Size((*me.cut.shape[:-1], me.vocab_shard.full_size))
            if func == _SHAPE:
                return full
            if func is T.size:
                dim = args[1] if len(args) > 1 else kwargs.get("dim")
                return full if dim is None else full[dim]
            if func is T.numel:
                return full.numel()
            if func in _ALIKE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in _ALONE and me.gathered is None and not _has_tensor(args[1:], kwargs):
                cut = me._checked()
                out = func(cut, *args[1:], **kwargs)
                if out is cut:
                    return me
                return cls.of(out, me.vocab_shard, me.sizes) if isinstance(out, T) else out
        return func(*_wholes(args), **_wholes(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is no method
        cls,
        func: Callable[..., Tree],
        types: Iterable[type[torch.Tensor]],
        args: Tree = (),
        kwargs: Tree = None,
    ) -> NoReturn:
        raise _unseen(f"a scripted function, torch.vmap, an autograd.Function ({func})")


def _unseen(what: str) -> ValueError:
    return ValueError(
        "the model gives its logits, of which this rank has some columns only, to code that torch's "
        f"functions do not see: {what}. Give it logits[...], which are whole, or name the head in rules as "
        "'replicate'"
    )


def _has_tensor(args: Iterable[Tree], kwargs: Mapping[str, Tree]) -> bool:
    return any(isinstance(value, T) for value in [*args, *kwargs.values()])


def _wholes(value: Tree) -> Tree:
    """With whole logits in the place of cut ones, in tuples, lists and dicts too."""
    if isinstance(value, CutLogits):
        return value.whole()
    if type(value) in (tuple, list):
        return type(value)(_wholes(item) for item in value)
    if type(value) is dict:
        return {key: _wholes(item) for key, item in value.items()}
    return value
