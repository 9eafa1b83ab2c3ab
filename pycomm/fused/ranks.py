"""The ranks of a fused operation: a Group as it is reached from one device, and its collectives on pieces.

An asynchronous collective returns a work with wait(); the tensors must live, and stay as they are, until
then. Parts are matrices of contiguous rows, one per rank, and may differ in their number of rows. pycomm
takes such a list as it is. Other backends (Gloo, NCCL) want equal parts in one buffer: where the parts are
not that already, they go through a padded copy (groups.py, [Note: uneven pieces]), taken in wait().

Memory that belongs to a group, such as registered buffers, is kept in `Ranks.cache`, which lives as long as
the process group. Nothing in it may refer to that object, or neither would ever be freed.
"""

import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from pycomm import _C, groups
from pycomm.communicator import Communicator
from pycomm.groups import Group, all_gather_flat, pad_pieces, reduce_scatter_flat, unpad_pieces

__all__ = ["ALONE", "Ranks", "of"]

_caches = weakref.WeakKeyDictionary()  # process group -> what Ranks.cache says


class Then:
    """A work that is followed by a copy out of a buffer of its own."""

    def __init__(self, work, copies):
        self._work, self._copies = work, copies

    def wait(self):
        self._work.wait()
        for target, source in self._copies:
            target.copy_(source)


def _then(work, copies, async_op):
    work = Then(work, copies)
    return work if async_op else work.wait()


class Ranks(NamedTuple):
    """This rank and its peers. communicator: the native one (pycomm._C) of the device; None where another
    backend moves the bytes. cache: see above.

    The collectives return a work when async_op, else when they are done: without a hand-off to another
    thread, where the group is idle.
    """

    group: Group
    communicator: object
    cache: dict

    @property
    def rank(self):
        return self.group.rank

    @property
    def size(self):
        return self.group.size

    def __str__(self):
        return f"[rank {self.rank}/{self.size}]"

    def all_gather(self, parts, x, async_op=True):
        """parts[r] = x of rank r. parts: one matrix where all have as many rows, else a list."""
        pg = self.group.pg
        if isinstance(pg, Communicator):
            work = pg.all_gather(x, parts, async_op=async_op)
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
        return work if async_op else None

    def reduce_scatter(self, out, parts, async_op=True):
        """out = the sum over all ranks of their parts[this rank]. parts: as in all_gather."""
        pg = self.group.pg
        if isinstance(pg, Communicator):
            work = pg.reduce_scatter(parts, out, async_op=async_op)
        elif (joined := _joined(parts)) is not None:
            work = reduce_scatter_flat(out, joined, group=pg, async_op=async_op)
        elif self.communicator is not None:
            work = dist.reduce_scatter(out, parts, group=pg, async_op=async_op)
        else:
            longest = max(part.shape[0] for part in parts)
            buffer = out.new_empty(longest, out.shape[1])
            work = reduce_scatter_flat(buffer, pad_pieces(parts, longest), group=pg, async_op=True)
            return _then(work, [(out, buffer[: out.shape[0]])], async_op)
        return work if async_op else None

    def all_reduce(self, x, async_op=True):
        """x = the sum of all ranks' x, in place."""
        pg = self.group.pg
        if isinstance(pg, Communicator):
            work = pg.all_reduce(x, async_op=async_op)
        else:
            work = dist.all_reduce(x, group=pg, async_op=async_op)
        return work if async_op else None

    def empty(self, count, dtype, device):
        """Collective: a flat tensor in memory that all ranks have mapped. Only where there is a
        communicator.
        """
        return self.communicator.empty([count], dtype, device)


ALONE = Ranks(groups.ALONE, None, {})


def of(group=None, device="cpu"):
    """The Ranks of a torch process group, a Communicator, or None: torch's default group, this process alone
    where there is none. Raises as groups.as_group.
    """
    group = groups.as_group(group, native=True)
    if group.pg is None:
        return ALONE
    if isinstance(group.pg, Communicator):
        return Ranks(group, group.pg._comm, _cache(group.pg))
    backend = group.pg._get_backend(torch.device(device))
    communicator = backend.communicator if isinstance(backend, _C.Backend) else None
    return Ranks(group, communicator, _cache(group.pg))


def _cache(group):
    cache = _caches.get(group)
    return _caches.setdefault(group, {}) if cache is None else cache


def _joined(parts):
    """The one buffer that the parts are, in order; None if they differ in size or do not lie side by side."""
    if isinstance(parts, torch.Tensor):
        return parts
    first, nbytes = parts[0], parts[0].numel() * parts[0].element_size()
    if any(
        part.shape != first.shape or part.data_ptr() != first.data_ptr() + r * nbytes
        for r, part in enumerate(parts)
    ):
        return None
    return first.as_strided((len(parts) * first.shape[0], first.shape[1]), (first.shape[1], 1))
