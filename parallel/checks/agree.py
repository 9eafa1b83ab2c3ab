"""How ranks agree about what was found: one way for all checks."""

import torch
import torch.distributed as dist

from pycomm.parallel.ground import comm
from pycomm.parallel.parts import Parallelized

__all__ = ["agreed", "raise_together"]

_MOST_BYTES = 1536  # of a sentence


def agreed(parts: Parallelized, flags: list[bool], error: Exception | None = None) -> list[bool]:
    """Whether each is true on some rank. Collective over all ranks.

    error: what the model raised here. If others did not raise it, they wait inside of its forward for
    collectives that do not come, and cannot meet this rank: then it is raised, as the cause.
    """
    told = torch.tensor(flags, dtype=torch.float64, device=parts.device)
    try:
        comm.all_reduce(told, parts.mesh.world, dist.ReduceOp.MAX)
    except dist.DistError as apart:
        if error is not None:
            raise error from apart
        raise
    return [bool(each) for each in told.tolist()]


def raise_together(parts: Parallelized, sentence: str | None) -> None:
    """Raises ValueError on all ranks, with the sentence of the first that has one. Collective over all."""
    world = parts.mesh.world
    first = torch.tensor(world.rank if sentence else world.size, device=parts.device)
    comm.all_reduce(first, world, dist.ReduceOp.MIN)
    text = (sentence or "").encode()[:_MOST_BYTES].ljust(_MOST_BYTES)
    text = torch.tensor(list(text), dtype=torch.uint8, device=parts.device)
    comm.broadcast(text, int(first), world)
    raise ValueError(f"[rank {world.rank}] {bytes(text.tolist()).decode(errors='ignore').rstrip()}")
