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
from pycomm import _C
from pycomm.status import __main__ as command
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
        text = until(r"Not arrived.* wait, the longest for (?!0\.0)", "--pid", mine, "--stacks", "none")
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
    longest = r"Not arrived at all_reduce #2: rank 2; 2 wait, the longest for (?!0\.0)\d"
    assert re.search(longest, text), "the time does not grow: " + text


def test_who_waits_over_hosts():
    """The ranks of this host, by their numbers in the group."""
    text, _ = run_ranks(3, the_last_one_looks, mode="processes", hosts="1+2", timeout=100)[2]
    assert "3 ranks:" in text and "not on this host, or ended: rank 0" in text, text
    assert re.search(r"rank 1 \(process \d+\): in all_reduce #3, waits for rank 2 for", text), text
    assert "Not arrived at all_reduce #3: rank 2; 1 wait" in text, text


def groups_in_turn(comm):
    found = []
    for calls in (3, 0, 2):
        name = f"of {calls} calls"
        with pycomm.Communicator(comm._store, comm.rank, 2, name=name, timeout=30.0) as own:
            for _ in range(calls):
                own.all_reduce(torch.ones(3))
            comm.barrier()
            text = status("--pid", str(os.getpid()), "--stacks", "none")
            group = text.partition(f"Group {name!r}")[2].partition("\nGroup ")[0]
            found.append(re.findall(r"rank \d \(process \d+\): (in no operation.*)", group))
            comm.barrier()
        del own  # and gives its row back
    return found


def test_a_group_does_not_begin_with_what_another_did():
    """It may get the row of one that has ended."""
    yet, last = "in no operation yet", "in no operation; the last was #"
    expected = [[f"{last}3"] * 2, [yet] * 2, [f"{last}2"] * 2]
    assert run_ranks(2, groups_in_turn, mode="processes") == [expected] * 2


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
    assert shown == [True, False]


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
        ([waiting(0, 1), place(1, operation="all_reduce", sequence=6)], [1]),
        ([waiting(0, 1), place(1, operation="barrier", sequence=7)], []),
        ([place(0, waiting_in="alloc", missing=2, ranks=(1, 2)), place(1), place(2)], [1, 2]),
    ],
    ids=["idle", "one", "chain", "in the one before", "in the same", "without a number"],
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
def life_file(data, nbytes, page=None):
    """Of another process, which has locks on all of its pages, or on this one."""
    fd = os.memfd_create("pycomm-life of a test")
    os.truncate(fd, nbytes)
    os.pwrite(fd, data, 0)
    ready, hold = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        fcntl.lockf(fd, fcntl.LOCK_EX, *(() if page is None else (1, page)))
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


def a_row(rank=0, size=4, *, waiting=0, operation=0, completed=0, since=0, missing=0, ranks=(), name=b"g"):
    whom = [*ranks, *[0] * (12 - len(ranks))]
    return pages._ROW.pack(2, rank, size, waiting, operation, completed, since, missing, *whom, name)


def page_of(*rows):
    page = struct.pack("<QiI", pages.MAGIC, 1, 0) + b"".join(rows)
    return page.ljust(pages.PAGE_BYTES, b"\0")


def places_of(*rows, now_ns=0):
    with life_file(page_of(*rows), pages.PAGE_BYTES) as pid:
        return read_places(pid, now_ns)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"\x1b[2J\x1b]0;mine\x07", "?[2J?]0;mine?"),
        ("left\u202eright\u2028".encode(), "left?right?"),
        (b"a\r\nb\x7f\x9b", "a??b?\ufffd"),
        ("\u00e4 \u9031".encode(), "\u00e4 \u9031"),
        (b"", ""),
        ("\u00e4".encode() * 54, "\u00e4" * 54),  # all 108 bytes
        (b"x" + "\u00e4".encode() * 54, "x" + "\u00e4" * 53 + "\ufffd"),  # cut inside of a letter
    ],
    ids=["escapes", "directions", "ends of lines", "letters", "empty", "full", "cut"],
)
def test_names_are_no_commands_to_a_terminal(name, shown, monkeypatch, capsys):
    """Those that a page has, in what is read and in what is printed."""
    rows = [a_row(rank, 4, name=name) for rank in range(4)]
    found = places_of(*rows)
    assert [(place.group, place.rank) for place in found] == [(shown, rank) for rank in range(4)]
    monkeypatch.setattr(command, "read_places", lambda pid: found)
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all(map(str.isprintable, lines)) and lines[0] == f"Group {shown!r}, 4 ranks:"


@pytest.mark.parametrize("missing", [1, 11, 12, 13, 300])
def test_of_many_missing_ranks_the_first_are_named(missing):
    """A page has room for twelve; what lies behind them is the name. Ranks have numbers above 255."""
    ranks = range(299, 299 + min(missing, 12))
    fields = dict(waiting=1, operation=70000 << 8 | 1, since=10**9, missing=missing, ranks=ranks)
    (place,) = places_of(a_row(640, 700, name=b"behind", **fields), now_ns=7 * 10**9)
    assert (place.rank, place.world_size, place.group) == (640, 700, "behind")
    assert (place.operation, place.sequence, place.waiting_in) == ("all_reduce", 70000, "all_reduce")
    assert (place.waiting_s, place.missing, place.ranks) == (6.0, missing, tuple(ranks))
    named = ", ".join(map(str, ranks)) + (", ..." if missing > 12 else "")
    text = list(describe("behind", [place]))
    assert f"waits for rank{'s' * (missing > 1)} {named} for 6.0 s" in text[1]
    absent = ", ".join(map(str, range(12))) + ", ..."
    assert text[2] == f"  not on this host, or ended: ranks {absent}"


def test_every_kind_of_operation_has_its_name():
    rows = [a_row(1, 2, waiting=kind, operation=5 << 8 | kind) for kind in range(1, len(pages.KINDS))]
    found = [(place.operation, place.waiting_in) for place in places_of(*rows)]
    assert found == [(name, name) for name in pages.KINDS[1:]]
    assert list(_C.kinds) == pages.KINDS[: len(_C.kinds)]
    (unknown,) = places_of(a_row(1, 2, waiting=len(pages.KINDS), operation=5 << 8 | len(pages.KINDS)))
    assert (unknown.operation, unknown.waiting_in) == (None, None)


@pytest.mark.parametrize(("rank", "size"), [(-1, 4), (4, 4), (0, 0), (0, -1), (5, pages.MOST_RANKS)])
def test_a_row_that_cannot_be_is_passed_over(rank, size):
    found = places_of(a_row(0, 4, name=b"before"), a_row(rank, size), a_row(3, 4, name=b"after"))
    assert [place.group for place in found] == ["before", "after"]


@pytest.mark.parametrize("held", range(3))
def test_only_pages_of_living_processes_are_read(held):
    """The lock on a page ends with its process; its rows stay."""
    data = b"".join(page_of(a_row(rank, 3)) for rank in range(3))
    with life_file(data, len(data), held) as pid:
        assert [(place.rank, place.pid) for place in read_places(pid)] == [(held, pid)]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_what_is_said_of_a_group(late):
    """Whichever rank is late, also the first and the last."""
    members = [
        place(rank) if rank == late else waiting(rank, late)._replace(waiting_s=1.5 + rank)
        for rank in range(3)
    ]
    members = [member._replace(world_size=3) for member in members]
    text = list(describe("g", members))
    others = [rank for rank in range(3) if rank != late]
    assert text[0] == "Group 'g', 3 ranks:"
    assert text[1 + late] == f"  rank {late} (process {100 + late}): in no operation; the last was #6"
    for rank in others:
        said = f"in barrier #7, waits for rank {late} for {1.5 + rank:.1f} s"
        assert text[1 + rank] == f"  rank {rank} (process {100 + rank}): {said}"
    longest = 1.5 + max(others)
    assert text[4:] == [f"  Not arrived at barrier #7: rank {late}; 2 wait, the longest for {longest:.1f} s."]


def test_groups_of_one_name_in_two_jobs_are_two(monkeypatch, capsys):
    """In each rank 1 is late: both processes' stacks are shown, in the order of their numbers."""
    jobs = [
        member._replace(file=file, world_size=2, pid=member.pid + 10 * file)
        for file in (2, 1)
        for member in (place(1), waiting(0, 1))
    ]
    shown = []
    monkeypatch.setattr(command, "read_places", lambda pid: jobs)
    monkeypatch.setattr(command, "show_stacks", shown.append)
    for whose in ("late", "all", "none"):
        assert command.main(["--stacks", whose]) == 0
    text = capsys.readouterr().out
    assert text.count("Group 'g', 2 ranks:") == 6 and "not on this host" not in text
    assert [text.index(f"process {pid}") for pid in (120, 121, 110, 111)] == sorted(
        text.index(f"process {pid}") for pid in (120, 121, 110, 111)
    )
    assert shown == [[111, 121], [110, 111, 120, 121], []]


def test_nobody_is_in_a_group(monkeypatch, capsys):
    monkeypatch.setattr(command, "read_places", lambda pid: [])
    assert command.main([]) == 0 and "No process of this user" in capsys.readouterr().out


def test_a_refusal_is_one_line(monkeypatch, capsys):
    assert command.main(["--pid", str(2**22 + 1)]) == 1
    said = capsys.readouterr()
    assert said.err == f"pycomm.status: there is no process {2**22 + 1}\n" and not said.out
