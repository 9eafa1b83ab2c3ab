"""Groups of ranks, as pycomm.fused and pycomm.parallel take them, and the pieces that they cut and join.

A Group is a process group with this rank's place in it and a name. One rank alone has no process group: code
above asks for the size and needs no other branch. The backend is whatever the process group has: pycomm,
Gloo, NCCL.

[Note: uneven pieces] Collectives of equal pieces are the portable and the fast ones. Where the lengths
differ, every piece is padded to the longest:

    sizes 3, 2, 2      pieces   a a a | b b | c c
                       padded   a a a | b b . | c c .         pad_pieces, unpad_pieces
"""

from typing import NamedTuple

import torch.distributed as dist

from pycomm.communicator import Communicator

__all__ = [
    "ALONE",
    "Group",
    "all_gather_flat",
    "as_group",
    "even_sizes",
    "pad_pieces",
    "reduce_scatter_flat",
    "unpad_pieces",
]

# torch 2.13 renames these two.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Group(NamedTuple):
    """Ranks that do collectives together.

    Attributes:
        name: for messages and counts; in pycomm.parallel that of the mesh axis, or of several joined by "+".
        pg: torch process group or Communicator; None for a rank alone.
    """

    name: str
    size: int
    rank: int
    pg: dist.ProcessGroup | Communicator | None


ALONE = Group("alone", 1, 0, None)


def as_group(group=None, name=None, *, native=False):
    """A Group.

    Args:
        group: a Group, a torch process group, or None: the default group, this rank alone where there is
        none.
        name: None: that of the process group.
        native: a Communicator will do as well.

    Raises ValueError where this rank is not in the group, TypeError for anything else.
    """
    if isinstance(group, Group):
        return group
    if native and isinstance(group, Communicator):
        return Group(name or group.name, group.world_size, group.rank, group)
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return ALONE
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            place = f"[rank {dist.get_rank()}/{dist.get_world_size()}]"
            raise ValueError(f"{place} this rank is not in the group that was given")
        kinds = "a torch ProcessGroup" + (", a pycomm.Communicator" if native else "")
        raise TypeError(f"group must be {kinds} or None, not {type(group).__name__}")
    return Group(name or group.group_name, group.size(), group.rank(), group)


def even_sizes(length, parts):
    """How torch.tensor_split cuts `length`: pieces that differ by at most one, longer ones first."""
    return [length // parts + (part < length % parts) for part in range(parts)]


def pad_pieces(pieces, longest):
    """The pieces joined along dim 0, each with zeros behind it up to `longest` rows: (len(pieces) * longest,
    ...).

    Not (len(pieces), longest, ...): Gloo wants the shape of the parts joined.
    """
    first = pieces[0]
    padded = first.new_zeros((len(pieces) * longest, *first.shape[1:]))
    for r, piece in enumerate(pieces):
        padded[r * longest : r * longest + piece.shape[0]] = piece
    return padded


def unpad_pieces(padded, sizes):
    """The pieces of pad_pieces, as views."""
    longest = padded.shape[0] // len(sizes)
    return [padded[r * longest : r * longest + size] for r, size in enumerate(sizes)]
