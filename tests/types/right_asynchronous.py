"""async_op=True returns a Work whose wait() returns the array."""

import torch
from typing_extensions import assert_type

import pycomm


def begin(comm: pycomm.Communicator, x: torch.Tensor, later: bool) -> pycomm.Work[torch.Tensor]:
    work = comm.all_gather(x, async_op=True)
    assert_type(work, pycomm.Work[torch.Tensor])
    assert_type(work.wait(timeout=3.0), torch.Tensor)
    assert_type(work.done(), bool)
    assert_type(comm.send(x, 1, async_op=True).wait(), None)
    assert_type(comm.all_reduce(x, async_op=later), torch.Tensor | pycomm.Work[torch.Tensor])
    return comm.all_reduce(x, async_op=True)
