"""What each rank says of itself, and whether all of it together can work.

    record   stack       processes that share it share their addresses: loopback is right among them alone
             interface, ip, port     the port listens until the group is made (probe.py)
             chosen      the user has chosen the interface
             wire        the engine that carries the bytes (PYCOMM_WIRE)
             point       port, process and space of its numbers, where the rank answers as long as the group
                         is there (pycomm/survivors/)

Where all ranks share a stack (hosts that PYCOMM_HOST_ID pretends), any address is right. Among several, one
rank is often special: the store's host routes to itself over loopback. Such ranks look at the addresses of
the others, take the one that routes there, and say so in a second record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pycomm import env
from pycomm.hosts.addresses import Address, choose, default_route, local_addresses, network_stack, route_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

CHOOSE = "PYCOMM_SOCKET_IFNAME chooses the interface"


class Record(NamedTuple):
    stack: str
    interface: str
    ip: str
    port: int
    chosen: bool
    wire: str
    point: tuple[int, int, str] = (0, 0, "")  # of a Place: port, pid, space

    @property
    def address(self) -> Address:
        return Address(self.interface, self.ip)


def own_address(store: dist.Store) -> tuple[Address, bool]:
    """The address for this rank, and whether the user has chosen it. Raises ValueError."""
    wanted = env.socket_interface()
    host, name = host_of(store), "The store's host"
    if host is None:
        host, name = env.master_address(), "MASTER_ADDR"
    if host is None:
        routed = default_route()
    else:
        try:
            routed = route_to(host, name)
        except ValueError:
            if wanted is None:
                raise
            routed = None  # the interface decides
    return choose(wanted, local_addresses(), routed), wanted is not None


def host_of(store: dist.Store) -> str | None:
    """The host that a store is on, None where it has none (a FileStore)."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return getattr(store, "host", None)


def address_towards(records: Sequence[Record], rank: int) -> Address | None:
    """Another Address for a rank whose first is loopback: the one that leads to the lowest rank elsewhere;
    None where there is none.
    """
    mine = records[rank]
    for other in records:
        if other.stack != mine.stack and not other.address.loopback:
            routed = route_to(other.ip)
            return choose(None, local_addresses(), routed) if routed else None
    return None


def must_choose_again(records: Sequence[Record]) -> list[int]:
    """The ranks whose address is loopback, not by the user's choice, although there are several stacks."""
    if len({record.stack for record in records}) == 1:
        return []
    return [rank for rank, one in enumerate(records) if one.address.loopback and not one.chosen]


def problem(records: Sequence[Record], label: Callable[[int], str]) -> str | None:
    """Why these addresses cannot work, as a sentence. label(rank): the name of its host."""
    for rank, record in enumerate(records):
        if record.wire != records[0].wire:
            return (
                f"PYCOMM_WIRE is {records[0].wire} on rank 0 ({label(0)}) and {record.wire} on rank {rank} "
                f"({label(rank)}). All ranks must use the same engine."
            )
    if len({record.stack for record in records}) == 1:
        return None
    for rank, record in enumerate(records):
        if record.address.loopback:
            return (
                f"Rank {rank} ({label(rank)}) has the address {record.ip} ({record.interface}), which other "
                f"hosts cannot reach. Use a MASTER_ADDR that they can reach, too; {CHOOSE}."
            )
    owners: dict[str, int] = {}
    for rank, record in enumerate(records):
        first = owners.setdefault(record.ip, rank)
        if records[first].stack != record.stack:
            interfaces = " and ".join(dict.fromkeys([records[first].interface, record.interface]))
            return (
                f"Rank {first} ({label(first)}) and rank {rank} ({label(rank)}) are on different machines "
                f"and have the same address, {record.ip} ({interfaces}). {CHOOSE}: "
                f"PYCOMM_SOCKET_IFNAME=^{interfaces.split()[0]} leaves this one out."
            )
    for rank, record in enumerate(records):
        if record.address.version != records[0].address.version:
            return (
                f"Rank 0 ({label(0)}) has the address {records[0].ip} and rank {rank} ({label(rank)}) "
                f"{record.ip}: one is IPv4, the other IPv6. {CHOOSE}."
            )
    return None


def make_record(address: Address, port: int, chosen: bool, point: tuple[int, int, str]) -> Record:
    return Record(network_stack(), *address, port, chosen, env.wire(), point)
