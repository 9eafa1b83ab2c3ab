"""The kernel as a way to peers' memory (process_vm_readv, process_vm_writev): where a sandbox forbids it, or
cannot copy from a buffer.
"""

import ctypes
import errno
import os
import struct

import pytest
import torch
from forked import LIMIT, Group, attempt

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
    """Buffers that are new to the group are streamed. With others an operation fails; nobody has died, so
    nobody says so.
    """

    def body(comm, link):
        if comm.describe()["reach"] != "process_vm_readv":
            return "no reach"
        known = torch.ones(50000)
        comm.all_reduce(known, algorithm="direct")
        if problem := forbid(call):
            return problem
        new = comm.all_reduce(torch.ones(50000), algorithm="direct")
        return new.eq(2).all().item(), attempt(comm.all_reduce, known, algorithm="direct")

    with Group(2, body) as group:
        for rank in range(2):
            outcome = group.get(rank)
            if isinstance(outcome, str):
                pytest.skip(outcome)
            right, (_, report) = outcome
            assert right
            assert report["kind"] == "CommError" and "died" not in report["text"], report
            assert "Operation not permitted" in report["text"] and "PYCOMM_CMA=0" in report["text"], report


# --- a rank that changes its user --------------------

NOBODY = 65534
PR_SET_DUMPABLE = 4
MANY = 1 << 18  # elements of a message, beyond eight rings of the groups below


def change_user():
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def become_untraceable():
    """What setuid does as well; it needs no rights."""
    assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0


def everything(comm):
    """Whether all collectives on large buffers, and messages in both directions, are right."""
    n, r = comm.world_size, comm.rank
    for algorithm in (None, "direct"):
        how = {"algorithm": algorithm}
        x = torch.full((50_000,), float(r))
        assert comm.all_reduce(x.clone(), **how).eq(n * (n - 1) / 2).all()
        assert comm.broadcast(x.clone(), 1, **how).eq(1).all()
        assert comm.all_gather(x, **how).eq(torch.arange(float(n))[:, None]).all()
        wide = torch.arange(float(n)).repeat_interleave(50_000) + 10 * r
        assert comm.reduce_scatter(wide, **how).eq(n * r + 5 * n * (n - 1)).all()
        turned = r + 10 * torch.arange(float(n)).repeat_interleave(50_000)
        assert comm.all_to_all(wide, **how).eq(turned).all()
        ins = [25_000 * (p + r + 1) for p in range(n)]
        uneven = comm.all_to_all(torch.full((sum(ins),), float(r)), in_splits=ins, out_splits=ins, **how)
        assert uneven.eq(torch.arange(float(n)).repeat_interleave(torch.tensor(ins))).all()
        parts = comm.gather(x, root=0, **how)
        assert r != 0 or parts.eq(torch.arange(float(n))[:, None]).all()
        assert comm.scatter(wide, torch.zeros(50_000), 1, **how).eq(r + 10).all()
        total = comm.reduce(x.clone(), root=1, **how)
        assert r != 1 or total.eq(n * (n - 1) / 2).all()
    # Tags out of order; a message between two large ones; one whose receiver comes late.
    right, left = (r + 1) % n, (r - 1) % n
    sends = [comm.send(torch.full((MANY,), r + 10.0 * tag), right, tag=tag, async_op=True) for tag in (1, 2)]
    sends.append(comm.send(torch.full((3,), r + 30.0), right, tag=3, async_op=True))
    sends.append(comm.send(torch.full((MANY,), r + 40.0), right, tag=4, async_op=True))
    got = [torch.zeros(MANY) for _ in range(3)] + [torch.zeros(3)]
    recvs = [
        comm.recv(y, left, tag=tag, async_op=True)
        for y, tag in zip(got[:2] + got[3:], (2, 4, 3), strict=True)
    ]
    recvs.append(comm.recv(got[2], tag=1, async_op=True))  # from any source
    for work in sends + recvs:
        work.wait(LIMIT)
    return all(bool(y.eq(left + value).all()) for y, value in zip(got, (20, 40, 10, 30), strict=True))


CHANGES = {  # how, and which ranks of three
    "all change their user": (change_user, [0, 1, 2]),
    "one changes its user": (change_user, [1]),
    "two change their user": (change_user, [0, 2]),
    "one cannot be traced": (become_untraceable, [1]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_rank_that_changes_its_user(name):
    """The kernel has copied between the ranks before and does not any more: operations stream, none fails."""
    change, ranks = CHANGES[name]
    if change is change_user and os.geteuid() != 0:
        pytest.skip("only root changes its user")

    def body(comm, link):
        if comm.describe()["reach"] != "process_vm_readv":
            return "no reach"
        found = [everything(comm)]
        late = torch.full((MANY,), 5.0 + comm.rank)
        pending = comm.send(late, (comm.rank + 1) % 3, tag=9, async_op=True)
        if comm.rank in ranks:
            change()
        y = torch.zeros(MANY)
        comm.recv(y, (comm.rank - 1) % 3, tag=9)
        pending.wait(LIMIT)
        found += [bool(y.eq(5 + (comm.rank - 1) % 3).all()), everything(comm), everything(comm)]
        return found

    with Group(3, body, staging_bytes=1 << 18) as group:
        for rank in range(3):
            outcome = group.get(rank)
            if isinstance(outcome, str):
                pytest.skip(outcome)
            assert outcome == [True] * 4, outcome


def test_a_group_of_ranks_that_cannot_be_traced():
    def body(comm, link):
        become_untraceable()
        with Communicator(comm._store, comm.rank, 2, name="second", timeout=LIMIT) as second:
            return second.describe()["reach"], large(second)

    with Group(2, body) as group:
        assert [group.get(rank) for rank in range(2)] == [("staging only", True)] * 2


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
