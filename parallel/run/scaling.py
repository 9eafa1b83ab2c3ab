"""torch's GradScaler around a step: fp16 gradients are computed from a loss times the scale, and a step whose
gradients are not finite on some rank is left out on all ranks.

    each rank        loss * scale --backward--> gradients * scale, summed over the ranks
    all ranks        one number: how many ranks have a gradient that is inf or nan        (updates.py)
    none             factor 1/scale joins that of clipping; step; the scaler counts a good step
    some             no step; the scaler halves its scale, or what it was made with

The scaler learns of it by its public methods alone: it is shown an optimizer over one number, whose gradient
is what was found on all ranks. So every rank's scaler goes the same way, as in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pycomm.parallel.ground.plan import Plan

__all__ = ["Scaling"]


class Scaling:
    """scaler: None for no scaling. Raises ValueError for anything else, and for what scaled gradients cannot
    go through.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, plan: Plan, device: torch.device) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ValueError(f"step(scaler=...) takes a torch.amp.GradScaler, not a {type(scaler).__name__}")
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.device = device
        if self.scaler is not None and plan.compression:
            raise ValueError(
                f"step(scaler=...): Plan({plan}) keeps what compression left out of a gradient for the next "
                "step, where an inf would stay for ever. Use bf16 without a scaler, or no compression"
            )

    @property
    def is_on(self) -> bool:
        return self.scaler is not None

    @property
    def scale(self) -> float:
        return self.scaler.get_scale() if self.scaler is not None else 1.0

    def end(self, found: bool) -> None:
        """found: whether some rank had a gradient that is not finite. Where it is on only."""
        assert self.scaler is not None
        number = torch.nn.Parameter(torch.zeros(1, device=self.device))
        number.grad = gradient = torch.full_like(number, torch.inf if found else 0.0)
        stand_in = torch.optim.SGD([number], lr=0.0)
        self.scaler.scale(gradient)  # the first call makes its state
        self.scaler.unscale_(stand_in)
        self.scaler.step(stand_in)
        self.scaler.update()
