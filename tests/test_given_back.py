"""An operation that ends with an error gives its buffers back: from then on no peer reads or writes them.

Between threads of one process a late reader would end the process, so it is not pytest's.
"""

import contextlib
import mmap
import os
import queue
import signal
import threading
import time

import pytest
import torch
from tiers import tier

from pycomm import CommError, PeerError
from pycomm.testing import run_ranks

LIMIT = 60
ROUNDS = 12
SIZE = 12 << 20  # bytes, a multiple of the three ranks; copied in some milliseconds


class Memory:
    """Bytes that are unmapped as soon as their owner wants."""

    def __init__(self, size, value=1):
        self.map = mmap.mmap(-1, size)
        self.tensor = torch.frombuffer(self.map, dtype=torch.uint8).fill_(value)

    def unmap(self):
        self.tensor = None
        self.map.close()


class Byte:
    """One byte of a rank's result, which another thread watches."""

    def __init__(self, memory, position):
        self.view = memoryview(memory.map)[position : position + 1]
        self.left = threading.Event()

    def wait_until_written(self):
        while not self.view[0]:
            pass
        self.view.release()  # its memory can be unmapped now
        self.left.set()


watched = queue.Queue()  # from rank 1 to rank 0, which are threads


def result_bytes(operation):
    return {"all_gather": 3 * SIZE, "reduce_scatter": SIZE // 3}.get(operation, SIZE)


def call(operation, algorithm, group, x, out):
    if operation == "broadcast":
        return group.broadcast(x, 0, algorithm=algorithm, async_op=True)
    out = out[: result_bytes(operation)]
    return getattr(group, operation)(x, out=out, algorithm=algorithm, async_op=True)


def given_back(comm, operation, algorithm, ends):
    """Rank 0 ends the operation when a byte of rank 1's result has been written, and all unmap what they
    brought. The bytes go from the result's first to its last: the moments come from the operation's own
    progress, so they meet it however fast the machine is. Where none did, as the thread that watches did not
    run in time, there are more rounds.
    """
    ended = 0
    for round in range(10 * ROUNDS):
        brings = operation != "broadcast" or comm.rank == 0
        group, x, out = comm.split(0), Memory(SIZE, int(brings)), Memory(3 * SIZE, 0)
        byte, closer = None, None
        if comm.rank == 1:
            position = result_bytes(operation) * (round % ROUNDS) // ROUNDS
            byte = Byte(x if operation == "broadcast" else out, position)
            watched.put(byte)
        if comm.rank == 0:
            end = group.close if ends == "close" else group.abort
            closer = threading.Thread(
                target=lambda byte, end: (byte.wait_until_written(), end()),
                args=(watched.get(timeout=LIMIT), end),
                daemon=True,
            )
            closer.start()
        comm.barrier()
        try:
            work = call(operation, algorithm, group, x.tensor, out.tensor)
            work.wait()
        except CommError:
            ended += 1
        work = None
        if byte:
            assert byte.left.wait(LIMIT)  # at once where the operation was ended
        x.unmap()
        out.unmap()
        if closer:
            closer.join(LIMIT)
        group.close()
        met = comm.all_reduce(torch.tensor([ended]))
        if round >= ROUNDS - 1 and int(met):
            break
    return ended


def in_a_process(comm, *args):
    return run_ranks(3, given_back, *args, mode="threads", timeout=LIMIT)


@tier(quick=1 / 12)
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


@tier(slow=1)
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
