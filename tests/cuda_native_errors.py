"""Errors of the native API in tests/test_cuda_python.py: each function runs in a process of its own, on CUDA
tensors of tests/fake_cuda.py.
"""

import contextlib
import threading
import time

import fake_cuda
import torch
from cuda_native_cases import processes, raises, threads

import pycomm


def own_errors(comm, device):
    """What is wrong on one rank is said at once, and the group goes on."""
    r = comm.rank
    x = torch.zeros(4, device="cuda")
    with raises(ValueError, f"[rank {r}/2] all_reduce", "different devices: "):
        comm.all_reduce(x, out=torch.zeros(4))
    with raises(ValueError, f"[rank {r}/2] all_gather", "different devices: "):
        comm.all_gather(x, [torch.zeros(4), torch.zeros(4)])
    with raises(ValueError, "all_reduce", "Float4_e2m1fn_x2 is not supported"):
        comm.all_reduce(torch.empty(4, dtype=torch.float4_e2m1fn_x2, device="cuda"))
    with raises(ValueError, "send", "Float4_e2m1fn_x2 is not supported"):
        comm.send(torch.empty(4, dtype=torch.float4_e2m1fn_x2, device="cuda"), 1 - r)
    with raises(ValueError, "broadcast", "root"):
        comm.broadcast(x, 7)
    with raises(ValueError, "all_to_all", "sum to"):
        comm.all_to_all(x, in_splits=[1, 2], out_splits=[2, 2])
    with raises(ValueError, "send"):
        comm.send(x, 9)
    comm.all_reduce(x.fill_(1))
    assert x.tolist() == [2] * 4
    with raises(ValueError, "recv"):
        comm.recv(x)  # from any rank
    with raises(ValueError, "this group works on cuda:0", "the tensor is on cuda:1"):
        comm.all_reduce(torch.zeros(4, device="cuda:1"))
    assert comm.all_reduce(torch.ones(1, device="cuda")).item() == 2


def mismatch(comm, device):
    """Told on both ranks; a resident group goes on."""
    r = comm.rank
    comm.all_reduce(torch.ones(8, device="cuda"))
    with raises(
        pycomm.MismatchError, f"[rank {r}/2] all_reduce", "count", rank=r, world_size=2, op="all_reduce"
    ):
        comm.all_reduce(torch.ones(8 + r, device="cuda"), async_op=True).wait(10.0)
    if comm.describe()["cuda"]["protocol"] == "resident":
        assert comm.all_reduce(torch.ones(1, device="cuda")).item() == 2
        x = torch.ones(8, device="cuda")
        with raises(pycomm.MismatchError):  # the next call reports an error that was not waited for
            comm.all_reduce(x) if r else comm.broadcast(x)
            fake_cuda.synchronize()
            fake_cuda.wait_until(lambda: comm.barrier())


def late(comm, device, missing=1):
    """A rank that does not come. Each call has its own timeout."""
    comm.all_reduce(torch.ones(8, device="cuda"), timeout=20)
    r, told = comm.rank, f"rank {missing} did not arrive"
    if r != missing:
        start = time.monotonic()
        with raises(pycomm.CommTimeoutError, told, rank=r, op="all_reduce", peer=missing):
            comm.all_reduce(torch.ones(8, device="cuda"), timeout=1.5, async_op=True).wait(20.0)
        assert time.monotonic() - start < 10
    else:
        fake_cuda.wait_until(lambda: comm.describe()["broken"])
        with raises(pycomm.CommTimeoutError):
            comm.all_reduce(torch.ones(8, device="cuda"))


def late_first(comm, device):
    late(comm, device, missing=0)


def aborted(comm, device):
    comm.all_reduce(torch.ones(8, device="cuda"))
    if comm.rank == 0:
        work = comm.all_reduce(torch.ones(8, device="cuda"), async_op=True)
        time.sleep(0.1)
        comm.abort("enough")
        with raises(pycomm.AbortedError, "enough"):
            work.wait(10.0)
    fake_cuda.wait_until(lambda: comm.describe()["broken"])
    with raises(pycomm.AbortedError, "enough"):
        comm.all_reduce(torch.ones(8, device="cuda"))


def left(comm, device):
    """A peer that closes the group before it comes to an operation."""
    comm.all_reduce(torch.ones(8, device="cuda"))
    if comm.rank == 0:
        with raises(pycomm.PeerError, "rank 1", peer=1):
            comm.all_reduce(torch.ones(8, device="cuda"), async_op=True).wait(20.0)


def closed_under_way(comm, device):
    """close() waits for a stream that is held up, and leaves nothing."""
    x = torch.ones(1000, device="cuda")
    comm.all_reduce(x)
    fake_cuda.synchronize()
    gate = fake_cuda.gate()
    works = [comm.all_reduce(x, async_op=True) for _ in range(3)]
    gate.open()
    comm.close()
    with contextlib.suppress(pycomm.CommError):
        works[-1].wait(5.0)
    del works


def failed_half_way(comm, device):
    """What could not be issued to its end is in the stream in part: close() waits for that."""
    x = torch.ones(1000, device="cuda")
    comm.all_reduce(x)
    fake_cuda.synchronize()
    comm.all_reduce(torch.ones(1))  # without the device
    if comm.rank == 0:
        fake_cuda.wait_until(lambda: comm.describe()["broken"])
        return
    opened, gate = [], fake_cuda.gate()

    def open_gate():
        opened.append(True)
        gate.open()

    fake_cuda.driver.fail("cuEventRecord", 1, 2)
    with raises(RuntimeError, "cuEventRecord failed: CUDA_ERROR_OUT_OF_MEMORY"):
        comm.all_reduce(x)
    later = threading.Timer(0.2, open_gate)
    later.start()
    comm.close()
    assert opened
    later.join()


ERRORS = [failed_half_way, own_errors, mismatch, late, late_first, aborted, left, closed_under_way]


def in_threads(name):
    threads(2, globals()[name])


def in_processes(name):
    processes(2, globals()[name])
