"""The Python interpreter around a blocked call: its lock, its signals (Ctrl-C) and its end."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy
import pytest
import torch
import torch.distributed as dist
from forked import HARD_LIMIT, LIMIT, Group, attempt, check_delays
from tiers import tier

from pycomm import Communicator, _autoload

# --- a group is dropped while its worker wants the lock --------------------

LARGE = 1 << 20  # elements: the worker runs it

PENDING = {
    "all_reduce": lambda comm: comm.all_reduce(numpy.ones(LARGE, numpy.float32), async_op=True),
    "recv": lambda comm: comm.recv(numpy.ones(LARGE, numpy.float32), 1, async_op=True),
    "send": lambda comm: comm.send(numpy.ones(LARGE, numpy.float32), 1, async_op=True),
    "queue": lambda comm: [
        comm.all_reduce(numpy.ones(count, numpy.float32), async_op=True) for count in (LARGE, 3, LARGE)
    ],
}


@pytest.mark.parametrize("pending", PENDING)
def test_drop_with_an_operation_pending(pending):
    """The last reference to a group goes, by the garbage collector or `del`, while an operation on memory
    that Python owns is under way: to free it, the worker needs Python's lock.
    """

    def body(comm, link):
        own = Communicator(comm._store, comm.rank, 2, name="dropped", timeout=LIMIT)
        if comm.rank == 0:
            work = PENDING[pending](own)
            time.sleep(0.05)  # the worker is at it
            del work, own
        comm.barrier(timeout=5.0)
        return "here"

    with Group(2, body) as group:
        assert [group.get(rank) for rank in (1, 0)] == ["here"] * 2


# --- Ctrl-C --------------------


def interruptible(link):
    """What the interpreter of a script does about Ctrl-C; then says that it is about to wait."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    link.send("waits")


WAITS = {
    "small": lambda comm: comm.all_reduce(torch.ones(1)),
    "large": lambda comm: comm.all_reduce(torch.ones(1 << 21)),
    "ring": lambda comm: comm.all_reduce(torch.ones(1 << 21), algorithm="ring"),
    "recv": lambda comm: comm.recv(torch.ones(1), 2),
    "send": lambda comm: comm.send(torch.ones(1 << 21), 2),
    "any source": lambda comm: comm.recv(torch.ones(1), tag=7),
    "barrier": lambda comm: comm.barrier(),
    "async": lambda comm: comm.all_reduce(torch.ones(1 << 21), async_op=True).wait(),
    "async small": lambda comm: comm.all_reduce(torch.ones(1), async_op=True).wait(),
    "irecv": lambda comm: comm.recv(torch.ones(1 << 21), 2, async_op=True).wait(),
    "behind the worker": lambda comm: [
        comm.all_reduce(torch.ones(1 << 21), async_op=True),
        comm.all_reduce(torch.ones(1 << 21)),
    ],
}


@tier(quick=1 / 4)
@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c(wait):
    """KeyboardInterrupt in the rank that got the signal, the reason in the one that waited with it."""

    def body(comm, link):
        if comm.rank == 2:
            return time.sleep(LIMIT)
        interruptible(link)
        WAITS[wait](comm)

    delays = []
    for _ in range(3):
        with Group(3, body) as group:
            assert [group.get(rank) for rank in (0, 1)] == ["waits"] * 2
            group.asleep(0, 1)  # in the wait: before it, nobody would be told
            then = group.kill(0, signal.SIGINT)
            reports = [group.get(rank) for rank in (0, 1)]
            delays += group.delays(then, reports)
        assert reports[0]["kind"] == "KeyboardInterrupt", reports[0]
        assert reports[1]["kind"] == "AbortedError", reports[1]
        assert "rank 0 aborted the group: interrupted" in reports[1]["text"], reports[1]
    check_delays(delays)


TORCH_WAITS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(1 << 21)),
    "work": lambda: dist.all_reduce(torch.ones(1 << 21), async_op=True).wait(),
    "small work": lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
    "recv": lambda: dist.recv(torch.ones(1), 2),
    "irecv": lambda: dist.irecv(torch.ones(1), 2).wait(),
    "barrier": lambda: dist.barrier(),
}


@pytest.mark.parametrize("wait", TORCH_WAITS)
def test_ctrl_c_through_torch(wait):
    def body(comm, link):
        _autoload.register()
        store = dist.PrefixStore("torch", comm._store)
        dist.init_process_group("pycomm", store=store, rank=comm.rank, world_size=3)
        if comm.rank == 2:
            return time.sleep(LIMIT)
        interruptible(link)
        TORCH_WAITS[wait]()

    with Group(3, body) as group:
        assert [group.get(rank) for rank in (0, 1)] == ["waits"] * 2
        group.asleep(0, 1)
        then = group.kill(0, signal.SIGINT)
        reports = [group.get(rank) for rank in (0, 1)]
        delays = group.delays(then, reports)
    assert reports[0]["kind"] == "KeyboardInterrupt", reports[0]
    assert reports[1]["kind"] == "AbortedError" and "interrupted" in reports[1]["text"], reports[1]
    check_delays(delays)


def test_ctrl_c_while_a_group_is_made():
    def body(comm, link):
        if comm.rank == 1:
            return time.sleep(LIMIT)
        interruptible(link)
        Communicator(comm._store, 0, 2, name="never", timeout=LIMIT)

    with Group(2, body) as group:
        assert group.get(0) == "waits"
        group.asleep(0)
        then = group.kill(0, signal.SIGINT)
        report = group.get(0)
        assert report["kind"] == "KeyboardInterrupt", report
        assert group.delays(then, [report])[0] <= HARD_LIMIT


def test_after_ctrl_c():
    """The interrupted rank may go on: its group says why it is broken."""

    def body(comm, link):
        if comm.rank == 1:
            return time.sleep(LIMIT)
        interruptible(link)
        try:
            comm.barrier()
        except KeyboardInterrupt:
            return attempt(comm.barrier)[1], threading.active_count()

    with Group(2, body) as group:
        assert group.get(0) == "waits"
        group.asleep(0)
        group.kill(0, signal.SIGINT)
        report, _ = group.get(0)
        assert report["kind"] == "AbortedError" and "interrupted" in report["text"], report


def test_a_handler_that_raises_nothing():
    """It runs at once, and the call goes on. It may use other groups; the same one would wait for itself."""

    def body(comm, link):
        other = Communicator(comm._store, comm.rank, 2, name="other", timeout=LIMIT)
        if comm.rank == 1:
            link.recv()
            other.barrier()
            return comm.all_reduce(torch.ones(3)).tolist()
        seen = []

        def handler(number, frame):
            seen.append(attempt(comm.all_reduce, torch.ones(1))[1])
            seen.append(attempt(other.barrier)[1])
            link.send("handled")

        signal.signal(signal.SIGINT, handler)
        link.send("waits")
        return comm.all_reduce(torch.ones(3)).tolist(), seen

    with Group(2, body) as group:
        assert group.get(0) == "waits"
        group.asleep(0)
        group.kill(0, signal.SIGINT)
        group.send(1)
        assert group.get(0) == "handled"
        result, (same, other) = group.get(0)
        assert result == [2.0] * 3 and other is None, other
        assert same["kind"] == "RuntimeError" and "inside another" in same["text"], same
        assert group.get(1) == [2.0] * 3


@pytest.mark.parametrize("wait", ["small", "large", "recv", "async", "irecv"])
def test_a_handler_that_leaves(wait):
    """What a SIGTERM handler of a trainer does: it closes the group and ends the program."""

    def body(comm, link):
        if comm.rank > 0:
            link.recv()
            return comm.barrier()

        def handler(number, frame):
            comm.close()
            sys.exit(3)

        signal.signal(signal.SIGTERM, handler)
        link.send("waits")
        WAITS[wait](comm)

    with Group(3, body) as group:
        assert group.get(0) == "waits"
        group.asleep(0)
        then = group.kill(0, signal.SIGTERM)
        report = group.get(0)
        assert (report["kind"], report["text"]) == ("SystemExit", "3"), report
        assert group.delays(then, [report])[0] <= HARD_LIMIT
        group.send(1, 2)
        peers = [group.get(rank) for rank in (1, 2)]
        assert all(peer["kind"] in ("PeerError", "AbortedError") for peer in peers), peers


# --- the end of the interpreter --------------------

SCRIPT = """
    import os, sys, threading, time, torch, torch.distributed as dist, pycomm

    api, call, folder = sys.argv[1:]
    rank = 0 if os.fork() else 1
    store = dist.FileStore(folder + "/store", 2)
    if api == "torch":
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=2)
        comm = dist.group.WORLD._get_backend(torch.device("cpu")).communicator
        calls = {"all_reduce": lambda: dist.all_reduce(torch.ones(1)),
                 "work": lambda: dist.all_reduce(torch.ones(1 << 20), async_op=True).wait(),
                 "recv": lambda: dist.recv(torch.ones(1), 1)}
    else:
        comm = pycomm.Communicator(store, rank, 2)
        calls = {"all_reduce": lambda: comm.all_reduce(torch.ones(1)),
                 "work": lambda: comm.all_reduce(torch.ones(1 << 20), async_op=True).wait(),
                 "recv": lambda: comm.recv(torch.ones(1), 1)}
    if rank == 1:
        time.sleep(20)
        os._exit(0)

    class Late:
        def __init__(self):
            self.comm, self.sleep, self.write = comm, time.sleep, os.write

        def __del__(self):
            self.comm.abort("late")
            self.sleep(0.3)
            self.write(1, b"here")

    sys.modules["late"] = Late()  # goes when the interpreter, which is ending, takes its modules apart
    threading.Thread(target=calls[call], daemon=True).start()
    time.sleep(0.1)
"""


@tier(quick=1 / 6)
@pytest.mark.parametrize("call", ["all_reduce", "work", "recv"])
@pytest.mark.parametrize("api", ["native", "torch"])
def test_a_daemon_thread_at_the_end(tmp_path, api, call):
    """The call of a daemon thread ends while the interpreter does: it is let go quietly."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), api, call, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, start_new_session=True)
    try:
        status = process.wait(40)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # rank 1 too
    output, errors = process.communicate()
    assert status == 0 and output == b"here", (status, output, errors)
