"""Recording (csrc/trace/, hooks in communicator and collectives), statistics and metrics, in real groups."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from tiers import tier
from torch_ranks import meeting

import pycomm
from pycomm import _C, env, trace
from pycomm.testing import run_ranks
from pycomm.trace import waits
from pycomm.trace.files import DONE, MESSAGE, OPERATION, read_files
from pycomm.trace.joined import NO_NAME, load
from pycomm.trace.waits import phases

CALLS = {  # name -> (what a rank calls, bytes of the whole buffer with 3 ranks)
    "all_reduce": (lambda comm: comm.all_reduce(torch.ones(1000)), 4000),
    "broadcast": (lambda comm: comm.broadcast(torch.ones(7)), 28),
    "all_gather": (lambda comm: comm.all_gather(torch.ones(5000)), 60000),
    "reduce_scatter": (lambda comm: comm.reduce_scatter(torch.ones(3, 11)), 132),
    "all_to_all": (lambda comm: comm.all_to_all(torch.ones(3, 2)), 24),
    "gather": (lambda comm: comm.gather(torch.ones(2)), 24),
    "scatter": (lambda comm: comm.scatter(torch.ones(9) if comm.rank == 0 else None, torch.ones(3)), 36),
    "barrier": (lambda comm: comm.barrier(), 0),
}


def every_kind(comm, folder, mode):
    with comm.trace(folder):
        for call, _ in CALLS.values():
            call(comm)
        works = [comm.all_reduce(torch.ones(100000), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        if comm.rank == 0:
            comm.send(torch.ones(10), 1)
        if comm.rank == 1:
            comm.recv(torch.ones(10))
    # not recorded any more; of threads, others may record still
    if mode == "processes":
        CALLS["all_reduce"][0](comm)
    return comm.statistics()


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_every_operation_is_recorded(tmp_path, mode):
    statistics = run_ranks(3, every_kind, str(tmp_path), mode, mode=mode)
    files = read_files(tmp_path)
    assert len(files) == (1 if mode == "threads" else 3)
    assert all(file.closed_ns and not file.torn and not file.overwritten for file in files)
    found = load(tmp_path)
    assert [row.rank for row in found.rows] == [0, 1, 2] and not found.notes
    (collective,) = found.collectives
    assert [_C.kinds[kind] for kind in collective.kind] == [*CALLS, *["all_reduce"] * 3]
    assert collective.nbytes.tolist() == [nbytes for _, nbytes in CALLS.values()] + [400000] * 3
    for row in found.rows:
        operations = row.operations[row.operations["type"] == OPERATION]
        assert (operations["outcome"] == DONE).all()
        assert (operations["issued"] <= operations["begun"]).all()
        assert (operations["begun"] <= operations["arrived"]).all()
        assert (operations["arrived"] <= operations["ended"]).all()
        assert (operations["waited"][:8] > 0).all()
    # nobody ends before the last has come, and everybody saw who that was
    assert (phases(collective) <= collective.ended).all()
    assert (collective.last >= 0).all()
    check_messages(found.rows)
    for rank in range(3):
        check_statistics(statistics[rank], 2 if mode == "processes" else 1)


def check_messages(rows):
    kinds = [[_C.kinds[m["kind"]] for m in row.operations if m["type"] == MESSAGE] for row in rows]
    assert kinds == [["send"], ["recv"], []]
    (recv,) = rows[1].operations[rows[1].operations["type"] == MESSAGE]
    assert (recv["nbytes"], recv["last"]) == (40, 0)


def check_statistics(found, calls):
    cell = found["all_reduce"]["16 KiB"]
    assert (cell["operations"], cell["bytes"], cell["measured"]) == (calls, 4000 * calls, 1)
    assert cell["waiting_s"] >= 0 and cell["moving_s"] >= 0
    assert found["all_reduce"]["4 MiB"]["operations"] == found["all_reduce"]["4 MiB"]["measured"] == 3
    assert found["barrier"]["64 B"]["operations"] == 1
    assert not any(operation.startswith("cuda ") for operation in found)


def test_operations_that_fail_are_not_measured(tmp_path):
    def body(comm):
        with comm.trace(str(tmp_path)):
            for fails in (False, True, False):
                with pytest.raises(pycomm.MismatchError) if fails else contextlib.nullcontext():
                    comm.all_reduce(torch.ones(3 + comm.rank if fails else 3))
        return comm.statistics()["all_reduce"]["64 B"]

    for cell in run_ranks(2, body):
        assert (cell["operations"], cell["measured"]) == (2, 2), cell


def test_waiting_and_moving_are_told_apart(tmp_path):
    """Rank 1 comes half a second late; then hardly anything moves."""

    def body(comm):
        with comm.trace(str(tmp_path)):
            for call in (comm.barrier, lambda: comm.all_reduce(torch.ones(3)), lambda: message(comm)):
                comm.broadcast(torch.ones(3))
                if comm.rank == 1:
                    time.sleep(0.5)
                call()
        return comm.statistics()

    def message(comm):
        if comm.rank == 1:
            comm.send(torch.ones(3), 0)
        else:
            comm.recv(torch.ones(3), 1)

    early, late = run_ranks(2, body)
    for kind in ("barrier", "all_reduce", "recv"):
        cell = early[kind]["64 B"]
        assert cell["waiting_s"] > 5 * cell["moving_s"] and cell["waiting_s"] > 0.1, (kind, cell)
    for kind in ("barrier", "all_reduce"):
        assert late[kind]["64 B"]["waiting_s"] == 0, "the last rank waits for nobody"
    lines = waits.table(load(tmp_path))  # a send need not know when its receiver comes
    assert {"send", "recv"} < {line.operation for line in lines}
    assert all(0 <= line.waiting_ms < 1e5 and 0 <= line.moving_ms < 1e5 for line in lines), waits.show(lines)


def test_sizes_are_classed_at_their_limits():
    sizes = {64: "64 B", 65: "1 KiB", 1024: "1 KiB", 1025: "16 KiB", 16384: "16 KiB", 16385: "256 KiB"}
    sizes |= {1 << 18: "256 KiB", (1 << 18) + 1: "4 MiB", 1 << 22: "4 MiB", (1 << 22) + 1: "64 MiB"}

    def body(comm):
        for size in sizes:
            comm.all_reduce(torch.zeros(size, dtype=torch.uint8))
        return {size: cell["operations"] for size, cell in comm.statistics()["all_reduce"].items()}

    expected = {}
    for name in sizes.values():
        expected[name] = expected.get(name, 0) + 1
    assert run_ranks(1, body) == [expected]


def uneven(comm):
    sizes = [3, 0, 5]
    comm.all_gather(torch.ones(sizes[comm.rank]), [torch.ones(size) for size in sizes])
    comm.reduce_scatter([torch.ones(size) for size in sizes])


def test_bytes_are_those_of_the_whole_buffer():
    """Of equal parts, and of a list of sizes; on every rank."""

    def body(comm):
        for call, _ in CALLS.values():
            call(comm)
        uneven(comm)
        return {
            kind: sum(cell["bytes"] for cell in cells.values()) for kind, cells in comm.statistics().items()
        }

    expected = {kind: nbytes for kind, (_, nbytes) in CALLS.items()}
    expected["all_gather"] += 4 * 8
    expected["reduce_scatter"] += 4 * 8
    assert run_ranks(3, body) == [expected] * 3


def test_a_mismatch_is_recorded_as_failed(tmp_path):
    def body(comm):
        with comm.trace(str(tmp_path)):
            with pytest.raises(pycomm.MismatchError):
                comm.all_reduce(torch.ones(1 + comm.rank))
            comm.barrier()
        return comm.statistics()

    statistics = run_ranks(2, body)
    for row in load(tmp_path).rows:
        assert row.operations["outcome"].tolist() == [2, 1]
    assert all("all_reduce" not in found for found in statistics)


def dies_in_an_operation(comm, together, folder):
    trace.begin(folder)
    comm.barrier()
    together.wait()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerError):
        comm.all_reduce(torch.ones(3))
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_was_recorded_outlives_sigkill(tmp_path):
    run_ranks(3, dies_in_an_operation, meeting(3), str(tmp_path), mode="processes", fail=False)
    found = load(tmp_path)
    assert [len(row.operations) for row in found.rows] == [2, 1, 2]
    assert sum("it still runs, or it was killed" in note for note in found.notes) == 3


def killed_while_it_waits(comm, folder):
    """Rank 0 is killed in an all_reduce to which rank 1, stopped, never comes."""
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    trace.begin(folder)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    comm.all_reduce(torch.ones(3))


def test_the_operation_in_which_a_process_died_is_named(tmp_path):
    run_ranks(2, killed_while_it_waits, str(tmp_path), mode="processes", timeout=2, fail=False)
    found = load(tmp_path)
    ((operation,),) = [row.operations for row in found.rows]
    assert (operation["outcome"], operation["ended"], operation["sequence"]) == (0, 0, 1)
    assert any("was in all_reduce #1 of group" in note for note in found.notes)


def pairs_of_one_name(comm, folder):
    """Ranks 0 and 1, and then 0 and 2, make a group of the same name and size."""
    with comm.trace(folder):
        for number, other in enumerate((1, 2)):
            if comm.rank in (0, other):
                store = torch.distributed.FileStore(f"{folder}/store{number}", 2)
                with pycomm.Communicator(store, min(comm.rank, 1), 2, name="pair") as pair:
                    for _ in range(number + 1):
                        pair.barrier()
        comm.barrier()


def test_groups_of_one_name_with_other_members_are_told_apart(tmp_path):
    """As after a death, when those that are left make theirs anew."""
    run_ranks(3, pairs_of_one_name, str(tmp_path), mode="processes", timeout=100)
    found = load(tmp_path)
    pairs = [each for each in found.collectives if found.groups[each.group].name == "pair"]
    assert [(len(each.sequence), [row.rank for row in each.rows]) for each in pairs] == [
        (1, [0, 1]),
        (2, [0, 2]),
    ]


def test_names_without_end(tmp_path):
    """More than there is room for: what is recorded under the first ones stays, the rest has none."""
    trace.begin(str(tmp_path))
    try:
        for n in range(9000):
            with trace.span(f"batch {n}"):
                pass
        with trace.span("batch 1"):
            pass
    finally:
        trace.end()
    found = load(tmp_path)
    names = [found.names[span["name"]] for span in found.rows[0].spans]
    known = names.index(NO_NAME)
    assert len(names) == 9001 and 5000 < known < 8000 and names[-1] == "batch 1"
    assert names[:known] == [f"batch {n}" for n in range(known)]
    assert sum("names of groups or spans had no room" in note for note in found.notes) == 1


@pytest.mark.parametrize("threads", [1, 4])
def test_ring_keeps_the_last_and_no_torn_record(tmp_path, threads):
    """More records than places, from several threads at once."""
    each, capacity = 3000, (64 << 10) // 64
    trace.begin(str(tmp_path), 1)  # the least: 1024 records
    try:

        def record(thread):
            for n in range(each):
                with trace.span("work", thread, n, n):
                    pass

        workers = [threading.Thread(target=record, args=(n,)) for n in range(threads)]
        for worker in workers:
            worker.start()
        (now,) = read_files(tmp_path)  # while they write
        assert (now.spans["microbatch"] == now.spans["bucket"]).all()
        for worker in workers:
            worker.join()
    finally:
        trace.end()
    (file,) = read_files(tmp_path)
    assert (len(file.spans), file.torn, file.overwritten) == (capacity, 0, threads * each - capacity)
    assert (file.spans["microbatch"] == file.spans["bucket"]).all()
    for thread in range(threads):
        mine = file.spans["microbatch"][file.spans["stage"] == thread]
        assert (np.diff(mine) == 1).all() and (not len(mine) or mine[-1] == each - 1)


def test_an_operation_that_the_ring_has_lapped_is_recorded_whole(tmp_path):
    def body(comm):
        if comm.rank == 0:
            trace.begin(str(tmp_path), 1)
            work = comm.recv(torch.ones(3), 1, async_op=True)
            for _ in range(2000):
                with trace.span("work"):
                    pass
        comm.barrier()
        if comm.rank == 1:
            comm.send(torch.ones(3), 0)
        else:
            work.wait()
        comm.barrier()
        if comm.rank == 0:
            trace.end()

    run_ranks(2, body)
    (file,) = read_files(tmp_path)
    recv = file.operations[file.operations["type"] == MESSAGE]
    assert recv["outcome"].tolist() in ([DONE], [DONE, DONE])  # the send of rank 1, a thread, may be there


def test_an_operation_of_one_trace_is_not_in_the_next(tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()

    def body(comm):
        if comm.rank == 0:
            trace.begin(str(folders[0]))
            work = comm.recv(torch.ones(3), 1, async_op=True)
            trace.end()
            trace.begin(str(folders[1]))
        comm.barrier()
        if comm.rank == 1:
            return comm.send(torch.ones(3), 0)
        work.wait()
        trace.end()

    run_ranks(2, body)
    found = []
    for folder in folders:
        (file,) = read_files(folder)
        mine = file.operations[file.operations["type"] == MESSAGE]
        found.append([_C.kinds[kind] for kind in mine["kind"]].count("recv"))
    assert found == [1, 0]


def test_a_forked_child_leaves_the_trace_of_its_parent_alone(tmp_path):
    trace.begin(str(tmp_path))
    try:
        with trace.span("parent"):
            pid = os.fork()
            if pid == 0:
                with trace.span("child"):
                    pass
                os._exit(_C.trace_active())
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        trace.end()
    (file,) = read_files(tmp_path)
    assert [file.names[number] for number in file.spans["name"]] == ["parent"]


def test_traces_nest_in_one_folder_only(tmp_path):
    trace.begin(str(tmp_path / "a"))
    trace.begin(str(tmp_path / "a"))
    with pytest.raises(ValueError, match="already; end that before"):
        trace.begin(str(tmp_path / "b"))
    trace.end()
    assert trace.folder() == str(tmp_path / "a")
    trace.end()
    assert trace.folder() is None
    assert len(list((tmp_path / "a").iterdir())) == 1


SCRIPT = """
import resource, sys, torch, pycomm
from pycomm import _C
if sys.argv[1] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (12 << 20, 12 << 20))  # room for a group's memory
for _ in range(2):
    with pycomm.Communicator(_C.LocalStore(), 0, 1) as comm:
        assert comm.all_reduce(torch.ones(3)).tolist() == [1, 1, 1]
"""


@tier(quick=1 / 2)
@pytest.mark.parametrize(
    ("case", "reason"), [("full", "File too large"), ("not a folder", "Not a directory"), ("fine", None)]
)
def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, case, reason):
    (tmp_path / "file").write_text("")
    folder = tmp_path / ("file" if case == "not a folder" else "new") / "trace"
    command = [sys.executable, "-c", SCRIPT, case]
    variables = env.for_child(PYCOMM_TRACE=str(folder))
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("records no trace") == (reason is not None)
    if reason:
        assert reason in done.stderr and not list(tmp_path.rglob("*.pytrace"))
    else:
        assert [row.operations["outcome"].tolist() for row in load(folder).rows] == [[1, 1]]


def test_nothing_is_measured_unasked():
    (found,) = run_ranks(1, lambda comm: (comm.barrier(), comm.statistics())[1])
    assert found["barrier"]["64 B"]["measured"] == 0


METRICS = """
import sys, urllib.request, torch, pycomm
from pycomm import _C, env
with pycomm.Communicator(_C.LocalStore(), 0, 1, name="g") as comm:
    comm.all_reduce(torch.ones(3))
    page = urllib.request.urlopen(f"http://127.0.0.1:{env.metrics_port()}/metrics", timeout=30)
    print(page.read().decode())
"""


def test_prometheus_endpoint():
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    variables = env.for_child(PYCOMM_METRICS_PORT=port, LOCAL_RANK=None)
    done = subprocess.run(
        [sys.executable, "-c", METRICS], env=variables, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    line = 'pycomm_operations_total{group="g",operation="all_reduce",rank="0",size="64 B"} 1.0'
    assert line in done.stdout
    assert "pycomm_moving_seconds_total{" in done.stdout
