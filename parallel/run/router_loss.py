"""The loss that a mixture of experts of transformers adds for its routers (config.output_router_logits).

    coefficient E sum_e C_e / N  P_e / N      C_e   how often expert e is chosen: a constant
                                              P_e   the sum of its probabilities
                                              N     rows of router logits
    all three over the tokens of a microbatch on all data ranks and over all layers, padding left out

It is no mean over tokens. So C and N are summed over the ranks, and each rank differentiates its own tokens'
part of P: the sum over the ranks is the loss above, value and gradient. Cost: one all_reduce of E + 1 numbers
for each microbatch. The loss of a step is that of its microbatches, each with the same weight, as it is by
accumulation in one process. Fedus et al. 2021 (Switch).

What a class of transformers computes for its own rows comes with its output (aux_loss). The same formula over
these rows must give that number, or the class means another one, which is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, overload

import torch

from pycomm.parallel.ground import comm
from pycomm.parallel.tensor import cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pycomm.parallel.given import LossFunction, Tree
    from pycomm.parallel.ground.batch import Microbatch
    from pycomm.parallel.ground.comm import Group

__all__ = ["RouterLoss", "plain_loss"]

Loss: TypeAlias = "LossFunction | RouterLoss"
MOST = 1e-2  # of the number that the class gives, which may be in 16 bits


@overload
def plain_loss(loss_fn: Loss) -> LossFunction: ...


@overload
def plain_loss(loss_fn: Loss | None) -> LossFunction | None: ...


def plain_loss(loss_fn: Loss | None) -> LossFunction | None:
    """The function of output and targets alone."""
    return cross_entropy if isinstance(loss_fn, RouterLoss) else loss_fn


class _Sums(NamedTuple):
    """Of this rank's rows."""

    counts: torch.Tensor  # C, in float64
    sums: torch.Tensor  # P
    rows: torch.Tensor  # N, in float64


class RouterLoss:
    """cross_entropy, and the loss of the routers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.name, config = type(model).__name__, model.config.get_text_config()
        self.coefficient = float(getattr(model, "router_aux_loss_coef", config.router_aux_loss_coef))
        self.top_k = int(getattr(model, "num_experts_per_tok", config.num_experts_per_tok))

    def of_routers(self, output: Tree, microbatch: Microbatch, group: Group = comm.ALONE) -> torch.Tensor:
        """This rank's part of the loss of the routers, a tensor without dimensions. group: the data ranks, on
        which this is collective. Raises ValueError for a class that computes something else.
        """
        layers = getattr(output, "router_logits", None)
        if not layers:
            raise self._unknown("its output has no router_logits")
        inputs = microbatch.inputs
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        if not microbatch.counts:
            mask = torch.zeros(layers[0].shape[0], device=layers[0].device)
        counts, sums, rows = self._sums(layers, mask)
        right = getattr(output, "aux_loss", None)
        right = None if right is None else float(torch.as_tensor(right).detach())
        own = float(self._product(counts, sums.detach(), rows))
        # where all is padding the class divides by no rows, and gives nan
        if right is None or (rows > 0 and not abs(own - right) <= MOST * abs(own)):
            raise self._unknown(f"it is {right} for the rows of this rank, and {own} was expected")
        numbers = torch.cat([counts, rows[None]])
        comm.all_reduce(numbers, group)
        return self.coefficient * self._product(numbers[:-1], sums, numbers[-1])

    def _sums(self, layers: Sequence[torch.Tensor], mask: torch.Tensor | None) -> _Sums:
        experts = layers[0].shape[-1]
        here = torch.ones(layers[0].shape[0], dtype=torch.float64, device=layers[0].device)
        here = here if mask is None else mask.reshape(-1).to(here)
        counts = torch.zeros(experts, dtype=torch.float64, device=here.device)
        sums: torch.Tensor | float = 0.0
        for logits in layers:
            probabilities = torch.softmax(logits, -1)
            chosen = torch.topk(probabilities, self.top_k, -1).indices
            counts.scatter_add_(0, chosen.flatten(), here.repeat_interleave(self.top_k))
            wide = probabilities.to(torch.promote_types(logits.dtype, torch.float32))
            sums = sums + (wide * here[:, None].to(wide.dtype)).sum(0)
        return _Sums(counts, torch.as_tensor(sums), here.sum() * len(layers))

    def _product(self, counts: torch.Tensor, sums: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """E sum_e C_e / N  P_e / N, in the dtype of P."""
        shares = counts / rows.clamp(min=1) / rows.clamp(min=1)
        return len(counts) * (shares.to(sums.dtype) * sums).sum()

    def _unknown(self, why: str) -> ValueError:
        return ValueError(
            f"the loss of the routers of {self.name} (config.output_router_logits) is not the one known here:"
            f" {why}. Set it to False, or pass loss_fn"
        )
