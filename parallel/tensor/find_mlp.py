"""Recognises an MLP: Linears h -> f, something that treats each of the f numbers alone, a Linear f -> h.

Sequential            Linear, elementwise ..., Linear           each such pair, from the front
a module's children   up (and gate) h -> f, down f -> h         the last Linear that fits is the down
torch's Transformer   linear1, linear2
layers
"""

from torch import nn

from pycomm.parallel.tensor.modules import is_elementwise, is_linear, join, linear_sizes
from pycomm.parallel.tensor.sublayers import Sublayer, Unfit

__all__ = ["find_mlp"]


def find_mlp(modules, fqn, taken):
    """[Sublayer] of the module `fqn`, or [] where it is no MLP. modules: name -> module of the model; taken:
    names of those that are cut already.

    Raises Unfit.
    """
    module = modules[fqn]
    if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        if not is_elementwise(module.activation):
            raise Unfit("its activation is not elementwise")
        pairs = [(("linear1",), "linear2")]
    elif type(module) is nn.Sequential:
        pairs = _pairs(module)
    else:
        pairs = _children(module, {name for name, _ in module.named_children() if join(fqn, name) in taken})
    sublayers = [
        Sublayer("mlp", fqn, tuple(join(fqn, up) for up in ups), join(fqn, down)) for ups, down in pairs
    ]
    return [s for s in sublayers if taken.isdisjoint((*s.columns, s.row))]


def _pairs(module):
    """Linear, elementwise ..., Linear in a Sequential, from the front."""
    pairs, up = [], None
    for name, layer in module.named_children():
        if not is_linear(layer):
            if up is not None and not is_elementwise(layer):
                up = None
        elif up is not None and linear_sizes(module._modules[up])[1] == linear_sizes(layer)[0]:
            pairs.append(((up,), name))
            up = None
        else:
            up = name
    return pairs


def _children(module, taken):
    """[(names of the Linears h -> f, name of the Linear f -> h)], or []. taken: names of children."""
    linears = {name: linear_sizes(layer) for name, layer in module.named_children() if is_linear(layer)}
    if len(linears) < 2 or not taken.isdisjoint(linears):
        return []
    for down in reversed(linears):
        f, h = linears[down]
        ups = tuple(name for name in linears if name != down)
        if all(linears[up] == (h, f) for up in ups):
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
    return [(ups, down)]
