"""What the parameters are for the user between calls, where the plan holds their values elsewhere.

    plan                          class        why
    zero=3                        Sharded      they are empty, and a sum of nothing is 0 without a word
    bf16 or offload, zero 0 to 2  Noted        the optimizer has a copy, which it would bring back
    others                        Parameter    what is written is what the optimizer has

Inside of calls all of them are plain Parameters again, so that no call of the model costs more
(writes.py changes the class). torch hands each function and attribute of such a parameter to
__torch_function__ here.

Sharded: sizes are the whole parameter's; dtype, device, hooks, `grad` and such are
answered; everything else is refused, `.data` too, since a write through it would not be seen.

Noted: everything goes on as always, but `p.data` is `p.detach()`, which counts what is written through it
(`p._version`), as a tensor given by `.data` does not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn, cast

import torch
from torch import nn

from pycomm.parallel.given import Tree
from pycomm.parallel.ground.asked import ASKING, LIKE_ITS_DTYPE, first_of, size_asked

__all__ = ["Known", "Noted", "Sharded", "way_out"]

T = torch.Tensor
_GRADIENT = ("grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_ANSWERED = {
    *ASKING,
    *(getattr(T, name).__get__ for name in _GRADIENT),
    *(getattr(T, name).__set__ for name in (*_GRADIENT, "requires_grad")),
    operator.attrgetter("grad.__delete__")(T),
}
_DATA = operator.attrgetter("data.__get__")(T)


class Known(NamedTuple):
    """Of a parameter that is Sharded."""

    name: str
    shape: torch.Size


def way_out(name: str) -> str:
    """How to write to a parameter."""
    module = name.rpartition(".")[0]
    of_one = f", model.get_submodule({module!r})" if module else ""
    return f"inside of `with par.gathered(model{of_one}):` it is whole, to read and to write"


class Sharded(nn.Parameter):
    known: Mapping[int, Known]  # by id, of the model's

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Tree],
        types: Sequence[type[torch.Tensor]],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ANSWERED or func in LIKE_ITS_DTYPE and not isinstance(args[0], Sharded):
                return func(*args, **kwargs)
        parameter = first_of(Sharded, (args, dict(kwargs)))
        assert parameter is not None  # one of them is why torch asks
        known = parameter._known()
        size = size_asked(func, known.shape, args, kwargs)
        if size is not None:
            return size
        _refuse(known, _name_of(func))

    def _known(self) -> Known:
        return type(self).known[id(self)]

    def __repr__(self) -> str:  # type: ignore[override]  # only torch itself gives it arguments
        name, shape = self._known()
        return f"Parameter containing:\n{name!r} {tuple(shape)}, sharded (zero=3); {way_out(name)}"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        _refuse(self._known(), "deepcopy")

    def __reduce_ex__(self, proto: object) -> NoReturn:
        _refuse(self._known(), "pickle")


def _refuse(known: Known, what: str) -> NoReturn:
    raise ValueError(
        f"{what} of the parameter {known.name!r} {tuple(known.shape)}: it is sharded under zero=3, and has "
        f"no values here between calls; {way_out(known.name)}. par.full_state_dict(model) gives all values, "
        "par.ema(model, decay) averages them, and par.num_parameters(model) counts them"
    )


def _name_of(func: Callable[..., Tree]) -> str:
    """Of an attribute the function has the name "__get__"."""
    owner = getattr(func, "__self__", None) if func.__name__.startswith("__") else None
    return getattr(owner, "__name__", func.__name__)


class Noted(nn.Parameter):
    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Tree],
        types: Sequence[type[torch.Tensor]],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree:
        with torch._C.DisableTorchFunctionSubclass():
            if func == _DATA:
                return cast(T, args[0]).detach()
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy
