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
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import FunctionCtx

from pycomm.parallel.ground import comm
from pycomm.parallel.models.norms import batch_norms

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm

    from pycomm.parallel.ground.mesh import Mesh

    class _OfNorm(FunctionCtx):
        saved_tensors: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
        needs_input_grad: tuple[bool, ...]
        group: comm.Group
        count: float
        rows: list[int]
        view: list[int]

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
        module.forward = functools.partial(_forward, layer, layer.forward, group)


def _forward(
    module: _BatchNorm, plain: Callable[[torch.Tensor], torch.Tensor], group: comm.Group, input: torch.Tensor
) -> torch.Tensor:
    x = input  # which is its name in torch, for callers that give it by name
    if not module.training and module.running_mean is not None:
        return plain(x)
    module._check_input_dim(x)
    y, mean, var, count = _BatchNormOverRanks.apply(x, module.weight, module.bias, module.eps, group)
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


class _BatchNormOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _OfNorm,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: comm.Group,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        channels = x.shape[1]
        view = [1, channels] + [1] * (x.dim() - 2)
        rows = [dim for dim in range(x.dim()) if dim != 1]
        exact = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        number = torch.full((1,), x.numel() // max(channels, 1), device=x.device)
        sums = torch.cat([exact.sum(rows).double(), number.double()])
        comm.all_reduce(sums, group)
        count = float(sums[-1])
        if count <= 1:
            raise ValueError(
                f"BatchNorm on rank {group.rank}/{group.size} of {group.name}: {int(count)} value per "
                f"channel on all ranks together, input {tuple(x.shape)}; in training it needs two or more"
            )
        mean = (sums[:-1] / count).to(exact.dtype)
        centered = exact - mean.view(view)
        var = centered.square().sum(rows)
        comm.all_reduce(var, group)
        var /= count
        scale = (var + eps).rsqrt()
        normal = centered.mul_(scale.view(view))
        ctx.save_for_backward(normal, weight, scale)
        ctx.group, ctx.count, ctx.rows, ctx.view = group, count, rows, view
        ctx.mark_non_differentiable(mean, var)
        y = normal
        if weight is not None:
            y = y * weight.to(y.dtype).view(view)
        if bias is not None:
            y = y + bias.to(y.dtype).view(view)
        return y.to(x.dtype, copy=y is normal), mean, var, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: _OfNorm, dy: torch.Tensor, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, None, None]:
        normal, weight, scale = ctx.saved_tensors
        exact = dy.to(normal.dtype)
        own = torch.stack([exact.sum(ctx.rows), (exact * normal).sum(ctx.rows)])
        total = own.clone()
        comm.all_reduce(total, ctx.group)
        a, b = (total / ctx.count).unbind()
        dx = exact - a.view(ctx.view) - normal * b.view(ctx.view)
        dx = dx.mul_((scale if weight is None else scale * weight.to(scale.dtype)).view(ctx.view))
        dw = own[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        db = own[0].to(normal.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None
        return dx.to(dy.dtype), dw, db, None, None
