"""The forward of torch.nn.MultiheadAttention on this rank's heads.

torch's own reads its weights without calling its modules and compares widths on the way, so it cannot run on
a part; the arithmetic here is the same, without the inference fast path. Per rank: q, k, v of its heads
(inputs that are the same tensor enter once), attention, its columns of out_proj, the output edge, and then
the bias. Cost: as any attention that is cut, one all_reduce forward and one backward. need_weights adds one,
of (N, L, S): the mean is over all heads, and separate heads are gathered. Source of the semantics:
torch.nn.MultiheadAttention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional as F

from pycomm.parallel.ground import differentiable

if TYPE_CHECKING:
    from torch import nn

    from pycomm.parallel.tensor.edges import SublayerInput, SublayerOutput
    from pycomm.parallel.tensor.heads import RankHeads

__all__ = ["MultiheadForward"]


def additive(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """A mask as torch takes it (bool: True is left out; or a floating-point term) as a term to add."""
    if mask is None or mask.is_floating_point():
        return mask
    return like.new_zeros(mask.shape).masked_fill(mask, -torch.inf)


class _Projected(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class MultiheadForward:
    """Takes the place of an nn.MultiheadAttention's forward. heads: of all ranks."""

    def __init__(
        self,
        module: nn.MultiheadAttention,
        source: SublayerInput,
        output: SublayerOutput,
        heads: Sequence[RankHeads],
    ) -> None:
        self.module, self.source, self.output, self.heads = module, source, output, heads
        self.total = heads[-1].q[1]  # heads of all ranks
        self.mine = heads[source.group.rank]
        self.widths = [head.q_count * module.head_dim for head in heads]  # columns of out_proj on every rank

    def project(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Projected:
        module, query_entered = self.module, self.source(query)
        key_entered = self.source(key)
        value_entered = self.source(value)
        self.source.clear()
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)
        else:
            weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        inputs = query_entered, key_entered, value_entered
        q, k, v = (F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True))
        if module.bias_k is not None and module.bias_v is not None:
            k = torch.cat([k, module.bias_k.expand(k.shape[0], 1, -1)], 1)
            v = torch.cat([v, module.bias_v.expand(v.shape[0], 1, -1)], 1)
        q, k, v = (x.unflatten(2, (self.mine.q_count, module.head_dim)).transpose(1, 2) for x in (q, k, v))
        if module.add_zero_attn:
            zero = k.new_zeros((*k.shape[:2], 1, k.shape[3]))
            k, v = torch.cat([k, zero], 2), torch.cat([v, zero], 2)
        return _Projected(q, k, v)

    def mask(
        self,
        attn_mask: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
    ) -> torch.Tensor | None:
        """The sum of both masks for this rank's heads, (N or 1, heads or 1, L or 1, S), or None."""
        attn_mask, key_padding_mask = additive(attn_mask, q), additive(key_padding_mask, q)
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.total))[:, slice(*self.mine.q)]
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.reshape(-1, 1, 1, key_padding_mask.shape[-1])
            attn_mask = key_padding_mask if attn_mask is None else attn_mask + key_padding_mask
        if attn_mask is None:
            return None
        # Keys that bias_k and add_zero_attn have put at the end are not masked.
        return F.pad(attn_mask, (0, k.shape[2] - attn_mask.shape[-1]))

    # signature of nn.MultiheadAttention.forward
    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        module, batched = self.module, query.dim() == 3
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as torch
        sequence_first = batched and not module.batch_first
        views: dict[int, torch.Tensor] = {}
        for x in (query, key, value):
            views[id(x)] = (
                x
                if batched and module.batch_first
                else x.transpose(0, 1)
                if sequence_first
                else x.unsqueeze(0)
            )
        q, k, v = self.project(views[id(query)], views[id(key)], views[id(value)])
        mask = self.mask(attn_mask, key_padding_mask, q, k)
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            out = weights @ v
            weights = self.all_weights(weights, average_attn_weights)
            weights = weights if batched else weights.squeeze(0)
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.output(
            out.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias, self.widths
        )
        return (out.transpose(0, 1) if sequence_first else out if batched else out.squeeze(0)), weights

    def all_weights(self, weights: torch.Tensor, average: bool) -> torch.Tensor:
        group = self.source.group
        if average:
            return differentiable.reduce_from(weights.sum(1), group) / self.total
        return differentiable.gather_from(weights, 1, [heads.q_count for heads in self.heads], group)
