"""Small objects between the ranks, and failures that all ranks learn of."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from pycomm import CommError
from pycomm.parallel.ground import comm

if TYPE_CHECKING:
    from collections.abc import Callable

    from pycomm.parallel.parts import Parallelized

__all__ = ["exchange", "exchange_over", "together", "together_over"]

T = TypeVar("T")


def exchange(parts: Parallelized, value: T) -> list[T]:
    """A small object of every rank, in order of rank. Collective over all ranks."""
    return exchange_over(parts.mesh.world, parts.device, value)


def exchange_over(group: comm.Group, device: torch.device, value: T) -> list[T]:
    """The same in a Group, through tensors on `device`."""
    if group.size == 1:
        return [value]
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    longest = torch.tensor([data.numel()], device=device)
    comm.all_reduce(longest, group, dist.ReduceOp.MAX)
    padded = data.new_zeros(int(longest))
    padded[: data.numel()] = data
    rows = data.new_empty(group.size * padded.numel())
    comm.all_gather(rows, padded, group)
    return [pickle.loads(bytes(row.tolist())) for row in rows.split(padded.numel())]


def together(parts: Parallelized, action: Callable[[], T]) -> T:
    """action(), which must not communicate, on every rank. When it raises on some, all raise: their own error
    or the first other.
    """
    return together_over(parts.mesh.world, parts.device, action)


def together_over(group: comm.Group, device: torch.device, action: Callable[[], T]) -> T:
    """The same in a Group. action may communicate in other groups, if a rank on which it fails closes them:
    then the rest fail too, by a CommError, and raise the error that was the cause.
    """
    error: Exception | None = None
    try:
        value = action()
    except Exception as caught:
        error = caught
    lost = isinstance(error, CommError)
    try:
        told = exchange_over(
            group, device, None if error is None or lost else (type(error).__name__, str(error))
        )
    except CommError:
        if error is not None:
            raise error from None
        raise
    if error is not None and not lost:
        raise error
    for rank, other in enumerate(told):
        if other is not None:
            kind = {"ValueError": ValueError, "FileNotFoundError": FileNotFoundError}.get(
                other[0], RuntimeError
            )
            raise kind(f"[rank {group.rank}] rank {rank} failed: {other[1]}") from error
    if error is not None:
        raise error
    return value
