"""What groups take from the machine and give back: descriptors, threads, memory, files; registered buffers;
messages of more than 2 GiB.
"""

import functools
import gc
import mmap
import os
import re
import tempfile
import time

import pytest
import torch
from collective_cases import difference, same, whole
from tiers import tier

import pycomm
from pycomm import _C
from pycomm.testing import run_ranks

MIB = 1 << 20


class Usage:
    """What this process holds now."""

    def __init__(self):
        gc.collect()
        self.fds = len(os.listdir("/proc/self/fd"))
        self.threads = len(os.listdir("/proc/self/task"))
        with open("/proc/self/maps") as maps:
            self.segments = sum("/memfd:" in line for line in maps)
        with open("/proc/self/status") as status:
            # without RssFile: pages of the libraries' code come in when a forked process first needs them
            kinds = re.findall(r"(?:RssAnon|RssShmem):\s+(\d+) kB", status.read())
        self.rss = sum(int(kib) << 10 for kib in kinds)

    def growth_since(self, before, rss_bound):
        """What has grown, as text. Threads that were joined may take a moment to leave /proc, with what they
        hold: then and now, so that there may be less than before.
        """
        now, deadline = self, time.monotonic() + 5
        while now.threads > before.threads and time.monotonic() < deadline:
            time.sleep(0.01)
            now = Usage()
        grown = [
            f"{name}: {getattr(before, name)} -> {getattr(now, name)}"
            for name in ("fds", "threads", "segments")
            if getattr(now, name) > getattr(before, name)
        ]
        return grown + [f"resident bytes: {before.rss} -> {now.rss}"] * (now.rss - before.rss > rss_bound)


def use(comm):
    """Starts all that a group may start: the worker, messages in all modes, a registered buffer, a staged
    operation.
    """
    other = 1 - comm.rank
    works = [
        comm.all_reduce(torch.ones(20000), async_op=True),
        comm.send(torch.ones(30000), other, async_op=True),
    ]
    comm.recv(torch.empty(30000), other)
    for work in works:
        work.wait()
    x = pycomm.empty(5000, comm=comm).fill_(1.0)
    comm.all_reduce(x, algorithm="two_shot")
    return x  # outlives its group


def recreate(comm, store, warm_up, times):
    """The same group again and again, on one store and under one name; returns what has grown since the
    warm-up.
    """
    before = None
    for i in range(warm_up + times):
        if i == warm_up:
            comm.barrier()
            before = Usage() if comm.rank == 0 or store is None else None
            comm.barrier()
        with pycomm.Communicator(
            store or comm._store, comm.rank, 2, name="again", timeout=20, staging_bytes=256 << 10
        ) as group:
            x = use(group) if i % 10 == 0 else group.all_reduce(torch.ones(3))
        assert x[-1] == 2
        del x, group
    comm.barrier()
    grown = Usage().growth_since(before, 3 * MIB) if before else []
    comm.barrier()
    return grown


@pytest.mark.parametrize("groups", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_groups_of_threads_leave_nothing(groups):
    assert run_ranks(2, recreate, _C.LocalStore(), 100, groups, timeout=60) == [[], []]


@pytest.mark.parametrize("groups", [80, pytest.param(200, marks=pytest.mark.slow)])
def test_groups_of_processes_leave_nothing(groups):
    assert run_ranks(2, recreate, None, 40, groups, mode="processes", timeout=60) == [[], []]


def test_sub_groups_without_close_go_with_their_last_reference():
    def body(comm):
        before = None
        for i in range(60):
            if i == 20:
                comm.barrier()
                before = Usage()
                comm.barrier()
            use(comm.split(0))
        comm.barrier()
        return Usage().growth_since(before, 3 * MIB)

    assert run_ranks(2, body, mode="processes", timeout=60) == [[], []]


@tier(quick=1 / 2)
@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_run_ranks_leaves_nothing(mode, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared_memory = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

    def shared_files():
        """Files in memory or /tmp that are mapped and shared."""
        with open("/proc/self/maps") as maps:
            return {
                line.split(maxsplit=5)[5] for line in maps if re.search(r"^\S+ ...s .* /(dev/shm|tmp)/", line)
            }

    others = shared_files()  # of multiprocessing, in tests before this one

    def body(comm):
        use(comm)
        return sorted(shared_files() - others)

    run_ranks(2, body, mode=mode)
    before = Usage()
    for _ in range(10):
        assert run_ranks(2, body, mode=mode) == [[], []]
    assert Usage().growth_since(before, 4 * MIB) == []
    assert os.listdir(tmp_path) == []
    left = set(os.listdir("/dev/shm")) - shared_memory if os.path.isdir("/dev/shm") else set()
    assert not [name for name in left if "pycomm" in name]


def mapped_bytes():
    """Bytes of shared segments in this process."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "/memfd:" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


@tier(quick=1 / 3)
@pytest.mark.parametrize("n", [2, 4, 16])
def test_staging_memory_is_bounded(n):
    """8 MiB per rank for a process's first group, 1 MiB for each further. Mapped is a little more: flags."""

    def body(comm):
        first = comm.describe()["staging_bytes"], mapped_bytes()
        groups = [comm.split(0) for _ in range(3)]
        return [first, *((group.describe()["staging_bytes"], mapped_bytes()) for group in groups)]

    for first, *further in run_ranks(n, body, mode="processes"):
        assert first[0] <= 8 * MIB and first[1] <= 1.1 * n * 8 * MIB
        assert all(staging <= MIB for staging, _ in further)
        assert further[-1][1] - first[1] <= 3 * 1.35 * n * MIB


def test_the_first_group_after_the_last_is_a_first_one_again():
    sizes = [run_ranks(2, lambda comm: comm.describe()["staging_bytes"])[0] for _ in range(3)]
    assert sizes == [8 * MIB] * 3


def peak():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read())[1]) << 10


def test_an_operation_on_much_data_allocates_nothing_of_its_size():
    """Other than the copy of an input that overlaps the output."""

    def body(comm):
        x, peaks = torch.ones(16 * MIB), {}
        calls = {
            algorithm: functools.partial(comm.all_reduce, x, "max", algorithm=algorithm)
            for algorithm in ("one_shot", "two_shot", "ring", "direct")
        }
        calls["broadcast"] = functools.partial(comm.broadcast, x, algorithm="staged")
        calls["overlap"] = functools.partial(
            comm.all_reduce, x[1:], "max", out=x[:-1]
        )  # shows that the measure works
        for name, call in [*calls.items(), *calls.items()]:  # the first round touches all of the staging
            comm.barrier()
            with open("/proc/self/clear_refs", "w") as clear:
                clear.write("5")  # VmHWM starts anew
            before = peak()
            call()
            peaks[name] = peak() - before
        return peaks

    for peaks in run_ranks(2, body, mode="processes"):
        assert peaks.pop("overlap") > 48 * MIB
        assert {name: grown for name, grown in peaks.items() if grown > 8 * MIB} == {}


# --- registered buffers --------------------


def registered(comm, counts):
    n, r, found = comm.world_size, comm.rank, []
    for seed, count in enumerate(counts):
        for algorithm in (None, "direct", "two_shot"):
            x, y, big = comm.empty(count), comm.empty(count), comm.empty((n, count))
            assert not x.any() and not big.any()
            v, w = whole(n, count, seed=seed), whole(n, n, count, seed=seed)
            plain = None if algorithm == "two_shot" else algorithm
            got = {
                "all_reduce": (comm.all_reduce(x.copy_(v[r]), out=y, algorithm=algorithm).clone(), v.sum(0))
            }
            got["all_reduce in place"] = comm.all_reduce(x, "max", algorithm=algorithm).clone(), v.amax(0)
            comm.reduce(x.copy_(v[r]), n - 1, algorithm=algorithm)
            got["reduce"] = x.clone(), v.sum(0) if r == n - 1 else v[r]
            got["broadcast"] = comm.broadcast(x.copy_(v[r]), n - 1, algorithm=plain).clone(), v[n - 1]
            got["all_gather"] = comm.all_gather(x.copy_(v[r]), big, algorithm=plain).clone(), v
            got["reduce_scatter"] = (
                comm.reduce_scatter(big.copy_(w[r]), x, algorithm=plain).clone(),
                w[:, r].sum(0),
            )
            got["all_to_all"] = (
                comm.all_to_all(big.copy_(w[r]), comm.empty((n, count)), algorithm=plain).clone(),
                w[:, r],
            )
            got["gather"] = (
                comm.gather(x.copy_(v[r]), big if r == 0 else None, algorithm=plain),
                v if r == 0 else None,
            )
            comm.scatter(big.copy_(w[r]), y, algorithm=plain)
            got["scatter"] = y.clone(), w[0, r]
            some = x.copy_(v[r]) if r else v[r].clone()  # registered on some ranks only
            got["mixed"] = comm.all_reduce(some, algorithm=algorithm).clone(), v.sum(0)
            for what, (result, right) in got.items():
                if right is not None and not same(result, right):
                    found.append(difference(f"rank {r}: {what}({count}, {algorithm})", result, right))
    x, y = comm.empty(20000), comm.empty(20000)
    if r == 0:
        del x  # its peers still have theirs
        x = y
    if not same(comm.all_reduce(x.fill_(1.0)), torch.full((20000,), float(n))):
        found.append(f"rank {r}: all_reduce after a registered buffer was dropped on rank 0")
    return found


@pytest.mark.parametrize(
    ("mode", "n", "cma"), [("threads", 3, "1"), ("processes", 2, "1"), ("processes", 3, "0")]
)
def test_registered_buffers(monkeypatch, mode, n, cma):
    monkeypatch.setenv("PYCOMM_CMA", cma)
    assert sum(run_ranks(n, registered, [1, 2049, 40009, 300007], mode=mode, timeout=45), []) == []


def test_registered_memory_is_given_back():
    def body(comm):
        keep, before = comm.empty(1 << 20), None
        for i in range(30):
            x = comm.empty(1 << 20).fill_(float(comm.rank))  # 4 MiB
            if i == 5:
                before = Usage()
            comm.all_reduce(x)
        assert x[-1] == 1 and not keep.any()
        del x
        grown = Usage().growth_since(before, 6 * MIB)
        with pytest.raises(pycomm.MismatchError, match="nbytes=(4 here, 8|8 here, 4) on rank"):
            comm.empty(1 + comm.rank)
        return [text for text in grown if not text.startswith(("fds", "segments"))], comm.all_reduce(
            keep[:1] + 1
        ).item()

    assert run_ranks(2, body, mode="processes") == [([], 2.0)] * 2


def kernel_makes_huge_pages():
    """Of small ones of shared memory, when asked: since Linux 6.1, where the machine does not forbid it."""
    with mmap.mmap(-1, 8 * MIB) as memory:
        for at in range(0, 8 * MIB, 4096):
            memory[at] = 0
        try:
            memory.madvise(25, 0, 8 * MIB)
        except OSError:
            return False
    return True


def mapped_by_huge_pages():
    with open("/proc/self/smaps") as maps:
        return sum(int(kib) << 10 for kib in re.findall(r"ShmemPmdMapped:\s+(\d+) kB", maps.read()))


def test_large_registered_memory_lies_on_huge_pages():
    """A rank's own part does when it gets it, and reads as zeros."""

    def body(comm):
        x = comm.empty(9 * MIB, torch.uint8)
        huge = mapped_by_huge_pages()
        zeros = not x.any()
        comm.barrier()
        y = comm.all_gather(x.fill_(comm.rank + 1), algorithm="direct").reshape(2, -1)
        return huge, zeros and all((y[r] == r + 1).all() for r in range(2))

    least = 2 * MIB if kernel_makes_huge_pages() else 0
    for huge, right in run_ranks(2, body, mode="processes"):
        assert right and huge >= least


# --- more than 2 GiB --------------------


@tier(slow=1)
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_more_than_two_gibibytes(operation):
    """Counts and byte offsets beyond 32 bits signed. 4.3 GB of memory in all; every piece is checked."""
    count, piece = (1 << 31) + 4099, 1 << 26

    def value(at, r):
        return (at // piece * 7 + 3 * r) % 251

    def body(comm):
        x = torch.empty(count, dtype=torch.uint8)
        for at in range(0, count, piece):
            x[at : at + piece].fill_(value(at, comm.rank))
        if operation == "all_reduce":
            comm.all_reduce(x, "max")
        else:
            comm.broadcast(x, 1)
        ranks = [0, 1] if operation == "all_reduce" else [1]
        return [
            at
            for at in range(0, count, piece)
            if not (x[at : at + piece] == max(value(at, r) for r in ranks)).all()
        ]

    assert run_ranks(2, body, timeout=100) == [[], []]
