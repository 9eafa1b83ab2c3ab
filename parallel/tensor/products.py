"""F.linear with the collective that tensor parallelism needs before or after it, by pycomm.fused, which
overlaps the two where that pays.

    function                 forward                        gradient of x           at the edge (edges.py)
    copy_linear              linear(x)                      all_reduce(dy W)        input
    linear_reduce            all_reduce(linear(x)) + b      dy W                    output
    gather_linear            linear(all_gather(x))          reduce_scatter(dy W)    input, with a sequence
    linear_reduce_scatter    reduce_scatter(linear(x)) + b  all_gather(dy) W        output, with a sequence

Each is F.linear beside a function of differentiable.py, with the same results to rounding. weight: (out, in)
as F.linear takes it, cut by rows in the two that enter and by columns in the two that leave; shards: the
lengths of the cut dimension on all ranks. pieces: slices.Pieces of the sequence.

[Note: bias] The bias of linear_reduce_scatter is added here and not in the fused operation, whose gradient of
it is that of all rows. So a rank has the part of its own rows, as of any parameter that works on a piece of
the sequence (Layout.partial), and sums 1/n of the rows.

[Note: apart] F.linear and the collective run one after the other, as written, where
- x is a vector, or its dtype or width does not fit the weight (F.linear's error is the one that the
  sublayer names), or under autocast;
- the weight gradient is to be postponed (zb-h1 and zbv): the mode DeferWeights sees F.linear;
- the product is small, on a CPU: below LEAST_FLOPS the arguments' way through Python is some percent of a
  call;
- gather_linear on a CPU: pycomm.fused gathers x again in backward instead of keeping it. That saves 1 - 1/n
  of the memory of x, and hides behind a product where something else than the cores moves bytes.

Traffic is recorded here as the collectives that an operation of pycomm.fused contains: those of forward
behind it, since a recomputation that has all it needs leaves it by an exception, before anything is sent;
those of backward in a hook of its result.

Sources: Shoeybi et al. 2019; Korthikanti et al. 2022; overlap: Wang et al., Overlap Communication with
Dependent Computation, 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

from pycomm import fused
from pycomm.parallel.ground import comm, differentiable
from pycomm.parallel.ground.split_backward import DeferWeights

if TYPE_CHECKING:
    from pycomm.parallel.ground.comm import Group
    from pycomm.parallel.tensor.slices import Pieces

__all__ = ["copy_linear", "gather_linear", "linear_reduce", "linear_reduce_scatter"]

LEAST_FLOPS = 2e8  # on a CPU


def copy_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Group, shards: Sequence[int]
) -> torch.Tensor:
    if not _fits(x, weight, group) or _small(x, weight.shape[1], shards):
        return F.linear(differentiable.copy_to(x, group), weight, bias)
    return _CopyLinear.apply(x, weight, bias, group, shards)


def linear_reduce(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Group, shards: Sequence[int]
) -> torch.Tensor:
    if not _fits(x, weight, group) or _small(x, weight.shape[0], shards):
        out = differentiable.reduce_from(F.linear(x, weight), group)
        return out if bias is None else out + bias
    out = fused.matmul_all_reduce(x, weight.t(), group.pg, bias=bias, shards=shards)
    _record_all_reduce(comm.nbytes_of(out), group)
    return out


def gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: Group,
    pieces: Pieces,
    shards: Sequence[int],
) -> torch.Tensor:
    if not _fits(x, weight, group) or not gathers_again(x):
        return F.linear(differentiable.gather_sum(x, *pieces, group), weight, bias)
    moved = _moved(x, x.shape[-1], pieces)
    out = fused.all_gather_matmul(x, weight.t(), group.pg, **pieces._asdict(), bias=bias, shards=shards)
    comm.record("all_gather", group, moved)
    if out.requires_grad:
        backward = ["reduce_scatter"] * x.requires_grad + ["all_gather"] * weight.requires_grad
        out.register_hook(functools.partial(_record_in_backward, backward, group, moved))
    return out


def linear_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: Group,
    pieces: Pieces,
    shards: Sequence[int],
) -> torch.Tensor:
    if not _fits(x, weight, group) or _small(x, weight.shape[0], shards):
        out = differentiable.reduce_scatter(F.linear(x, weight), *pieces, group)
    else:
        moved = _moved(x, weight.shape[0], pieces)
        out = fused.matmul_reduce_scatter(x, weight.t(), group.pg, **pieces._asdict(), shards=shards)
        comm.record("reduce_scatter", group, moved)
        if out.requires_grad:
            out.register_hook(functools.partial(_record_in_backward, ["all_gather"], group, moved))
    return out if bias is None else out + bias  # [Note: bias]


def gathers_again(x: torch.Tensor) -> bool:
    """Whether an input of gather_linear is to be gathered again in backward, [Note: apart]."""
    return x.device.type != "cpu"


def _small(x: torch.Tensor, width: int, shards: Sequence[int]) -> bool:
    """Whether a CPU's product is too small, [Note: apart]; by what is equal on all ranks. width: that of the
    weight which is not cut.
    """
    return x.device.type == "cpu" and 2 * x.shape[:-1].numel() * width * max(shards) < LEAST_FLOPS


def _fits(x: torch.Tensor, weight: torch.Tensor, group: Group) -> bool:
    """Whether pycomm.fused is to be used: the same on all ranks, [Note: apart]."""
    return (
        group.size > 1
        and x.dim() > 1
        and x.dtype == weight.dtype
        and x.shape[-1] == weight.shape[1]
        and not torch.is_autocast_enabled(x.device.type)
        and not _postpones(x)
    )


def _postpones(x: torch.Tensor) -> bool:
    if not torch.overrides.has_torch_function((x,)):  # quick: no mode is active
        return False
    return any(isinstance(mode, DeferWeights) for mode in torch.overrides._get_current_function_mode_stack())


class _Context(Protocol):
    rest: tuple[Group, Sequence[int]]  # and the shards
    saved_tensors: tuple[torch.Tensor, torch.Tensor]  # x, weight
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _CopyLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: Group,
        shards: Sequence[int],
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rest = group, shards
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch._C.DisableTorchFunctionSubclass():  # in a loss the weight may not be read (reads.py)
            return _gradients_of_copy_linear(ctx, grad)


def _gradients_of_copy_linear(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (x, weight), (group, shards), needed = ctx.saved_tensors, ctx.rest, ctx.needs_input_grad
    flat = grad.flatten(0, -2)
    if torch.is_grad_enabled():  # for a second derivative: in functions that autograd records
        of_x = differentiable.reduce_from(grad @ weight, group) if needed[0] else None
        of_weight = flat.t() @ x.flatten(0, -2) if needed[1] else None
        return of_x, of_weight, flat.sum(0) if needed[2] else None, None, None
    grad_x = None
    if needed[0]:
        _record_all_reduce(comm.nbytes_of(x), group)
        grad_x = fused.matmul_all_reduce(grad, weight, group.pg, shards=shards)
    grad_weight = flat.t() @ x.flatten(0, -2) if needed[1] else None
    return grad_x, grad_weight, flat.sum(0) if needed[2] else None, None, None


def _record_all_reduce(nbytes: int, group: Group) -> None:
    comm.record("all_reduce", group, 2 * (group.size - 1) * nbytes // group.size)


def _record_in_backward(ops: Iterable[str], group: Group, nbytes: int, grad: torch.Tensor) -> None:
    for op in ops:
        comm.record(op, group, nbytes)


def _moved(x: torch.Tensor, columns: int, pieces: Pieces) -> int:
    """Bytes of the pieces of all others, of `columns` columns and each as long as the longest, as
    ground/comm.py counts them.
    """
    dim, sizes = pieces
    lead = x.shape[:dim] + x.shape[dim + 1 : -1]
    return lead.numel() * columns * x.element_size() * max(sizes) * (len(sizes) - 1)
