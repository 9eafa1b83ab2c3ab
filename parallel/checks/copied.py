"""Copies of what a user has made, for a trial: what is done with a copy does not reach the original.

    optimizer    its class and attributes, with other tensors in the place of parameters; no state, no hooks
    function     a function of Python with copies of what it holds (closure, defaults, globals that can be
                 changed in place), a method of a copied object

What can go wrong: an object without a copy (a lock, a file, a process group). The error is the caller's to
catch; nothing was changed by then.
"""

import collections
import copy
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

__all__ = ["copied_function", "copied_optimizer"]

Memo: TypeAlias = dict[int, Any]  # id of an object -> what stands in its place
_PLAIN = (list, dict, set, collections.deque, bytearray, torch.Tensor)


def copied_optimizer(
    opt: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    stand_ins: Mapping[int, torch.Tensor],
    seen: Memo | None = None,
) -> torch.optim.Optimizer:
    """groups: parameter groups of the copy. stand_ins: id of a parameter -> what attributes of the optimizer
    have in its place.
    """
    new = object.__new__(type(opt))
    memo: Memo = {**stand_ins, **(seen or {}), id(opt): new}
    inner = [value for value in vars(opt).values() if isinstance(value, torch.optim.Optimizer)]
    for each in inner:
        if id(each) not in memo:
            memo[id(each)] = copied_optimizer(each, groups, stand_ins, memo)
    for key, value in vars(opt).items():
        if key == "param_groups":
            # the groups of an optimizer inside of this one may be the same objects
            new.__dict__[key] = memo[id(inner[0])].param_groups if inner else [{**group} for group in groups]
        elif key == "state":
            new.__dict__[key] = memo[id(inner[0])].state if inner else collections.defaultdict(dict)
        elif isinstance(value, collections.OrderedDict) and "_hooks" in key:
            new.__dict__[key] = collections.OrderedDict()
        elif not (callable(value) and hasattr(type(opt), key)):  # else put over a method, for this object
            new.__dict__[key] = copy.deepcopy(value, memo)
    return new


def copied_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes the same, on copies."""
    return _function(function, {})


def _function(function: Callable[..., Any], memo: Memo) -> Callable[..., Any]:
    if isinstance(function, functools.partial):
        return functools.partial(
            _function(function.func, memo),
            *copy.deepcopy(function.args, memo),
            **copy.deepcopy(function.keywords, memo),
        )
    if isinstance(function, types.MethodType):
        return types.MethodType(_function(function.__func__, memo), copy.deepcopy(function.__self__, memo))
    if not isinstance(function, types.FunctionType):
        return copy.deepcopy(function, memo)
    cells = tuple(types.CellType(_held(cell.cell_contents, memo)) for cell in function.__closure__ or ())
    used = {
        name: copy.deepcopy(function.__globals__[name], memo)
        for name in _names_in(function.__code__)
        if isinstance(function.__globals__.get(name), _PLAIN)
    }
    new = types.FunctionType(
        function.__code__,
        {**function.__globals__, **used},
        function.__name__,
        copy.deepcopy(function.__defaults__, memo),
        cells,
    )
    new.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
    return new


def _held(value: object, memo: Memo) -> object:
    return _function(value, memo) if isinstance(value, types.FunctionType) else copy.deepcopy(value, memo)


def _names_in(code: types.CodeType) -> Iterable[str]:
    """That it and the functions inside of it refer to."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
