"""What modules write beside themselves: globals, attributes of classes, variables of a closure, objects that
several of them hold.

    LOSSES.append(x.pow(2).mean())      a list in the module's file
    Block.total = Block.total + load    an attribute of the class
    self.stats["load"] += load          an object that other modules hold, too

Nobody but Python sees these. So what the forwards of the modules name is looked up once, and what the
functions and methods that they name do, some levels deep: global names, attributes of classes, cells of
closures, and containers that two of the modules hold. Each that holds something that can be changed, or that
this code assigns to, becomes a place. Its content is told by a token: numbers as they are, tensors by
identity and version, containers and objects two levels deep. Most models have none, or some tables that never
change; a token of a number or a short list costs a microsecond.

A run that is made for shapes alone is kept() from leaving anything there.

Not found are names that are made up at run time (setattr, globals()[...]), what lies deeper, and what is
written through modules that are not named in the code.
"""

import collections
import contextlib
import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn

from pycomm.parallel.given import Tree
from pycomm.parallel.models.modes import as_written

__all__ = ["SharedState", "keep"]

_DEEP = 4  # functions that functions name
_FOREIGN = {"torch", "numpy", "pycomm", "functorch", *sys.stdlib_module_names}
_MISSING, _NAN = object(), object()
_NUMBERS = (int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, collections.deque)

Space: TypeAlias = "types.CellType | dict[str, object] | type | nn.Module"  # where a name has its value
How: TypeAlias = Literal["STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"]
Token: TypeAlias = object  # equal where the same is held
Restore: TypeAlias = Callable[[], None]
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class _Names(NamedTuple):
    """What code names."""

    used: frozenset[str]
    stored: dict[str, set[str]]  # How -> those that it stores


class Place(NamedTuple):
    """What can be changed."""

    space: Space
    name: str
    words: str  # for people


class SharedState:
    """modules: those whose code is looked through. others: that may hold the same objects."""

    def __init__(self, modules: Iterable[nn.Module], others: Iterable[nn.Module] = ()) -> None:
        modules = list(modules)
        self.places: dict[tuple[int, str], Place] = {}  # by the id of the namespace, and the name
        self.looked_at: set[tuple[types.FunctionType, type | None]] = set()
        for kind, forward in {(type(module), _forward_of(module)) for module in modules}:
            self._of_function(forward, kind, _DEEP)
        self._of_objects(modules, others)

    def tokens(self) -> list[Token]:
        """What all places hold, to be compared with ==."""
        return [_token(_read(space, name)) for space, name, _ in self.places.values()]

    def changed(self, before: Sequence[Token]) -> str | None:
        """Words for the first place whose token is another one now; None where all are the same."""
        for (space, name, words), token in zip(self.places.values(), before, strict=True):
            if _token(_read(space, name)) != token:
                return words
        return None

    @contextlib.contextmanager
    def kept(self, on_meta: bool = False) -> Iterator[None]:
        """All is afterwards as it was before. on_meta: inside, tensors in the places have no data."""
        before = [(space, name, _read(space, name)) for space, name, _ in self.places.values()]
        undo = [keep(value) for _, _, value in before]
        for space, name, value in before if on_meta else ():
            if isinstance(value, torch.Tensor):
                _write(space, name, _on_meta(value))
            _empty_within(value)
        try:
            yield
        finally:
            for (space, name, value), restore in zip(before, undo, strict=True):
                restore()
                if _read(space, name) is not value:
                    _write(space, name, value)

    def _add(self, space: Space, name: str, words: str) -> None:
        self.places.setdefault((id(space), name), Place(space, name, words))

    def _of_function(self, function: object, kind: type | None, deep: int) -> None:
        """kind: the class that it is a method of."""
        function = inspect.unwrap(function) if callable(function) else function
        function = getattr(function, "__func__", function)  # of a method that functools.wraps has wrapped
        if not isinstance(function, types.FunctionType) or _is_foreign(function.__module__) or deep < 0:
            return
        if (function, kind) in self.looked_at:
            return
        self.looked_at.add((function, kind))
        names = _names(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            words = f"the variable {name!r} of {function.__qualname__}"
            self._of_name(Place(cell, name, words), names, "STORE_DEREF", deep)
        space = function.__globals__
        for name in names.used:
            words = f"the global {name!r} of {function.__module__}"
            self._of_name(Place(space, name, words), names, "STORE_GLOBAL", deep)
        if kind is not None:
            self._of_class(kind, names.used, names, deep)
            if names.used & {"__class__", "type"}:
                self._of_new(kind, names)

    def _of_name(self, place: Place, names: _Names, how: How, deep: int) -> None:
        """Of what a name in the code stands for."""
        value = _read(place.space, place.name)
        if isinstance(value, type):
            self._of_class(value, names.used | {"__init__"}, names, deep - 1)
            self._of_new(value, names)
        elif isinstance(value, types.FunctionType):
            self._of_function(value, None, deep - 1)
        elif isinstance(value, types.ModuleType) and not _is_foreign(value.__name__):
            for name in names.used & names.stored["STORE_ATTR"] & vars(value).keys():
                self._add(vars(value), name, f"{name!r} of the module {value.__name__}")
        elif _is_mutable(value) or place.name in names.stored[how] and (value is _MISSING or _is_data(value)):
            self._add(*place)

    def _of_class(self, kind: type, used: Set[str], names: _Names, deep: int) -> None:
        """Of names that may stand for attributes of a class."""
        for each in kind.__mro__:
            if _is_foreign(each.__module__):
                continue
            for name in used & vars(each).keys():
                value = vars(each)[name]
                for function in _functions(value):
                    self._of_function(function, kind, deep - 1)
                if _is_mutable(value) or name in names.stored["STORE_ATTR"] and _is_data(value):
                    self._add(each, name, f"the attribute {name!r} of the class {each.__name__}")

    def _of_new(self, kind: type, names: _Names) -> None:
        """Of attributes that code may give to a class."""
        if not _is_foreign(kind.__module__):
            for name in names.stored["STORE_ATTR"]:
                if not hasattr(kind, name):
                    self._add(kind, name, f"the attribute {name!r} of the class {kind.__name__}")

    def _of_objects(self, modules: Sequence[nn.Module], others: Iterable[nn.Module]) -> None:
        """Objects that two modules hold."""
        held: dict[int, list[tuple[nn.Module, str]]] = {}
        known = {id(_read(space, name)) for space, name, _ in self.places.values()}
        for module in {id(module): module for module in [*modules, *others]}.values():
            for name, value in vars(module).items():
                if name not in _NOT_WRITTEN and _is_mutable(value) and not isinstance(value, torch.Tensor):
                    held.setdefault(id(value), []).append((module, name))
        inside = {id(module) for module in modules}
        for value, holders in held.items():
            found = [(module, name) for module, name in holders if id(module) in inside]
            if found and len(holders) > 1 and value not in known:
                module, name = found[0]
                self._add(module, name, f"the object {name!r}, which several modules hold")


_NOT_WRITTEN = {*nn.Module().__dict__, "config", "cfg", "args"}  # hooks and the like, and configurations


def _is_foreign(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _FOREIGN


def _is_mutable(value: object) -> bool:
    if isinstance(value, (*_CONTAINERS, torch.Tensor, types.SimpleNamespace)):
        return True
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, nn.Module))
        and not _is_foreign(kind.__module__)
    )


def _is_data(value: object) -> bool:
    if isinstance(value, (types.FunctionType, staticmethod, classmethod, property, functools.partial)):
        return False
    return isinstance(value, _NUMBERS) or _is_mutable(value)


def _functions(value: object) -> list[Callable[..., Tree]]:
    """The functions of an entry of a class."""
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset) if each is not None]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    return [value] if isinstance(value, types.FunctionType) else []


def _forward_of(module: nn.Module) -> Callable[..., Tree]:
    """The function behind what wrappers may have made of it."""
    forward = as_written(module.forward)
    while isinstance(forward, functools.partial):
        forward = as_written(next((each for each in forward.args if callable(each)), forward.func))
    forward = getattr(forward, "__func__", forward)
    return forward if isinstance(forward, types.FunctionType) else type(module).forward


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.cache
def _names(code: types.CodeType) -> _Names:
    codes = list(_codes(code))
    stored: dict[str, set[str]] = {"STORE_GLOBAL": set(), "STORE_DEREF": set(), "STORE_ATTR": set()}
    for instruction in (each for one in codes for each in dis.get_instructions(one)):
        stored.get(instruction.opname, set()).add(instruction.argval)
    return _Names(frozenset(name for each in codes for name in each.co_names), stored)


def _read(space: Space, name: str) -> Any:
    if isinstance(space, types.CellType):
        try:
            return space.cell_contents
        except ValueError:  # nothing in it yet
            return _MISSING
    return (space if isinstance(space, dict) else vars(space)).get(name, _MISSING)


def _write(space: Space, name: str, value: object) -> None:
    if isinstance(space, types.CellType):
        space.cell_contents = value
    elif isinstance(space, dict):
        space.pop(name, None) if value is _MISSING else space.__setitem__(name, value)
    elif value is _MISSING:
        delattr(space, name)
    else:
        setattr(space, name, value)


def _token(value: object, deep: int = 2) -> Token:
    if isinstance(value, _NUMBERS):
        return value if value == value else _NAN
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if deep and isinstance(value, dict):
        return id(value), [(id(key), _token(each, deep - 1)) for key, each in _entries(value).items()]
    if deep and isinstance(value, (list, tuple, collections.deque, set)):
        return id(value), [_token(each, deep - 1) for each in value]
    if deep and _is_mutable(value):
        return id(value), [(name, _token(each, deep - 1)) for name, each in vars(value).items()]
    return id(value)


def keep(value: object, deep: int = 2) -> Restore:
    """A function that makes a container, or an object, what it was."""
    if not deep or not _is_mutable(value) or isinstance(value, torch.Tensor):
        return _nothing
    if isinstance(value, (set, list, collections.deque)):
        return _keep_elements(value, deep)
    held = value if isinstance(value, dict) else vars(value)
    within = _entries(held)
    undo = [keep(each, deep - 1) for each in within.values()]

    def restore() -> None:
        _refill(held, within)
        for each in undo:
            each()

    return restore


def _keep_elements(held: set[ValueT] | list[ValueT] | collections.deque[ValueT], deep: int) -> Restore:
    within = list(held)
    undo = [keep(each, deep - 1) for each in within]

    def restore() -> None:
        held.clear()
        (held.update if isinstance(held, set) else held.extend)(within)
        for each in undo:
            each()

    return restore


def _kind_of(mapping: dict[KeyT, ValueT]) -> type[dict[KeyT, ValueT]]:
    return collections.OrderedDict if isinstance(mapping, collections.OrderedDict) else dict


def _entries(mapping: dict[KeyT, ValueT]) -> dict[KeyT, ValueT]:
    """What a dict has, whatever its class gives instead (transformers' ACT2FN makes a new object at each
    access).
    """
    return {key: dict.__getitem__(mapping, key) for key in _kind_of(mapping).__iter__(mapping)}


def _refill(mapping: dict[KeyT, ValueT], entries: dict[KeyT, ValueT]) -> None:
    kind = _kind_of(mapping)
    kind.clear(mapping)
    for key, value in entries.items():
        kind.__setitem__(mapping, key, value)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _empty_within(value: Any, deep: int = 2) -> None:
    """Tensors in a container, or an object, lose their data."""
    if not deep or not _is_mutable(value) or isinstance(value, (torch.Tensor, set)):
        return
    held = value if isinstance(value, (list, dict, collections.deque)) else vars(value)
    for key, each in list(_entries(held).items() if isinstance(held, dict) else enumerate(held)):
        if isinstance(each, torch.Tensor):
            held[key] = _on_meta(each)
        elif isinstance(each, tuple) and any(isinstance(one, torch.Tensor) for one in each):
            held[key] = tuple(_on_meta(one) if isinstance(one, torch.Tensor) else one for one in each)
        else:
            _empty_within(each, deep - 1)


def _nothing() -> None:
    pass
