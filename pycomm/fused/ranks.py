"""The ranks of a fused operation: a Group as it is reached from one device, and its collectives on pieces.

An asynchronous collective returns a work with wait(); the tensors must live, and stay as they are, until
then. Parts are matrices of contiguous rows, one per rank, and may differ in their number of rows. pycomm
takes such a list as it is. Other backends (Gloo, NCCL) want equal parts in one buffer: where the parts are
not that already, they go through a padded copy (groups.py, [Note: uneven pieces]), taken in wait().

Memory that belongs to a group, such as registered buffers, is kept in `Ranks.cache`, which lives as long as
the process group. Nothing in it may refer to that object, or neither would ever be freed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, cast, overload

import torch
import torch.distributed as dist

from pycomm import _C, groups
from pycomm.communicator import Communicator
from pycomm.groups import Group, all_gather_flat, pad_pieces, reduce_scatter_flat, unpad_pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pycomm.fused.choice import Choice
    from pycomm.fused.context import Context
    from pycomm.fused.machine import Machine

__all__ = ["ALONE", "AnyGroup", "Cache", "Parts", "Ranks", "Work", "of"]

AnyGroup: TypeAlias = "Group | dist.ProcessGroup | Communicator | None"  # None: torch's default group
Parts: TypeAlias = "torch.Tensor | list[torch.Tensor]"  # one matrix where all parts have as many rows


class Cache:
    """What belongs to a group and lives as long as it."""

    def __init__(self) -> None:
        self.staging: torch.Tensor | None = None  # flat bytes that all ranks have mapped (plain.py)
        self.machines: dict[torch.device, Machine] = {}
        self.contexts: dict[torch.device, Context] = {}
        self.decided: dict[tuple[torch.device, str], Choice] = {}  # by device and tuner.key_of


_caches: weakref.WeakKeyDictionary[dist.ProcessGroup | Communicator, Cache] = weakref.WeakKeyDictionary()


class Work(Protocol):
    """A collective that runs."""

    def wait(self) -> object: ...


class Then:
    """A work that is followed by a copy out of a buffer of its own."""

    def __init__(self, work: Work, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._work, self._copies = work, copies

    def wait(self) -> None:
        self._work.wait()
        for target, source in self._copies:
            target.copy_(source)


def _then(work: Work, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], async_op: bool) -> Work | None:
    then = Then(work, copies)
    if async_op:
        return then
    then.wait()
    return None


class Ranks(NamedTuple):
    """This rank and its peers. communicator: the native one (pycomm._C) of the device; None where another
    backend moves the bytes. cache: see above.

    The collectives return a work when async_op, else when they are done: without a hand-off to another
    thread, where the group is idle.
    """

    group: Group
    communicator: _C.Communicator | None
    cache: Cache

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def __str__(self) -> str:
        return f"[rank {self.rank}/{self.size}]"

    @overload
    def all_gather(self, parts: Parts, x: torch.Tensor, async_op: Literal[True] = True) -> Work: ...

    @overload
    def all_gather(self, parts: Parts, x: torch.Tensor, async_op: Literal[False]) -> None: ...

    def all_gather(self, parts: Parts, x: torch.Tensor, async_op: bool = True) -> Work | None:
        """parts[r] = x of rank r. parts: one matrix where all have as many rows, else a list."""
        pg = self.group.pg
        if isinstance(pg, Communicator):
            work = pg.all_gather(x, parts, async_op=async_op)
        elif isinstance(parts, torch.Tensor):
            work = all_gather_flat(parts, x, group=pg, async_op=async_op)
        elif (joined := _joined(parts)) is not None:
            work = all_gather_flat(joined, x, group=pg, async_op=async_op)
        elif self.communicator is not None:
            work = dist.all_gather(parts, x, group=pg, async_op=async_op)
        else:
            sizes = [part.shape[0] for part in parts]
            buffer = x.new_empty(self.size * max(sizes), x.shape[1])
            work = all_gather_flat(buffer, pad_pieces([x], max(sizes)), group=pg, async_op=True)
            copies = list(zip(parts, unpad_pieces(buffer, sizes), strict=True))
            return _then(work, copies, async_op)
        return cast("Work", work) if async_op else None

    @overload
    def reduce_scatter(self, out: torch.Tensor, parts: Parts, async_op: Literal[True] = True) -> Work: ...

    @overload
    def reduce_scatter(self, out: torch.Tensor, parts: Parts, async_op: Literal[False]) -> None: ...

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, async_op: bool = True) -> Work | None:
        """out = the sum over all ranks of their parts[this rank]. parts: as in all_gather."""
        pg = self.group.pg
        if isinstance(pg, Communicator):
            work = pg.reduce_scatter(parts, out, async_op=async_op)
        elif isinstance(parts, torch.Tensor):
            work = reduce_scatter_flat(out, parts, group=pg, async_op=async_op)
        elif (joined := _joined(parts)) is not None:
            work = reduce_scatter_flat(out, joined, group=pg, async_op=async_op)
        elif self.communicator is not None:
            work = dist.reduce_scatter(out, parts, group=pg, async_op=async_op)
        else:
            longest = max(part.shape[0] for part in parts)
            buffer = out.new_empty(longest, out.shape[1])
            work = reduce_scatter_flat(buffer, pad_pieces(parts, longest), group=pg, async_op=True)
            return _then(work, [(out, buffer[: out.shape[0]])], async_op)
        return cast("Work", work) if async_op else None

    @overload
    def all_reduce(self, x: torch.Tensor, async_op: Literal[True] = True) -> Work: ...

    @overload
    def all_reduce(self, x: torch.Tensor, async_op: Literal[False]) -> None: ...

    def all_reduce(self, x: torch.Tensor, async_op: bool = True) -> Work | None:
        """x = the sum of all ranks' x, in place."""
        pg = self.group.pg
        if isinstance(pg, Communicator):
            work = pg.all_reduce(x, async_op=async_op)
        else:
            work = dist.all_reduce(x, group=pg, async_op=async_op)
        return cast("Work", work) if async_op else None

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Collective: a flat tensor in memory that all ranks have mapped. Only where there is a
        communicator.
        """
        assert self.communicator is not None
        memory: torch.Tensor = self.communicator.empty([count], dtype, device)
        return memory


ALONE = Ranks(groups.ALONE, None, Cache())


def of(group: AnyGroup = None, device: torch.device | str = "cpu") -> Ranks:
    """The Ranks of a torch process group, a Communicator, or None: torch's default group, this process alone
    where there is none. Raises as groups.as_group.
    """
    found = groups.as_group(group, native=True)
    if found.pg is None:
        return ALONE
    if isinstance(found.pg, Communicator):
        return Ranks(found, found.pg._comm, _cache(found.pg))
    backend = found.pg._get_backend(torch.device(device))
    communicator = backend.communicator if isinstance(backend, _C.Backend) else None
    return Ranks(found, communicator, _cache(found.pg))


def _cache(group: dist.ProcessGroup | Communicator) -> Cache:
    cache = _caches.get(group)
    return _caches.setdefault(group, Cache()) if cache is None else cache


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The one buffer that the parts are, in order; None if they differ in size or do not lie side by side."""
    first, nbytes = parts[0], parts[0].numel() * parts[0].element_size()
    if any(
        part.shape != first.shape or part.data_ptr() != first.data_ptr() + r * nbytes
        for r, part in enumerate(parts)
    ):
        return None
    return first.as_strided((len(parts) * first.shape[0], first.shape[1]), (first.shape[1], 1))
