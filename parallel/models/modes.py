"""Modes of torch functions, which see every call of torch's Python API while they are active; and copies of
modules, for runs that leave no trace.
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import torch

__all__ = ["as_written", "copied", "eager", "is_compiled", "uncompiled", "without_modes"]


ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
P = ParamSpec("P")
ResultT = TypeVar("ResultT")


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """None of them is active inside: they would take other tensors for the hidden state."""
    with contextlib.ExitStack() as stack:
        for _ in torch.overrides._get_current_function_mode_stack():
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        yield


def copied(module: ModuleT, memo: dict[int, object] | None = None) -> ModuleT:
    """A deep copy. Raises ValueError for what has none, with what to do."""
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        name, held = _not_copied(module)
        if isinstance(held, torch.Tensor):
            hint = (
                "Weights that a hook computes (torch.nn.utils.weight_norm) are made anew by a "
                "parametrization (torch.nn.utils.parametrizations)"
            )
        else:
            hint = (
                "Hold it outside of the module, or give the class a __getstate__ without it and a "
                "__setstate__ that makes a new one"
            )
        raise ValueError(
            f"a {type(module).__name__} cannot be copied, which a pipeline needs for runs without data, "
            f"because of its {name!r}, a {type(held).__name__} ({type(error).__name__}: {error}). {hint}, or "
            "use a plan without pp"
        ) from error


def _not_copied(module: torch.nn.Module) -> tuple[str, object]:
    """(name, value) of the first attribute in the module that has no copy; ("", module) if each has one."""
    own = ("_parameters", "_buffers")
    for name, part in module.named_modules():
        held = {key: value for key, value in vars(part).items() if key not in (*own, "_modules")}
        for key, value in {**held, **part._parameters, **part._buffers}.items():
            try:
                copy.deepcopy(value)
            except Exception:
                return f"{name}.{key}".lstrip("."), value
    return "", module


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile has wrapped it, or compile() has changed it."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def uncompiled(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """The function, which a compiler passes over, with all that it calls but what is compiled by itself.
    Every optimizer of torch's loads the compiler; without one the function stays as it is.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    made = torch.compiler.disable(function)
    made.as_written = function
    return made


def as_written(function: ResultT) -> ResultT:
    """What uncompiled() was given; another function itself."""
    return getattr(function, "as_written", function)


def eager() -> AbstractContextManager[object]:
    """A context in which what is compiled runs as it is written: nothing is compiled for runs on the side."""
    known = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if known else contextlib.nullcontext()
