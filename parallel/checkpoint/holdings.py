"""What a rank holds of the model at full precision, whatever the plan.

holdings(parts)    ranges of elements of local parameters: whole ones (zero 0), or pieces (zero 1 to 3)
boxes.boxes_of     where these lie in the original model's parameters, and what of them this rank counts
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm.parallel.checkpoint.boxes import boxes_of
from pycomm.parallel.data.bucket import ParamInfo
from pycomm.parallel.models.trunk import Side

if TYPE_CHECKING:
    from pycomm.parallel.checkpoint.boxes import Box
    from pycomm.parallel.parts import Parallelized

__all__ = ["Holding", "holdings", "persistent_buffers"]


class Holding(NamedTuple):
    """Elements start to stop of the flattened local parameter of `info`."""

    info: ParamInfo
    start: int
    stop: int
    values: torch.Tensor  # at full precision, detached
    part: torch.nn.Parameter | None  # what the optimizer has for it; None when it is in no bucket (frozen)
    first: bool  # this rank is the first of those that hold just these elements

    def boxes(self, values: torch.Tensor, counted: bool) -> list[Box]:
        """boxes_of this range; values: the part, or state of the optimizer that has its shape."""
        if counted and not self.info.counted:
            return []
        return boxes_of(self.info.layout, self.info.shape, self.start, self.stop, values, counted)


def holdings(parts: Parallelized) -> list[Holding]:
    """Holdings of all parameters of this rank, frozen ones included."""
    found: list[Holding] = []
    sharded: set[int] = set()
    for shards in parts.all_shards:
        for info, piece, part in shards.owned:
            values, first = part.detach(), shards.bucket.is_first
            found.append(Holding(info, piece.start, piece.stop, values, part, first))
        sharded.update(id(info) for info in shards.bucket.infos)
    for info in parts.infos:
        if id(info) not in sharded:
            first = info.group.rank == 0 and info.replicas.rank == 0
            found.append(Holding(info, 0, info.numel, info.param.detach(), None, first))
    return found


def persistent_buffers(parts: Parallelized) -> dict[str, tuple[torch.Tensor, bool]]:
    """{name: (buffer, used)}; used: it has data and its module runs on this rank."""
    owners = parts.stage_model.owners if parts.stage_model is not None else []
    elsewhere = {name for name, _, side in owners if side is not Side.AROUND and not parts.stages.here(side)}
    found = {}
    for prefix, module in parts.model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                found[f"{prefix}.{key}" if prefix else key] = (
                    buffer.detach(),
                    not buffer.is_meta and prefix not in elsewhere,
                )
    return found
