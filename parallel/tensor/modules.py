"""What tensor parallelism asks of a plain module graph: which layers are linear, how wide they are, what is
elementwise, and names.
"""

import types
from collections.abc import Callable
from typing import Protocol, TypeGuard, cast

import torch
from torch import nn

__all__ = [
    "base_of",
    "child",
    "is_adapter",
    "is_elementwise",
    "is_linear",
    "is_projection",
    "is_transposed",
    "join",
    "linear_sizes",
    "reads",
    "within",
]

ELEMENTWISE = (
    *(nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
    *(nn.Mish, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.ReLU6),
)


class Adapter(Protocol):
    """What is asked of a layer with an adapter, as peft's lora.Linear."""

    lora_A: nn.ModuleDict
    lora_B: nn.ModuleDict
    base_layer: nn.Module
    forward: Callable[..., torch.Tensor]

    @property
    def _modules(self) -> dict[str, nn.Module | None]: ...


def is_transposed(linear: nn.Module) -> bool:
    """Whether the weight is (in, out), as in the Conv1D of transformers."""
    return type(linear).__name__ == "Conv1D" and hasattr(linear, "nf")


def is_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    plain = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
    if module is None or type(module) not in plain and not is_transposed(module):
        return False
    return module._parameters.get("weight") is not None  # not one that a hook computes (weight_norm)


def is_adapter(module: nn.Module | None) -> TypeGuard[Adapter]:
    """Whether it wraps a Linear and adds products of low rank to it (peft's lora.Linear)."""
    parts = getattr(module, "_modules", {})
    return all(isinstance(parts.get(name), nn.ModuleDict) for name in ("lora_A", "lora_B")) and is_linear(
        parts.get("base_layer")
    )


def is_projection(module: nn.Module | None) -> TypeGuard[nn.Module]:
    """A Linear, or one with an adapter."""
    return is_linear(module) or is_adapter(module)


def base_of(projection: nn.Module) -> nn.Linear:
    """The Linear that an adapter wraps; any other layer itself."""
    return cast(nn.Linear, projection._modules["base_layer"] if is_adapter(projection) else projection)


def linear_sizes(linear: nn.Module) -> tuple[int, int]:
    """(in_features, out_features)"""
    base = base_of(linear)
    out_dim = 1 if is_transposed(base) else 0
    return base.weight.shape[1 - out_dim], base.weight.shape[out_dim]


def is_elementwise(function: Callable[..., torch.Tensor]) -> bool:
    """Whether it works on each element alone: what it gives for a part of the input is the part of what it
    gives for the whole.
    """
    if isinstance(function, ELEMENTWISE):
        return True
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        return False
    try:
        with torch.no_grad():
            x = 2 * torch.arange(12.0).sin().reshape(1, 2, 6)  # neither rising nor falling
            whole, first, last = function(x), function(x[..., :3]), function(x[..., 3:])
            return whole.shape == x.shape and torch.allclose(whole, torch.cat([first, last], -1))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False


def reads(module: nn.Module, attribute: str) -> bool:
    """Whether the code of a module's classes names an attribute, other than where it is made or tied."""
    return any(
        attribute in _names_in(function.__code__)
        for kind in type(module).__mro__[: type(module).__mro__.index(nn.Module)]
        for name, function in vars(kind).items()
        if isinstance(function, types.FunctionType) and name not in ("__init__", "_tie_weights")
    )


def _names_in(code: types.CodeType) -> set[str]:
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return {*code.co_names, *(name for part in inner for name in _names_in(part))}


def within(fqn: str, blocks: str | None) -> bool:
    """Whether a module is the trunk or lies in it; the trunk of an nn.Sequential is the model itself, with
    the empty name.
    """
    return not blocks or fqn == blocks or fqn.startswith(blocks + ".")


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def child(module: nn.Module, path: str) -> nn.Module | None:
    """The module at a dotted path below `module`, or None."""
    found: nn.Module | None = module
    for name in path.split("."):
        found = found._modules.get(name) if isinstance(found, nn.Module) else None
    return found
