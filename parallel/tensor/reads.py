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

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

from pycomm.parallel.ground.asked import ASKING, LIKE_ITS_DTYPE, first_of, size_asked
from pycomm.parallel.ground.layout import Layout
from pycomm.parallel.models.modes import uncompiled
from pycomm.parallel.tensor.adapters import AdapterForward
from pycomm.parallel.tensor.narrow import SublayerForward

if TYPE_CHECKING:
    from pycomm.parallel.expert.moe import MoE
    from pycomm.parallel.given import Tree

__all__ = ["Reads"]

P = ParamSpec("P")
R = TypeVar("R")
T = torch.Tensor
_ASKING = {
    *ASKING,
    *(T.__repr__, T.__format__),
    operator.attrgetter("data.__set__")(T),  # zero/streamed.py gathers and frees with it
}


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
        moes: Mapping[str, MoE],
        stacked: Collection[str],
    ) -> None:
        self.notes: dict[int, _Note] = {}  # id of a parameter -> _Note
        self.guarded: list[nn.Parameter] = []
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
            inner: nn.Module | None = module.out_proj if isinstance(module, nn.MultiheadAttention) else None
            if isinstance(module.forward, AdapterForward):
                inner = module.forward.base  # whose bias it adds
            self._let(
                module, [p for each in (module, inner) if each is not None for p in each._parameters.values()]
            )
        _find_sublayers(model, self.notes)
        _leave_uncompiled(model)

    def _guard(self, parameter: nn.Parameter, name: str, why: str, shape: torch.Size | None = None) -> None:
        if type(parameter) is nn.Parameter and id(parameter) not in self.notes:
            self.guarded.append(parameter)
            self.notes[id(parameter)] = _Note(name, why, shape, ())

    def _let(self, module: nn.Module, parameters: Iterable[nn.Parameter | None]) -> None:
        """The forward of `module` may read these."""
        own = [each for each in parameters if each is not None and id(each) in self.notes]
        if own:
            module.forward = functools.partial(_as_parameters, own, module.forward)

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
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


def _find_sublayers(model: nn.Module, notes: dict[int, _Note]) -> None:
    for module in model.modules():
        forward = module.forward
        while isinstance(forward, functools.partial):
            forward = forward.args[1] if forward.func is _as_parameters else forward.func
        if isinstance(forward, SublayerForward):
            for parameter in module.parameters():
                note = notes.get(id(parameter))
                if note is not None:
                    notes[id(parameter)] = note._replace(sublayers=(*note.sublayers, forward))


def _leave_uncompiled(model: nn.Module) -> None:
    """Dynamo takes neither a change of class nor a view that tells another shape (narrow.py): what is cut
    runs as it is written, between compiled parts.
    """
    for module in model.modules():
        forward = module.__dict__.get("forward")
        is_cut = isinstance(forward, SublayerForward) or getattr(forward, "func", None) is _as_parameters
        if forward is not None and is_cut:
            module.forward = uncompiled(forward)


def _as_parameters(
    own: Sequence[nn.Parameter], forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    kind = own[0].__class__
    for parameter in own:
        parameter.__class__ = nn.Parameter
    try:
        return forward(*args, **kwargs)
    finally:
        for parameter in own:
            parameter.__class__ = kind


class _Guarded(nn.Parameter):
    notes: dict[int, _Note]  # of the Reads that it belongs to

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Tree],
        types: Collection[type[torch.Tensor]],
        args: tuple[Tree, ...] = (),
        kwargs: dict[str, Tree] | None = None,
    ) -> Tree:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ASKING or func in LIKE_ITS_DTYPE and not isinstance(args[0], _Guarded):
                return func(*args, **kwargs)
            parameter = first_of(_Guarded, (args, kwargs))
            assert parameter is not None  # one of them is why torch asks
            note = type(parameter).notes[id(parameter)]
            size = size_asked(func, note.shape or parameter.shape, args, kwargs)
            if size is not None:
                inside = any(forward.running for forward in note.sublayers)
                return func(*args, **kwargs) if inside else size
        raise ValueError(
            f"the model or the loss reads {note.name!r}, {note.why}, beside its layer (a penalty on weights, "
            f"a product of its own; {getattr(func, '__name__', func)}): {_way_out(note)}"
        )


def _way_out(note: _Note) -> str:
    if note.why is _CUT:
        return "name the layer in rules as 'replicate', or use a plan with tp=1"
    if note.why is _ABSENT:
        return "leave it out, or use a plan with pp=1"
    if note.why is _PARTIAL:
        return "leave it out, or use a plan without megatron_sp, or with tp=1"
    return "leave it out, or use a plan with ep=1"
