"""How ranks agree about what was found: one way for all checks."""

from datetime import timedelta

import torch
import torch.distributed as dist

from pycomm.parallel.ground import comm
from pycomm.parallel.parts import Parallelized

__all__ = ["Elsewhere", "agreed", "raise_together"]

_MOST_BYTES = 1536  # of a sentence
ALONE = 10.0  # seconds that a rank whose model has raised waits for the others to raise, too


class Elsewhere(Exception):
    """Another stage has not run. all_know: of the agreement of all stages."""

    def __init__(self, all_know: bool = False) -> None:
        super().__init__("another stage has not run")
        self.all_know = all_know


def agreed(parts: Parallelized, *numbers: float, error: Exception | None = None) -> list[float]:
    """The largest of each on any rank. Collective over all ranks.

    error: what the model raised here. If others did not raise it, they wait inside of its forward for
    collectives that do not come, and cannot meet this rank: then, after ALONE seconds, it is raised, as the
    cause. They find it in the last words.
    """
    told = torch.tensor(numbers, dtype=torch.float64, device=parts.device)
    if error is None or isinstance(error, Elsewhere):
        comm.all_reduce(told, parts.mesh.world, dist.ReduceOp.MAX)
        return told.tolist()
    try:
        work = comm.all_reduce(told, parts.mesh.world, dist.ReduceOp.MAX, async_op=True)
        work.wait(timedelta(seconds=ALONE))
    except dist.DistError as apart:
        raise error from apart
    parts.last_words.leave(None)
    return told.tolist()


def raise_together(parts: Parallelized, sentence: str | None) -> None:
    """Raises ValueError on all ranks, with the sentence of the first that has one. Collective over all."""
    world = parts.mesh.world
    first = torch.tensor(world.rank if sentence else world.size, device=parts.device)
    comm.all_reduce(first, world, dist.ReduceOp.MIN)
    text = (sentence or "").encode()[:_MOST_BYTES].ljust(_MOST_BYTES)
    told = torch.tensor(list(text), dtype=torch.uint8, device=parts.device)
    comm.broadcast(told, int(first), world)
    raise ValueError(f"[rank {world.rank}] {bytes(told.tolist()).decode(errors='ignore').rstrip()}")
