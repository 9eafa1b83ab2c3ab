"""Mean cross-entropy over the targets that count, from whole logits or from logits that are cut by
vocabulary.

    loss = mean over t of  log(sum_v exp(x_tv)) - x_t,target
    gradient of x_tv = (softmax_tv - [v = target_t]) / count

A column-parallel head may leave its output cut: rank r has the columns [start, stop). Then three numbers per
token cross ranks instead of V:

    all_reduce MAX    m_t = max_v x_tv                                  N numbers
    all_reduce SUM    sum_v exp(x_tv - m_t), and x_t,target - m_t       2N numbers; the second is 0 but on the
                                                                        rank with the target's column

Backward needs nothing from others. Only the logits and one number per token are kept for it. Whether logits
are cut cannot be told from their size, so the head marks its output (attribute `vocab_shard`, cut_logits.py).
A plain tensor of a rank's columns that has lost the mark is detected by `head`.
Source: Shoeybi et al., Megatron-LM, 2019, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pycomm.parallel.ground import comm, differentiable
from pycomm.parallel.tensor.cut_logits import CutLogits, VocabShard

if TYPE_CHECKING:
    from pycomm.parallel.tensor.apply import Head

__all__ = ["cross_entropy"]


class _Context(Protocol):
    saved_tensors: tuple[torch.Tensor, ...]
    shard: VocabShard

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _ShardedSum(torch.autograd.Function):
    """Sum over targets != ignore_index; logits (N, columns), targets (N,)."""

    @staticmethod
    def forward(
        ctx: _Context,
        logits: torch.Tensor,
        targets: torch.Tensor,
        shard: VocabShard,
        ignore_index: int,
    ) -> torch.Tensor:
        x = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        rows, columns = x.shape
        top = x.amax(1) if columns else x.new_full((rows,), -torch.inf)
        comm.all_reduce(top, shard.group, dist.ReduceOp.MAX)
        here = (targets >= shard.start) & (targets < shard.stop) & (targets != ignore_index)
        index = torch.where(here, targets - shard.start, 0)
        parts = x.new_zeros((2, rows))
        if columns:
            parts[0] = (x - top[:, None]).exp().sum(1)
            parts[1] = torch.where(here, x.gather(1, index[:, None])[:, 0] - top, 0)
        comm.all_reduce(parts, shard.group)
        log_sum = parts[0].log()
        counts = targets != ignore_index
        ctx.save_for_backward(logits, top + log_sum, index, here, counts)
        ctx.shard = shard
        return torch.where(counts, log_sum - parts[1], 0).sum().to(logits.dtype)

    @staticmethod
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _differentiable_gradient(ctx, grad), None, None, None
        logits, log_sum, index, here, counts = ctx.saved_tensors
        out = (logits.to(log_sum.dtype) - log_sum[:, None]).exp_()
        if logits.shape[1]:
            out.scatter_add_(1, index[:, None], -here[:, None].to(out.dtype))
        out.mul_((counts * grad)[:, None])
        return out.to(logits.dtype), None, None, None


def _differentiable_gradient(ctx: _Context, grad: torch.Tensor) -> torch.Tensor:
    """Of the logits, for a second derivative: in functions that autograd records. One more all_reduce of N
    numbers, for log_sum as a function of the logits of all ranks.
    """
    logits, known, index, here, counts = ctx.saved_tensors
    group = ctx.shard.group
    x = logits.to(known.dtype)
    total = differentiable.reduce_from((x - known[:, None]).exp().sum(1), group)  # 1, but for rounding
    log_sum = differentiable.copy_to(known + total.log(), group)
    out = (x - log_sum[:, None]).exp()
    if logits.shape[1]:
        out = out.scatter_add(1, index[:, None], -here[:, None].to(out.dtype))
    return (out * (counts * differentiable.copy_to(grad, group))[:, None]).to(logits.dtype)


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, ignore_index: int = -100, head: Head | None = None
) -> torch.Tensor:
    """The mean over targets != ignore_index, as torch.nn.functional.cross_entropy gives it; 0 with zero
    gradient where no target counts.

    logits: (..., V) floating point, or (..., V_local) as a column-parallel head left them; targets: (...)
    integers, the same on all ranks.
    head: the object `TensorParallel.head`, to detect cut logits that were changed after the head. Raises
    ValueError for those, for shapes that do not fit, and (on CPU) for targets outside of the vocabulary. All
    ranks of tp call it, and get the same value.
    """
    shard = getattr(logits, "vocab_shard", None)
    if isinstance(logits, CutLogits):
        logits, shard = logits.for_loss()
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"cross_entropy: logits of shape {tuple(logits.shape)} do not fit targets of shape "
            f"{tuple(targets.shape)}"
        )
    if (
        shard is None
        and head is not None
        and head.sharded_output
        and logits.shape[-1] == head.local_size != head.full_size
    ):
        raise ValueError(
            f"cross_entropy: logits have {logits.shape[-1]} columns, this rank's part of {head.full_size}, "
            f"but no longer the mark of the head {head.fqn!r}: the model or the loss function changed them "
            "(view, slice, float, ...). Pass the head's output itself with targets of the same leading "
            "shape, or leave the logits whole: head.sharded_output = False"
        )
    vocab = logits.shape[-1] if shard is None else shard.full_size
    targets = targets.reshape(-1)
    counts = targets != ignore_index
    if targets.device.type == "cpu" and bool((counts & ((targets < 0) | (targets >= vocab))).any()):
        raise ValueError(
            f"cross_entropy: targets must lie in 0..{vocab - 1} or be ignore_index={ignore_index}"
        )
    flat = logits.reshape(targets.numel(), logits.shape[-1])
    if torch.is_autocast_enabled(flat.device.type) and flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()  # as autocast does for torch's
    if shard is None:
        total = F.cross_entropy(flat, targets, ignore_index=ignore_index, reduction="sum")
    else:
        total = _ShardedSum.apply(flat, targets, shard, ignore_index)
    return total / counts.sum().clamp(min=1)
