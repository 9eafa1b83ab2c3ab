"""An operation that ends with an error gives its buffers back: from then on no peer reads or writes them.

Between threads of one process a late reader would end the process, so it is not pytest's.
"""

import contextlib
import mmap
import os
import signal
import threading
import time

import pytest
import torch

from pycomm import CommError, PeerError
from pycomm.testing import run_ranks

LIMIT = 60
ROUNDS = 12
SIZE = 12 << 20  # bytes, a multiple of the three ranks; copied in some milliseconds


class Memory:
    """Bytes that are unmapped as soon as their owner wants."""

    def __init__(self, size):
        self.map = mmap.mmap(-1, size)
        self.tensor = torch.frombuffer(self.map, dtype=torch.uint8).fill_(1)

    def unmap(self):
        self.tensor = None
        self.map.close()


def call(operation, algorithm, group, x, out):
    if operation == "broadcast":
        return group.broadcast(x, 0, algorithm=algorithm, async_op=True)
    size = {"all_gather": 3 * SIZE, "reduce_scatter": SIZE // 3}.get(operation, SIZE)
    return getattr(group, operation)(x, out=out[:size], algorithm=algorithm, async_op=True)


def given_back(comm, operation, algorithm, ends):
    """Rank 0 ends the operation at some moment of it, and all unmap what they brought. The moments go from
    the beginning to the end of one that was left alone.
    """
    ended, duration = 0, 0.0
    for round in range(ROUNDS):
        group, x, out = comm.split(0), Memory(SIZE), Memory(3 * SIZE)
        if round == 0:
            start = time.perf_counter()
            call(operation, algorithm, group, x.tensor, out.tensor).wait()
            duration = time.perf_counter() - start
        delay = duration * round / ROUNDS
        comm.barrier()
        timer = threading.Timer(delay, group.close if ends == "close" else group.abort)
        if comm.rank == 0:
            timer.start()
        try:
            work = call(operation, algorithm, group, x.tensor, out.tensor)
            work.wait()
        except CommError:
            ended += 1
        work = None
        x.unmap()
        out.unmap()
        if comm.rank == 0:
            timer.join()
        group.close()
        comm.barrier()
    return ended


def in_a_process(comm, *args):
    return run_ranks(3, given_back, *args, mode="threads", timeout=LIMIT)


@pytest.mark.parametrize("ends", ["close", "abort"])
@pytest.mark.parametrize(
    "operation, algorithm",
    [
        ("all_gather", "direct"),
        ("all_reduce", "direct"),
        ("broadcast", "direct"),
        ("reduce_scatter", "direct"),
        ("all_gather", None),
    ],
)
def test_no_peer_reads_or_writes_what_was_given_back(operation, algorithm, ends):
    (ended,) = run_ranks(1, in_a_process, operation, algorithm, ends, mode="processes", timeout=LIMIT)
    assert sum(ended) > 0, "no operation was ended in its middle"


def stopped_reader(comm, delay):
    """Rank 1 is stopped in a broadcast out of registered memory, goes on when rank 0 has given up and has
    filled the memory anew, and says what it got.
    """
    x = comm.empty(96 << 20, torch.uint8)
    x.fill_(1 - comm.rank)
    reader = int(comm.broadcast(torch.tensor([os.getpid()]), 1))
    comm.barrier()
    if comm.rank == 0:
        timer = threading.Timer(delay, os.kill, (reader, signal.SIGSTOP))
        timer.start()
    try:
        comm.broadcast(x, 0, algorithm="direct", timeout=0.3 if comm.rank == 0 else None)
        outcome = "done"
    except CommError:
        outcome = "error"
    if comm.rank == 0:
        timer.join()
        x.fill_(2)
        os.kill(reader, signal.SIGCONT)
    return outcome, bool((x == 1).all())


def test_what_a_stopped_rank_reads_late_is_no_result():
    outcomes = []
    for delay in (0.002, 0.004, 0.006, 0.008, 0.01, 0.02):
        _, (outcome, right) = run_ranks(2, stopped_reader, delay, mode="processes", timeout=LIMIT)
        assert right or outcome == "error", f"stopped after {delay} s"
        outcomes.append(outcome)
    assert "error" in outcomes, "no copy was met"


def freed_by_its_sender(comm, delay):
    if comm.rank == 0:
        x = Memory(48 << 20)
        work = comm.send(x.tensor, 1, async_op=True)
        comm.send(torch.ones(1), 1, tag=1)
        time.sleep(delay)
        comm.close()
        with contextlib.suppress(CommError):
            work.wait()
        x.unmap()
        return True
    x = torch.zeros(48 << 20, dtype=torch.uint8)
    comm.recv(torch.ones(1), 0, tag=1)
    try:
        comm.recv(x, 0)
    except CommError as error:
        return type(error), str(error)
    return bool((x == 1).all())


def test_a_sender_that_leaves_and_frees_its_message_is_named():
    """In the middle of the receiver's copy by the kernel (a small ring), which finds no memory there."""
    for delay in (0.001, 0.003, 0.006, 0.009, 0.012, 0.015):
        options = {"mode": "processes", "timeout": LIMIT, "staging_bytes": 1 << 17}
        _, got = run_ranks(2, freed_by_its_sender, delay, **options)
        assert got is True or got[0] is PeerError, got
