"""What functools.lru_cache remembers across a run without data. A table of positions that was made on meta
would be given to the real forward, and a real one to the run on meta. So what such a run has asked is
emptied behind it, and a run that fails after it was given something old is tried again.

Known are the caches of functions in modules and of methods that exist when the object is made, and those of
modules that are new when a run begins, but for those of torch.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

__all__ = ["Caches"]

_CACHE = functools._lru_cache_wrapper
ResultT = TypeVar("ResultT")
if TYPE_CHECKING:
    Cache: TypeAlias = functools._lru_cache_wrapper[object]


class Caches:
    def __init__(self) -> None:
        self.all: list[Cache] = []
        self.hit = False  # the last run was given something old
        self._seen: set[str] = set()  # names of modules
        self._find()

    def _find(self) -> None:
        """Adds the caches of modules that were not there yet."""
        found: dict[int, Cache] = {}
        classes: dict[int, type] = {}
        for name, module in list(sys.modules.items()):
            if name in self._seen:
                continue
            self._seen.add(name)
            if name.split(".")[0] != "torch" and isinstance(module, types.ModuleType):
                for value in list(vars(module).values()):
                    if isinstance(value, type):
                        classes[id(value)] = value  # once, however many modules import it
                    elif type(value) is _CACHE:
                        found[id(value)] = value
        for kind in classes.values():
            found |= {id(value): value for value in list(vars(kind).values()) if type(value) is _CACHE}
        known = set(map(id, self.all))
        for key, each in found.items():
            if key not in known and not (each.__module__ or "").startswith("torch."):
                self.all.append(each)

    def around(self, run: Callable[[], ResultT]) -> ResultT:
        """run(), a run without data."""
        self._find()
        try:
            return self._emptied(run)
        except Exception:
            if not self.hit:
                raise
        return self._emptied(run)

    def _emptied(self, run: Callable[[], ResultT]) -> ResultT:
        before = [each.cache_info() for each in self.all]
        try:
            return run()
        finally:
            self.hit = False
            for each, old in zip(self.all, before, strict=True):
                now = each.cache_info()
                self.hit = self.hit or now.hits != old.hits
                if (now.hits, now.misses) != (old.hits, old.misses):
                    each.cache_clear()
