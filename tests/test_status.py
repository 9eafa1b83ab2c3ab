"""python -m pycomm.status, beside ranks that wait for each other."""

import contextlib
import fcntl
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time

import pytest
import torch

import pycomm
from pycomm.status import pages
from pycomm.status.__main__ import describe
from pycomm.status.pages import Place, Refused, read_places
from pycomm.testing import run_ranks

PATIENCE_S = 40


def status(*options):
    command = [sys.executable, "-m", "pycomm.status", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def until(pattern, *options):
    """What status says once it says this."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        text = status(*options)
        if re.search(pattern, text) or time.monotonic() > deadline:
            return text


def the_last_one_looks(comm):
    comm.barrier()
    text = ""
    if comm.rank == 2:
        mine = str(os.getpid())
        text = until("Not arrived.*2 wait", "--pid", mine, "--stacks", "none")
    comm.all_reduce(torch.ones(3))
    comm.barrier()
    return text, os.getpid()


def test_who_waits_for_whom():
    outcomes = run_ranks(3, the_last_one_looks, mode="processes", name="training", timeout=100)
    text, pids = outcomes[2][0], [pid for _, pid in outcomes]
    assert "Group 'training', 3 ranks:" in text
    for rank in (0, 1):
        line = rf"rank {rank} \(process {pids[rank]}\): in all_reduce #2, waits for rank 2 for \d+\.\d s"
        assert re.search(line, text), text
    assert f"rank 2 (process {pids[2]}): in no operation; the last was #1" in text
    assert re.search(r"Not arrived at all_reduce #2: rank 2; 2 wait, the longest for \d", text), text


def waits_for_a_message(comm):
    text = ""
    if comm.rank == 0:
        comm.recv(torch.ones(3), 1)
    else:
        text = until("in recv, waits for rank 1", "--pid", str(os.getpid()), "--stacks", "none")
        comm.send(torch.ones(3), 0)
    comm.barrier()
    return text


def test_a_message_is_waited_for():
    text = run_ranks(2, waits_for_a_message, mode="processes", timeout=100)[1]
    assert "in recv, waits for rank 1 for" in text


def reads_itself(comm):
    with pytest.raises(Refused, match="this process is a rank"):
        read_places()
    comm.barrier()


def test_a_rank_does_not_read_its_own_pages():
    """It would drop its locks; afterwards the peers still take it for alive."""
    run_ranks(2, reads_itself, mode="processes")


def closes_its_group(comm):
    shown = []
    for _ in range(2):
        text = status("--stacks", "none", "--pid", str(os.getpid())) if comm.rank == 0 else ""
        shown.append("Group 'brief'" in text)
        with contextlib.suppress(pycomm.CommError):
            comm.barrier()
        comm.close()
    return shown


def test_rows_go_with_their_groups():
    """No trace of a group that its ranks have closed. (Python's object may live on.)"""
    shown, _ = run_ranks(2, closes_its_group, mode="processes", name="brief", timeout=100)
    assert shown[0]


def test_processes_of_others_are_refused(monkeypatch):
    monkeypatch.setattr(pages.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(Refused, match="is not yours"):
        read_places(os.getpid())
    assert read_places() == []


def test_no_such_process():
    with pytest.raises(Refused, match="there is no process"):
        read_places(2**22 + 1)


def place(rank, **fields):
    empty = Place(100 + rank, 1, "g", rank, 4, None, 0, 6, None, 0.0, 0, ())
    return empty._replace(**fields)


def waiting(rank, whom):
    return place(rank, operation="barrier", sequence=7, waiting_in="barrier", missing=1, ranks=(whom,))


@pytest.mark.parametrize(
    ("members", "late"),
    [
        ([place(0), place(1)], []),
        (
            [
                place(0, operation="barrier", sequence=7, waiting_in="barrier", missing=1, ranks=(1,)),
                place(1),
            ],
            [1],
        ),
        (  # a chain: 0 waits for 1, which waits for 2
            [
                place(0, operation="all_reduce", sequence=7, waiting_in="all_reduce", missing=1, ranks=(1,)),
                place(1, operation="all_reduce", sequence=7, waiting_in="all_reduce", missing=1, ranks=(2,)),
                place(2),
            ],
            [2],
        ),
    ],
    ids=["idle", "one", "chain"],
)
def test_not_arrived(members, late):
    from pycomm.status.__main__ import not_arrived

    assert [member.rank for member in not_arrived(members)] == late


def computes_for_long(comm):
    text = ""
    if comm.rank == 0:
        comm.barrier()
    else:
        text = until("def|computes_for_long|no stack", "--pid", str(os.getpid()))
        comm.barrier()
    return text


def test_python_stack_of_the_late_rank():
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=sys.exec_prefix + "/bin")
    if spy is None:
        pytest.skip("py-spy is not installed")
    text = run_ranks(2, computes_for_long, mode="processes", timeout=100)[1]
    if "no stack" in text:
        pytest.skip("py-spy may not look into processes here (ptrace)")
    assert "computes_for_long" in text


def stopped_while_it_is_looked_at(comm, folder):
    """Rank 1 is stopped; rank 0 waits for it; rank 2 looks, all stacks too, and lets it go on."""
    comm.barrier()
    if comm.rank == 1:
        (folder / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    text = ""
    if comm.rank == 2:
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        text = until("waits for ranks? 1", "--pid", str(os.getpid()), "--stacks", "all")
        os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
    comm.all_reduce(torch.ones(3))
    return text


def test_a_stopped_rank_is_shown(tmp_path):
    text = run_ranks(3, stopped_while_it_is_looked_at, tmp_path, mode="processes", timeout=100)[2]
    assert re.search(r"rank 1 \(process \d+\): in no operation; the last was #1", text), text
    assert re.search(r"rank 0 \(process \d+\): in all_reduce #2, waits for ranks? 1", text), text


def a_page(draws):
    """A page of ours with rows in which any field may be anything."""
    row = [2, 1, 4, 2, 5 << 8 | 1, 4, 10**9, 1, *[0] * 12, b"group"]
    page = bytearray(struct.pack("<QiI", pages.MAGIC, 1, 0).ljust(pages.PAGE_BYTES, b"\0"))
    for start in range(16, pages.PAGE_BYTES - 176 + 1, 176):
        data = bytearray(pages._ROW.pack(*row))
        for _ in range(draws.randrange(4)):
            place = draws.randrange(4, len(data))
            data[place] = draws.choice([0, 1, 27, 127, 128, 255])
        page[start : start + 176] = data
    return bytes(page)


@contextlib.contextmanager
def life_file(data, nbytes):
    """Of another process, which has locks on all of its pages."""
    fd = os.memfd_create("pycomm-life of a test")
    os.truncate(fd, nbytes)
    os.pwrite(fd, data, 0)
    ready, hold = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        fcntl.lockf(fd, fcntl.LOCK_EX)
        os.write(ready[1], b"x")
        os.close(hold[1])
        os.read(hold[0], 1)
        os._exit(0)
    os.close(fd)
    os.read(ready[0], 1)
    try:
        yield pid
    finally:
        for end in (*ready, *hold):
            os.close(end)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("seed", range(8))
def test_pages_with_anything_in_them(seed):
    draws = random.Random(seed)
    data = b"".join(a_page(draws) for _ in range(6)) + draws.randbytes(2 * pages.PAGE_BYTES)
    with life_file(data, len(data)) as pid:
        found = read_places(pid)
        assert found and all(0 <= place.rank < place.world_size for place in found)
        groups = {}
        for place in found:
            groups.setdefault(place.group, []).append(place)
        for name, members in groups.items():
            assert all(line.isprintable() for line in describe(name, members))


def test_a_file_of_pages_without_end(monkeypatch):
    """That of a memory of 2 TiB, of which nothing is there but the first page."""
    asked = []
    monkeypatch.setattr(pages, "_holder", lambda fd, byte: asked.append(byte) or 0)
    with life_file(a_page(random.Random(0)), 2 << 40) as pid:
        assert read_places(pid) == []
    assert len(asked) == pages.MOST_PAGES
