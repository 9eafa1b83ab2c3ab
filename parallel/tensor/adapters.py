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

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from pycomm.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from pycomm.parallel.tensor.modules import Adapter, base_of, is_adapter
from pycomm.parallel.tensor.narrow import plain
from pycomm.parallel.tensor.sublayers import Unfit

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree
    from pycomm.parallel.tensor.cut_sublayer import Cutter
    from pycomm.parallel.tensor.edges import SublayerInput, SumEdge
    from pycomm.parallel.tensor.slices import Slices

__all__ = ["AdapterForward", "cut_column_adapter", "cut_row_adapter", "factors_of"]


def factors_of(modules: Mapping[str, nn.Module], columns: Iterable[str], row: str) -> tuple[str, ...]:
    """Names of the parameters of adapters that all ranks hold and use for their part. columns, row: names of
    the layers of a sublayer.

    Raises Unfit for an adapter that must not be cut.
    """
    found: tuple[str, ...] = ()
    for name in (*columns, row):
        layer = modules[name]
        if is_adapter(layer):
            _check(name, layer, name == row)
            found += _whole_factors(name, layer, name == row)
    return found


def _check(name: str, layer: Adapter, is_row: bool) -> None:
    variants = getattr(layer, "lora_variant", None)
    if variants:
        kinds = ", ".join(sorted({type(kind).__name__ for kind in variants.values()}))
        raise Unfit(f"the adapter of {name} is of the kind {kinds}, not plain LoRA")
    if len(getattr(layer, "lora_magnitude_vector", None) or ()):
        raise Unfit(f"the adapter of {name} looks at the whole weight")
    factors = [*layer.lora_A.values(), *layer.lora_B.values()]
    if not all(type(factor) is nn.Linear for factor in factors):
        raise Unfit(f"the adapter of {name} is not made of Linear layers")
    if is_row and any(factor.bias is not None for factor in layer.lora_B.values()):
        raise Unfit(f"lora_B of {name} has a bias, which each rank would add")


def _whole_factors(name: str, layer: Adapter, is_row: bool) -> tuple[str, ...]:
    whole, factors = ("lora_B", layer.lora_B) if is_row else ("lora_A", layer.lora_A)
    return tuple(f"{name}.{whole}.{key}" for key, _ in factors.named_parameters())


class _Entered:
    """In the place of the input edge inside of an adapter, which has it around it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def leave_group(self) -> None:
        """There is none."""


def _unsummed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: Sequence[int]
) -> torch.Tensor:
    """In the place of the output edge."""
    return F.linear(plain(x), weight)


class AdapterForward:
    """Takes the place of the forward of a wrapped layer that is cut. inner: that forward; enters: of a layer
    that is cut by rows; output: of one that is cut by columns; base: the layer that is wrapped.
    """

    def __init__(
        self,
        inner: Callable[..., torch.Tensor],
        base: ColumnParallelLinear | RowParallelLinear,
        enters: SublayerInput | None = None,
        output: SumEdge | None = None,
    ) -> None:
        self.inner, self.base, self.enters, self.output = inner, base, enters, output

    def __call__(self, x: torch.Tensor, *args: Tree, **kwargs: Tree) -> torch.Tensor:
        if self.enters is not None:
            return self.inner(self.enters(x), *args, **kwargs)
        assert self.output is not None  # one of both
        return self.output.sum(self.inner(plain(x), *args, **kwargs), self.base.bias)


def cut_column_adapter(adapter: Adapter, slices: Slices, source: SublayerInput, cutter: Cutter) -> None:
    """Cuts the rows of the base and of each lora_B."""

    def part(layer: nn.Module) -> ColumnParallelLinear:
        column = ColumnParallelLinear.from_module(
            base_of(layer),
            cutter.group,
            gather_output=False,
            sequence=cutter.sequence,
            slices=slices,
            take=cutter.take,
        )
        column.take_input_from(_Entered(), shared=True)
        return column

    for key, factor in list(adapter.lora_B.items()):
        _replace(adapter.lora_B, key, part(factor))
    base = part(adapter.base_layer)
    _replace(adapter, "base_layer", base)
    adapter.forward = AdapterForward(adapter.forward, base, enters=source)


def cut_row_adapter(adapter: Adapter, slices: Slices, output: SumEdge, cutter: Cutter) -> None:
    """Cuts the columns of the base and of each lora_A."""

    def part(layer: nn.Module) -> RowParallelLinear:
        row = RowParallelLinear.from_module(
            base_of(layer),
            cutter.group,
            input_is_parallel=True,
            sequence=cutter.sequence,
            slices=slices,
            take=cutter.take,
        )
        row.give_output_to(_unsummed)
        return row

    for key, factor in list(adapter.lora_A.items()):
        _replace(adapter.lora_A, key, part(factor))
    base = part(adapter.base_layer)
    _replace(adapter, "base_layer", base)
    adapter.forward = AdapterForward(adapter.forward, base, output=output)


def _replace(owner: Adapter | nn.ModuleDict, key: str, layer: nn.Module) -> None:
    """As swap() of cut_sublayer.py does it, in one place."""
    old = owner._modules[key]
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(layer, hooks).update(getattr(old, hooks))
    owner._modules[key] = layer
