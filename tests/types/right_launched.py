"""Ranks of one process, and of torchrun."""

import torch
import torch.distributed as dist
from typing_extensions import assert_type

import pycomm
from pycomm.testing import run_ranks


def main(comm: pycomm.Communicator) -> float:
    x = torch.full((3,), float(comm.rank))
    return comm.all_reduce(x).sum().item()


def launched() -> None:
    dist.init_process_group("pycomm")
    group = dist.new_group([0, 1])
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    dist.destroy_process_group()


if __name__ == "__main__":
    sums = run_ranks(4, main)
    assert_type(sums, list[float])
