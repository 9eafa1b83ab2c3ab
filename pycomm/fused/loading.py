"""Loads the kernels of a group's launches, so that no rank waits in a kernel for one that loads another.

[Note: loading] A driver may have to wait for the kernels that run before it can load another, and ranks that
are threads share one. So ranks meet on the host before a kernel is loaded: then all earlier launches of the
group are with the device, and end. They load, one thread at a time, and meet again before one of them
launches. Nothing else is done under the lock: a rank that launches what is loaded must never wait for one
that loads.

[Note: layouts] Triton makes another kernel where an operand is aligned otherwise, or has other strides: a
rank alone may come with such a one at any call, when its peers are in their kernels already. So at the first
use of a problem two are loaded, for the operands as they are and for dense ones; later operands that fit
neither are copied.
"""

from __future__ import annotations

import functools
import re
import threading
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from pycomm.fused.machine import exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor

    from pycomm.fused.context import Context
    from pycomm.fused.kernels.tile import Tile

__all__ = ["Argument", "Arguments", "Constant", "Miscompiled", "Operands", "miscompiled", "start"]

_loading = threading.Lock()

Operands: TypeAlias = "tuple[torch.Tensor | None, ...]"  # matrices and a bias
Argument: TypeAlias = "torch.Tensor | TensorDescriptor | int | None"
Constant: TypeAlias = "int | Tile"  # what a kernel is compiled for, or an option of Triton's compiler
# Of a launch: in order, and by keyword.
Arguments: TypeAlias = "tuple[tuple[Argument, ...], dict[str, Constant]]"
# All that the choice of a kernel depends on in a tensor of known shape and dtype.
Layout: TypeAlias = "tuple[bool | tuple[bool, ...], ...] | None"


class Loaded(NamedTuple):
    """Of one use of a kernel: the layouts that it was loaded for; which operands are dense by columns."""

    layouts: frozenset[tuple[Layout, ...]]
    by_columns: tuple[bool, ...]


def start(
    context: Context,
    use: Hashable,
    kernel: JITFunction | InterpretedFunction,
    programs: int,
    operands: Operands,
    arguments: Callable[..., Arguments],
) -> None:
    """Launches. Collective at the first `use`, which names the kernel, alike on all ranks, but for the layout
    of the operands.
    """
    layouts = tuple(map(_layout, operands))
    loaded = context.started.get(use)
    if loaded is None:
        loaded = context.started[use] = _load_together(context, kernel, programs, operands, arguments)
    elif layouts not in loaded.layouts:
        operands = _dense(operands, loaded.by_columns)
    positional, by_keyword = arguments(*operands)
    with context.place():
        kernel[(programs,)](*positional, **by_keyword)


def _load_together(
    context: Context,
    kernel: JITFunction | InterpretedFunction,
    programs: int,
    operands: Operands,
    arguments: Callable[..., Arguments],
) -> Loaded:
    exchange(context.communicator, "")
    by_columns = tuple(x is not None and x.dim() == 2 and x.stride(0) < x.stride(1) for x in operands)
    dense = _dense(operands, by_columns)
    forms = {tuple(map(_layout, form)): form for form in (operands, dense)}
    wrong = ""
    if not isinstance(kernel, InterpretedFunction):
        with _loading:
            for form in forms.values():
                wrong = wrong or miscompiled(_load(kernel, programs, *arguments(*form)))
    if wrong := next(filter(None, exchange(context.communicator, wrong)), ""):
        raise Miscompiled(wrong)
    return Loaded(frozenset(forms), by_columns)


def _load(
    kernel: JITFunction,
    programs: int,
    positional: tuple[Argument, ...],
    by_keyword: dict[str, Constant],
) -> CompiledKernel:
    compiled = kernel.warmup(*positional, grid=(programs,), **by_keyword)
    compiled.run  # noqa: B018  the attribute is made by loading
    return compiled


# --- layouts --------------------


def _layout(x: torch.Tensor | None) -> Layout:
    if x is None:
        return None
    unit = 16 // x.element_size()
    strides = tuple(
        (stride == 1, stride % 16 == 0, stride % unit == 0, stride < 2**31, stride >= length)
        for stride, length in zip(x.stride(), reversed(x.shape), strict=True)
    )
    return x.data_ptr() % 16 == 0, *strides


def _dense(operands: Operands, by_columns: tuple[bool, ...]) -> Operands:
    """The operands, copied where they are not dense in this order and aligned."""
    return tuple(
        None if x is None else _dense_rows(x.t()).t() if columns else _dense_rows(x)
        for x, columns in zip(operands, by_columns, strict=True)
    )


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    # is_contiguous() would let a dimension of length 1 have any stride.
    if x.stride() == ((1,) if x.dim() == 1 else (max(1, x.shape[1]), 1)) and x.data_ptr() % 16 == 0:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


# --- what Triton made --------------------


class Miscompiled(RuntimeError):
    """Triton's compiler made code of a kernel that computes something else."""


# [Note: halves of a pair] LLVM's vectorizer may put two 32-bit values into a pair of which only the upper is
# used, the lower being shifted by 31. Triton 3.6's code for sm_90 then shifts the pair as one 64-bit number,
# and bits of the lower one get into the upper. Seen on an H100 in an index of the bias: wrong results, the
# same in every run. So code that takes the upper half of a sum of shifted numbers is refused.
_UPPER_HALF = re.compile(r"mov\.b64\s+\{\s*_\s*,\s*%r\d+\s*\},\s*(%rd\d+);")
_PAIR = r"or\.b64\s+{0},\s*(%rd\d+),\s*(%rd\d+);"
_SHIFTED = r"(?:mul\.wide\.u32|shl\.b64)\s+(?:{0}|{1}),"


def miscompiled(compiled: CompiledKernel | None) -> str:
    """ "" or why a compiled kernel must not run. See [Note: halves of a pair]."""
    return _miscompiled(compiled.name, compiled.asm["ptx"]) if compiled is not None else ""


@functools.lru_cache(256)
def _miscompiled(name: str, ptx: str) -> str:
    for register in _UPPER_HALF.findall(ptx):
        pair = re.search(_PAIR.format(register), ptx)
        if pair and re.search(_SHIFTED.format(*pair.groups()), ptx):
            return (
                f"Triton {triton.__version__} compiles {name} to code that gives wrong results: it shifts "
                "two numbers as one. Another configuration, another version of Triton or PYCOMM_FUSED=plain "
                "will do."
            )
    return ""
