"""Death and delay of ranks: killed, exited, closed, stopped, late. The others learn it soon and by name. See
forked.py for the means.
"""

import functools
import os
import random
import signal
import tempfile
import threading
import time

import pytest
import torch
from forked import HARD_LIMIT, LIMIT, Group, attempt, check_delays, check_named, failure
from tiers import tier

import pycomm
from pycomm import Communicator

MiB = 1 << 20

# --- what the ranks are doing, again and again, when one of them dies: make(comm) returns one step of it ----


def collective(operation, nbytes, **options):
    def make(comm):
        x = torch.ones(nbytes // 4)
        if (
            operation == "all_gather"
        ):  # the output is there before: fresh memory would cost more than the operation
            options["out"] = torch.zeros(comm.world_size * x.numel())
        return lambda: getattr(comm, operation)(x, **options)

    return make


def small(comm):
    def step():
        comm.all_reduce(torch.ones(2))
        comm.barrier()

    return step


def messages(count):
    """Around the ring of ranks: every rank sends to the next one and receives from the one before."""

    def make(comm):
        x, y, n = torch.ones(count), torch.zeros(count), comm.world_size

        def step():
            works = [
                comm.send(x, (comm.rank + 1) % n, async_op=True),
                comm.recv(y, (comm.rank - 1) % n, async_op=True),
            ]
            for work in works:
                work.wait()

        return step

    return make


def asynchronous(comm):
    xs = [torch.ones(MiB) for _ in range(4)]

    def step():
        works = [comm.all_reduce(x, async_op=True) for x in [*xs, torch.ones(1)]]
        time.sleep(0.001)  # the worker is at it
        for work in works:
            work.wait()

    return step


def small_asynchronous(comm):
    def step():
        for work in [comm.all_reduce(torch.ones(8), async_op=True) for _ in range(5)]:
            work.wait()

    return step


PHASES = {
    "small": small,
    "one_shot": collective("all_reduce", 4 * MiB, algorithm="one_shot"),
    "two_shot": collective("all_reduce", 16 * MiB, algorithm="two_shot"),
    "ring": collective("all_reduce", 16 * MiB, algorithm="ring"),
    "direct": collective("all_reduce", 16 * MiB, algorithm="direct"),
    "all_gather staged": collective("all_gather", 2 * MiB, algorithm="staged"),
    "broadcast direct": collective("broadcast", 16 * MiB, algorithm="direct"),
    "p2p in_slot": messages(50),
    "p2p poured at once": messages(MiB // 16),
    "p2p streamed": messages(3 * MiB // 4),
    "p2p by the kernel": messages(6 * MiB // 4),  # where it allows that
    "async": asynchronous,
    "async small": small_asynchronous,
}


OPTIONS = {"p2p by the kernel": {"staging_bytes": 1 << 17}}  # a small ring


def again_and_again(phase, comm, link):
    step = PHASES[phase](comm)
    step()
    link.send("started")
    while True:
        step()


def killed(phase, world_size):
    """Delays of all survivors of one SIGKILL at a random moment."""
    dead = random.randrange(world_size)
    body = functools.partial(again_and_again, phase)
    with Group(world_size, body, **OPTIONS.get(phase, {})) as group:
        group.expect("started")
        time.sleep(random.uniform(0.0, 0.05))
        then = group.kill(dead)
        reports = [group.get(rank) for rank in group.others(dead)]
        delays = group.delays(then, reports, dead)
    for report in reports:
        check_named(report, dead)
    return delays


@tier(quick=1 / 15)
@pytest.mark.parametrize("phase", PHASES)
def test_kill(phase):
    """2, 3 and 7 survivors; the first ones twice."""
    check_delays([delay for world_size in (3, 3, 4, 8) for delay in killed(phase, world_size)])


def ended_from_within(phase, end):
    """As killed(), but the victim ends itself, by a thread, in the middle of its operation."""
    dead = random.randrange(3)

    def body(comm, link):
        def at_once():
            link.recv()
            time.sleep(random.uniform(0.0, 0.05))
            link.send(time.monotonic())
            end(comm)
            link.send("ended")

        if comm.rank == dead:
            threading.Thread(target=at_once, daemon=True).start()
        again_and_again(phase, comm, link)

    with Group(3, body, **OPTIONS.get(phase, {})) as group:
        group.expect("started")
        group.send(dead)
        then = group.moment(group.get(dead))
        reports = [group.get(rank) for rank in group.others(dead)]
        delays = group.delays(then, reports, dead)
        own = (
            [group.get(dead), group.get(dead)] if end is close else None
        )  # the call's error, and that close() has returned
    for report in reports:
        check_named(report, dead)
    return delays, own


def close(comm):
    comm.close()


@tier(quick=1 / 4)
@pytest.mark.parametrize("phase", PHASES)
def test_exit(phase):
    check_delays([delay for _ in range(2) for delay in ended_from_within(phase, lambda comm: os._exit(0))[0]])


@pytest.mark.parametrize("phase", PHASES)
def test_close_under_way(phase):
    """close() by another thread, in the middle of an operation: the own call ends, and the peers learn who
    left.
    """
    delays, own = ended_from_within(phase, close)
    error = next(message for message in own if message != "ended")
    assert "ended" in own and error["kind"] == "AbortedError" and "closed" in error["text"], own
    check_delays(delays)


@pytest.mark.parametrize("how", ["kill", "exit", "close"])
def test_before_the_operation(how):
    """The victim is gone before the others begin."""

    def body(comm, link):
        link.recv()
        if comm.rank == 1:
            if how == "exit":
                os._exit(0)
            elif how == "close":
                comm.close()
                link.send("closed")
            signal.pause()
        return (
            attempt(comm.all_reduce, torch.ones(2)),
            attempt(comm.all_gather, torch.ones(MiB)),
            attempt(comm.send, torch.ones(2), 1),
        )

    with Group(4, body) as group:
        if how == "kill":
            group.kill(1)
        else:
            group.send(1)
        if how == "close":
            assert group.get(1) == "closed"
        else:
            group.join(1)
        group.send(*group.others(1))
        outcomes = [group.get(rank) for rank in group.others(1)]
    check_delays([outcome[0][0].own for outcome in outcomes])
    for (_, first), *later in outcomes:
        check_named(first, 1)
        for seconds, report in later:  # a broken group says so at once
            check_named(report, 1)
            assert seconds.own < 0.1 and "broken" in report["text"], report


def test_while_others_wait():
    """The victim never calls: the others sleep in a small operation, a large one and a recv when it dies."""
    calls = [
        lambda c: c.all_reduce(torch.ones(1)),
        lambda c: c.all_reduce(torch.ones(4 * MiB)),
        lambda c: c.recv(torch.ones(1), 3),
    ]

    def body(comm, link):
        return calls[comm.rank](comm) if comm.rank < 3 else time.sleep(LIMIT)

    delays = []
    for _ in range(3):
        with Group(4, body) as group:
            time.sleep(0.15)
            then = group.kill(3)
            reports = [group.get(rank) for rank in range(3)]
            delays += group.delays(then, reports, 3)
        for report in reports:
            check_named(report, 3)
    check_delays(delays)


def test_death_of_a_large_process():
    """The kernel frees the memory of a process first, which takes a while, and drops its locks then."""

    def body(comm, link):
        ballast = torch.ones(400 * MiB) if comm.rank == 2 else None  # 1.6 GB
        comm.barrier()
        link.send("started")
        comm.barrier() if comm.rank < 2 else time.sleep(LIMIT)
        return ballast

    with Group(3, body) as group:
        group.expect("started")
        time.sleep(0.05)
        then = group.kill(2)
        reports = [group.get(rank) for rank in range(2)]
        delays = group.delays(then, reports)
    for report in reports:
        check_named(report, 2)
    check_delays(delays)


def test_recv_from_any_source():
    def body(comm, link):
        return comm.recv(torch.ones(1)) if comm.rank != 2 else time.sleep(LIMIT)

    with Group(3, body) as group:
        time.sleep(0.1)
        then = group.kill(2)
        reports = [group.get(rank) for rank in range(2)]
        delays = group.delays(then, reports, 2)
    for report in reports:
        check_named(report, 2)
    check_delays(delays)


@pytest.mark.parametrize("nbytes", [1024, 4 * MiB], ids=["small", "large"])
@pytest.mark.parametrize("operation", ["all_reduce", "recv", "send"])
def test_polled(operation, nbytes):
    """Somebody who only asks done() is told as well, by wait() after done() has become true."""

    def body(comm, link):
        if comm.rank == 1:
            time.sleep(LIMIT)
        x = torch.ones(nbytes // 4)
        work = (
            comm.all_reduce(x, async_op=True)
            if operation == "all_reduce"
            else getattr(comm, operation)(x, 1, async_op=True)
        )
        end = time.monotonic() + 3.0
        while not work.done() and time.monotonic() < end:
            time.sleep(0.001)
        assert work.done(), "done() is still false 3 s after the peer's death"
        work.wait()

    with Group(2, body) as group:
        time.sleep(0.1)
        then = group.kill(1)
        report = group.get(0)
        (delay,) = group.delays(then, [report], 1)
    check_named(report, 1)
    assert delay < HARD_LIMIT


def test_two_groups():
    """Two groups of the same processes in two threads; the victim has another number in each, and each group
    names its own.
    """

    def body(comm, link):
        other = comm.split(0, key=-comm.rank)
        outcomes = {}

        def loop(group, count):
            try:
                while True:
                    group.all_reduce(torch.ones(count))
            except pycomm.CommError as error:
                outcomes[group.name] = failure(error)

        threads = [threading.Thread(target=loop, args=args) for args in ((comm, 2), (other, MiB))]
        for thread in threads:
            thread.start()
        link.send("started")
        for thread in threads:
            thread.join(LIMIT)
        return outcomes[comm.name], outcomes[other.name]

    with Group(4, body) as group:
        group.expect("started")
        time.sleep(0.05)
        then = group.kill(3)
        pairs = [group.get(rank) for rank in range(3)]
        delays = group.delays(then, [report for pair in pairs for report in pair], 3)
    for first, second in pairs:
        check_named(first, 3)
        check_named(second, 0)
    check_delays(delays)


def test_child_of_the_dead_lives_on():
    """A worker forked by the victim (DataLoader) inherits all its descriptors and outlives it."""

    def body(comm, link):
        if comm.rank != 1:
            return again_and_again("small", comm, link)
        worker = os.fork()
        if worker == 0:
            signal.alarm(60)
            signal.pause()
        link.send(worker)
        return again_and_again("small", comm, link)

    with Group(3, body) as group:
        worker = group.get(1)
        try:
            group.expect("started")
            then = group.kill(1)
            reports = [group.get(rank) for rank in (0, 2)]
            delays = group.delays(then, reports, 1)
            os.kill(worker, 0)  # still there
        finally:
            os.kill(worker, signal.SIGKILL)
    for report in reports:
        check_named(report, 1)
    check_delays(delays)


# --- deadlines --------------------

TIMEOUT = 0.8  # seconds


def check_timeout(seconds, report, missing, op, timeout=TIMEOUT):
    assert report["kind"] == "CommTimeoutError" and report["op"] == op, report
    assert timeout <= seconds.wall + 0.05 and seconds.own <= timeout + 1.0, (seconds, report)
    names = "rank " if len(missing) == 1 else "ranks "
    assert (
        f"{names}{', '.join(map(str, missing))} did not arrive" in report["text"] and op in report["text"]
    ), report
    assert report["peer"] == missing[0], report


@pytest.mark.parametrize("stopped", [(2,), (1, 3)], ids=str)
@pytest.mark.parametrize("nbytes", [8, 4 * MiB], ids=["small", "large"])
def test_stopped(stopped, nbytes):
    """SIGSTOP: alive, so only the deadline can tell. Woken later, the ranks get an error at once, and so does
    every later operation.
    """

    def body(comm, link):
        link.recv()
        results = [attempt(comm.all_reduce, torch.ones(nbytes // 4)), attempt(comm.barrier)]
        link.send(results)

    with Group(4, body, operation_timeout=TIMEOUT) as group:
        for rank in stopped:
            group.kill(rank, signal.SIGSTOP)
        group.send(*range(4))
        for rank in group.others(*stopped):
            first, second = group.get(rank)
            check_timeout(*first, stopped, "all_reduce")
            assert (
                second[0].own < 0.1
                and second[1]["kind"] == "CommTimeoutError"
                and "broken" in second[1]["text"]
            ), second
        for rank in stopped:
            group.kill(rank, signal.SIGCONT)
        for rank in stopped:
            (seconds, late), second = group.get(rank)
            assert (
                late["kind"] == second[1]["kind"] == "CommTimeoutError"
                and max(seconds.own, second[0].own) < HARD_LIMIT
            ), (late, second)


@pytest.mark.parametrize("phase", ["two_shot", "ring", "p2p streamed", "p2p by the kernel"])
def test_stopped_under_way(phase):
    """Everybody but the stopped rank waits for somebody; only the stopped one is to blame."""

    def body(comm, link):
        try:
            again_and_again(phase, comm, link)
        except pycomm.CommError as error:
            return failure(error)

    with Group(4, body, operation_timeout=TIMEOUT, **OPTIONS.get(phase, {})) as group:
        group.expect("started")
        time.sleep(random.uniform(0.0, 0.05))
        then = group.kill(2, signal.SIGSTOP)
        reports = [group.get(rank) for rank in (0, 1, 3)]
        delays = group.delays(then, reports)
    for report, delay in zip(reports, delays, strict=True):
        assert report["kind"] == "CommTimeoutError" and delay <= TIMEOUT + 1.0, report
        assert report["peer"] == 2 and "rank 2 did not arrive" in report["text"], report


def test_never_arrives():
    """Per-call timeouts, of a collective and of a work that the worker runs; every missing rank and the
    operation are named.
    """

    def body(comm, link):
        if comm.rank in (1, 2):
            link.recv()
            return attempt(comm.all_reduce, torch.ones(4 * MiB))
        work = comm.all_reduce(torch.ones(4 * MiB), async_op=True)
        time.sleep(0.1)
        return attempt(work.wait, timeout=TIMEOUT)

    with Group(4, body) as group:
        for rank in (0, 3):
            check_timeout(*group.get(rank), (1, 2), "all_reduce")
        group.send(1, 2)
        for rank in (1, 2):  # late: an error, and soon
            seconds, late = group.get(rank)
            assert late["kind"] == "CommTimeoutError" and seconds.own < HARD_LIMIT, late


def test_message_never_comes():
    def body(comm, link):
        if comm.rank:
            time.sleep(LIMIT)
        seconds, report = attempt(comm.recv, torch.ones(4), 1, timeout=TIMEOUT)
        return seconds, report

    with Group(2, body) as group:
        check_timeout(*group.get(0), (1,), "recv")


def test_creation_times_out():
    """A rank that never comes to the rendezvous is named by those who did."""
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(os.path.join(folder, "store"), 3)
        seconds, report = attempt(Communicator, store, 0, 3, timeout=TIMEOUT)
    assert report["kind"] == "CommTimeoutError" and "1, 2" in report["text"], report
    assert TIMEOUT <= seconds.wall + 0.05 and seconds.own < TIMEOUT + 1.0
