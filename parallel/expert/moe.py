"""A mixture of experts: a plain module in one process, expert-parallel after shard().

    x (..., dim) -> gate (dim -> experts) -> softmax -> the top_k experts of each token -> dispatch -> experts
    -> weighted sum (..., dim)

Who holds what, with 5 experts over 2 ranks (the gate is on both):

    one process      gate  experts.0  experts.1  experts.2  experts.3  experts.4
    rank 0           gate  experts.0  experts.1  experts.2
    rank 1           gate                                   experts.3  experts.4

No token is dropped and no expert has a limit (Gale et al. 2022, MegaBlocks, says why); the price is that a
rank whose experts are chosen often has more work and more memory than the others. dispatch.py has the
movement of the tokens and its cost.

Load-balance loss (Fedus et al. 2021, Switch; Lepikhin et al. 2020, GShard), over ALL tokens of the ranks in
`counted_over`:

    aux = aux_loss * E * sum_e f_e P_e     f_e: share of the assignments that go to expert e (a constant)
                                           P_e: mean probability of e

It is not linear in the tokens, so the mean of the ranks' own losses would be another loss than the single
process has. The counts and the sums of probabilities are therefore all-reduced (16 E bytes), and each rank
differentiates its own tokens' part of P: the sum over ranks of the gradients is the gradient of the loss
above. The gradient enters the graph at the output of the module, so the user's loss needs no term for it, and
the module may lie inside a pipeline stage. It is multiplied by `aux_scale`: whoever cuts a batch into
microbatches sets 1 / microbatches, whoever scales the loss (fp16) sets that factor.

[Note: equal graphs] All ranks must do the same collectives in forward, in backward and in the recomputation
of activation checkpointing, also a rank without tokens, without experts, or with an expert that no token
chose. So nothing is left out for being empty: an expert is called with 0 rows (its parameters then get zero
gradients, and hooks such as ZeRO's all-gather run on every rank), and an input without gradient is treated as
if it had one, or a rank without experts would have no path to combine's backward collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from pycomm.parallel.expert import dispatch
from pycomm.parallel.ground import comm

__all__ = ["MoE"]


if TYPE_CHECKING:

    class _OfAddGradient(FunctionCtx):
        saved_tensors: tuple[torch.Tensor]
        scale: float


class Chosen(NamedTuple):
    """What the gate says of each token, in fp32 at least."""

    probabilities: torch.Tensor  # (tokens, experts)
    weights: torch.Tensor  # (tokens, top_k)
    experts: torch.Tensor  # (tokens, top_k) int64


class _AddGradient(torch.autograd.Function):
    """out, unchanged; in backward `aux` gets `scale` as its gradient, as if scale * aux had been added to the
    loss.
    """

    @staticmethod
    def forward(ctx: _OfAddGradient, out: torch.Tensor, aux: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(aux)
        ctx.scale = scale
        return out.view_as(out)

    @staticmethod
    def backward(ctx: _OfAddGradient, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (aux,) = ctx.saved_tensors
        return grad, torch.full_like(aux, ctx.scale), None


class MoE(nn.Module):
    """Mixture of experts, top_k of num_experts for each token.

    dim: last dimension of the input. expert: makes one expert, a module (n, dim) -> (n, dim) that treats rows
    alike and takes n = 0.
    aux_loss: coefficient of the load-balance loss, 0 for none; it acts in training mode only.
    renormalize: the weights of the chosen experts are divided by their sum. Default: when top_k > 1; with one
    choice the weight would be 1 and the gate would get no gradient from the loss (Switch keeps the
    probability).
    group: shards the experts over it at once, for use alone; gate's weight is taken from its rank 0. The
    gradient of the gate is then this rank's part and the caller sums it over the group, as for every
    parameter that all ranks hold. None: shard() may be called later.

    Parameters: `gate.weight` (num_experts, dim), `experts.<global index>.<name>`.
    State: `last_aux`, the load-balance loss of the last forward in training mode (a scalar without gradient,
    equal on all ranks; None before), `aux_scale`, the factor of its gradient (float, 1.0), and `is_counted`:
    False while the rows are no rows of this rank ([Note: no rows] in ground/batch.py), of which none is sent.
    Raises ValueError for numbers that do not fit. Source: Shazeer et al. 2017; Fedus et al. 2021.
    """

    read_counts = staticmethod(dispatch.read_counts)

    def __init__(
        self,
        dim: int,
        expert: Callable[[], nn.Module],
        num_experts: int,
        top_k: int = 2,
        *,
        aux_loss: float = 0.01,
        renormalize: bool | None = None,
        group: comm.GroupLike = None,
    ) -> None:
        super().__init__()
        if isinstance(expert, nn.Module):
            raise ValueError(
                "MoE(expert=...) takes a function that makes an expert, not a module "
                f"({type(expert).__name__}): lambda: ..."
            )
        if num_experts < 1 or not 1 <= top_k <= num_experts:
            raise ValueError(
                f"MoE: top_k={top_k} of num_experts={num_experts}; needs 1 <= top_k <= num_experts"
            )
        self.dim, self.num_experts, self.top_k = dim, num_experts, top_k
        self.aux_loss, self.aux_scale, self.is_counted = aux_loss, 1.0, True
        self.last_aux: torch.Tensor | None = None
        self.renormalize = top_k > 1 if renormalize is None else renormalize
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleDict({str(index): expert() for index in range(num_experts)})
        if len({id(module) for module in self.experts.values()}) < num_experts:
            raise ValueError(
                "MoE(expert=...) returned the same module twice; it must make a new one at each call"
            )
        self.group, self.counted_over, self.held = comm.ALONE, comm.ALONE, [num_experts]
        self.is_sharded = False
        if group is not None:
            ep = comm.as_group(group, "ep")
            self.shard(ep, ep)
            comm.broadcast(self.gate.weight.data, 0, ep)

    def shard(self, group: comm.GroupLike, counted_over: comm.GroupLike) -> None:
        """Keeps this rank's experts and drops the others; from then on forward and backward are collective on
        both groups.

        group: the ranks over which the experts are laid: consecutive ones to each, one more to the first
        ranks where they do not divide, so that a rank may get none.
        counted_over: all ranks whose tokens make up the batch of the load-balance loss, this group's among
        them.
        Call before the optimizer is made. Raises ValueError when called twice.
        """
        ep, data = comm.as_group(group, "ep"), comm.as_group(counted_over, "data")
        if self.is_sharded:
            raise ValueError(
                f"[rank {ep.rank}] MoE.shard: experts are already laid over {self.group.size} ranks "
                f"({self.group.name!r})"
            )
        self.held = comm.even_sizes(self.num_experts, ep.size)
        first = sum(self.held[: ep.rank])
        kept = range(first, first + self.held[ep.rank])
        for index in range(self.num_experts):
            if index not in kept:
                del self.experts[str(index)]
        self.group, self.counted_over, self.is_sharded = ep, data, True

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, held={self.held}"

    def choose(self, x: torch.Tensor) -> Chosen:
        """x: (tokens, dim)."""
        logits = self.gate(x)
        probabilities = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        # A stable sort and not topk: of equal probabilities, which 16-bit logits often give, the lower expert
        # wins, always.
        chosen = probabilities.detach().argsort(dim=-1, descending=True, stable=True)[:, : self.top_k]
        weights = probabilities.gather(1, chosen)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Chosen(probabilities, weights, chosen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., dim) -> (..., dim), same dtype. Collective on the groups; ranks may have different numbers
        of tokens, also 0.
        """
        if x.shape[-1] != self.dim:
            raise ValueError(
                f"[rank {self.group.rank}] MoE: the input's last dimension is {x.shape[-1]}, dim={self.dim}"
            )
        if x.is_meta:  # only the shape is asked for: routes depend on values
            return torch.empty_like(x)
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # see [Note: equal graphs]
        tokens = x.reshape(-1, self.dim)
        if not self.is_counted:
            left_out, tokens = tokens, tokens[:0]
        probabilities, weights, chosen = self.choose(tokens)
        routes, counts = dispatch.make_routes(chosen, self.held, self.group, self.read_counts)
        balanced = self.aux_loss != 0 and self.training
        if balanced:
            sums = probabilities.sum(0)
            # Counts are exact up to 2**53, and travel in one collective with the sums.
            over_ranks = torch.cat([counts.double(), sums.detach().double()])
            work = comm.all_reduce(over_ranks, self.counted_over, async_op=True)
        rows = dispatch.dispatch(tokens, routes, self.group)
        if self.experts:
            pieces = zip(self.experts.values(), rows.split(routes.per_expert), strict=True)
            # Under autocast experts may give another dtype; a rank without experts could not know which.
            rows = torch.cat([expert(piece) for expert, piece in pieces]).to(x.dtype)
        out = dispatch.combine(rows, weights.to(rows.dtype), routes, self.group)
        if balanced:
            work.wait()
            out = _AddGradient.apply(out, self._balance(over_ranks, sums), self.aux_scale)
        if not self.is_counted:
            out = torch.cat([out, torch.zeros_like(left_out)])
        return out.view(x.shape)

    def _balance(self, over_ranks: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """This rank's part of the load-balance loss, whose gradient is right; keeps the value over all ranks
        in last_aux.
        """
        counts, all_sums = over_ranks.split(self.num_experts)
        assignments = counts.sum().clamp(min=1)
        # assignments / top_k = tokens
        factors = self.aux_loss * self.num_experts * counts / assignments * (self.top_k / assignments)
        self.last_aux = (factors * all_sums).sum().to(sums.dtype)
        return (factors.to(sums.dtype) * sums).sum()
