"""How far apart numbers may be that are the same: the one table of all checks. All are relative.

equal shapes      STRICT: equal rows give equal bits. Where a model works on other shapes for other values
                  (experts that choose tokens), or gives other bits for the same, as COARSE
other shapes      COARSE, by the coarsest dtype in which the model computes
positions         OF_POSITIONS, of the mean size of a position: norms may compute in fp32 by themselves
losses            OF_LOSS, by the dtype in which the loss is computed
random numbers    OF_DRAWN, of a loss of more rows, for which it draws other ones
"""

from typing import NamedTuple

import torch

__all__ = ["OF_DRAWN", "STRICT", "Rounding", "coarse", "of_loss", "of_positions", "rounding_of"]

STRICT = 1e-6
COARSE, COARSE_ELSE = {torch.float64: 1e-5, torch.float32: 1e-3}, 0.1
OF_LOSS, OF_LOSS_ELSE = {torch.float64: 1e-6, torch.float32: 1e-4}, 2e-2
OF_POSITIONS, OF_POSITIONS_ELSE = {torch.float64: 1e-5, torch.float32: 1e-4}, 5e-2
OF_DRAWN = 0.2


def coarse(dtype: torch.dtype) -> float:
    return COARSE.get(dtype, COARSE_ELSE)


def of_positions(dtype: torch.dtype) -> float:
    return OF_POSITIONS.get(dtype, OF_POSITIONS_ELSE)


def of_loss(dtype: torch.dtype) -> float:
    return OF_LOSS.get(dtype, OF_LOSS_ELSE)


class Rounding(NamedTuple):
    """How far what is the same may be apart, relative."""

    equal: float  # in runs of equal shapes
    other: float  # in runs of other shapes
    draws: bool  # the model draws random numbers, other ones for other shapes
    loss_draws: bool = False  # the loss does


def rounding_of(dtypes: set[torch.dtype], is_rough: bool, draws: bool) -> Rounding:
    """dtypes: in which the model computes. is_rough: equal shapes give other bits, see above."""
    most = max(map(coarse, dtypes), default=coarse(torch.float64))
    return Rounding(most if is_rough else 0.0, most, draws)
