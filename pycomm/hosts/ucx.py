"""Makes UCX's workers between the ranks of several hosts (csrc/hosts/ucx_wire.h), with PYCOMM_WIRE=ucx.

    every rank   opens the library         the system's, which knows the machine's network, else the wheel's
                 tells version, addresses  one address for each worker
                 connects, greets          ranks of other hosts, leaders once more
                 waits for all greetings   whoever has not greeted within the limit is named

UCX chooses among the transports that it finds. It may use the network interface that pycomm has chosen
(addresses.py), since its own choice may be a bridge that every machine has, and all InfiniBand devices.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pycomm import _C, env

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pycomm.hosts.addresses import Address
    from pycomm.hosts.meeting import Meeting

# A rank's version of UCX, and the address of each of its workers.
Said: TypeAlias = tuple[str, list[str]]

LIBRARY = "libucp.so.0"
INFINIBAND = Path("/sys/class/infiniband")
# Ranks of one host do not use the wire; where hosts are simulated, shared memory would not notice a death.
TRANSPORTS = "^sm,cuda"
# Else UCX would take the signals of a crash from Python's faulthandler, print what pycomm says in its errors,
# and block while it connects. Segments as long as its receive buffers halve the time of the processor for
# 1 MiB and save a quarter for 16 MiB (8K is UCX's own).
FOR_UCX = {
    "UCX_HANDLE_ERRORS": "none",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_TCP_CONN_NB": "y",
    "UCX_TCP_TX_SEG_SIZE": "64K",
}
SPINS = 50  # looks of a waiter before it sleeps, a microsecond each


def make(meeting: Meeting, address: Address, leaders: Sequence[int]) -> tuple[_C.UcxWire, _C.UcxWire | None]:
    """Over all ranks, and over the leaders. Raises RuntimeError, TimeoutError."""
    context = _open(meeting, address)
    spins = SPINS if meeting.hosts.count(meeting.hosts[meeting.rank]) < _cores() else 0
    with contextlib.ExitStack() as opened:
        data, control = _C.UcxWire(context, meeting.rank, meeting.world_size, spins), None
        opened.callback(data.close)
        if meeting.rank in leaders:
            control = _C.UcxWire(context, leaders.index(meeting.rank), len(leaders), spins)
            opened.callback(control.close)
        said = _exchange(meeting, context.version, [data, control])
        mine = meeting.hosts[meeting.rank]
        _greet(meeting, data, {r: _address(said[r], 0) for r in said if meeting.hosts[r] != mine}, list(said))
        if control is not None:
            others = {host: _address(said[leaders[host]], 1) for host in range(len(leaders)) if host != mine}
            _greet(meeting, control, others, leaders)
        opened.pop_all()
    return data, control


def _open(meeting: Meeting, address: Address) -> _C.UcxContext:
    infiniband = infiniband_devices()
    own = FOR_UCX | {"UCX_TCP_AF_PRIO": "inet6,inet" if address.version == 6 else "inet,inet6"}
    if not infiniband:  # no network must know the memory it uses: munmap and its like need not be replaced
        own["UCX_MEM_EVENTS"] = "n"
    env.prepare_ucx(own)
    file = find_library()
    settings = env.ucx_settings(TLS=TRANSPORTS, NET_DEVICES=",".join([address.interface, *infiniband]))
    try:
        return _C.UcxContext(file, settings, meeting.world_size)
    except RuntimeError as error:
        where, oldest = (
            f"rank {meeting.rank} ({meeting.label(meeting.rank)})",
            ".".join(map(str, _C.oldest_ucx)),
        )
        raise RuntimeError(
            f"PYCOMM_WIRE=ucx, and UCX cannot be used on {where}: {error}. UCX {oldest} or later is needed: "
            "`pip install libucx-cu12` brings it for TCP; libucx0 of Debian and Ubuntu, or the network's "
            "drivers, for InfiniBand, too."
        ) from None


def find_library() -> str:
    """What dlopen is to open: the library that this process or the system has, else the wheel's."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(LIBRARY)
        return LIBRARY
    return str(wheel() or LIBRARY)


def wheel() -> Path | None:
    """The file in the wheel libucx-cu12, or one of its kind; None where there is none."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("libucx")
        for folder in (spec and spec.submodule_search_locations) or ():
            if (file := Path(folder, "lib", LIBRARY)).exists():
                return file
    return None


def infiniband_devices() -> list[str]:
    """Those of this machine as UCX names them, ["mlx5_0:1", ...]."""
    ports = sorted(INFINIBAND.glob("*/ports/*")) if INFINIBAND.is_dir() else []
    return [f"{port.parent.parent.name}:{port.name}" for port in ports]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _exchange(meeting: Meeting, version: str, wires: Sequence[_C.UcxWire | None]) -> dict[int, Said]:
    """Of all ranks. Raises RuntimeError where versions differ."""
    addresses = [base64.b64encode(wire.address).decode() if wire is not None else "" for wire in wires]
    meeting.hurry()
    meeting.tell("ucx", (version, addresses))
    said = meeting.hear("ucx", range(meeting.world_size))
    for rank, (other, _) in said.items():
        if other.split(".")[:2] != said[0][0].split(".")[:2]:
            raise RuntimeError(
                f"Rank 0 ({meeting.label(0)}) has UCX {said[0][0]} and rank {rank} ({meeting.label(rank)}) "
                f"{other}. All ranks must have the same version."
            )
    return said


def _address(said: Said, wire: int) -> bytes:
    return base64.b64decode(said[1][wire])


def _greet(meeting: Meeting, wire: _C.UcxWire, addresses: Mapping[int, bytes], ranks: Sequence[int]) -> None:
    """Until all peers have greeted. addresses: by the peer's number on this wire; ranks: their ranks."""
    missing = list(addresses)
    try:
        wire.connect(addresses)
        meeting.hurry()
        while missing := wire.missing():
            if time.monotonic() > meeting.deadline:
                raise TimeoutError(f"{_not_connected(meeting, ranks, missing)} within {meeting.timeout:g} s.")
            meeting.pause()
    except _C.WireError as error:
        meeting.listen()
        raise RuntimeError(f"{_not_connected(meeting, ranks, missing)}: {error}.") from None


def _not_connected(meeting: Meeting, ranks: Sequence[int], peers: Iterable[int]) -> str:
    others = ", ".join(f"rank {ranks[peer]} ({meeting.label(ranks[peer])})" for peer in peers)
    return f"UCX has not connected rank {meeting.rank} ({meeting.label(meeting.rank)}) to {others}"
