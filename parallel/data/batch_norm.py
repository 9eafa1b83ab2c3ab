"""BatchNorm over the rows of all data ranks: what one process computes from the same microbatch.

    forward    n = values per channel on all ranks, S = sum of x        one all_reduce of C + 1 numbers
               mean = S / n,  V = sum of (x - mean)^2                   one of C
               y = (x - mean) r w + b,  r = 1 / sqrt(V / n + eps)
    backward   A = sum of dy, B = sum of dy (x - mean) r                one of 2 C
               dx = w r (dy - A / n - (x - mean) r B / n)
               db = this rank's A, dw = this rank's B: summed with all other gradients

(Ioffe and Szegedy 2015, the derivatives of its section 3.) Squares are summed of differences from the mean:
sums of squares alone lose all digits where the mean is large.

The layer stays what it is, a torch module with its buffers; only its forward changes, and only where it would
compute statistics. Buffers are then equal on all ranks. The collectives have a group of their own: the order
of their calls is that of the layers, the same on all ranks, while a bucket of gradients may become complete
before or after a layer's backward. Half precision is computed in fp32.

What is kept is x, not (x - mean) r: a second derivative needs it (_differentiable_gradients), and it is no
larger.

Rows that stand in for none ([Note: no rows] in ground/batch.py) are normalized, and are in no sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import FunctionCtx

from pycomm.parallel.ground import comm, differentiable
from pycomm.parallel.models.norms import batch_norms

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm

    from pycomm.parallel.ground.mesh import Mesh

    class _OfNorm(FunctionCtx):
        saved_tensors: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]
        needs_input_grad: tuple[bool, ...]
        group: comm.Group
        count: float
        eps: float
        rows: list[int]
        view: list[int]
        counted: bool

        def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


__all__ = ["synchronize"]


def synchronize(model: torch.nn.Module, mesh: Mesh) -> None:
    """Changes the forwards where there are several data ranks. Collective over all ranks."""
    layers = batch_norms(model)
    if not layers or mesh.rows[0] == 1:
        return
    group = mesh.apart("dp", "ep")
    for layer in layers.values():
        module: torch.nn.Module = layer
        module.forward = functools.partial(_forward, layer, layer.forward, group, mesh=mesh)


def _forward(
    module: _BatchNorm,
    plain: Callable[[torch.Tensor], torch.Tensor],
    group: comm.Group,
    input: torch.Tensor,
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """mesh: says whether the rows are counted."""
    x = input  # which is its name in torch, for callers that give it by name
    if not module.training and module.running_mean is not None:
        return plain(x)
    module._check_input_dim(x)
    counted = mesh is None or mesh.counts_rows
    y, mean, var, count = _BatchNormOverRanks.apply(x, module.weight, module.bias, module.eps, group, counted)
    if module.training and module.track_running_stats:
        _track(module, mean, var, count)
    return y


@torch.no_grad()
def _track(module: _BatchNorm, mean: torch.Tensor, var: torch.Tensor, count: float) -> None:
    batches, means, variances = module.num_batches_tracked, module.running_mean, module.running_var
    if batches is None or means is None or variances is None:  # taken away after the layer was made
        return
    batches.add_(1)
    part = module.momentum if module.momentum is not None else 1.0 / float(batches)
    unbiased = var * (count / (count - 1))
    means.mul_(1 - part).add_(mean.to(means.dtype), alpha=part)
    variances.mul_(1 - part).add_(unbiased.to(variances.dtype), alpha=part)


def _if(counted: bool, values: torch.Tensor) -> torch.Tensor:
    """values, or zeros that depend on them in autograd: collectives of a backward are called all the same."""
    return values if counted else values.masked_fill(values.new_ones((), dtype=torch.bool), 0.0)


class _BatchNormOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _OfNorm,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: comm.Group,
        counted: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        channels = x.shape[1]
        view = [1, channels] + [1] * (x.dim() - 2)
        rows = [dim for dim in range(x.dim()) if dim != 1]
        exact = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        number = torch.full((1,), x.numel() // max(channels, 1), device=x.device)
        sums = _if(counted, torch.cat([exact.sum(rows).double(), number.double()]))
        comm.all_reduce(sums, group)
        count = float(sums[-1])
        if count <= 1:
            raise ValueError(
                f"BatchNorm on rank {group.rank}/{group.size} of {group.name}: {int(count)} value per "
                f"channel on all ranks together, input {tuple(x.shape)}; in training it needs two or more"
            )
        mean = (sums[:-1] / count).to(exact.dtype)
        centered = exact - mean.view(view)
        var = _if(counted, centered.square().sum(rows))
        comm.all_reduce(var, group)
        var /= count
        scale = (var + eps).rsqrt()
        normal = centered.mul_(scale.view(view))
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.group, ctx.count, ctx.eps, ctx.counted = group, count, eps, counted
        ctx.rows, ctx.view = rows, view
        ctx.mark_non_differentiable(mean, var)
        y = normal
        if weight is not None:
            y = y * weight.to(y.dtype).view(view)
        if bias is not None:
            y = y + bias.to(y.dtype).view(view)
        return y.to(x.dtype, copy=y is normal), mean, var, count

    @staticmethod
    def backward(
        ctx: _OfNorm, dy: torch.Tensor, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, None, None, None]:
        if torch.is_grad_enabled():
            return *_differentiable_gradients(ctx, dy), None, None, None
        x, weight, mean, scale = ctx.saved_tensors
        centered = x.to(scale.dtype) - mean.view(ctx.view)
        exact = dy.to(centered.dtype)
        own = torch.stack([exact.sum(ctx.rows), (exact * centered).sum(ctx.rows) * scale])
        own = _if(ctx.counted, own)
        total = own.clone()
        comm.all_reduce(total, ctx.group)
        a, b = (total / ctx.count).unbind()
        dx = (exact - a.view(ctx.view)).addcmul_(centered, (b * scale).view(ctx.view), value=-1)
        dx = _if(ctx.counted, dx)
        dx = dx.mul_((scale if weight is None else scale * weight.to(scale.dtype)).view(ctx.view))
        dw = own[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        db = own[0].to(mean.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None
        return dx.to(dy.dtype), dw, db, None, None, None


def _differentiable_gradients(
    ctx: _OfNorm, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Of x, weight and bias, for a second derivative: the formulas at the head of this file in functions that
    autograd records, from x on.
    """

    def over_ranks(part: torch.Tensor) -> torch.Tensor:
        """The sum, which each rank uses for its own rows: so gradients are summed, too."""
        part = _if(ctx.counted, part)
        return differentiable.copy_to(differentiable.reduce_from(part, ctx.group), ctx.group)

    x, weight, mean, _ = ctx.saved_tensors
    exact, grad = x.to(mean.dtype), dy.to(mean.dtype)
    centered = exact - (over_ranks(exact.sum(ctx.rows)) / ctx.count).view(ctx.view)
    scale = (over_ranks(centered.square().sum(ctx.rows)) / ctx.count + ctx.eps).rsqrt()
    normal = centered * scale.view(ctx.view)
    own = _if(ctx.counted, torch.stack([grad.sum(ctx.rows), (grad * normal).sum(ctx.rows)]))
    a, b = (over_ranks(own) / ctx.count).unbind()
    dx = _if(ctx.counted, grad - a.view(ctx.view) - normal * b.view(ctx.view))
    dx = dx * (scale if weight is None else scale * weight.to(scale.dtype)).view(ctx.view)
    dw = own[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
    db = own[0].to(mean.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None
    return dx.to(dy.dtype), dw, db
