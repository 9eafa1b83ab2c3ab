"""pycomm.testing: results and failures of ranks as threads, forked processes and new interpreters."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.testing import RankFailure, RankProcesses, processes, run_ranks
from pycomm.testing import run as running
from pycomm.testing.groups import GroupOptions, make_options
from pycomm.testing.processes import Outcome


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_run_ranks_returns_results_in_order_and_passes_arguments(mode):
    assert run_ranks(4, lambda comm, a, b: (comm.rank, comm.world_size, a + b), 1, 2, mode=mode) == [
        (r, 4, 3) for r in range(4)
    ]
    pids = run_ranks(3, lambda comm: os.getpid(), mode=mode)
    assert (set(pids) == {os.getpid()}) == (mode == "threads") and len(set(pids)) == (
        1 if mode == "threads" else 3
    )
    assert run_ranks(1, lambda comm: comm.name, mode=mode, name="mine") == ["mine"]


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_run_ranks_reports_the_rank_that_failed_first(mode):
    def body(comm):
        if comm.rank == 1:
            raise KeyError("the cause")
        comm.barrier()

    with pytest.raises(RankFailure, match="rank 1: KeyError: 'the cause'") as caught:
        run_ranks(3, body, mode=mode, timeout=20)
    assert isinstance(caught.value.__cause__, KeyError) and isinstance(caught.value.failures[1], KeyError)
    assert all(
        isinstance(error, (pycomm.AbortedError, pycomm.PeerError))
        for rank, error in caught.value.failures.items()
        if rank != 1
    )
    got = run_ranks(
        3,
        lambda comm: comm.rank if comm.rank != 2 else body(comm) or 1 / 0,
        mode=mode,
        timeout=20,
        fail=False,
    )
    assert got[:2] == [0, 1] and isinstance(got[2], Exception)


def test_run_ranks_ends_processes_when_the_time_is_up():
    def body(comm):
        if comm.rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        return os.getpid()

    def children():
        return {
            pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()
        }

    before, start = (
        children(),
        time.monotonic(),
    )  # multiprocessing may have started a process of its own in an earlier test
    got = run_ranks(2, body, mode="processes", timeout=0.3, operation_timeout=60, fail=False)
    assert time.monotonic() - start < 30
    assert isinstance(got[1], TimeoutError) and "rank 1 did not finish within 0.3 s" in str(got[1])
    assert children() <= before  # no child is left, not even a dead one


def test_run_ranks_reports_dead_processes():
    def body(comm):
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank == 1:
            os._exit(7)
        return lambda: "cannot be pickled"

    got = run_ranks(3, body, mode="processes", timeout=20, fail=False)
    assert (
        "killed by signal 9" in str(got[0])
        and "exited with status 7" in str(got[1])
        and "rank 2: cannot send" in str(got[2])
    )


@pytest.mark.parametrize("dead", [0, 2])
def test_the_cause_is_the_rank_that_has_died(dead):
    """Not what the others say of it, whichever comes first."""

    def body(comm):
        if comm.rank == dead:
            os._exit(3)
        comm.barrier()

    with pytest.raises(RankFailure, match=f"rank {dead}: ChildProcessError") as caught:
        run_ranks(3, body, mode="processes", timeout=20)
    assert str(caught.value.__cause__) == f"rank {dead} exited with status 3"


@pytest.mark.parametrize("kinds", [(pycomm.PeerError,), (pycomm.AbortedError, pycomm.PeerError)])
@pytest.mark.parametrize("place", range(3))
def test_the_cause_is_the_first_that_is_no_echo(kinds, place):
    failures = dict(enumerate(kind("echo") for kind in kinds))
    first = failures[0]
    assert running._failure(4, dict(failures)).__cause__ is first  # where all are echoes
    for cause in (KeyError("x"), pycomm.CommTimeoutError("late"), ChildProcessError("died")):
        later = [*failures.items(), (3, ValueError("later"))]
        later.insert(min(place, len(failures)), (2, cause))
        failure = running._failure(5, dict(later))
        assert failure.__cause__ is cause
        assert str(failure).startswith(f"{len(later)} of 5 ranks failed:\n  rank 0: {type(first).__name__}")


def test_failures_that_are_wanted_end_nobody(monkeypatch):
    """With fail=False the others go on, however long ago one has failed."""
    monkeypatch.setattr(running, "GRACE_S", 0.01)

    def body(comm):
        if comm.rank == 0:
            raise KeyError("soon")
        time.sleep(0.5)
        return "late"

    got = run_ranks(2, body, mode="processes", timeout=60, fail=False)
    assert isinstance(got[0], KeyError) and got[1] == "late"


def test_run_ranks_reports_threads_that_do_not_finish():
    release = threading.Event()
    try:
        with pytest.raises(RankFailure, match="rank 0 did not finish within 0.1 s"):
            options = {"timeout": 0.1, "operation_timeout": 60}
            run_ranks(2, lambda comm: comm.rank == 0 and release.wait(60), **options)
    finally:
        release.set()


def test_run_ranks_checks_its_mode():
    with pytest.raises(ValueError, match="mode='fibers'"):
        run_ranks(2, lambda comm: None, mode="fibers")


# --- process groups, new interpreters --------------------


def sum_of_ranks(rank):
    """At the top level: a new interpreter finds it by its name."""
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return dist.get_backend(), x.item(), dist.get_world_size()


@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_run_ranks_makes_a_default_group(backend):
    assert run_ranks(3, sum_of_ranks, mode="processes", backend=backend) == [(backend, 3.0, 3)] * 3
    assert not dist.is_initialized()


def test_run_ranks_starts_new_interpreters():
    assert run_ranks(2, sum_of_ranks, mode="spawn", backend="pycomm") == [("pycomm", 1.0, 2)] * 2


def test_operation_timeout_is_apart_from_that_of_all():
    done = threading.Event()

    def alone(comm):
        if comm.rank == 1:
            assert done.wait(60)
            return
        with pytest.raises(pycomm.CommTimeoutError, match=r"0\.2 s"):
            comm.recv(torch.ones(1), 1)
        done.set()

    run_ranks(2, alone, timeout=60.0, operation_timeout=0.2)


def limit_of_operations(rank):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    if dist.get_backend() == "gloo":
        return backend.options._timeout.total_seconds()
    return backend.communicator.timeout


@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_operation_timeout_is_that_of_a_default_group(backend):
    options = {"mode": "processes", "backend": backend, "timeout": 60.0}
    assert run_ranks(2, limit_of_operations, operation_timeout=7.5, **options) == [7.5] * 2
    assert run_ranks(1, limit_of_operations, **options) == [60.0]


@pytest.mark.parametrize("options", [{}, {"backend": "pycomm"}, {"backend": "gloo"}])
def test_ranks_may_come_later_than_an_operation_may_take(options, monkeypatch):
    """The group is made within the limit of all."""
    join = GroupOptions.join

    def late(self, store, rank, world_size):
        time.sleep(0.5 * rank)
        return join(self, store, rank, world_size)

    monkeypatch.setattr(GroupOptions, "join", late)
    options = {"mode": "processes", "operation_timeout": 0.2, **options}
    assert run_ranks(2, lambda group: group is not None, **options) == [True, True]


@pytest.mark.parametrize(
    "options, text",
    [
        ({"backend": "gloo"}, "one default group"),
        ({"backend": "gloo", "mode": "processes", "threads": 2}, "threads: for a Communicator"),
        ({"devices": ["cuda:0"]}, "one for each of 2 ranks"),
        ({"wire_delay_us": 5}, "wire_delay_us=5: for simulated hosts of threads"),
        ({"wire_delay_us": 5, "hosts": "01", "mode": "processes"}, "wire_delay_us=5: for simulated hosts"),
        (
            {"wire_delay_us": 5, "name": "a", "backend": "gloo", "mode": "processes"},
            "name, wire_delay_us: for a Communicator, not with backend='gloo'",
        ),
        ({"hosts": "012"}, "hosts='012' has 3 ranks, the group 2"),
    ],
)
def test_run_ranks_checks_its_options(options, text):
    with pytest.raises(ValueError, match=text):
        run_ranks(2, lambda group: None, **options)


@pytest.mark.parametrize(
    ("timeout", "operation_timeout", "hosts", "making", "operations"),
    [
        (60.0, None, None, 60.0, 60.0),
        (60.0, 2.0, None, 60.0, 2.0),
        (2.0, 60.0, None, 60.0, 60.0),
        (60.0, 2.0, "01", 2.0, 2.0),  # over hosts a rank that does not come is looked for
        (60.0, None, [0, 1], 60.0, 60.0),
    ],
)
def test_limits_of_a_group(timeout, operation_timeout, hosts, making, operations):
    made = make_options(2, timeout, in_threads=True, hosts=hosts, operation_timeout=operation_timeout)
    assert (made.making_timeout, made.operation_timeout) == (making, operations)
    assert made.hosts == (None if hosts is None else [0, 1])


def test_a_failure_ends_the_ranks_that_wait_for_it():
    """Gloo waits for a message of a rank that lives, until its own time limit."""

    def body(rank):
        if rank == 0:
            raise ValueError("cannot")
        time.sleep(600)

    with pytest.raises(RankFailure, match="rank 1: TimeoutError: .* of the first failure") as caught:
        run_ranks(2, body, mode="processes", backend="gloo", timeout=60)
    assert isinstance(caught.value.__cause__, ValueError)


def test_ranks_of_gloo_begin_together(tmp_path, monkeypatch):
    """Else one could end while a peer is still connecting, which Gloo takes for a crash."""
    made = dist.init_process_group

    def late(*args, rank, **kwargs):
        made(*args, rank=rank, **kwargs)
        if rank == 1:
            time.sleep(0.3)
            (tmp_path / "made").touch()

    monkeypatch.setattr(dist, "init_process_group", late)
    there = run_ranks(2, lambda rank: (tmp_path / "made").exists(), mode="processes", backend="gloo")
    assert there == [True, True]


def deep_in_a_rank(comm):
    if comm.rank == 1:
        raise KeyError("deep")
    return comm.rank


def test_an_error_of_a_process_has_its_traceback_and_a_thread_its_own():
    for mode in ("threads", "processes"):
        got = run_ranks(2, deep_in_a_rank, mode=mode, fail=False)
        assert got[0] == 0 and isinstance(got[1], KeyError) and got[1].args == ("deep",)
        if mode == "processes":
            assert hasattr(got[1], "__notes__") is (sys.version_info >= (3, 11))
            assert all(
                "in deep_in_a_rank" in note for note in getattr(got[1], "__notes__", ["in deep_in_a_rank"])
            )
        else:
            assert got[1].__traceback__ is not None


@pytest.mark.parametrize(
    ("devices", "in_threads", "there", "expected"),
    [
        (["cuda:1", "cuda:0"], True, True, ["device cuda:0", "a stream"]),
        (["cuda:1", "cuda:0"], False, True, ["device cuda:0", "a stream"]),
        (None, True, True, ["a stream"]),  # threads of one device must not wait for each other
        (None, True, False, []),
        (None, False, True, []),  # making the first stream would begin with CUDA
    ],
)
def test_each_rank_has_its_device_and_stream(monkeypatch, devices, in_threads, there, expected):
    said = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: said.append(f"device {device}"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "a stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda of: said.append(of) or contextlib.nullcontext())
    made = make_options(2, 60.0, in_threads=in_threads, devices=devices)
    with made._on_device(1):
        assert said == expected


class CannotBeRead(Exception):
    def __init__(self, first, second):
        super().__init__(first)


def fail_in_threads(comm):
    run_ranks(2, raise_on_rank_1)


def raise_on_rank_1(comm):
    if comm.rank == 1:
        raise ValueError("of rank 1")


def test_a_failure_of_ranks_within_a_rank_is_told():
    with pytest.raises(RankFailure) as caught:
        run_ranks(1, fail_in_threads, mode="processes")
    inner = caught.value.failures[0]
    assert isinstance(inner, RankFailure) and "of rank 1" in str(inner) and set(inner.failures) == {1}


def test_an_exception_that_cannot_be_read_back_is_told():
    def body(comm):
        raise CannotBeRead("the text", 2)

    (error,) = run_ranks(1, body, mode="processes", fail=False)
    assert isinstance(error, RuntimeError) and "the text" in str(error)


# --- RankProcesses --------------------


def echo(rank, link, suffix):
    while (text := link.recv()) != "end":
        link.send(f"{rank}{text}{suffix}")
    return rank


def test_processes_are_told_what_to_do_next():
    with RankProcesses([2, 5], echo, "!", limit=60) as ranks:
        for text in ("a", "b"):
            for rank in (2, 5):
                ranks.links[rank].send(text)
            assert [ranks.recv(rank, 20) for rank in (2, 5)] == [f"2{text}!", f"5{text}!"]
        ranks.kill(5)
        with pytest.raises(ChildProcessError, match="rank 5 was killed by signal 9"):
            ranks.recv(5, 20)
        with pytest.raises(TimeoutError, match="rank 2 said nothing for 0.01 s"):
            ranks.recv(2, 0.01)
        ranks.links[2].send("end")
        found = ranks.outcomes(20)
        assert found[2] == (True, 2) and isinstance(found[5].value, ChildProcessError)
        assert ranks.join(20) == []


def test_a_death_is_seen_though_a_process_of_the_rank_lives_on():
    """It has inherited the rank's end of the pipe."""

    def body(rank, link):
        if (child := os.fork()) == 0:
            time.sleep(600)
        link.send(child)
        os.kill(os.getpid(), signal.SIGKILL)

    with RankProcesses(1, body) as ranks:
        child = ranks.recv(0, 20)
        try:
            assert "killed by signal 9" in str(ranks.outcomes(20)[0].value)
        finally:
            os.kill(child, signal.SIGKILL)


class _Told(RankProcesses):
    """Ranks that end at these seconds of a clock, or never; without processes."""

    def __init__(self, ends):
        self.ends, self.links, self.now, self.killed = ends, dict.fromkeys(ends), 0.0, []

    def _outcome(self, rank):
        end, ok = self.ends[rank]
        return Outcome(ok, rank) if self.now >= end else None

    def kill(self, rank):
        self.killed.append((rank, self.now))


@pytest.mark.parametrize(
    ("ends", "timeout", "grace", "killed"),
    [
        ({0: (1, True), 1: (4, True)}, 10, 2, []),
        ({0: (1, False), 1: (2, False), 2: (2.9, False), 3: (4, True)}, 10, 2, [3]),  # of the first failure
        ({0: (1, False), 1: (8, True)}, 10, None, []),
        ({0: (1, True), 1: (99, True)}, 10, 2, [1]),
        ({0: (14, False), 1: (99, True)}, 10, 20, [1]),  # no later than without a failure
        ({0: (99, True), 1: (99, True)}, 10, None, [0, 1]),
    ],
)
def test_who_is_waited_for_and_how_long(monkeypatch, ends, timeout, grace, killed):
    ranks = _Told(ends)

    def wait(links, seconds):
        ranks.now += max(seconds, 0.01)

    monkeypatch.setattr(processes.multiprocessing.connection, "wait", wait)
    monkeypatch.setattr(processes.time, "monotonic", lambda: ranks.now)
    found = ranks.outcomes(timeout, grace)
    failed = [end + grace for end, ok in ends.values() if not ok and grace is not None]
    last = min([15.0, *failed])
    assert [rank for rank, _ in ranks.killed] == killed and set(found) == set(ends)
    for rank, when in ranks.killed:
        assert last <= when < last + 0.3 and isinstance(found[rank].value, TimeoutError)
        why = f"within {grace} s of the first failure" if last < 15 else f"within {timeout} s"
        assert str(found[rank].value) == f"rank {rank} did not finish {why}"
    assert all(found[rank] == (ends[rank][1], rank) for rank in ends if rank not in killed)


def test_ranks_end_themselves():
    with RankProcesses(1, lambda rank, link: time.sleep(600), limit=0.5) as ranks:
        assert ranks.join(30) == [] and ranks.processes[0].exitcode == -signal.SIGALRM


def test_threads_have_ended_for_the_system_too():
    """Else a process that is forked next inherits locks that their last steps hold (MKL's, once)."""
    libc, key = ctypes.CDLL(None), ctypes.c_uint()
    assert libc.pthread_key_create(ctypes.byref(key), ctypes.cast(libc.usleep, ctypes.c_void_p)) == 0

    def body(comm):
        libc.pthread_setspecific(key, ctypes.c_void_p(100_000))  # us: usleep of it is the thread's last step
        return threading.get_native_id()

    for thread in run_ranks(2, body):
        assert not os.path.exists(f"/proc/self/task/{thread}")


def test_threads_run_their_own_backward_passes():
    """torch runs those of all threads of a process in one thread per GPU, where ranks would wait for each
    other.
    """
    import torch

    before = torch.autograd.is_multithreading_enabled()
    assert run_ranks(2, lambda comm: torch.autograd.is_multithreading_enabled()) == [False, False]
    assert torch.autograd.is_multithreading_enabled() is before


def test_what_cuda_must_know_is_said_before_it_begins(monkeypatch):
    """Asking whether there is a GPU begins with it."""
    import torch

    from pycomm import env

    told = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: told.append("asked") or False)
    monkeypatch.setattr(env, "allow_thread_ranks", lambda: told.append("told"))
    run_ranks(2, lambda comm: comm.rank)
    assert told[0] == "told"
