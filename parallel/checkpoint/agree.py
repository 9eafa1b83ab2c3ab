"""Small objects between the ranks, and failures that all ranks learn of."""

import pickle

import torch
import torch.distributed as dist

from pycomm.parallel.ground import comm

__all__ = ["exchange", "together"]


def exchange(parts, value):
    """A small object of every rank, in order of rank. Collective over all ranks."""
    world = parts.mesh.world
    if world.size == 1:
        return [value]
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(parts.device)
    longest = torch.tensor([data.numel()], device=parts.device)
    comm.all_reduce(longest, world, dist.ReduceOp.MAX)
    padded = data.new_zeros(int(longest))
    padded[: data.numel()] = data
    rows = data.new_empty(world.size * padded.numel())
    comm.all_gather(rows, padded, world)
    return [pickle.loads(bytes(row.tolist())) for row in rows.split(padded.numel())]


def together(parts, action):
    """action(), which must not communicate, on every rank. When it raises on some, all raise: their own error
    or the first other.
    """
    value = error = None
    try:
        value = action()
    except Exception as caught:
        error = caught
    told = exchange(parts, None if error is None else (type(error).__name__, str(error)))
    if error is not None:
        raise error
    for rank, other in enumerate(told):
        if other is not None:
            kind = {"ValueError": ValueError, "FileNotFoundError": FileNotFoundError}.get(
                other[0], RuntimeError
            )
            raise kind(f"[rank {parts.mesh.world.rank}] rank {rank} failed: {other[1]}")
    return value
