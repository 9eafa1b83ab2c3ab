"""Abort, fork, close, and what is left of a group: nothing. The means are in forked.py."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from forked import HARD_LIMIT, LIMIT, Group, attempt, check_delays
from tiers import tier

from pycomm import Communicator

ROOT = Path(__file__).parent.parent


def right(comm):
    """Small and large operations and messages of the group give right results."""
    n, works = comm.world_size, []
    for count in (3, 1 << 20):
        assert comm.all_reduce(torch.full((count,), float(comm.rank))).eq(n * (n - 1) / 2).all()
    if n > 1:
        y = torch.zeros(5)
        works = [
            comm.send(torch.full((5,), float(comm.rank)), (comm.rank + 1) % n, async_op=True),
            comm.recv(y, (comm.rank - 1) % n, async_op=True),
        ]
    for work in works:
        work.wait(5.0)
    assert not works or y.eq((comm.rank - 1) % n).all()
    return "right"


# --- abort --------------------

WAITS = {
    "small": lambda comm: comm.all_reduce(torch.ones(1)),
    "large": lambda comm: comm.all_reduce(torch.ones(1 << 21)),
    "ring": lambda comm: comm.all_reduce(torch.ones(1 << 21), algorithm="ring"),
    "recv": lambda comm: comm.recv(torch.ones(1), 3),
    "send": lambda comm: comm.send(torch.ones(1 << 21), 3),
    "any source": lambda comm: comm.recv(torch.ones(1), tag=7),
    "async": lambda comm: comm.all_reduce(torch.ones(1 << 21), async_op=True).wait(),
    "async small": lambda comm: comm.all_reduce(torch.ones(1), async_op=True).wait(),
}


@tier(quick=1 / 9)
@pytest.mark.parametrize("wait", WAITS)
def test_abort(wait):
    """By another thread of a rank that waits itself (0), by one that does nothing else (3): all waiters are
    free within 0.2 s.
    """

    def body(comm, link):
        def abort():
            link.recv()
            link.send(time.monotonic())
            comm.abort("enough of it")

        if comm.rank in (0, 3):
            threading.Thread(target=abort, daemon=True).start()
        if comm.rank == 3:
            return time.sleep(LIMIT)
        WAITS[wait](comm)

    delays = []
    for who in (0, 3, 0):
        with Group(4, body) as group:
            time.sleep(0.06)  # they sleep in the wait
            group.send(who)
            then = group.moment(group.get(who))
            reports = [group.get(rank) for rank in range(3)]
            delays += group.delays(then, reports)
        for report in reports:
            assert (
                report["kind"] == "AbortedError"
                and f"rank {who} aborted the group: enough of it" in report["text"]
            ), report
    check_delays(delays)


def test_exception_in_with_block():
    """It aborts the group, with its text; nobody waits for the rank that has left."""

    def body(comm, link):
        with comm:
            if comm.rank == 1:
                raise KeyError("no such file")
            comm.barrier()

    with Group(3, body) as group:
        reports = [group.get(rank) for rank in range(3)]
    assert reports[1]["kind"] == "KeyError"
    for report in (reports[0], reports[2]):
        assert (
            report["kind"] == "AbortedError"
            and "rank 1 aborted the group: KeyError: 'no such file'" in report["text"]
        ), report


SCRIPT_WHERE_A_RANK_ENDS = """
    import os, sys, torch, pycomm

    folder, how = sys.argv[1:]
    rank = 0 if os.fork() else 1 if os.fork() else 2
    comm = pycomm.Communicator(torch.distributed.FileStore(folder + "/store", 3), rank, 3, timeout=20.0)
    comm.all_reduce(torch.ones(1 << 20), async_op=True).wait()
    if rank != 1:
        try:
            comm.barrier()
        except pycomm.CommError as error:
            sys.stdout.write(f"{type(error).__name__} {error.peer}\\n"); sys.stdout.flush()
            os._exit(0)
    elif how == "exception":
        raise RuntimeError("uncaught")
    elif how == "sys.exit":
        sys.exit(0)
"""


@tier(quick=1 / 4)
@pytest.mark.parametrize("how", ["end", "exception", "sys.exit"])
def test_script_ends(tmp_path, how):
    """The script of one rank ends, with the interpreter taking the group down in its own order."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT_WHERE_A_RANK_ENDS), str(tmp_path), how]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert sorted(result.stdout.split("\n")) == ["", "PeerError 1", "PeerError 1"], result
    assert ("uncaught" in result.stderr) == (how == "exception"), result.stderr


# --- after the end --------------------


@pytest.mark.parametrize("reason", ["death", "timeout", "abort"])
def test_broken_then_new_group(reason):
    """A broken group says why to every later call, at once; the survivors make a new one, and close both."""
    kind = {"death": "PeerError", "timeout": "CommTimeoutError", "abort": "AbortedError"}[reason]

    def body(comm, link):
        if comm.rank == 1:
            time.sleep(LIMIT)
        if comm.rank == 2 and reason == "abort":
            comm.abort("for the test")
        first = attempt(comm.all_reduce, torch.ones(1), timeout=0.5 if reason == "timeout" else 30.0)
        later = [
            attempt(lambda: comm.all_gather(torch.ones(1 << 20), async_op=True).wait()),
            attempt(comm.recv, torch.ones(1), 0 if comm.rank else 2),
        ]
        later += [attempt(comm.barrier), attempt(comm.split, 0), attempt(comm.empty, 10)]
        with Communicator(comm._store, min(comm.rank, 1), 2, name="survivors", timeout=10.0) as new:
            comm.close()
            return first, later, right(new)

    with Group(3, body) as group:
        if reason == "death":
            group.kill(1)
        for rank in (0, 2):
            first, later, fine = group.get(rank)
            assert first[1]["kind"] == kind and fine == "right", first
            for seconds, report in later:
                assert report["kind"] == kind and report["peer"] == first[1]["peer"], report
                assert (
                    seconds.own < HARD_LIMIT
                    and "The group is broken: close it and create a new one" in report["text"]
                ), (seconds, report)


def test_use_after_close():
    calls = {
        "all_reduce": lambda comm: comm.all_reduce(torch.ones(1)),
        "all_gather": lambda comm: comm.all_gather(torch.ones(1 << 20)),
        "async": lambda comm: comm.all_reduce(torch.ones(1), async_op=True).wait(),
        "async large": lambda comm: comm.all_reduce(torch.ones(1 << 20), async_op=True).wait(),
        "barrier": lambda comm: comm.barrier(),
        "send": lambda comm: comm.send(torch.ones(1), 1 - comm.rank),
        "recv": lambda comm: comm.recv(torch.ones(1), 1 - comm.rank, async_op=True).wait(),
        "split": lambda comm: comm.split(0),
        "empty": lambda comm: comm.empty(3),
    }

    def body(comm, link):
        right(comm)
        comm.barrier()
        comm.close()
        comm.close()
        return {name: attempt(call, comm) for name, call in calls.items()}

    with Group(2, body) as group:
        for rank in range(2):
            for name, (seconds, report) in group.get(rank).items():
                assert (
                    report["kind"] == "AbortedError"
                    and "closed" in report["text"]
                    and seconds.own < HARD_LIMIT
                ), (name, report)


def test_close_before_the_others_finish():
    """Whoever is done may leave: the others finish what it took part in."""

    def body(comm, link):
        time.sleep(0.1 * comm.rank)
        results = [
            comm.broadcast(torch.full((count,), float(comm.rank)), 0).eq(0).all().item()
            for count in (3, 5000, 1 << 20)
        ]
        comm.close()
        return results

    with Group(3, body) as group:
        assert [group.get(rank) for rank in range(3)] == [[True] * 3] * 3


# --- fork --------------------


def in_a_child(body, *args):
    """Forks, runs body(*args) in the child and ends it; returns its report (None if it hangs for 5 s)."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        try:
            text = repr(body(*args))
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text or None


def drop(comm):
    """What the end of an interpreter does: the last reference goes."""
    comm.close()
    comm._comm = None
    return "gone"


def leave_with_block(comm):
    with comm:
        sys.exit(0)


CHILD_USES = {
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(1)),
    "large": lambda comm: comm.all_reduce(torch.ones(1 << 20)),
    "async": lambda comm: comm.all_reduce(torch.ones(1 << 20), async_op=True).wait(),
    "barrier": lambda comm: comm.barrier(),
    "send": lambda comm: comm.send(torch.ones(1), 1 - comm.rank),
    "recv": lambda comm: comm.recv(torch.ones(1), 1 - comm.rank),
    "split": lambda comm: comm.split(0),
}


@tier(quick=1 / 3)
@pytest.mark.parametrize("worker", ["no worker", "worker idle", "worker busy"])
def test_fork(worker):
    """The child of a rank gets a clear error, however it uses the group, and neither its use nor its end
    disturbs the parent's.
    """

    def body(comm, link):
        works = []
        if worker != "no worker":
            comm.all_reduce(torch.ones(1 << 20), async_op=True).wait()
            time.sleep(0.08)
        if worker == "worker busy" and comm.rank == 0:  # rank 1 comes later: under way at the forks
            works = [
                comm.all_reduce(torch.ones(1 << 20), async_op=True),
                comm.recv(torch.ones(1 << 20), 1, async_op=True),
            ]
            time.sleep(0.02)
        texts = {name: in_a_child(use, comm) for name, use in CHILD_USES.items()} if comm.rank == 0 else {}
        texts["abort"] = in_a_child(comm.abort)
        texts["with"] = in_a_child(leave_with_block, comm)
        texts["drop"] = in_a_child(drop, comm)
        if worker == "worker busy" and comm.rank == 1:
            works = [
                comm.all_reduce(torch.ones(1 << 20), async_op=True),
                comm.send(torch.ones(1 << 20), 0, async_op=True),
            ]
        for work in works:
            work.wait(10.0)
        return texts, right(comm)

    with Group(2, body) as group:
        for rank in range(2):
            texts, fine = group.get(rank)
            assert fine == "right"
            assert texts.pop("drop") == "'gone'" and texts.pop("with") == "SystemExit: 0", texts
            assert texts.pop("abort") is not None
            for name, text in texts.items():
                assert (
                    text and text.startswith("AbortedError") and "before a fork" in text and "child" in text
                ), f"{name}: {text}"


def test_child_makes_its_own_group():
    """A forked child may create a group, of its own rank or with others."""

    def body(comm, link):
        right(comm)

        def alone():
            with Communicator(torch.distributed.HashStore(), 0, 1, timeout=5.0) as own:
                return right(own)

        def together():
            with Communicator(comm._store, comm.rank, 2, name="children", timeout=5.0) as own:
                return right(own)

        return in_a_child(alone), in_a_child(together), right(comm)

    with Group(2, body) as group:
        for rank in range(2):
            assert group.get(rank) == ("'right'", "'right'", "right")


# --- nothing is left, nothing is needed --------------------


def segments(pid):
    """Inodes of pycomm's segments that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return {line.split()[4] for line in maps.splitlines() if "memfd:pycomm" in line}


def sockets():
    return set(re.findall(r"@pycomm-\w+", Path("/proc/net/unix").read_text()))


def test_nothing_left_after_kill():
    def listing():
        return {
            str(path)
            for folder in ("/dev/shm", "/tmp")
            if os.path.isdir(folder)
            for path in Path(folder).iterdir()
            if "pycomm" in path.name.lower()
        }

    def body(comm, link):
        kept = comm.empty(1000)
        link.send("started")
        while True:
            comm.all_reduce(kept)

    files = listing()
    with Group(3, body) as group:
        group.expect("started")
        inherited = segments(os.getpid())  # of groups that earlier tests have left in this process
        mine = set.union(*(segments(pid) for pid in group.pids)) - inherited
        assert len(mine) == 3, "the group's own segment, that of empty(), and the pages of its life file"
        during = listing() - files
        for rank in range(3):
            group.kill(rank)
            group.join(rank)
        everybody = [segments(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        assert not mine & set.union(*everybody)
        assert all(path.startswith("/tmp/pycomm-") for path in during), (
            f"other than the folder of this test's FileStore: {during}"
        )
        left, end = sockets(), time.monotonic() + 5.0
        while left and time.monotonic() < end:  # those of others who are creating a group at this moment go
            time.sleep(0.05)
            left &= sockets()
        assert not left


SCRIPT_WITHOUT_SHM = """
    import os, sys, torch
    from pycomm.testing import run_ranks

    def body(comm):
        x = comm.all_reduce(torch.full((5_000_000,), float(comm.rank + 1)))
        y = comm.empty(25_000_000)  # 100 MB, more than there is in /dev/shm
        y.fill_(comm.rank)
        comm.all_reduce(y)
        comm.barrier()
        opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        opened.append(open("/proc/self/maps").read())
        return x.eq(6).all().item() and y.eq(3).all().item(), any("/dev/shm" in text for text in opened)

    print(os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize, os.access("/dev/shm", os.W_OK))
    assert run_ranks(3, body, mode="processes", timeout=30.0) == [(True, False)] * 3
    print("right", os.listdir("/dev/shm"))
"""
MOUNTS = {"64 MB": "size=64m", "empty and read-only": "size=4k,ro"}


@tier(slow=1)
@pytest.mark.parametrize("mount", MOUNTS)
def test_small_or_no_dev_shm(mount):
    """In a mount namespace of its own, where we may make one; else the same run shows at least that /dev/shm
    is never opened.
    """
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT_WITHOUT_SHM)]
    inside = [
        "unshare",
        "-m",
        "sh",
        "-c",
        f'mount -t tmpfs -o {MOUNTS[mount]} tmpfs /dev/shm && exec "$@"',
        "sh",
    ]
    permitted = subprocess.run([*inside, "true"], capture_output=True, timeout=20).returncode == 0
    result = subprocess.run(
        [*inside, *command] if permitted else command, capture_output=True, text=True, timeout=90, cwd=ROOT
    )
    assert result.returncode == 0 and "right" in result.stdout, result
    if permitted:
        limit, writable = result.stdout.split()[:2]
        assert (
            int(limit) <= 64 << 20
            and "right []" in result.stdout
            and (writable == "False") == ("ro" in MOUNTS[mount])
        ), result.stdout
