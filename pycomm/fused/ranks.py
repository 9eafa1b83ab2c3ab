"""The ranks of a fused operation: one face for a torch process group, a pycomm.Communicator, and a process alone.

An asynchronous collective returns a work with wait(); the tensors must live, and stay as they are, until then. Parts are matrices of
contiguous rows, one per rank, and may differ in their number of rows. pycomm takes such a list as it is. Other backends (Gloo, NCCL) want
equal parts in one buffer: where the parts are not that already, they go through a padded copy, taken in wait().

Memory that belongs to a group, such as registered buffers, is kept in `Ranks.cache`, which lives as long as the group's object. Nothing
in it may refer to that object, or neither would ever be freed.
"""

import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from pycomm import _C
from pycomm.communicator import Communicator

__all__ = ["ALONE", "Ranks", "of"]

# torch 2.13 renames these two.
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_caches = weakref.WeakKeyDictionary()  # group -> what Ranks.cache says


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
    """This rank and its peers. group: None alone; communicator: the native one (pycomm._C), None where another backend moves the bytes.

    The collectives return a work when async_op, else when they are done: without a hand-off to another thread, where the group is idle.
    """

    group: object
    rank: int
    size: int
    communicator: object
    cache: dict

    @property
    def name(self):
        if self.group is None:
            return "alone"
        return self.group.name if isinstance(self.group, Communicator) else self.group.group_name

    def __str__(self):
        return f"[rank {self.rank}/{self.size}]"

    def all_gather(self, parts, x, async_op=True):
        """parts[r] = x of rank r. parts: one matrix where all have as many rows, else a list."""
        if isinstance(self.group, Communicator):
            work = self.group.all_gather(x, parts, async_op=async_op)
        elif (joined := _joined(parts)) is not None:
            work = _gather_flat(joined, x, group=self.group, async_op=async_op)
        elif self.communicator is not None:
            work = dist.all_gather(parts, x, group=self.group, async_op=async_op)
        else:
            longest = max(part.shape[0] for part in parts)
            buffer = x.new_empty(self.size * longest, x.shape[1])
            work = _gather_flat(buffer, _padded([x], longest), group=self.group, async_op=True)
            return _then(work, [(part, buffer[r * longest :][: part.shape[0]]) for r, part in enumerate(parts)], async_op)
        return work if async_op else None

    def reduce_scatter(self, out, parts, async_op=True):
        """out = the sum over all ranks of their parts[this rank]. parts: as in all_gather."""
        if isinstance(self.group, Communicator):
            work = self.group.reduce_scatter(parts, out, async_op=async_op)
        elif (joined := _joined(parts)) is not None:
            work = _scatter_flat(out, joined, group=self.group, async_op=async_op)
        elif self.communicator is not None:
            work = dist.reduce_scatter(out, parts, group=self.group, async_op=async_op)
        else:
            longest = max(part.shape[0] for part in parts)
            buffer = out.new_empty(longest, out.shape[1])
            work = _scatter_flat(buffer, _padded(parts, longest), group=self.group, async_op=True)
            return _then(work, [(out, buffer[: out.shape[0]])], async_op)
        return work if async_op else None

    def all_reduce(self, x, async_op=True):
        """x = the sum of all ranks' x, in place."""
        if isinstance(self.group, Communicator):
            work = self.group.all_reduce(x, async_op=async_op)
        else:
            work = dist.all_reduce(x, group=self.group, async_op=async_op)
        return work if async_op else None

    def empty(self, count, dtype, device):
        """Collective: a flat tensor in memory that all ranks have mapped. Only where there is a communicator."""
        return self.communicator.empty([count], dtype, device)


ALONE = Ranks(None, 0, 1, None, {})


def of(group=None, device="cpu"):
    """The ranks of a torch process group, a Communicator, or None: torch's default group, this process alone where there is none.

    Raises TypeError for anything else, ValueError where this rank is not in the group.
    """
    if isinstance(group, Communicator):
        return Ranks(group, group.rank, group.world_size, group._comm, _cache(group))
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return ALONE
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"[rank {dist.get_rank()}/{dist.get_world_size()}] this rank is not in the group that was given")
        raise TypeError(f"group must be a torch ProcessGroup, a pycomm.Communicator or None, not {type(group).__name__}")
    backend = group._get_backend(torch.device(device))
    communicator = backend.communicator if isinstance(backend, _C.Backend) else None
    return Ranks(group, group.rank(), group.size(), communicator, _cache(group))


def _cache(group):
    cache = _caches.get(group)
    return _caches.setdefault(group, {}) if cache is None else cache


def _joined(parts):
    """The one buffer that the parts are, in order; None if they differ in size or do not lie side by side."""
    if isinstance(parts, torch.Tensor):
        return parts
    first, nbytes = parts[0], parts[0].numel() * parts[0].element_size()
    if any(part.shape != first.shape or part.data_ptr() != first.data_ptr() + r * nbytes for r, part in enumerate(parts)):
        return None
    return first.as_strided((len(parts) * first.shape[0], first.shape[1]), (first.shape[1], 1))


def _padded(parts, longest):
    """The parts, each with zeros behind it up to `longest` rows, in one buffer."""
    buffer = parts[0].new_zeros(len(parts) * longest, parts[0].shape[1])
    for r, part in enumerate(parts):
        buffer[r * longest :][: part.shape[0]] = part
    return buffer
