"""What a model holds is after the runs of a check what it was before, so that a check changes no training.

    modules, containers, objects, cells of closures    stay where they are, and are filled with what they held
    tensors, arrays, generators of random numbers      a copy stands in their place meanwhile
    parameters                                         are not written: a check computes no gradient

All that modules hold is held so, four levels deep, and what the hooks on them hold: their closures, and the
objects whose methods they are; objects and functions, if they come from where the modules come from, or from
the user's script. Each place is filled with the very objects that were there. A place that
nobody knows of is the danger here. A model of transformers hangs hooks on its modules in its first forward,
and notes on itself that it did. When the note was put back and the table of hooks was not, the next forward
hung them once more, and every hidden state was recorded twice from then on.

Not held: what lies deeper, what has no copy (an iterator), objects with slots and those of other packages, as
a trainer or a logger, which may work meanwhile. Globals and attributes of classes: ground/shared_state.py.

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

import torch
from torch import nn

from pycomm.parallel.pipeline.absent import Absent

__all__ = ["kept"]

_DEEP = 4
_LONG = 10_000  # entries of a container, which is then filled again as a whole
_NOT_LOOKED_AT = {"_parallel"}  # of a model: what parallelize() gave it
_APART = {"torch", "pycomm"}  # no model's own
_NUMBERS = (int, float, complex, str, bytes, types.NoneType, type, types.ModuleType)
_COPIED = (torch.Tensor, torch.Generator, random.Random, array.array, bytearray)
_NOT_COPIED = (nn.Parameter, Absent)


@contextlib.contextmanager
def kept(model):
    """See the head of the file."""
    modules = list(model.modules())
    held = _Held(modules)
    try:
        for module in modules:
            held.module(module)
        yield
    finally:
        held.restore()


class _Held:
    """Places and what they held."""

    def __init__(self, modules):
        self.packages = {_package_of(type(module)) for module in modules} - _APART | {"__main__"}
        self.undo = []  # functions that fill a place, in any order
        # id of a value -> (the value, what stands in its place meanwhile)
        self.known = {id(module): (module, module) for module in modules}

    def restore(self):
        for each in self.undo:
            each()

    def module(self, module):
        names = [name for name in vars(module) if name not in _NOT_LOOKED_AT]
        self._namespace(vars(module), names, _DEEP)

    def _namespace(self, space, names, deep):
        """Of the attributes of something."""
        before = dict(space)
        self.undo.append(functools.partial(_refill, space, before))
        for name in names:
            own = self._of(before[name], deep)
            if own is not before[name]:
                space[name] = own

    def _of(self, value, deep):
        """What stands in the place of a value: most often itself, when what it holds has been noted."""
        if isinstance(value, _NUMBERS) or not deep:
            return value
        if id(value) not in self.known:
            self.known[id(value)] = value, value  # it may hold itself
            self.known[id(value)] = value, self._noted(value, deep - 1)
        return self.known[id(value)][1]

    def _noted(self, value, deep):
        if isinstance(value, nn.Module):  # one that is no child of the model
            self.module(value)
        elif isinstance(value, dict):
            self._dict(value, deep)
        elif isinstance(value, (list, collections.deque)):
            before = list(value)
            self.undo.append(lambda: (value.clear(), value.extend(before)))
            for place, each in enumerate(before if len(before) <= _LONG else ()):
                own = self._of(each, deep)
                if own is not each:
                    value[place] = own
        elif isinstance(value, set):
            before = set(value)
            self.undo.append(lambda: (value.clear(), value.update(before)))
        elif isinstance(value, tuple):
            items = [self._of(each, deep) for each in value]
            if any(own is not each for own, each in zip(items, value, strict=True)):
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        elif isinstance(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._of(each, deep)
        elif isinstance(value, types.MethodType):
            self._of(value.__self__, deep)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or () if _package_of(value) in self.packages else ():
                self._cell(cell, deep)
        elif isinstance(value, _COPIED) or _is_of_numpy(value):
            return _copy_of(value)
        elif isinstance(getattr(value, "__dict__", None), dict) and self._is_ours(value):
            self._namespace(vars(value), list(vars(value)), deep)
        return value

    def _is_ours(self, value):
        return isinstance(value, types.SimpleNamespace) or _package_of(type(value)) in self.packages

    def _dict(self, value, deep):
        """Whatever its class gives at an access."""
        kind = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        before = {key: dict.__getitem__(value, key) for key in kind.__iter__(value)}
        self.undo.append(functools.partial(_refill, value, before, kind))
        for key, each in before.items() if len(before) <= _LONG else ():
            own = self._of(each, deep)
            if own is not each:
                kind.__setitem__(value, key, own)

    def _cell(self, cell, deep):
        try:
            before = cell.cell_contents
        except ValueError:  # nothing in it yet
            return
        self.undo.append(functools.partial(setattr, cell, "cell_contents", before))
        own = self._of(before, deep)
        if own is not before:
            cell.cell_contents = own


def _refill(space, before, kind=dict):
    kind.clear(space)
    for key, value in before.items():
        kind.__setitem__(space, key, value)


def _copy_of(value):
    if isinstance(value, _NOT_COPIED):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.is_leaf and value.requires_grad)
    if isinstance(value, torch.Generator):
        return torch.Generator(value.device).set_state(value.get_state())
    try:
        return copy.deepcopy(value)
    except Exception:  # it has none
        return value


def _is_of_numpy(value):
    """Its arrays and generators. Scalars are copied, too, which does no harm."""
    return _package_of(type(value)) == "numpy"


def _package_of(kind):
    """Of a class or a function."""
    return (kind.__module__ or "").partition(".")[0]
