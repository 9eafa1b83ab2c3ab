"""Recognises an MLP: Linears h -> f, something that treats each of the f numbers alone, a Linear f -> h.

Sequential            Linear, elementwise ..., Linear           each such pair, from the front
a module's children   up (and gate) h -> f, down f -> h         the last Linear that fits is the down
                      gate and up in one h -> 2f, down f -> h   the probe says whether they are its halves
two modules           intermediate.dense h -> f, output.dense   as in BERT
torch's Transformer   linear1, linear2
layers
"""

from collections.abc import Mapping
from typing import NamedTuple, cast

from torch import nn

from pycomm.parallel.tensor.adapters import factors_of
from pycomm.parallel.tensor.modules import child, is_elementwise, is_projection, join, linear_sizes
from pycomm.parallel.tensor.sublayers import Sublayer, Unfit

__all__ = ["find_mlp"]

HALVES = ("gate_up_proj", "down_proj")  # [gate | up] wherever these names are used
APART = ("intermediate", "output")


class _Pair(NamedTuple):
    ups: tuple[str, ...]  # names of the Linears h -> f
    down: str  # of the Linear f -> h


def find_mlp(modules: Mapping[str, nn.Module], fqn: str, taken: set[str]) -> list[Sublayer]:
    """Of the module `fqn`: [] where it is no MLP. modules: of the model, by name; taken: names of those that
    are cut already.

    Raises Unfit.
    """
    module = modules[fqn]
    if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        if not is_elementwise(cast(nn.Module, module.activation)):
            raise Unfit("its activation is not elementwise")
        pairs = [_Pair(("linear1",), "linear2")]
    elif type(module) is nn.Sequential:
        pairs = _pairs(module)
    else:
        cut = {name for name, _ in module.named_children() if join(fqn, name) in taken}
        pairs = _children(module, cut) or _apart(module)
    sublayers = [_sublayer(modules, fqn, *pair) for pair in pairs]
    return [s for s in sublayers if taken.isdisjoint((*s.columns, s.row))]


def _sublayer(modules: Mapping[str, nn.Module], fqn: str, ups: tuple[str, ...], down: str) -> Sublayer:
    columns, row = tuple(join(fqn, up) for up in ups), join(fqn, down)
    is_fused = linear_sizes(modules[columns[0]])[1] != linear_sizes(modules[row])[0]
    is_known = not is_fused or (*ups, down) == HALVES
    return Sublayer("mlp", fqn, columns, row, inside=factors_of(modules, columns, row), is_known=is_known)


def _pairs(module: nn.Module) -> list[_Pair]:
    """Linear, elementwise ..., Linear in a Sequential, from the front."""
    pairs: list[_Pair] = []
    up: str | None = None
    for name, layer in module.named_children():
        if not is_projection(layer):
            if up is not None and not is_elementwise(layer):
                up = None
        elif up is not None and linear_sizes(module.get_submodule(up))[1] == linear_sizes(layer)[0]:
            pairs.append(_Pair((up,), name))
            up = None
        else:
            up = name
    return pairs


def _children(module: nn.Module, taken: set[str]) -> list[_Pair]:
    """taken: names of children."""
    linears = {name: linear_sizes(layer) for name, layer in module.named_children() if is_projection(layer)}
    if len(linears) < 2 or not taken.isdisjoint(linears):
        return []
    for down in reversed(linears):
        f, h = linears[down]
        ups = tuple(name for name in linears if name != down)
        if all(linears[up] == (h, f) for up in ups) or [linears[up] for up in ups] == [(h, 2 * f)]:
            break
    else:
        return []
    if h == f and len(linears) > 2:
        raise Unfit("more than two square Linear layers: which comes last is not known")
    if next(module.parameters(recurse=False), None) is not None:
        raise Unfit("it has parameters of its own")
    for name, layer in module.named_children():
        shapes = {tuple(parameter.shape) for parameter in layer.parameters()}
        is_norm_of_h = "norm" in type(layer).__name__.lower() and shapes == {(h,)} and h != f
        if name not in linears and not is_norm_of_h and name not in taken and not is_elementwise(layer):
            raise Unfit(f"{name} ({type(layer).__name__}) is not elementwise")
    return [_Pair(ups, down)]


def _apart(module: nn.Module) -> list[_Pair]:
    """The same of a Linear and an activation in one module, and a Linear in the next (BERT and its kin)."""
    up, down = (child(module, f"{name}.dense") for name in APART)
    if not (is_projection(up) and is_projection(down)) or linear_sizes(up) != linear_sizes(down)[::-1]:
        return []
    first = module.get_submodule(APART[0])
    for name, layer in first.named_children():
        if layer is not up and not is_elementwise(layer):
            raise Unfit(f"{APART[0]}.{name} ({type(layer).__name__}) is not elementwise")
    if next(first.parameters(recurse=False), None) is not None:
        raise Unfit(f"{APART[0]} has parameters of its own")
    return [_Pair((f"{APART[0]}.dense",), f"{APART[1]}.dense")]
