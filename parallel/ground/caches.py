"""What functools.lru_cache remembers across a run without data. A table of positions that was made on meta
would be given to the real forward, and a real one to the run on meta. So what such a run has asked is
emptied behind it, and a run that fails after it was given something old is tried again.

Known are the caches of functions in modules and of methods that exist when the object is made, but for those
of torch.
"""

import functools
import sys
import types

__all__ = ["Caches"]

_CACHE = functools._lru_cache_wrapper


class Caches:
    def __init__(self):
        found = {}
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] != "torch" and isinstance(module, types.ModuleType):
                for value in list(vars(module).values()):
                    of_class = list(vars(value).values()) if isinstance(value, type) else ()
                    found |= {id(each): each for each in (value, *of_class) if type(each) is _CACHE}
        self.all = [each for each in found.values() if not (each.__module__ or "").startswith("torch.")]

    def around(self, run):
        """run(), a run without data."""
        try:
            return self._emptied(run)
        except Exception:
            if not self.hit:
                raise
        return self._emptied(run)

    def _emptied(self, run):
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
