"""The loss of a batch, from those of its microbatches on the ranks.

Each microbatch's loss is weighted (batch.py), so the loss of the batch is a sum. The ranks of tp have the
same one, and the first of them counts it; ranks that do not hold the last stage have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm.parallel.ground import comm

if TYPE_CHECKING:
    from pycomm.parallel.ground.mesh import Mesh

__all__ = ["Result", "own_loss", "sum_losses"]


class Result(NamedTuple):
    """What a step gives, on every rank: float64 tensors without dimensions."""

    loss: torch.Tensor  # mean over the whole batch
    norm: torch.Tensor | None = None  # of the whole gradient, before clipping


def own_loss(losses: Sequence[torch.Tensor], mesh: Mesh, device: torch.device) -> torch.Tensor:
    """Sum of this rank's losses, zero where another rank counts them: a 0-dim float64 tensor."""
    if not losses or mesh.coordinate("tp"):
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([loss.detach().double() for loss in losses]).sum()


def sum_losses(losses: Sequence[torch.Tensor], mesh: Mesh, device: torch.device) -> torch.Tensor:
    """The loss of the whole batch, on every rank. Collective over all ranks."""
    loss = own_loss(losses, mesh, device)
    comm.all_reduce(loss, mesh.world)
    return loss
