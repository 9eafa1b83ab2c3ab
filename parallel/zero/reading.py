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

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Reading"]

T = torch.Tensor
# They ask for what an empty tensor has, too.
_HAS = {
    *(T.dtype.__get__, T.device.__get__, T.layout.__get__, T.requires_grad.__get__, T.is_leaf.__get__),
    *(T.grad.__get__, T.grad_fn.__get__, T.is_cuda.__get__, T.is_cpu.__get__, T.is_meta.__get__),
    *(T.is_sparse.__get__, T.is_quantized.__get__, T.is_floating_point, torch.is_floating_point),
    *(T.is_complex, torch.is_complex, T.element_size, T.__hash__, T.requires_grad_, T._version.__get__),
    T.data.__set__,  # streamed.py gathers and frees with it
}


class Reading(TorchFunctionMode):
    """For forwards. unit_of: id of a parameter -> its Unit. read: called with a unit that is not whole."""

    def __init__(self, unit_of, read):
        super().__init__()
        self.unit_of, self.read = unit_of, read

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _HAS:
            self._look(args)
            self._look(kwargs.values())
        return func(*args, **kwargs)

    def _look(self, values):
        for value in values:
            if isinstance(value, torch.nn.Parameter):
                unit = self.unit_of.get(id(value))
                if unit is not None and not unit.is_whole:
                    self.read(unit)
            elif isinstance(value, (list, tuple)):
                self._look(value)
