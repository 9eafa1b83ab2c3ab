"""What a group says of itself."""

from pathlib import Path

import torch
from typing_extensions import assert_type

import pycomm


def watch(comm: pycomm.Communicator, folder: Path) -> float:
    with comm.trace(folder) as same:
        assert_type(same, pycomm.Communicator)
        same.barrier()
    text = pycomm.explain("all_reduce", 1 << 20, 8, hosts="2x4")
    text += pycomm.explain("all_gather_matmul", (512, 512, 512), 4, device="cuda", dtype="bfloat16")
    assert_type(text, str)
    statistics = comm.statistics()
    return sum(cell["bytes"] for sizes in statistics.values() for cell in sizes.values())


def of_any(x: torch.Tensor) -> torch.Tensor:
    with pycomm.Communicator(timeout=30, name="mine") as comm:
        return comm.all_reduce(comm.all_gather(x))
