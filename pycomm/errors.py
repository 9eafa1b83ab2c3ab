"""The errors of the wire: what went wrong between ranks.

A wrong argument on this rank alone is a ValueError or TypeError; these are for what needs two ranks to see.
All are torch.distributed.DistBackendError, so that code written for other backends of torch.distributed
catches them.

The message names the rank, the operation, both values and the way out:

    [rank 2/4] all_reduce #17: count=1024 here, 512 on rank 3. All ranks must pass equal sizes.
"""

from __future__ import annotations

import torch.distributed

__all__ = ["AbortedError", "CommError", "CommTimeoutError", "MismatchError", "PeerError"]


class CommError(torch.distributed.DistBackendError):
    """Base of all errors of a collective or point-to-point operation.

    Attributes, each None where it is unknown or has no meaning:
        rank: this rank in the group; world_size: the group's size.
        op: name of the operation, e.g. "all_reduce".
        sequence: number of the operation in its group; the same on all ranks.
        peer: rank in the group of the other side: who died, did not arrive, or called something else.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        op: str | None = None,
        sequence: int | None = None,
        peer: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.world_size = world_size
        self.op = op
        self.sequence = sequence
        self.peer = peer


class MismatchError(CommError):
    """The ranks of a group called different things: another operation, size, dtype, reduce-op, root, splits
    or message length.

    Raised on every rank of the group. No data of the operation was delivered.
    """


class PeerError(CommError):
    """A rank died or left the group (killed, exited, closed) while others needed it; `peer` says which.

    Raised on all survivors within 0.2 s of the death. The group is broken: close it.
    """


class CommTimeoutError(CommError, TimeoutError):
    """A rank did not arrive before the deadline of the operation; `peer` is the first one missing, the
    message lists all.
    """


class AbortedError(CommError):
    """The group was aborted, by abort() on this rank from another thread or on another rank, or it is already
    closed.
    """
