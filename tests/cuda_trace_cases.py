"""Times on a device in a trace, in tests/test_cuda_python.py: each function runs in a process of its own, on
CUDA tensors of tests/fake_cuda.py, whose events keep the host's time.
"""

import os
import signal
import tempfile
import threading
import time
from types import SimpleNamespace

import cuda_native_cases as native
import fake_cuda
import numpy as np
import torch
from torch_ranks import meeting

import pycomm
from pycomm import trace
from pycomm.fused.context import Context
from pycomm.testing import run_ranks
from pycomm.trace import devices
from pycomm.trace.device_clock import LAUNCH
from pycomm.trace.files import DEVICE, read_files
from pycomm.trace.joined import load

ROUNDING = 1000  # nanoseconds: the driver tells times as floats of milliseconds


def held_up(comm, device, folder):
    """Operations of two groups and a launch, behind a stream that is held up."""
    x, y = torch.ones(1000, device="cuda"), torch.empty(1000, device="cuda")
    second = pycomm.Communicator(comm._store, comm.rank, comm.world_size, name="second", timeout=20.0)
    for group in (comm, second):
        group.all_reduce(x)  # sets up
    context = SimpleNamespace(communicator=comm._comm, device=x.device, shares_device=True, launches=1)
    fake_cuda.synchronize()
    with comm.trace(folder):
        comm.all_reduce(x)
        fake_cuda.synchronize()
        gate = fake_cuda.gate()
        comm.all_reduce(x)
        second.all_reduce(x)
        with Context.place(context):
            y.copy_(x)  # in stream order, where a product would be computed by torch on the CPU
        work = comm.all_gather(x, async_op=True)
        issued = time.monotonic_ns()
        time.sleep(0.02)
        opened = time.monotonic_ns()
        gate.open()
        work.wait()
        fake_cuda.synchronize()
        ended = time.monotonic_ns()
        comm.barrier()  # a trace of threads ends with its last
    second.close()
    return issued, opened, ended


def check_held_up(folder, moments):
    """By the clock of the trace, which begins a nanosecond before its first operation."""
    found = load(folder)
    assert not [note for note in found.notes if "not known" in note], found.notes
    assert any(note.startswith("Times on devices: known to ") for note in found.notes), found.notes
    for row, (issued, opened, ended) in zip(found.rows, moments, strict=True):
        mine = np.sort(row.operations, order="issued")
        start = _start(folder)
        assert (mine["device_begin"] >= mine["issued"]).all()
        assert (mine["device_begin"] <= mine["device_end"]).all()
        behind = mine[1:5]
        assert (behind["ended"] + start <= issued).all(), "the host runs ahead"
        assert (behind["device_begin"] + start + ROUNDING >= opened).all()
        assert (behind["device_end"] + start <= ended + ROUNDING + found.device_error_ns).all()
        line = mine[[found.groups[group].name == "default" for group in mine["group"]]]
        assert (line["device_end"][:-1] <= line["device_begin"][1:] + ROUNDING).all(), "one after the other"
        assert (mine["kind"] == LAUNCH).sum() == 1
    named = {(line.axis, line.operation): line.calls for line in devices.table(found)}
    assert named["default", "all_reduce"] == 2 and named["second", "all_reduce"] == 1, named
    assert named["default", "fused product"] == 1 and named["default", "all_gather"] == 1, named


def _start(folder):
    return min(int(file.operations["issued"].min()) for file in read_files(folder)) - 1


def held_up_in(kind, world_size):
    with tempfile.TemporaryDirectory() as folder:
        moments = getattr(native, kind)(world_size, held_up, folder)
        check_held_up(folder, moments)


def begun_and_ended_beside(comm, device, folder):
    """Traces begin and end on another thread while two issue operations in streams of their own; then the
    group is aborted under one.
    """
    x, enough = torch.ones(100, device="cuda"), threading.Event()
    comm.all_reduce(x.clone())

    def traces():
        while not enough.is_set():
            with comm.trace(folder):
                time.sleep(0.003)

    toggling = threading.Thread(target=traces)
    toggling.start()
    for _ in range(60):
        y = x.clone()
        work = comm.all_reduce(y, async_op=True)
        comm.all_reduce(x.clone())
        work.wait()
        native.equal(y.cpu(), torch.full((100,), float(comm.world_size)))
    enough.set()
    toggling.join()
    with comm.trace(folder):
        if comm.rank == 0:
            comm.all_reduce(x.clone(), async_op=True)
            comm.abort("enough")
        fake_cuda.wait_until(lambda: comm.describe()["broken"])
        with native.raises(pycomm.AbortedError, "enough"):
            comm.all_reduce(x)


def beside_in(kind):
    with tempfile.TemporaryDirectory() as folder:
        getattr(native, kind)(2, begun_and_ended_beside, folder)


def timed(folder):
    """So many operations of this process have times on the device."""
    (mine,) = [file for file in read_files(folder) if file.pid == os.getpid()]
    return int((mine.operations["device_begin"] > 0).sum())


def killed():
    """The trace of the living has their times, and that of the dead what it had until then."""
    together = meeting(2)

    def rank(comm):
        with fake_cuda.stream():
            trace.begin(folder)
            for _ in range(3):
                comm.all_reduce(torch.ones(8, device="cuda"))
            comm.barrier()
            fake_cuda.wait_until(lambda: timed(folder) == 4)
            together.wait()
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with native.raises(pycomm.PeerError, "rank 1 died"):
                comm.all_reduce(torch.ones(8, device="cuda"), async_op=True).wait(10.0)
            trace.end()
        comm.close()
        fake_cuda.check_nothing_left()
        return "told"

    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(2, rank, mode="processes", timeout=20.0, fail=False)
        assert results[0] == "told" and isinstance(results[1], ChildProcessError), results
        found = load(folder)
        for row in found.rows:
            mine = np.sort(row.operations[row.operations["type"] == DEVICE], order="issued")
            assert len(mine) >= 4 and (mine["device_begin"][:4] > 0).all(), (mine, found.notes)
