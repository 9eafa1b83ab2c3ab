"""Parameters that a rank must not read beside their layer, as it has less than one process has of them.

    sum(p.square().sum() for p in model.parameters())     a penalty, in the forward or in the loss
    F.linear(x, self.proj.weight)                         a layer's product, done by the model itself

    what tp has cut                        each rank would take its part for the whole
    norms under megatron_sp, and others    whole, but gradients are summed over tp: a penalty would count
    with `partial` layouts                 once for each rank
    experts under ep                       a penalty would count only with the share of this rank's rows
    blocks of other stages under pp        they have no values here

No shape need tell. So through every forward of a step these parameters have a class of their own, but for
the time in which the module runs that has them:

    class        Guarded | Parameter | Guarded | Parameter | Guarded                     | Parameter
    forward      ....... | layer 1   | ....... | layer 2   | model's own code, the loss  | backward

and torch hands each function and attribute of a Guarded to __torch_function__ here: dtype, device and such
are answered, sizes are those of one process (inside a sublayer that is cut: of this rank, as narrow.py has
it), and everything else is refused, values without gradient too. Whatever begins in a later step is seen like
in the first one.

Cost: 0.1 us for each change of class. Alternatives that lost: a mode of torch functions, which sees every
call of the forward (1 us each); counting the edges to AccumulateGrad, which misses `detach()` and numbers.
"""

import contextlib
import functools
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import nn

from pycomm.parallel.ground.layout import Layout
from pycomm.parallel.models.modes import uncompiled
from pycomm.parallel.tensor.adapters import AdapterForward
from pycomm.parallel.tensor.narrow import SublayerForward

__all__ = ["Reads"]

T = torch.Tensor
# Not by what they hold.
_ASKING = {
    *(T.dtype.__get__, T.device.__get__, T.layout.__get__, T.requires_grad.__get__, T.is_leaf.__get__),
    *(T.grad_fn.__get__, T.is_cuda.__get__, T.is_cpu.__get__, T.is_meta.__get__, T.is_sparse.__get__),
    *(T.is_quantized.__get__, T.is_nested.__get__, T.is_mkldnn.__get__, T.itemsize.__get__),
    *(T._version.__get__, T.output_nr.__get__, T.retains_grad.__get__, T.name.__get__),
    *(T.is_floating_point, torch.is_floating_point, T.is_complex, torch.is_complex, T.element_size),
    *(T.get_device, T.is_inference, torch.is_inference, T.is_contiguous, T.data_ptr, T.register_hook),
    *(T.register_post_accumulate_grad_hook, T.__hash__, T.requires_grad_, T.__repr__, T.__format__),
    *(T.new_zeros, T.new_ones, T.new_empty, T.new_full, T.new_tensor),
    T.data.__set__,  # zero/streamed.py gathers and frees with it
}
_LIKE_ITS_DTYPE = {T.to, T.type_as}  # as their second argument
_SHAPE, _NDIM = T.shape.__get__, T.ndim.__get__  # new objects at each access, which are equal


class _Note(NamedTuple):
    """Of a parameter that is guarded."""

    name: str
    why: str
    shape: torch.Size | None  # in one process; None: the parameter's own
    sublayers: tuple[SublayerForward, ...]  # those that it lies in


class Reads:
    """layouts: of the parameters of `model`, by name, final. moes, stacked: {name: MoE layer}, and names of
    modules with stacked experts, whose experts have been dealt over ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: Mapping[str, Layout],
        moes: Mapping[str, nn.Module],
        stacked: Collection[str],
    ) -> None:
        self.notes = {}  # id of a parameter -> _Note
        self.guarded = []
        self.kind = type("Parameter", (_Guarded,), {"notes": self.notes})
        for name, parameter in model.named_parameters():
            layout = layouts[name]
            if parameter.is_meta:
                self._guard(parameter, name, _ABSENT, torch.Size(layout.full_shape))
            elif layout.dim is not None:
                why = _DEALT if name.rpartition(".")[0] in stacked else _CUT
                self._guard(parameter, name, why, torch.Size(layout.full_shape))
            elif layout.partial:
                self._guard(parameter, name, _PARTIAL)
        for prefix, moe in moes.items():
            for name, parameter in moe.experts.named_parameters():
                self._guard(parameter, f"{prefix}.experts.{name}", _DEALT)
            for expert in moe.experts.values():
                self._let(expert, list(expert.parameters()))
        for module in model.modules():
            inner = module.out_proj if isinstance(module, nn.MultiheadAttention) else None
            if isinstance(module.forward, AdapterForward):
                inner = module.forward.base  # whose bias it adds
            self._let(
                module, [p for each in (module, inner) if each is not None for p in each._parameters.values()]
            )
        _find_sublayers(model, self.notes)
        _leave_uncompiled(model)

    def _guard(self, parameter, name, why, shape=None):
        if type(parameter) is nn.Parameter and id(parameter) not in self.notes:
            self.guarded.append(parameter)
            self.notes[id(parameter)] = _Note(name, why, shape, ())

    def _let(self, module, parameters):
        """The forward of `module` may read these."""
        own = [parameter for parameter in parameters if id(parameter) in self.notes]
        if own:
            module.forward = functools.partial(_as_parameters, own, module.forward)

    @contextlib.contextmanager
    def refused(self):
        """Around a forward and its loss."""
        kind = self.kind
        for parameter in self.guarded:
            parameter.__class__ = kind
        try:
            yield
        finally:
            for parameter in self.guarded:
                parameter.__class__ = nn.Parameter


_CUT = "of which this rank of tp has a part only"
_PARTIAL = "whose gradients are summed over tp, as each rank works on its positions or heads with it"
_ABSENT = "which another pipeline stage has"
_DEALT = "an expert that this rank of ep alone has"


def _find_sublayers(model, notes):
    for module in model.modules():
        forward = module.forward
        while isinstance(forward, functools.partial):
            forward = forward.args[1] if forward.func is _as_parameters else forward.func
        if isinstance(forward, SublayerForward):
            for parameter in module.parameters():
                note = notes.get(id(parameter))
                if note is not None:
                    notes[id(parameter)] = note._replace(sublayers=(*note.sublayers, forward))


def _leave_uncompiled(model):
    """Dynamo takes neither a change of class nor a view that tells another shape (narrow.py): what is cut
    runs as it is written, between compiled parts.
    """
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, SublayerForward) or getattr(forward, "func", None) is _as_parameters:
            module.forward = uncompiled(forward)


def _as_parameters(own, forward, *args, **kwargs):
    kind = own[0].__class__
    for parameter in own:
        parameter.__class__ = nn.Parameter
    try:
        return forward(*args, **kwargs)
    finally:
        for parameter in own:
            parameter.__class__ = kind


class _Guarded(nn.Parameter):
    notes = None  # of the Reads that it belongs to

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ASKING or func in _LIKE_ITS_DTYPE and not isinstance(args[0], _Guarded):
                return func(*args, **kwargs)
            parameter = _first((args, kwargs))
            note = type(parameter).notes[id(parameter)]
            size = _size(func, note.shape or parameter.shape, args, kwargs)
            if size is not None:
                inside = any(forward.running for forward in note.sublayers)
                return func(*args, **kwargs) if inside else size
        raise ValueError(
            f"the model or the loss reads {note.name!r}, {note.why}, beside its layer (a penalty on weights, "
            f"a product of its own; {getattr(func, '__name__', func)}): {_way_out(note)}"
        )


def _way_out(note):
    if note.why is _CUT:
        return "name the layer in rules as 'replicate', or use a plan with tp=1"
    if note.why is _ABSENT:
        return "leave it out, or use a plan with pp=1"
    if note.why is _PARTIAL:
        return "leave it out, or use a plan without megatron_sp, or with tp=1"
    return "leave it out, or use a plan with ep=1"


def _first(value):
    if isinstance(value, _Guarded):
        return value
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, (list, tuple, type({}.values()))):
        return next((found for found in map(_first, value) if found is not None), None)
    return None


def _size(func, shape, args, kwargs):
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
