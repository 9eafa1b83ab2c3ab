"""What an error knows may be unknown."""

import torch
import torch.distributed as dist
from typing_extensions import assert_type

import pycomm


def survive(comm: pycomm.Communicator, x: torch.Tensor) -> pycomm.Communicator:
    try:
        comm.all_reduce(x, timeout=5)
    except pycomm.PeerError as error:
        assert_type(error.peer, int | None)
        smaller = comm.shrink(exclude=[error.peer] if error.peer is not None else [])
        assert_type(smaller.former_ranks, list[int])
        return smaller
    except (pycomm.CommTimeoutError, pycomm.MismatchError, pycomm.AbortedError) as error:
        print(error.rank, error.op, error.sequence)
    part = comm.split(color=comm.rank % 2)
    return comm if part is None else part


def survive_in_torch() -> dist.ProcessGroup:
    dist.init_process_group("pycomm")
    return pycomm.shrink_group(timeout=10)
