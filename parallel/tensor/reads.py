"""Parameters that are cut, read beside the layer that has them.

    sum(p.square().sum() for p in model.parameters())     a penalty, in the forward or in the loss
    F.linear(x, self.proj.weight)                         a layer's product, done by the model itself

Each rank would take its part for the whole, and no shape need tell. So in the first step a mode of torch
functions looks for such parameters among the arguments of every call. It lets pass what a layer of this
package or the parameter's own module does, what asks for a shape, a dtype and the like, and what no gradient
goes through (a moving average). Cost: a microsecond of host time per torch call, in the first step.
"""

import contextlib
import sys

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["Reads"]

T = torch.Tensor
_PACKAGE = __name__.rpartition(".")[0] + "."
# Not by what they hold.
_ASKING = {
    *(T.detach, T.size, T.numel, T.dim, T.is_floating_point, torch.is_floating_point, T.is_complex),
    *(torch.is_complex, T.element_size, T.__hash__, T.requires_grad_, T.is_contiguous, T.stride),
    *(torch.is_tensor, T.register_hook, T.get_device, T.__repr__, T.__format__),
}


class Reads:
    """layouts: of the parameters of `model`, by name, final."""

    def __init__(self, model, layouts):
        self.cut = {}  # id of a parameter -> its name
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in layouts and layouts[name].dim is not None:
                self.cut.setdefault(id(parameter), name)
        self.seen = set()  # keys of the forwards that were looked at

    @contextlib.contextmanager
    def looked_for(self, key):
        """Around a forward. key: of forwards that run the same code."""
        with contextlib.nullcontext() if key in self.seen else _Looking(self.cut):
            yield
        self.seen.add(key)


class _Looking(TorchFunctionMode):
    def __init__(self, cut):
        super().__init__()
        self.cut = cut

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)  # what is compiled is not looked at
        name = getattr(func, "__name__", "")
        if torch.is_grad_enabled() and func not in _ASKING and name not in ("__get__", "__set__"):
            self._look(args)
            self._look(kwargs.values())
        return func(*args, **kwargs)

    def _look(self, values):
        for value in values:
            if isinstance(value, nn.Parameter):
                if id(value) in self.cut and not _by_its_layer(value):
                    raise ValueError(
                        f"the model or the loss reads {self.cut[id(value)]!r}, of which this rank of tp has "
                        "a part only, beside its layer (a penalty on weights, a product of its own): name "
                        "the layer in rules as 'replicate', or use a plan with tp=1"
                    )
            elif isinstance(value, (list, tuple)):
                self._look(value)


def _by_its_layer(parameter):
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_PACKAGE) and name != __name__:
            return True
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and any(p is parameter for p in owner._parameters.values()):
            return True
        frame = frame.f_back
    return False
