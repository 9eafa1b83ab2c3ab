"""torch.distributed on registered memory (allocate_tensor) against ordinary tensors, in place, in turns, in
one run on this machine.

    python -m pycomm.benchmarks.registered [ranks]          prints a Markdown table; default 2 ranks

Each turn fills the tensor, waits for all ranks and times a batch of calls; the slowest rank counts. The table
has medians over the turns. Results are compared with what they should be before the turns.
"""

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from pycomm.benchmarks.common import ranks, report

SIZES = {"4 KiB": 4 << 10, "256 KiB": 256 << 10, "4 MiB": 4 << 20, "25 MiB": 25 << 20}
TURNS, WARM_UP = 40, 3
BATCH_BYTES, LONGEST_BATCH = 16 << 20, 200
CPU = torch.device("cpu")
Operation: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]  # (whole, this rank's part of it)


class Row(NamedTuple):
    operation: str
    size: str
    ordinary_us: float
    registered_us: float


def all_reduce(x: torch.Tensor, mine: torch.Tensor) -> None:
    dist.all_reduce(x)


def reduce_scatter_tensor(x: torch.Tensor, mine: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(mine, x)


def all_gather_into_tensor(x: torch.Tensor, mine: torch.Tensor) -> None:
    dist.all_gather_into_tensor(x, mine)


OPERATIONS = (all_reduce, reduce_scatter_tensor, all_gather_into_tensor)


def check(operation: Operation, x: torch.Tensor, mine: torch.Tensor, rank: int, world_size: int) -> None:
    x.fill_(rank + 1.0)
    operation(x, mine)
    total = world_size * (world_size + 1) / 2
    if operation is all_gather_into_tensor:
        right = all(bool((part == p + 1.0).all()) for p, part in enumerate(x.chunk(world_size)))
    else:
        right = bool(((x if operation is all_reduce else mine) == total).all())
    if not right:
        raise RuntimeError(f"rank {rank}: {operation.__name__} of {x.numel()} elements is wrong")


def batch_us(operation: Operation, x: torch.Tensor, mine: torch.Tensor, calls: int) -> float:
    """Microseconds of one call on the slowest rank."""
    x.zero_()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        operation(x, mine)
    took = torch.tensor((time.perf_counter() - start) / calls * 1e6)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measure(_: int) -> list[Row]:
    warnings.simplefilter("ignore", FutureWarning)  # torch renames the two functions; both names stay valid
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None  # this rank has joined
    backend, rows = dist.group.WORLD._get_backend(CPU), list[Row]()
    for size, nbytes in SIZES.items():
        count = nbytes // 4 // world_size * world_size
        tensors = [torch.zeros(count), backend.allocate_tensor(count, dtype=torch.float32, device=CPU)]
        calls = max(1, min(LONGEST_BATCH, BATCH_BYTES // nbytes))
        for operation in OPERATIONS:
            pairs = [(x, x.chunk(world_size)[rank]) for x in tensors]
            for pair in pairs:
                check(operation, *pair, rank, world_size)
            turns = [[batch_us(operation, *pair, calls) for pair in pairs] for _ in range(WARM_UP + TURNS)]
            ordinary, registered = map(statistics.median, zip(*turns[WARM_UP:], strict=True))
            rows.append(Row(operation.__name__, size, ordinary, registered))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    world_size = int(arguments[0]) if arguments else 2
    rows = ranks.run(world_size, measure, mode="processes", backend="pycomm", timeout=1800.0)[0]
    titles = ["operation", "size", "ordinary (us)", "registered (us)", "ratio"]
    cells = [[name, size, f"{a:.1f}", f"{b:.1f}", f"{a / b:.2f}"] for name, size, a, b in rows]
    print(*report.markdown_table(titles, cells), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    main()
