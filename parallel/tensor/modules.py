"""What tensor parallelism asks of a plain module graph: which layers are linear, how wide they are, what is
elementwise, and names.
"""

import torch
from torch import nn

__all__ = ["child", "is_elementwise", "is_linear", "is_transposed", "join", "linear_sizes", "within"]

ELEMENTWISE = (
    *(nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
    *(nn.Mish, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.ReLU6),
)


def is_transposed(linear):
    """Whether the weight is (in, out), as in the Conv1D of transformers."""
    return type(linear).__name__ == "Conv1D" and hasattr(linear, "nf")


def is_linear(module):
    plain = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return type(module) in plain or is_transposed(module)


def linear_sizes(linear):
    """(in_features, out_features)"""
    out_dim = 1 if is_transposed(linear) else 0
    return linear.weight.shape[1 - out_dim], linear.weight.shape[out_dim]


def is_elementwise(function):
    """Whether it works on each element alone: what it gives for a part of the input is the part of what it
    gives for the whole.
    """
    if isinstance(function, ELEMENTWISE):
        return True
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        return False
    try:
        with torch.no_grad():
            x = torch.linspace(-2, 2, 12).reshape(1, 2, 6)
            return torch.allclose(function(x)[..., :3], function(x[..., :3])) and function(x).shape == x.shape
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False


def within(fqn, blocks):
    """Whether a module is the trunk or lies in it; the trunk of an nn.Sequential is the model itself, with
    the empty name.
    """
    return not blocks or fqn == blocks or fqn.startswith(blocks + ".")


def join(prefix, name):
    return f"{prefix}.{name}" if prefix and name else prefix or name


def child(module, path):
    """The module at a dotted path below `module`, or None."""
    for name in path.split("."):
        module = module._modules.get(name) if isinstance(module, nn.Module) else None
    return module
