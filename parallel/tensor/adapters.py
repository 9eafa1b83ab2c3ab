"""Linear layers with low-rank adapters (LoRA, as peft wraps them), cut as the layers that they wrap.

    y = W x + s B A dropout(x)          A: (r, in), B: (out, r), r small

    cut by rows       x enters once for W and A.  y_r = W_r x + s B_r (A x)             A whole
    cut by columns    y = sum over ranks of       W_r x_r + s B (A_r x_r)               B whole

The factor that is whole sees a part of the gradient on each rank: of its own rows of B, or of its own columns
of A. So its gradient is summed over tp (Layout.partial), once per step, and no collective is added to the
forward or the backward: both products share the two edges of the sublayer.

Dropout is drawn from the shared stream before an A that is whole, and from the rank's own before an A that is
cut (stream_edges.py). What looks at the whole weight (DoRA) or at the whole of what B gives is not cut.
Source: Hu et al., LoRA, 2021.
"""

from torch import nn
from torch.nn import functional as F

from pycomm.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from pycomm.parallel.tensor.modules import base_of, is_adapter
from pycomm.parallel.tensor.narrow import plain
from pycomm.parallel.tensor.sublayers import Unfit

__all__ = ["AdapterForward", "cut_column_adapter", "cut_row_adapter", "factors_of"]


def factors_of(modules, columns, row):
    """Names of the parameters of adapters that all ranks hold and use for their part. modules: name ->
    module; columns, row: names of the layers of a sublayer.

    Raises Unfit for an adapter that must not be cut.
    """
    found = ()
    for name in (*columns, row):
        if is_adapter(modules[name]):
            _check(name, modules[name], name == row)
            found += _whole_factors(name, modules[name], name == row)
    return found


def _check(name, layer, is_row):
    if getattr(layer, "lora_variant", None):
        kinds = ", ".join(sorted({type(kind).__name__ for kind in layer.lora_variant.values()}))
        raise Unfit(f"the adapter of {name} is of the kind {kinds}, not plain LoRA")
    if len(getattr(layer, "lora_magnitude_vector", None) or ()):
        raise Unfit(f"the adapter of {name} looks at the whole weight")
    factors = [*layer.lora_A.values(), *layer.lora_B.values()]
    if not all(type(factor) is nn.Linear for factor in factors):
        raise Unfit(f"the adapter of {name} is not made of Linear layers")
    if is_row and any(factor.bias is not None for factor in layer.lora_B.values()):
        raise Unfit(f"lora_B of {name} has a bias, which each rank would add")


def _whole_factors(name, layer, is_row):
    whole = "lora_B" if is_row else "lora_A"
    return tuple(f"{name}.{whole}.{key}" for key, _ in layer._modules[whole].named_parameters())


class _Inside:
    """In the place of both edges inside of an adapter, which has them around it."""

    def __call__(self, x, weight=None, bias=None, lengths=None):
        return x if weight is None else F.linear(plain(x), weight)

    def leave_group(self):
        """There is none."""


class AdapterForward:
    """Takes the place of the forward of a wrapped layer that is cut. inner: that forward; enters: the
    SublayerInput of a layer that is cut by rows, or None; output: the SublayerOutput of one that is cut by
    columns, or None; base: the layer that is wrapped.
    """

    def __init__(self, inner, base, enters=None, output=None):
        self.inner, self.base, self.enters, self.output = inner, base, enters, output

    def __call__(self, x, *args, **kwargs):
        if self.enters is not None:
            return self.inner(self.enters(x), *args, **kwargs)
        return self.output.sum(self.inner(plain(x), *args, **kwargs), self.base.bias)


def cut_column_adapter(adapter, slices, source, cutter):
    """Cuts the rows of the base and of each lora_B. source: the SublayerInput."""

    def part(layer):
        options = {"gather_output": False, "slices": slices, "take": cutter.take}
        column = ColumnParallelLinear.from_module(layer, cutter.group, sequence=cutter.sequence, **options)
        column.take_input_from(_Inside(), shared=True)
        return column

    for key, factor in list(adapter.lora_B.items()):
        _replace(adapter.lora_B, key, part(factor))
    base = part(base_of(adapter))
    _replace(adapter, "base_layer", base)
    adapter.forward = AdapterForward(adapter.forward, base, enters=source)


def cut_row_adapter(adapter, slices, output, cutter):
    """Cuts the columns of the base and of each lora_A. output: the SublayerOutput."""

    def part(layer):
        options = {"input_is_parallel": True, "slices": slices, "take": cutter.take}
        row = RowParallelLinear.from_module(layer, cutter.group, sequence=cutter.sequence, **options)
        row.give_output_to(_Inside())
        return row

    for key, factor in list(adapter.lora_A.items()):
        _replace(adapter.lora_A, key, part(factor))
    base = part(base_of(adapter))
    _replace(adapter, "base_layer", base)
    adapter.forward = AdapterForward(adapter.forward, base, output=output)


def _replace(owner, key, layer):
    """As swap() of cut_sublayer.py does it, in one place."""
    old = owner._modules[key]
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(layer, hooks).update(getattr(old, hooks))
    owner._modules[key] = layer
