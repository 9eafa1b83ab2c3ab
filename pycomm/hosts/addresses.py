"""Which address of this machine the other hosts are to use.

    1. an interface that PYCOMM_SOCKET_IFNAME allows, or GLOO_SOCKET_IFNAME names
    2. else the address from which packets to the store's host, or else to MASTER_ADDR, would leave
    3. else the one of the default route
    4. else that of the only interface that is not loopback

2 and 3 ask the kernel by connecting a UDP socket, which sends nothing. The host's own name is not asked: on
many machines it resolves to loopback. Where the store is on this machine 2 is often loopback, too; what
happens then is in records.py.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

SIOCGIFCONF, SIOCGIFFLAGS, IFF_UP = 0x8912, 0x8913, 1
IFREQ_BYTES = 40  # of a struct ifreq: 16 of name, a sockaddr_in, padding
MOST_ADDRESSES = 4096
GLOBAL_SCOPES = ("00", "10")  # of /proc/net/if_inet6: global, host; link-local ones need a zone
# from the blocks for documentation: the default route leads there
ANYWHERE = ("192.0.2.1", "2001:db8::1")
EXACT = "GLOO_SOCKET_IFNAME"  # names as they are; PYCOMM_SOCKET_IFNAME has prefixes, ^ and =


class Address(NamedTuple):
    """An address of an interface."""

    interface: str
    ip: str

    @property
    def loopback(self) -> bool:
        return ipaddress.ip_address(self.ip).is_loopback

    @property
    def version(self) -> Literal[4, 6]:
        return ipaddress.ip_address(self.ip).version


def local_addresses() -> list[Address]:
    """All addresses of interfaces that are up, in the system's order, IPv4 before IPv6."""
    return _ipv4() + _ipv6()


def choose(wanted: tuple[str, str] | None, found: Sequence[Address], routed: str | None) -> Address:
    """The Address to use.

    Args:
        wanted: the variable that the user has set, and its value.
        found: all addresses there are.
        routed: the IP that leads to the store.

    Raises ValueError.
    """
    allowed = _allowed(*wanted, found) if wanted else found
    if wanted and not allowed:
        what = "{}={!r} in the environment: no such interface has an address here".format(*wanted)
        raise ValueError(f"{what}. There are {shown(found)}.")
    for address in allowed:
        if address.ip == routed:
            return address
    if wanted:
        version = ipaddress.ip_address(routed).version if routed else 4
        explicit = wanted[0] == EXACT or not wanted[1].startswith("^")
        # what was asked for by its name is taken in the order of the names, whatever it is
        return min(allowed, key=lambda one: (not explicit and one.loopback, one.version != version))
    if routed:
        return Address("an interface without a name here", routed)
    outside = [address for address in found if not address.loopback]
    if len({address.interface for address in outside}) == 1:
        return min(outside, key=lambda one: one.version)
    if not outside and found:
        return found[0]
    raise ValueError(
        "Cannot tell which address the other hosts are to use: the store names no host, MASTER_ADDR is not "
        f"set, and there is no default route. PYCOMM_SOCKET_IFNAME chooses one of {shown(found)}."
    )


def _allowed(variable: str, value: str, found: Sequence[Address]) -> Sequence[Address]:
    """Those of `found` that the variable allows, in its order."""
    names = [name.strip() for name in value.removeprefix("^").split(",") if name.strip()]
    if variable == EXACT:
        fits = [[address for address in found if address.interface == name] for name in names]
        return next((group for group in fits if group), [])
    exact = bool(names) and names[0].startswith("=")
    names = [name.removeprefix("=") for name in names]

    def matches(address: Address, name: str) -> bool:
        return address.interface == name if exact else address.interface.startswith(name)

    if value.startswith("^"):
        return [one for one in found if not any(matches(one, name) for name in names)]
    inside = [one for name in names for one in found if matches(one, name)]
    return list(dict.fromkeys(inside))


def shown(found: Sequence[Address]) -> str:
    """For messages: "eth0 (10.0.0.6, fd00::6), lo (127.0.0.1)"."""
    by_name: dict[str, list[str]] = {}
    for address in found:
        by_name.setdefault(address.interface, []).append(address.ip)
    return ", ".join(f"{name} ({', '.join(ips)})" for name, ips in by_name.items()) or "no interfaces"


def route_to(host: str, name: str = "the host") -> str | None:
    """The local IP from which packets to `host` leave; None where there is no route. name: where the host
    comes from, for the error.

    Raises ValueError when the host's name cannot be resolved.
    """
    try:
        targets = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        text = f"{name} {host!r} cannot be resolved here ({error.strerror or error})"
        raise ValueError(f"{text}. Is the name known to all hosts? An address works, too.") from None
    for family, kind, protocol, _, target in targets:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    return None


def default_route() -> str | None:
    """The local IP from which packets to the rest of the world leave."""
    return next((ip for ip in map(route_to, ANYWHERE) if ip), None)


def network_stack() -> str:
    """The kernel's boot and the network namespace: equal for processes that share their addresses."""
    namespace = Path("/proc/thread-self/ns/net")
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {namespace.readlink()}"
    return socket.gethostname()


def _ipv4() -> list[Address]:
    buffer = array.array("B", bytes(IFREQ_BYTES * MOST_ADDRESSES))
    place, _ = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, SIOCGIFCONF, struct.pack("iL", len(buffer), place))
        used = struct.unpack("iL", answer)[0]
        found = []
        for start in range(0, used, IFREQ_BYTES):
            entry = buffer[start : start + IFREQ_BYTES].tobytes()
            name = entry[:16].split(b"\0")[0].decode()
            if _is_up(asked, name):
                found.append(Address(name.split(":")[0], socket.inet_ntoa(entry[20:24])))
    return found


def _ipv6() -> list[Address]:
    try:
        lines = Path("/proc/thread-self/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return []
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for line in lines:
            digits, _, _, scope, _, name = line.split()
            if scope in GLOBAL_SCOPES and _is_up(asked, name):
                found.append(Address(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found


def _is_up(asked: socket.socket, name: str) -> bool:
    try:
        answer = fcntl.ioctl(asked, SIOCGIFFLAGS, struct.pack("16s24x", name.encode()))
    except OSError as error:
        if error.errno == errno.ENODEV:  # it has gone since
            return False
        raise
    return bool(struct.unpack("16sh22x", answer)[1] & IFF_UP)
