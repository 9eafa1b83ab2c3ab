"""Parameters that are read without calling the module they belong to, while ZeRO-3 has them sharded.

    F.linear(x, self.wte.weight)                a head that is tied by hand
    multi_head_attention_forward(..., w, b)     MultiheadAttention, of its child out_proj
    sum(p.square().sum() for p in ...)          a penalty, in the forward or in the loss

No forward is there that could gather them, and an empty tensor need not be an error (its sum is zero). So a
mode of torch functions looks for sharded parameters among the arguments of every call of a forward. The unit
of one that it finds is gathered at once, and stays whole through this pass and all later ones: nobody can
tell which backward will want it. The cost is its memory, and a microsecond of host time per torch call.

Dtype, device and such can be asked for at any time. Ranks must read alike, as they must call alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.overrides import TorchFunctionMode

from pycomm.parallel.given import Tree

if TYPE_CHECKING:
    from pycomm.parallel.zero.units import Unit

__all__ = ["Reading"]

T = torch.Tensor
# They ask for what an empty tensor has, too.
_READ = (
    *("dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "is_cuda", "is_cpu"),
    *("is_meta", "is_sparse", "is_quantized", "_version"),
)
_WRITTEN = ("data",)  # streamed.py gathers and frees with it
_HAS: set[Callable[..., Tree]] = {
    *(getattr(T, name).__get__ for name in _READ),
    *(getattr(T, name).__set__ for name in _WRITTEN),
    *(T.is_floating_point, torch.is_floating_point, T.is_complex, torch.is_complex),
    *(T.element_size, T.__hash__, T.requires_grad_),
}


class Reading(TorchFunctionMode):
    """For forwards. unit_of: by the id of a parameter. read: called with a unit that is not whole."""

    def __init__(self, unit_of: Mapping[int, Unit], read: Callable[[Unit], None]) -> None:
        super().__init__()
        self.unit_of, self.read = unit_of, read

    def __torch_function__(
        self,
        func: Callable[..., Tree],
        types: Sequence[type],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree:
        kwargs = kwargs or {}
        if func not in _HAS:
            self._look(args)
            self._look(kwargs.values())
        return func(*args, **kwargs)

    def _look(self, values: Iterable[Tree]) -> None:
        for value in values:
            if isinstance(value, torch.nn.Parameter):
                unit = self.unit_of.get(id(value))
                if unit is not None and not unit.is_whole:
                    self.read(unit)
            elif isinstance(value, (list, tuple)):
                self._look(value)
