"""A configuration as one module sees it."""

from typing import Any

__all__ = ["ConfigView", "values_of"]


class ConfigView:
    """A configuration with some values replaced, for one module; everything else is read from, and written
    to, the configuration itself.
    """

    def __init__(self, config: object, values: dict[str, object]) -> None:
        object.__setattr__(self, "_whole", config)
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_whole", "_values"):
            raise AttributeError(name)
        return self._values[name] if name in self._values else getattr(self._whole, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._whole, name, value)


def values_of(config: object) -> dict[str, object]:
    """The attributes that an object has itself, as seen."""
    seen = dict(getattr(config, "__dict__", {}))
    return {**values_of(seen["_whole"]), **seen["_values"]} if isinstance(config, ConfigView) else seen
