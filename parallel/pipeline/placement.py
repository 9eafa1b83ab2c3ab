"""Which blocks make up a virtual stage, and which rank holds it."""

from collections.abc import Sequence
from typing import NamedTuple

from pycomm.parallel.models.trunk import Side

__all__ = ["Stages", "cut_blocks"]


class Stages(NamedTuple):
    """The virtual stages of a pipeline; one stage on rank 0 without a pipeline."""

    bounds: tuple[tuple[int, int], ...]  # per stage: its first block, and the one after its last
    placement: tuple[int, ...]  # per stage: the rank of pp that holds it
    mine: tuple[int, ...]  # the stages of this rank, in rising order
    between: int = 0  # the stage that ends the first of two lists, and runs what is called between them

    @property
    def last(self) -> int:
        return len(self.bounds) - 1

    def of(self, side: Side) -> tuple[int, ...]:
        """The stages that run what is on this Side of the blocks; both ends for what is around them."""
        return {
            Side.BEFORE: (0,),
            Side.BETWEEN: (self.between,),
            Side.AFTER: (self.last,),
            Side.AROUND: (0, self.last),
        }[side]

    def here(self, side: Side) -> bool:
        """Whether a module on this Side of the blocks runs on this rank."""
        return any(stage in self.mine for stage in self.of(side))


def cut_blocks(nblocks: int, stages: int, sizes: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """(first, last + 1) block of each stage. Without sizes as even as possible, the later stages being the
    longer ones.

    Raises ValueError when there are fewer blocks than stages or sizes do not add up.
    """
    if sizes is None:
        if nblocks < stages:
            raise ValueError(
                f"{stages} pipeline stages for {nblocks} blocks: each stage needs one block at least"
            )
        sizes = [nblocks // stages + (stage >= stages - nblocks % stages) for stage in range(stages)]
    if sum(sizes) != nblocks:
        raise ValueError(f"stages={tuple(sizes)} are {sum(sizes)} blocks, but the model has {nblocks}")
    bounds, start = [], 0
    for size in sizes:
        bounds.append((start, start + size))
        start += size
    return bounds
