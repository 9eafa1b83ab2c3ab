"""Groups of ranks, as pycomm.fused and pycomm.parallel take them, and the pieces that they cut and join.

A Group is a process group with this rank's place in it and a name. One rank alone has no process group: code
above asks for the size and needs no other branch. The backend is whatever the process group has: pycomm,
Gloo, NCCL.

[Note: uneven pieces] Collectives of equal pieces are the portable and the fast ones. Where the lengths
differ, every piece is padded to the longest:

    sizes 3, 2, 2      pieces   a a a | b b | c c
                       padded   a a a | b b . | c c .         pad_pieces, unpad_pieces

Which host each rank is on is told by host_mark, and a placement of ranks is a list of host numbers, by rank.
"""

import functools
import hashlib
import os
import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from pycomm import env
from pycomm.communicator import Communicator
from pycomm.member import DEFAULT_TIMEOUT
from pycomm.options import DEFAULT_HOST_TIMEOUT
from pycomm.survivors.store import PointStore

__all__ = [
    "ALONE",
    "Group",
    "all_gather_flat",
    "as_group",
    "even_sizes",
    "host_mark",
    "hosts_of",
    "is_launched",
    "note_joined",
    "numbered",
    "pad_pieces",
    "reduce_scatter_flat",
    "replacement_store",
    "shared_store",
    "show_hosts",
    "shrink_limit",
    "unpad_pieces",
    "waits_to_join",
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


def as_group(
    group: Group | dist.ProcessGroup | Communicator | None = None,
    name: str | None = None,
    *,
    native: bool = False,
) -> Group:
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
        outside: object = dist.GroupMember.NON_GROUP_MEMBER
        if group == outside:
            place = f"[rank {dist.get_rank()}/{dist.get_world_size()}]"
            raise ValueError(f"{place} this rank is not in the group that was given")
        kinds = "a torch ProcessGroup" + (", a pycomm.Communicator" if native else "")
        raise TypeError(f"group must be {kinds} or None, not {type(group).__name__}")
    return Group(name or group.group_name, group.size(), group.rank(), group)


def even_sizes(length: int, parts: int) -> list[int]:
    """How torch.tensor_split cuts `length`: pieces that differ by at most one, longer ones first."""
    return [length // parts + (part < length % parts) for part in range(parts)]


def pad_pieces(pieces: Sequence[torch.Tensor], longest: int) -> torch.Tensor:
    """The pieces joined along dim 0, each with zeros behind it up to `longest` rows: (len(pieces) * longest,
    ...).

    Not (len(pieces), longest, ...): Gloo wants the shape of the parts joined.
    """
    first = pieces[0]
    padded = first.new_zeros((len(pieces) * longest, *first.shape[1:]))
    for r, piece in enumerate(pieces):
        padded[r * longest : r * longest + piece.shape[0]] = piece
    return padded


def unpad_pieces(padded: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The pieces of pad_pieces, as views."""
    longest = padded.shape[0] // len(sizes)
    return [padded[r * longest : r * longest + size] for r, size in enumerate(sizes)]


def host_mark() -> bytes:
    """16 bytes that are equal in processes which can share memory: one kernel, network namespace and user, or
    one PYCOMM_HOST_ID, as csrc/transport/record.cc has it.
    """
    word = env.settings().host_id or _own_host()
    return hashlib.blake2b(word.encode(), digest_size=16).digest()


@functools.cache
def _own_host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            kernel = file.readline().strip()
        return f"{kernel}-{os.stat('/proc/self/ns/net').st_ino}-{os.geteuid()}"
    except OSError:
        return "unknown"  # a mesh that takes hosts for one, or for several, is slower and no less right


def numbered(marks: Iterable[Hashable]) -> list[int]:
    """The number of each rank's host, from a mark for each rank: hosts count in the order of their lowest
    ranks.
    """
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(mark, len(seen)) for mark in marks]


def hosts_of(text: str | Sequence[int], world_size: int) -> list[int]:
    """For each rank the number of its host. "2x3": two hosts of three ranks; "3+5": hosts of three and five;
    "0101": the host of each rank, one digit each; a list of numbers is taken as it is. Raises ValueError.
    """
    try:
        if not isinstance(text, str):
            hosts = [int(host) for host in text]
        elif "x" in text:
            count, size = map(int, text.split("x"))
            hosts = [rank // size for rank in range(count * size)]
        elif "+" in text:
            hosts = [host for host, size in enumerate(text.split("+")) for _ in range(int(size))]
        else:
            hosts = [int(digit) for digit in text]
    except ValueError:
        raise ValueError(f"hosts={text!r}: expected a form like '2x3', '3+5' or '0101'") from None
    if len(hosts) != world_size:
        raise ValueError(f"hosts={text!r} has {len(hosts)} ranks, the group {world_size}")
    return hosts


def shrink_limit(timeout: float | None, spans_hosts: bool) -> float:
    """Seconds for Communicator.shrink(), if a rank that lives may come `timeout` seconds late; None: as late
    as PYCOMM_TIMEOUT, which is also the most. Over hosts PYCOMM_HOST_TIMEOUT is added, because a silent host
    counts as silent only after it.
    """
    settings = env.settings()
    longest = settings.timeout or DEFAULT_TIMEOUT
    limit = longest if timeout is None else min(timeout, longest)
    return limit + (settings.host_timeout or DEFAULT_HOST_TIMEOUT) * spans_hosts


def show_hosts(hosts: Sequence[int]) -> str:
    """A list of host numbers in words, as Communicator.describe()["hosts"] has them: "2 hosts x 4", "hosts of
    3 + 5", "1 host x 4".
    """
    sizes = [hosts.count(host) for host in sorted(set(hosts))]
    if len(set(sizes)) > 1:
        return f"hosts of {' + '.join(map(str, sizes))}"
    return f"{len(sizes)} host{'s' * (len(sizes) > 1)} x {sizes[0]}"


def shared_store(comm: Communicator) -> PointStore:
    """A torch store of the ranks of a Communicator over hosts, in the process of rank 0. It raises PeerError
    when that has ended, and host is its address.
    """
    return PointStore(comm._comm.point, 0)


# What `python -m pycomm.run` and the ranks that it has started say to each other, in its store.
_RUN = "pycomm/run"
_JOINED = "joined/"
_joined = threading.Event()  # of this process


def is_launched() -> bool:
    """Whether a launcher has started this process as one of several."""
    return env.launched()


def replacement_store() -> tuple[bool, dist.Store | None]:
    """(whether this process takes the place of a dead one, the store in which such processes ask to be taken
    in); (False, None) where it was not started by `python -m pycomm.run`.
    """
    number = env.replacement()
    if number is None:
        return False, None
    launch = env.launch()
    store = dist.TCPStore(launch.master_addr, launch.master_port, is_master=False, wait_for_workers=False)
    return number > 0, dist.PrefixStore(_RUN, store)


def note_joined(store: dist.Store) -> None:
    """Tells pycomm.run that this process, which takes the place of a dead one, has a part now."""
    number = env.replacement()
    if number is not None:
        store.set(f"{_JOINED}{number}", "")
        _joined.set()


def waits_to_join() -> bool:
    """Whether this process takes the place of a dead one, and the others have not taken it in yet."""
    return bool(env.replacement()) and not _joined.is_set()


def has_joined(store: dist.Store, number: int) -> bool:
    """For pycomm.run. store: its own."""
    return dist.PrefixStore(_RUN, store).check([f"{_JOINED}{number}"])
