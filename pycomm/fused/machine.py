"""What the kernels of a group find on a device: its architecture, how much of it a rank may use, whether the
ranks' kernels can talk.

Asked once for each group and device; collective then, because all ranks must come to the same answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from typing import TYPE_CHECKING, NamedTuple, TypedDict, TypeVar

import torch

if TYPE_CHECKING:
    from pycomm import _C
    from pycomm.fused.ranks import Ranks

__all__ = ["Machine", "exchange", "of"]

ROLES = 3  # of a kernel, at most; each needs a program
INTERPRETED_PROGRAMS = ROLES
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED (cuda.h)
MOST_BYTES = 4096  # of a value that is exchanged


_TOKEN = secrets.token_hex(8)  # of this process
T = TypeVar("T")


class Machine(NamedTuple):
    """arch: compute capability, 90 for sm_90; 80 in the interpreter. ranks_on_device: of the group, most on
    any device. programs: of a rank that run at the same time: its share of the multiprocessors. obstacle: why
    kernels of different ranks cannot signal each other, or "". threads: other ranks of the group are threads
    of this process and use this device."""

    arch: int
    ranks_on_device: int
    programs: int
    obstacle: str
    threads: bool = False


class _Here(TypedDict):
    """What a rank tells its peers of its GPU and itself."""

    resident: bool
    deaf: list[str]  # GPUs of peers that it cannot signal
    arch: int
    process: str


def exchange(communicator: _C.Communicator | None, value: T) -> list[T]:
    """Every rank's value (JSON), in order of rank; [value] without a communicator. Collective, over the CPU
    side of the group, so it neither waits for a device nor is captured."""
    if communicator is None or communicator.world_size == 1:
        return [value]
    text = json.dumps(value).encode()
    if len(text) > MOST_BYTES:
        place = f"[rank {communicator.rank}/{communicator.world_size}]"
        raise ValueError(
            f"{place} a value of {len(text)} bytes is too long to exchange, at most {MOST_BYTES}"
        )
    mine = torch.full(
        (1, MOST_BYTES), ord(" "), dtype=torch.uint8, device="cpu"
    )  # whatever torch's default device is
    mine[0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    everyone = torch.empty(communicator.world_size, MOST_BYTES, dtype=torch.uint8, device="cpu")
    communicator.all_gather_flat(mine, everyone, None, False, None, None)
    return [json.loads(bytes(row.tolist())) for row in everyone]


def of(ranks: Ranks, device: torch.device | str) -> Machine:
    """The Machine of a group on a device. Its backend must be pycomm, unless it has one rank."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    known = ranks.cache.machines
    if device not in known:
        known[device] = (
            _on_cuda(ranks, device) if device.type == "cuda" else Machine(80, 1, INTERPRETED_PROGRAMS, "")
        )
    return known[device]


def _on_cuda(ranks: Ranks, device: torch.device) -> Machine:
    facts = torch.cuda.get_device_properties(device)
    arch = 10 * facts.major + facts.minor
    if ranks.size == 1:
        return Machine(arch, 1, facts.multi_processor_count, "")
    assert ranks.communicator is not None
    if ranks.communicator.describe()["cuda"] is None:  # sets up the group's device side
        ranks.all_reduce(torch.zeros(1, 1, device=device), async_op=False)
    side = ranks.communicator.describe()["cuda"]
    resident = side["protocol"] == "resident"
    uuids = exchange(ranks.communicator, str(facts.uuid))
    deaf = [uuid for uuid in sorted({*uuids} - {str(facts.uuid)}) if not _native_atomics(device, uuid)]
    process = f"{os.getpid()} {_TOKEN}"  # containers may have the same numbers, forks have the same token
    mine: _Here = {"resident": resident, "deaf": deaf, "arch": arch, "process": process}
    said = exchange(ranks.communicator, mine)
    obstacle = ""
    if not all(one["resident"] for one in said):
        obstacle = (
            "ranks share a GPU from several processes, so their kernels do not run together and may not wait "
            "for each other"
        )
    elif any(one["deaf"] for one in said):
        rank = next(rank for rank, one in enumerate(said) if one["deaf"])
        obstacle = (
            f"rank {rank}'s GPU has no native atomics on a peer's memory (no NVLink between them, or hidden "
            "from the process)"
        )
    elif others := [rank for rank, one in enumerate(said) if one["arch"] != said[0]["arch"]]:
        found = f"sm_{said[0]['arch']} on rank 0, sm_{said[others[0]]['arch']} on rank {others[0]}"
        obstacle = f"the ranks' GPUs are not alike ({found}), so no configuration is for all"
    most = max(uuids.count(uuid) for uuid in uuids)
    programs = facts.multi_processor_count // most
    if most > 1:  # [Note: places] in context.py
        programs = min(programs, int(side["blocks"]))
    if programs < ROLES:
        have = f"{most} ranks share {facts.multi_processor_count} multiprocessors"
        obstacle = obstacle or f"{have}; a rank's kernels need {ROLES}"
    here = [one["process"] for one, uuid in zip(said, uuids, strict=True) if uuid == str(facts.uuid)]
    return Machine(arch, most, max(1, programs), obstacle, threads=here.count(process) > 1)


def _native_atomics(device: torch.device, uuid: str) -> bool:
    """Whether `device` can do atomics on the memory of the GPU with this uuid. False if this process does not
    see it.
    """
    for peer in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(peer).uuid) == uuid:
            value = ctypes.c_int()
            failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(
                ctypes.byref(value), NATIVE_ATOMICS, device.index, peer
            )
            return not failed and bool(value.value)
    return False
