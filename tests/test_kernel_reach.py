"""The kernel as a way to peers' memory (process_vm_readv, process_vm_writev): where a sandbox forbids it, or
cannot copy from a buffer.
"""

import ctypes
import errno
import os
import struct

import pytest
import torch
from forked import Group, attempt

from pycomm import Communicator

SYSCALLS = {"x86_64": {"read": 310, "write": 311}, "aarch64": {"read": 270, "write": 271}}
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def forbid(call, error=errno.EPERM):
    """From now on process_vm_readv or process_vm_writev of this process gives EPERM, as in a sandbox."""
    number = SYSCALLS[os.uname().machine][call]
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, REFUSE | error), (0x06, 0, 0, ALLOW)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = Program(len(steps), ctypes.cast(ctypes.c_char_p(code), ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0), (PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program))):
        if libc.prctl(*arguments, 0, 0) != 0:
            return os.strerror(ctypes.get_errno())
    return ""


def large(comm):
    """Operations that the kernel would carry, in both directions."""
    x = comm.all_reduce(torch.full((50000,), comm.rank + 1.0))
    y = comm.broadcast(torch.full((50000,), float(comm.rank)), 1)
    z = torch.zeros(50000)
    work = comm.send(torch.full((50000,), float(comm.rank)), 1 - comm.rank, async_op=True)
    comm.recv(z, 1 - comm.rank)
    work.wait()
    return x.eq(3).all().item() and y.eq(1).all().item() and z.eq(1 - comm.rank).all().item()


@pytest.mark.parametrize("call", ["read", "write"])
def test_kernel_forbids_one_direction(call):
    """Found out when the group is made; it takes another way to the peers."""

    def body(comm, link):
        problem = forbid(call) if comm.rank == 1 else ""
        with Communicator(comm._store, comm.rank, 2, name="second", timeout=20.0) as second:
            return problem, second.describe()["reach"], large(second)

    with Group(2, body) as group:
        for rank in range(2):
            outcome = group.get(rank)
            assert isinstance(outcome, tuple), outcome
            problem, reach, right = outcome
            if problem:
                pytest.skip(f"cannot install a seccomp filter: {problem}")
            assert (reach, right) == ("staging only", True)


@pytest.mark.parametrize("call", ["read", "write"])
def test_kernel_forbids_later(call):
    """Nobody has died, so nobody says so."""

    def body(comm, link):
        if comm.describe()["reach"] != "process_vm_readv":
            return "no reach"
        return forbid(call) or attempt(comm.all_reduce, torch.ones(50000), algorithm="direct")

    with Group(2, body) as group:
        for rank in range(2):
            outcome = group.get(rank)
            if isinstance(outcome, str):
                pytest.skip(outcome)
            report = outcome[1]
            assert report["kind"] == "CommError" and "died" not in report["text"], report
            assert "Operation not permitted" in report["text"] and "PYCOMM_CMA=0" in report["text"], report


def test_memory_that_the_kernel_cannot_copy():
    """As a device driver maps it, one rank's buffers. Operations on it take another way."""

    def body(comm, link):
        if comm.describe()["reach"] != "process_vm_readv":
            return "no reach"
        if comm.rank == 1 and (problem := forbid("read", errno.EFAULT)):
            return problem
        x = comm.all_reduce(torch.full((50000,), comm.rank + 1.0), algorithm="direct")
        parts = comm.all_gather(torch.full((50000,), float(comm.rank)), algorithm="direct")
        message = torch.full((1 << 20,), float(comm.rank))
        if comm.rank == 1:
            comm.send(message, 0)
        else:
            comm.recv(message, 1)
        return x.eq(3).all().item(), parts[1].eq(1).all().item(), message.eq(1).all().item()

    with Group(2, body, staging_bytes=1 << 17) as group:
        for rank in range(2):
            outcome = group.get(rank)
            if isinstance(outcome, str):
                pytest.skip(outcome)
            assert outcome == (True,) * 3, outcome


def test_a_page_of_the_kernels_own():
    """[vvar] is mapped into every process as a driver maps a device's memory."""

    def body(comm, link):
        with open("/proc/self/maps") as maps:
            lines = [line for line in maps if line.rstrip().endswith("[vvar]")]
        if comm.describe()["reach"] != "process_vm_readv" or not lines:
            return "no reach, or no such page"
        page = int(lines[0].split("-")[0], 16)
        x = torch.zeros(1024, dtype=torch.int32)
        if comm.rank == 0:
            x = torch.frombuffer((ctypes.c_char * 4096).from_address(page), dtype=torch.int32)
        got = comm.broadcast(x, 0, algorithm="direct")
        return len({bytes(row.numpy()) for row in comm.all_gather(got)[1:]})

    with Group(3, body) as group:
        for rank in range(3):
            outcome = group.get(rank)
            if isinstance(outcome, str):
                pytest.skip(outcome)
            assert outcome == 1, outcome
