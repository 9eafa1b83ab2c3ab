"""Each result has the type of the array that was given."""

import numpy as np
import torch
from typing_extensions import assert_type

import pycomm

with pycomm.Communicator() as comm:
    x = torch.ones(4)
    assert_type(comm.all_reduce(x), torch.Tensor)
    assert_type(comm.all_reduce(x, "max", out=torch.empty(4), algorithm="ring"), torch.Tensor)
    assert_type(comm.reduce_scatter([x, x]), torch.Tensor)
    assert_type(comm.all_gather(x, [torch.empty(4), torch.empty(4)]), list[torch.Tensor])
    assert_type(comm.gather(x, root=1), torch.Tensor | None)
    assert_type(comm.all_to_all(x, in_splits=[1, 3], out_splits=[2, 2]), torch.Tensor)
    assert_type(comm.broadcast(np.zeros(3, dtype=np.float32)).dtype, np.dtype[np.float32])
    assert_type(comm.all_reduce(x, pycomm.premul_sum(0.5)), torch.Tensor)
    assert_type(comm.recv(x), int)
    assert_type(comm.empty((2, 3), torch.bfloat16), torch.Tensor)
