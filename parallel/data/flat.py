"""How parameters of any shapes lie in one flat buffer that is cut into equal chunks, one per rank.

    parts = 3       | chunk 0        | chunk 1        | chunk 2        |
    cut anywhere    | a a a a b b b b| b b c c c c c c| d d d d . . . .|   . = padding, always zero
    whole           | a a a a d d d d| b b b b b b . .| c c c c c c . .|   for optimizers that need shapes

A Piece is what one chunk holds of one parameter. Cut anywhere, the padding is less than one element per rank;
whole, the largest chunk decides and parameters are dealt by size, largest first, to the emptiest chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["FlatSpec", "Piece"]


class Piece(NamedTuple):
    """Elements start to stop of the flattened parameter `index`, which lie at `offset` of the flat buffer."""

    index: int  # type: ignore[assignment]  # the field hides tuple.index
    start: int
    stop: int
    offset: int


class FlatSpec:
    """Places of parameters of these shapes in a buffer of `parts` chunks. `numel`: of the buffer; `chunk`: of
    one chunk.
    """

    def __init__(self, shapes: Iterable[Sequence[int]], parts: int, whole: bool = False) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.parts = parts
        self.offsets = [0] * len(self.sizes)
        if whole:
            loads = [0] * parts
            members: list[list[int]] = [[] for _ in range(parts)]
            for index in sorted(range(len(self.sizes)), key=lambda i: (-self.sizes[i], i)):
                part = loads.index(min(loads))
                members[part].append(index)
                loads[part] += self.sizes[index]
            self.chunk = max(loads, default=0)
            for part, indices in enumerate(members):
                offset = part * self.chunk
                for index in sorted(indices):
                    self.offsets[index] = offset
                    offset += self.sizes[index]
        else:
            total = 0
            for index, size in enumerate(self.sizes):
                self.offsets[index] = total
                total += size
            self.chunk = -(-total // parts)
        self.numel = self.chunk * parts

    def pieces(self, part: int | None = None) -> list[Piece]:
        """What chunk `part` holds, in order of parameters; None: the whole buffer, where every parameter is
        one piece.
        """
        low, high = (0, self.numel) if part is None else (part * self.chunk, (part + 1) * self.chunk)
        found = []
        for index, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            start, stop = max(offset, low), min(offset + size, high)
            if start < stop or (size == 0 and low <= offset < max(high, 1)):
                found.append(Piece(index, start - offset, stop - offset, start))
        return found

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """One view per parameter into the flat buffer, with the parameter's shape."""
        return [
            flat[o : o + n].view(shape)
            for o, n, shape in zip(self.offsets, self.sizes, self.shapes, strict=True)
        ]
