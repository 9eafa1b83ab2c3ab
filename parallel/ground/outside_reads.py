"""Parameters that the user's own loop reads outside of the model's forward, where a rank has less than one
process has of them.

    loss = f(model(x), y) + sum(p.square().sum() for p in model.parameters())

    zero=3           the values are sharded, and an empty tensor's sum is 0
    tp, ep           this rank's part; what is whole may have its gradients summed over tp (megatron_sp)

Values and gradients would be others than in one process, without a word. So from the first forward of such a
loop on these parameters have a class of their own, but for the time in which the plan works with them
(forwards, backwards, the optimizer), and what would be recorded for a gradient is refused. Without gradients
(torch.no_grad, detach) all goes through: averages, prints and copies of what is here.

Inside of a forward tensor/reads.py and zero/reading.py see what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree

__all__ = ["OutsideReads", "Read"]

T = torch.Tensor
_VIEWS = {getattr(T, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
_WITHOUT_GRADIENT = {
    *(
        T.detach,
        T.detach_,
        T.requires_grad_,
        T.size,
        T.dim,
        T.numel,
        T.nelement,
        T.stride,
        T.__len__,
        T.__hash__,
    ),
    *(T.is_floating_point, torch.is_floating_point, T.is_complex, torch.is_complex, T.element_size),
    *(T.get_device, T.is_contiguous, T.data_ptr, T.register_hook, T.register_post_accumulate_grad_hook),
    *(
        T.retain_grad,
        T.__repr__,
        T.__format__,
        T.__deepcopy__,
        T.__reduce_ex__,
        T.untyped_storage,
        T.storage_offset,
    ),
    *(T.new_zeros, T.new_ones, T.new_empty, T.new_full, T.new_tensor, torch.zeros_like, torch.ones_like),
    *(torch.empty_like, torch.rand_like, torch.randn_like, torch.full_like, T.type, T.is_inference),
    *(T.is_shared, T.share_memory_, T.tolist, T.numpy, T.is_pinned),
}


class Read(NamedTuple):
    """A parameter that must not be read."""

    parameter: nn.Parameter
    name: str
    why: str
    numel: int | None  # with so many elements it may be; None: never


class OutsideReads:
    """is_used: the user's own loop is at work."""

    def __init__(self, reads: Collection[Read]) -> None:
        self.reads = reads
        self.is_used = self.is_on = False
        notes = {id(read.parameter): read for read in reads}
        self.kind = type("Parameter", (_Outside,), {"notes": notes})

    def refuse(self) -> None:
        """From here on, where the loop is at work."""
        if self.is_used and not self.is_on:
            self.is_on = True
            for read in self.reads:
                if type(read.parameter) is nn.Parameter:
                    read.parameter.__class__ = self.kind

    def allow(self) -> None:
        if self.is_on:
            self.is_on = False
            for read in self.reads:
                if type(read.parameter) is self.kind:
                    read.parameter.__class__ = nn.Parameter


class _Outside(nn.Parameter):
    notes: Mapping[int, Read]  # of the OutsideReads that it belongs to

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Tree],
        types: Collection[type[torch.Tensor]],
        args: tuple[Tree, ...] = (),
        kwargs: dict[str, Tree] | None = None,
    ) -> Tree:
        with torch._C.DisableTorchFunctionSubclass():
            if torch.is_grad_enabled() and func not in _WITHOUT_GRADIENT and not _is_attribute(func):
                for read in _reads_in((args, kwargs or {})):
                    if read.parameter.requires_grad and read.parameter.numel() != read.numel:
                        raise ValueError(
                            f"the loss reads the parameter {read.name!r}, {read.why}, outside of the model's "
                            f"forward ({getattr(func, '__name__', func)}): a penalty on weights would be "
                            "another one than in one process. Use the optimizer's weight_decay, or a plan "
                            "without tp, ep and zero=3; what needs no gradient reads it under torch.no_grad()"
                        )
            return func(*args, **(kwargs or {}))


def _is_attribute(func: Callable[..., Tree]) -> bool:
    return getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__") and func not in _VIEWS


def _reads_in(value: Tree) -> list[Read]:
    if isinstance(value, _Outside):
        note = type(value).notes.get(id(value))
        return [] if note is None else [note]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [read for each in value for read in _reads_in(each)]
    return []
