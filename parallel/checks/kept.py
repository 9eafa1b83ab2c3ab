"""What a model holds is after the runs of a check what it was before, so that a check changes no training.

    modules, containers, objects, cells of closures    stay where they are, and are filled with what they held
    tensors, arrays, generators of random numbers      a copy stands in their place meanwhile
    parameters                                         stay, with their values; their hooks are put back

All that modules hold is held so, four levels deep, and what the hooks on them hold: their closures, and the
objects whose methods they are; objects and functions, if they come from where the modules come from, or from
the user's script. Afterwards each place has the same objects again. The danger is a place that nobody knows
of. A model of transformers hangs hooks on its modules in its first forward, and notes on itself
that it did. When the note was put back and the table of hooks was not, the next forward hung them once more,
and every hidden state was recorded twice from then on.

[Note: twice] Something may be reached by two ways (a proxy of a module, vars() of an object), and is then
noted twice, the second time with copies in its places. So places are filled in the reverse order, and the
first note counts. What a value holds itself is noted before what hooks reach, as those begin further away.

Not held: deeper levels; iterators, which have no copy; objects with slots; objects of other packages, such as
a trainer or a logger, which may work meanwhile; values of parameters that a forward writes. Globals and
attributes of classes: models/shared_state.py.

Why no copy of the model runs in its place: closures over a block, or over a list that it holds, would write
to the original and be missed by the copy; and stages, units of ZeRO-3 and sublayers that tp has cut know the
modules that they were made for.
"""

import array
import collections
import contextlib
import copy
import functools
import random
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from typing import TypeAlias, TypeVar, cast

import torch
from torch import nn

from pycomm.parallel.pipeline.absent import Absent

__all__ = ["kept"]

Value: TypeAlias = object  # whatever a module holds

_DEEP = 4
_LONG = 10_000  # entries of a container, which is then filled again as a whole
_LARGE = 1 << 20  # elements of a tensor beside the model (a data set), which no loss writes to
_MOST = 200_000  # entries that are looked at, of all containers
_TABLES = {*nn.Module().__dict__}  # torch's own attributes of a module, as the tables of hooks
_NOT_LOOKED_AT = {"_parallel"}  # of a model: what parallelize() gave it
_APART = {"torch", "pycomm"}  # no model's own
_SAME = (int, float, complex, str, bytes, types.NoneType, type, types.ModuleType)
_COPIED = (torch.Tensor, torch.Generator, random.Random, array.array, bytearray)
_OF_PARAMETER = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextlib.contextmanager
def kept(model: nn.Module, *others: Value) -> Iterator[None]:
    """See the head of the file. others: losses, of which the same is kept, but for large tensors."""
    modules = list(model.modules())
    held = _Held(modules, others)
    try:
        held.modules(modules)
        held.of_others(others)
        yield
    finally:
        held.restore()


K = TypeVar("K")
_Container = dict[Value, Value] | set[Value] | list[Value] | collections.deque[Value]


class _Held:
    """Places and what they held."""

    def __init__(self, modules: list[nn.Module], others: tuple[Value, ...] = ()) -> None:
        kinds = [each if isinstance(each, types.FunctionType) else type(each) for each in (*modules, *others)]
        self.packages = {_package_of(kind) for kind in kinds} - _APART | {"__main__"}
        self.largest: int | None = None  # elements of a tensor that is copied; None: any
        self.undo: list[Callable[[], None]] = []  # each fills a place, called from the last to the first
        # id of a value -> (the value, what stands in its place meanwhile)
        self.known: dict[int, tuple[Value, Value]] = {id(module): (module, module) for module in modules}
        self.others: list[nn.Module] = []  # modules that are no children of the model, and wait
        self.left = _MOST

    def restore(self) -> None:
        for each in reversed(self.undo):
            each()

    def modules(self, modules: list[nn.Module]) -> None:
        """And those that are found in what they hold."""
        while modules:
            self._modules(modules)
            modules, self.others = self.others, []

    def of_others(self, others: tuple[Value, ...]) -> None:
        self.largest = _LARGE
        for each in others:
            self._of(each, _DEEP)
        modules, self.others = self.others, []
        self.modules(modules)

    def _modules(self, modules: list[nn.Module]) -> None:
        for is_table in (False, True):
            for module in modules:
                names = [name for name in vars(module) if (name in _TABLES) is is_table]
                self._namespace(module, [name for name in names if name not in _NOT_LOOKED_AT], _DEEP)
        for parameter in (each for module in modules for each in module._parameters.values()):
            if type(parameter) is nn.Parameter:
                self._hooks_of(parameter)
                if vars(parameter):
                    self._namespace(parameter, list(vars(parameter)), _DEEP)

    def _hooks_of(self, parameter: nn.Parameter) -> None:
        for name in _OF_PARAMETER:
            table = getattr(parameter, name)
            if isinstance(table, dict):
                self._of(table, _DEEP)
            else:
                self.undo.append(functools.partial(_take_away, parameter, name))

    def _namespace(self, owner: Value, names: list[str], deep: int) -> None:
        """Of the attributes of something that has a dict of them."""
        space, kind = vars(owner), type(owner)
        before = dict(space)

        def put_back() -> None:
            _refill(space, before, dict)
            _give_class(owner, kind)

        self.undo.append(put_back)
        for name in names:
            own = self._of(before[name], deep)
            if own is not before[name]:
                space[name] = own

    def _of(self, value: Value, deep: int) -> Value:
        """What stands in the place of a value: most often itself, when what it holds has been noted."""
        if isinstance(value, _SAME) or not deep or type(value) in weakref.ProxyTypes:
            return value
        if id(value) not in self.known:
            self.known[id(value)] = value, value  # it may hold itself
            try:
                own = self._noted(value, deep - 1)
            except Exception:  # of a class that does not let itself be looked at
                own = value
            self.known[id(value)] = value, own
            self.known.setdefault(id(own), (own, own))
        return self.known[id(value)][1]

    def _noted(self, value: Value, deep: int) -> Value:
        if isinstance(value, nn.Module):
            self.others.append(value)
        elif isinstance(value, (dict, list, collections.deque, set)):
            self._container(value, deep)
        elif isinstance(value, tuple):
            return self._made_anew(value, deep)
        elif isinstance(value, functools.partial):
            return self._partial(value, deep)
        elif isinstance(value, types.MethodType):
            self._of(value.__self__, deep)
        elif isinstance(value, types.BuiltinMethodType):  # of a generator, perhaps
            own = self._of(value.__self__, deep)
            return value if own is value.__self__ else getattr(own, value.__name__)
        elif isinstance(value, types.FunctionType):
            if _package_of(value) in self.packages:
                self._function(value, deep)
        elif isinstance(value, torch.Tensor) and self.largest and value.numel() > self.largest:
            return value
        elif isinstance(value, _COPIED) or _package_of(type(value)) == "numpy":
            return _copy_of(value)
        elif _attributes(value) is not None and self._is_ours(value):
            self._namespace(value, list(vars(value)), deep)
        return value

    def _is_ours(self, value: Value) -> bool:
        return isinstance(value, types.SimpleNamespace) or _package_of(type(value)) in self.packages

    def _container(self, value: _Container, deep: int) -> None:
        if isinstance(value, dict):
            self._mapping(value, deep)
        elif isinstance(value, set):
            self.undo.append(functools.partial(_refill_set, value, set(value)))
        else:
            self._row(value, list if isinstance(value, list) else collections.deque, deep)
        space = _attributes(value)
        if space is not None and space is not value:
            self._namespace(value, list(space), deep)

    def _mapping(self, value: dict[Value, Value], deep: int) -> None:
        is_ordered = isinstance(value, collections.OrderedDict)
        kind: type[dict[Value, Value]] = collections.OrderedDict if is_ordered else dict
        before = _entries(value, kind)
        self.undo.append(functools.partial(_refill, value, before, kind))
        for key, own in self._instead(before, deep):
            kind.__setitem__(value, key, own)

    def _row(self, value: MutableSequence[Value], kind: type[MutableSequence[Value]], deep: int) -> None:
        """kind: list or deque, whatever the class of the value does."""
        before = list(value)

        def put_back() -> None:
            kind.clear(value)
            kind.extend(value, before)

        self.undo.append(put_back)
        for place, own in self._instead(dict(enumerate(before)) if len(before) <= _LONG else {}, deep):
            kind.__setitem__(value, place, own)

    def _instead(self, entries: Mapping[K, Value], deep: int) -> list[tuple[K, Value]]:
        """[(key, what stands in its place)] where that is something else."""
        self.left -= len(entries)
        if len(entries) > _LONG or self.left < 0:
            return []
        pairs = [(key, each, self._of(each, deep)) for key, each in entries.items()]
        return [(key, own) for key, each, own in pairs if own is not each]

    def _made_anew(self, value: tuple[Value, ...], deep: int) -> tuple[Value, ...]:
        items = [self._of(each, deep) for each in value]
        if all(own is each for own, each in zip(items, value, strict=True)):
            return value
        made: Callable[..., tuple[Value, ...]] = type(value)
        return made(*items) if hasattr(value, "_fields") else made(items)

    def _partial(self, value: functools.partial[Value], deep: int) -> functools.partial[Value]:
        before = [value.func, *value.args, *value.keywords.values()]
        own = [self._of(each, deep) for each in before]
        if all(one is each for one, each in zip(own, before, strict=True)):
            return value
        count = 1 + len(value.args)
        function, *args = own[:count]
        keywords = dict(zip(value.keywords, own[count:], strict=True))
        return functools.partial(cast("Callable[..., Value]", function), *args, **keywords)

    def _function(self, value: types.FunctionType, deep: int) -> None:
        for each in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            self._of(each, deep)
        if vars(value):
            self._namespace(value, list(vars(value)), deep)
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # nothing in it yet
                before = cell.cell_contents
                self.undo.append(functools.partial(setattr, cell, "cell_contents", before))
                own = self._of(before, deep)
                if own is not before:
                    cell.cell_contents = own


def _attributes(value: Value) -> dict[str, Value] | None:
    """The dict of its attributes, or None."""
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else None


def _entries(mapping: dict[K, Value], kind: type[dict[K, Value]]) -> dict[K, Value]:
    """Whatever its class gives at an access."""
    return {key: dict.__getitem__(mapping, key) for key in kind.__iter__(mapping)}


def _refill(mapping: dict[K, Value], before: dict[K, Value], kind: type[dict[K, Value]]) -> None:
    """Without a moment in which what stays is not there, as another thread may read it."""
    now = _entries(mapping, kind)
    for key in now.keys() - before.keys():
        kind.__delitem__(mapping, key)
    for key, value in before.items():
        if key not in now or now[key] is not value:
            kind.__setitem__(mapping, key, value)
    if list(kind.__iter__(mapping)) != list(before):
        kind.clear(mapping)
        for key, value in before.items():
            kind.__setitem__(mapping, key, value)


def _refill_set(value: set[Value], before: set[Value]) -> None:
    """One that is as before stays untouched: its order would be another one."""
    if set.symmetric_difference(value, before):
        set.clear(value)
        set.update(value, before)


def _give_class(owner: Value, kind: type) -> None:
    if type(owner) is not kind:
        owner.__class__ = kind


def _take_away(parameter: nn.Parameter, name: str) -> None:
    if getattr(parameter, name) is not None:
        setattr(parameter, name, None)


def _copy_of(value: Value) -> Value:
    if isinstance(value, (nn.Parameter, Absent)) or type(value).__name__ == "memmap":
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.is_leaf and value.requires_grad)
    if isinstance(value, torch.Generator):
        return torch.Generator(value.device).set_state(value.get_state())
    return copy.deepcopy(value)


def _package_of(kind: type | types.FunctionType) -> str:
    """Of a class or a function."""
    return (kind.__module__ or "").partition(".")[0]
