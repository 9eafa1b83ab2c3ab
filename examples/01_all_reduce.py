"""The smallest pycomm program: every rank contributes an array, every rank gets the sum. NumPy here; torch
tensors work the same.

python examples/01_all_reduce.py                             # 4 ranks as threads of this process
torchrun --nproc-per-node 4 examples/01_all_reduce.py        # 4 processes, found through the environment
"""

import os

import numpy as np

import pycomm
from pycomm.testing import run_ranks


def add_up(comm: pycomm.Communicator) -> np.ndarray:
    x = np.arange(4, dtype=np.float32) + 10 * comm.rank  # rank 0: 0 1 2 3, rank 1: 10 11 12 13, ...
    return comm.all_reduce(x)  # in place: x is the sum now


if __name__ == "__main__":
    if "RANK" in os.environ:
        with pycomm.Communicator() as comm:
            print(
                f"rank {comm.rank} of {comm.world_size}: {add_up(comm)}\n", end=""
            )  # one write: ranks share the terminal
    else:
        for rank, result in enumerate(run_ranks(4, add_up)):
            print(f"rank {rank} of 4: {result}")
