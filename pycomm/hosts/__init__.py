"""How the ranks of a group that spans hosts come to reach each other: addresses, checks, Gloo; NCCL.

    engines(store, rank, hosts, labels, token, timeout, look)    called by the extension, for each such group

    every rank   chooses its address       addresses.py    by the route to the store, or PYCOMM_SOCKET_IFNAME
                 publishes it              meeting.py      through the store; from here on a failure of one
                                                           rank is raised by all, in the same words
                 judges all addresses      records.py      loopback, duplicates, IPv4 beside IPv6
                 opens its point           survivors/      where it answers when the group has lost ranks
    leaders      connect to all others     probe.py        whoever cannot be reached is named
    every rank   makes Gloo's contexts     engine.py       in a thread, since its constructor can hang
                 or UCX's workers          ucx.py          with PYCOMM_WIRE=ucx
                 keeps Gloo's sockets      forks.py        from its children, which may outlive it

Gloo is the one in the torch wheel; pycomm uses its messages between two ranks alone.

    nccl(store, ..., device, look)      called by the first operation on a CUDA tensor (nccl_engine.py)
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from pycomm import env
from pycomm.hosts.engine import engines
from pycomm.hosts.nccl_engine import nccl
from pycomm.survivors import shrinking

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Backend

    from pycomm import _C
    from pycomm.hosts.engine import Engines
    from pycomm.survivors import Point
    from pycomm.survivors.shrinking import Shrunk

__all__ = ["Makers", "engines", "makers", "nccl"]


class Makers(NamedTuple):
    """What the extension calls where a group spans hosts: csrc/bindings/engines.h."""

    engines: Callable[..., Engines]
    nccl: Callable[..., Backend]
    checks: Callable[[], str]


def makers() -> Makers:
    return Makers(functools.partial(engines, shrinker=_shrink), nccl, env.nccl_checks)


def _shrink(
    point: Point, comm: _C.Communicator, exclude: Sequence[int], exactly: bool, timeout: float
) -> Shrunk:
    return shrinking.shrink(point, comm, exclude, exactly, timeout, makers)
