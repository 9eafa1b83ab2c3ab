"""Firewalls between emulated hosts, for tests: a host is cut off from all others, and the link may heal.

    host 0   eth0 --- p0   (off the bridge)   br0 --- p1 --- eth0   host 1

    drop          the host's port is taken off the bridge: nothing passes, and nobody says so
    reset         the same, and this program answers each TCP segment with a reset, as REJECT with tcp-reset
    unreachable   or with ICMP "port unreachable", the default of REJECT: who connects is refused
    deaf          the host drops what it receives; what it sends arrives
    mute          the others drop what it sends; what they send arrives

A firewall passes ARP, or has the addresses; here the hosts keep each other's for the time.

    python firewall.py p0 br0 10.77.0.1 reset     where the switch is: says "ready", answers until killed
"""

import contextlib
import re
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Callable

KINDS = ("drop", "reset", "unreachable", "deaf", "mute")
ETH_P_ALL, PACKET_OUTGOING = 3, 4
TCP, ICMP = 6, 1
FIN, SYN, RST, ACK = 1, 2, 4, 16
LIMIT_S = 30.0


class Firewall:
    """hosts: pycomm.testing.emulated.Hosts. host: the number of the one that is cut off. kind: see above."""

    def __init__(self, hosts, host: int, kind: str) -> None:
        self.hosts, self.host, self.kind, self._rejecting = hosts, host, kind, None

    def begin(self) -> None:
        hosts, address = self.hosts, self.hosts.address(self.host)
        others = [host for host in range(len(hosts.names)) if host != self.host]
        if self.kind == "deaf":
            for other in others:
                self._ignore(self.host, hosts.address(other))
        elif self.kind == "mute":
            for other in others:
                self._ignore(other, address)
        else:
            self._keep_neighbours()
            self._at_switch("ip", "link", "set", f"p{self.host}", "nomaster")
            if self.kind != "drop":
                self._reject()

    def end(self) -> None:
        if self._rejecting is not None:
            self._rejecting.kill()
            self._rejecting.communicate(timeout=LIMIT_S)
            self._rejecting = None
        if self.kind in ("deaf", "mute"):
            for host in range(len(self.hosts.names)):
                with contextlib.suppress(subprocess.CalledProcessError):  # the host has none, or no more
                    while True:
                        self._on(host, "ip", "rule", "del", "pref", "10")
        else:
            self._at_switch("ip", "link", "set", f"p{self.host}", "master", "br0")

    def _ignore(self, host: int, sender: str) -> None:
        """The host drops what comes from an address: by a rule before the one for its own addresses."""
        rules = self._on(host, "ip", "rule", "show")
        if rules.startswith("0:"):
            self._on(host, "ip", "rule", "add", "pref", "20", "lookup", "local")
            self._on(host, "ip", "rule", "del", "pref", "0")
        self._on(host, "ip", "rule", "add", "pref", "10", "from", sender, "iif", "eth0", "blackhole")

    def _reject(self) -> None:
        self._at_switch("ip", "link", "set", "br0", "promisc", "on")
        address = self.hosts.address(self.host)
        command = [sys.executable, __file__, f"p{self.host}", "br0", address, self.kind]
        self._rejecting = subprocess.Popen(
            [*self.hosts.switch_command(), *command], stdout=subprocess.PIPE, text=True
        )
        assert self._rejecting.stdout.readline() == "ready\n"

    def _keep_neighbours(self) -> None:
        cards = {}
        for host in range(len(self.hosts.names)):
            shown = self._on(host, "ip", "link", "show", "eth0")
            cards[host] = re.search(r"link/ether (\S+)", shown)[1]
        for host in cards:
            for other, card in cards.items():
                if other != host:
                    known = [self.hosts.address(other), "lladdr", card, "dev", "eth0", "nud", "permanent"]
                    self._on(host, "ip", "neigh", "replace", *known)

    def _on(self, host: int, *command: str) -> str:
        return _run([*self.hosts.command(host), *command])

    def _at_switch(self, *command: str) -> str:
        return _run([*self.hosts.switch_command(), *command])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return done.stdout


# --- the program that answers --------------------


def checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ip_packet(protocol: int, source: bytes, target: bytes, payload: bytes) -> bytes:
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 0, 0, 64, protocol, 0, source, target)
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + payload


def reset_of(packet: bytes, source: bytes, target: bytes, segment: bytes) -> bytes | None:
    """The reset that the target would send; none in answer to a reset."""
    sport, dport, seq, ack, offset, flags = struct.unpack("!HHIIBB", segment[:14])
    if flags & RST:
        return None
    if flags & ACK:
        fields = (dport, sport, ack, 0, 5 << 4, RST)
    else:
        length = len(segment) - (offset >> 4) * 4 + bool(flags & SYN) + bool(flags & FIN)
        fields = (dport, sport, 0, (seq + length) & 0xFFFFFFFF, 5 << 4, RST | ACK)
    bare = struct.pack("!HHIIBBHHH", *fields, 0, 0, 0)
    total = checksum(target + source + struct.pack("!BBH", 0, TCP, len(bare)) + bare)
    return ip_packet(TCP, target, source, bare[:16] + struct.pack("!H", total) + bare[18:])


def unreachable_of(packet: bytes, source: bytes, target: bytes, segment: bytes) -> bytes | None:
    bare = struct.pack("!BBHI", 3, 3, 0, 0) + packet[:28]
    return ip_packet(ICMP, target, source, bare[:2] + struct.pack("!H", checksum(bare)) + bare[4:])


def answer(frame: bytes, host: bytes, make: Callable[..., bytes | None]) -> bytes | None:
    """The frame that rejects this one, back to who sent it; None where it is not TCP from or to the host: the
    bridge shows what the others send to each other, too.
    """
    if frame[12:14] != b"\x08\x00" or frame[23] != TCP or host not in (frame[26:30], frame[30:34]):
        return None
    packet = frame[14 : 14 + struct.unpack("!H", frame[16:18])[0]]
    made = make(packet, packet[12:16], packet[16:20], packet[(packet[0] & 15) * 4 :])
    return None if made is None else frame[6:12] + frame[:6] + frame[12:14] + made


def main(names: list[str], address: str, kind: str) -> None:
    sockets, host = [], socket.inet_aton(address)
    for name in names:
        one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        one.bind((name, ETH_P_ALL))
        sockets.append(one)
    print("ready", flush=True)
    make = reset_of if kind == "reset" else unreachable_of
    while True:
        for one in select.select(sockets, [], [])[0]:
            frame, place = one.recvfrom(1 << 17)
            if place[2] != PACKET_OUTGOING and (rejected := answer(frame, host, make)) is not None:
                with contextlib.suppress(OSError):  # the device is busy: a rejected packet may be lost, too
                    one.send(rejected)


if __name__ == "__main__":
    main(sys.argv[1:-2], *sys.argv[-2:])
