"""Buffers that the forwards of a step have written: running averages, counts.

One process writes them from all rows and positions of a microbatch, a rank from its own; where that makes a
difference the ranks hold different buffers afterwards, and what is computed with them is not that of one
process. So a mark of what was written travels with the numbers at the end of a step, for each rank of pp:

    sum over n ranks of mark, of mark^2        n * sum(mark^2) = sum(mark)^2    only if all are equal

BatchNorms, which are over all rows here, experts, and tables that have got another shape are not looked at.
Cost, for models with such buffers: two numbers for each rank of pp, and a pass over what was written.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from pycomm.parallel.ground.same_batch import differ, mark_of, powers
from pycomm.parallel.models.norms import batch_norms
from pycomm.parallel.pipeline.absent import Absent

if TYPE_CHECKING:
    from pycomm.parallel.parts import Parallelized

__all__ = ["WrittenBuffers"]

_Place = tuple[str, str]  # the name of a module, and of a buffer of its
_Modules = list[tuple[str, torch.nn.Module]]
_held: weakref.WeakKeyDictionary[Parallelized, _Modules] = weakref.WeakKeyDictionary()  # that are looked at


class _State(NamedTuple):
    """Of a buffer. Another one where it has been written or exchanged."""

    id: int
    version: int | None
    shape: torch.Size


def _modules_of(parts: Parallelized) -> _Modules:
    """All that are looked at, so that a later buffer of theirs is; none for a model without buffers."""
    norms = {id(module) for module in batch_norms(parts.model).values()}
    norms |= {id(module) for moe in parts.moes for module in moe.experts.modules()}
    found = [(name, module) for name, module in parts.model.named_modules() if id(module) not in norms]
    return found if any(module._buffers for _, module in found) else []


class WrittenBuffers:
    """Made before the first forward of a step."""

    def __init__(self, parts: Parallelized) -> None:
        self.mesh, self.device = parts.mesh, parts.device
        if parts not in _held:
            _held[parts] = _modules_of(parts)
        self.held = _held[parts]
        self.before = {place: _state(value) for place, value in self._buffers()}

    def _buffers(self) -> Iterator[tuple[_Place, torch.Tensor]]:
        """Each that this rank has."""
        for name, module in self.held:
            for key, value in module._buffers.items():
                if value is not None and not value.is_meta and not isinstance(value, Absent):
                    yield (name, key), value

    def numbers(self) -> torch.Tensor:
        """What is to be summed over all ranks: as many on each, none for a model without buffers."""
        if not self.held:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        written = [
            value
            for place, value in self._buffers()
            if place in self.before and _is_other(self.before[place], _state(value))
        ]
        mark = mark_of(written) if written else 0
        sums = torch.zeros(self.mesh.group("pp").size, 2, dtype=torch.float64)
        sums[self.mesh.coordinate("pp")] = torch.tensor(powers(mark), dtype=torch.float64)
        return sums.flatten().to(self.device)

    def check(self, sums: torch.Tensor) -> None:
        """Raises ValueError, on every rank, where ranks have written different values."""
        count = self.mesh.world.size // self.mesh.group("pp").size
        for total, squares in sums.view(sums.numel() // 2, 2).tolist():
            if differ(total, squares, count):
                names = [repr(".".join(filter(None, place))) for place in self._written()]
                shown = ("one of " if len(names) > 1 else "") + ", ".join(names[:5])
                raise ValueError(
                    f"[rank {self.mesh.world.rank}] step: the forward writes a buffer ({shown}) from this "
                    "rank's rows, positions or heads, and the ranks differ in it: one process would have "
                    "another. Use a BatchNorm for averages over the batch, or a plan that does not cut what "
                    "it is over; no parameter was changed"
                )

    def _written(self) -> list[_Place]:
        return [place for place, value in self._buffers() if self.before.get(place) != _state(value)]


def _state(value: torch.Tensor) -> _State:
    return _State(id(value), None if value.is_inference() else value._version, value.shape)


def _is_other(before: _State, now: _State) -> bool:
    return before != now and before.shape == now.shape
