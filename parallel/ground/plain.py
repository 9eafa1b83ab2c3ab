"""Plain values as text, so that ranks can compare them and an error can show them.

Two values have the same text where they are equal: 1 and 1.0, a tuple and a list, a number of Python and one
of numpy or in a tensor. A nan is equal to a nan. Of what is not plain (a stream, a config object) only the
class is in the text: two ranks never have the same object.
"""

import enum
from collections.abc import Collection, Mapping, Set

import torch

__all__ = ["SIMPLE", "class_text", "text_of"]

SIMPLE = frozenset({bool, int, float, str, type(None)})
DEPTH = 4  # of containers in containers; what lies deeper is not compared
MOST = 64  # elements of a tensor or an array; larger ones are not compared


def text_of(value: object, on_device: bool = False, depth: int = DEPTH) -> str:
    """The text of a value. on_device: also of tensors that are not on the CPU, which waits for the device."""
    if isinstance(value, torch.Tensor):
        return _text_of_tensor(value, on_device)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, (bool, torch.dtype)):
        return str(value)
    if type(value).__module__ == "numpy":
        listed = getattr(value, "tolist", None)
        if listed is not None and getattr(value, "size", 1) <= MOST:
            return text_of(listed(), on_device, depth)
        return class_text(type(value))
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, (float, complex)):
        return _text_of_number(value)
    if isinstance(value, str):
        return repr(str(value))
    if isinstance(value, (list, tuple, Set, Mapping)) and depth:
        return _text_of_container(value, on_device, depth - 1)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', None) or ''}.{value.__qualname__}".lstrip(".")
    return class_text(type(value))


def class_text(kind: type) -> str:
    """The name of a class; with its module for torch's own. A user's module may be `__main__` on one rank and
    have its own name on another.
    """
    is_torch = kind.__module__.split(".")[0] == "torch"
    return f"{kind.__module__}.{kind.__qualname__}" if is_torch else kind.__qualname__


def _text_of_tensor(tensor: torch.Tensor, on_device: bool) -> str:
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not known or tensor.is_meta or tensor.numel() > MOST or not (on_device or tensor.device.type == "cpu"):
        return "a tensor"
    return text_of(tensor.tolist(), depth=tensor.dim())


def _text_of_number(value: float | complex) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return repr(float(value) if isinstance(value, float) else complex(value))


def _text_of_container(value: Collection[object], on_device: bool, depth: int) -> str:
    if isinstance(value, Mapping):
        pairs = [[text_of(each, on_device, depth) for each in pair] for pair in value.items()]
        return "{" + ", ".join(f"{key}: {each}" for key, each in sorted(pairs)) + "}"
    texts = [text_of(each, on_device, depth) for each in value]
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(texts)) + "}"
    return "(" + ", ".join(texts) + ")"
