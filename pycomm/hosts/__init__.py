"""How the ranks of a group that spans hosts come to reach each other: addresses, checks, Gloo.

    engines(store, rank, hosts, labels, token, timeout)      called by the extension, for each such group

    every rank   chooses its address       addresses.py    by the route to the store, or PYCOMM_SOCKET_IFNAME
                 publishes it              meeting.py      through the store; from here on a failure of one
                                                           rank is raised by all, in the same words
                 judges all addresses      records.py      loopback, duplicates, IPv4 beside IPv6
    leaders      connect to all others     probe.py        whoever cannot be reached is named
    every rank   makes Gloo's contexts     engine.py       in a thread, since its constructor can hang
                 or UCX's workers          ucx.py          with PYCOMM_WIRE=ucx

Gloo is the one in the torch wheel; pycomm uses its messages between two ranks alone.
"""

from pycomm.hosts.engine import engines

__all__ = ["engines"]
