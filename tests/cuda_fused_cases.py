"""Launches of fused products among the operations of a group, in tests/test_cuda_python.py. Each function
runs in a process of its own, on CUDA tensors of tests/fake_cuda.py; no kernel of Triton runs there, a copy
takes its place.
"""

from types import SimpleNamespace

import cuda_native_cases as native
import fake_cuda
import torch
from torch_ranks import data, equal

import pycomm
from pycomm.fused.context import Context


def launch_in_line(comm, device):
    """A launch that is not the group's own, as of a fused product, beside asynchronous collectives from
    another stream: it reads what the one before has made, and makes what the one behind reads.
    """
    r, n = comm.rank, comm.world_size
    before, behind = data(r, 100).to("cuda"), torch.zeros(100, device="cuda")
    made = 2 * data(r + 10, 100).to("cuda")
    comm.all_reduce(before.clone())  # sets up
    fake_cuda.synchronize()
    context = SimpleNamespace(communicator=comm._comm, device=behind.device, shares_device=True)
    copy = torch.empty(100, device="cuda")
    mine = fake_cuda.driver.current_stream(device)
    with fake_cuda.stream(device) as other:
        gates = [fake_cuda.gate(device)]
        first = comm.all_reduce(before, async_op=True)
        fake_cuda.driver.exchange_stream(mine, device)
        with Context.place(context):
            copy.copy_(before)
            gates.append(fake_cuda.gate(device))
            behind.copy_(made)
        fake_cuda.driver.exchange_stream(other, device)
        second = comm.all_reduce(behind, async_op=True)
        assert not second.done()
        for gate in gates:
            gate.open()
        first.wait(), second.wait()
    equal(copy.cpu(), sum(data(p, 100) for p in range(n)))
    equal(behind.cpu(), sum(2 * data(p + 10, 100) for p in range(n)))


def shared_stream(comm, device):
    """Two ranks that are threads launch into one stream: one would wait behind the other for ever."""
    comm.all_reduce(torch.ones(3, device="cuda"))
    fake_cuda.synchronize()
    context = SimpleNamespace(
        communicator=comm._comm, device=torch.device("cuda", device), shares_device=True
    )
    comm.barrier()
    mine = fake_cuda.driver.exchange_stream(0, device)
    if comm.rank == 0:
        with Context.place(context):
            pass
    comm.all_reduce(torch.ones(3))  # on the CPU
    if comm.rank == 1:
        with native.raises(ValueError, "use the same CUDA stream"), Context.place(context):
            raise AssertionError("launched")
    fake_cuda.driver.exchange_stream(mine, device)


def broken(comm, device):
    """Nothing is launched in a group that is broken."""
    comm.all_reduce(torch.ones(3, device="cuda"))
    fake_cuda.synchronize()
    context = SimpleNamespace(
        communicator=comm._comm, device=torch.device("cuda", device), shares_device=True
    )
    if comm.rank == 0:
        comm.abort("enough")
    fake_cuda.wait_until(lambda: comm.describe()["broken"])
    with native.raises(pycomm.AbortedError, "enough"), Context.place(context):
        raise AssertionError("launched")


def in_threads(name, world_size):
    native.threads(world_size, globals()[name])


def in_processes(name, world_size):
    native.processes(world_size, globals()[name])
