"""torch.distributed on registered memory (allocate_tensor) against ordinary tensors, in place, in turns, in one run on this machine.

    python -m pycomm.benchmarks.registered [ranks]          prints a Markdown table; default 2 ranks

Each turn fills the tensor, waits for all ranks and times a batch of calls; the slowest rank counts. The table has medians over the turns.
Results are compared with what they should be before the turns.
"""

import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings

import torch
import torch.distributed as dist

SIZES = {"4 KiB": 4 << 10, "256 KiB": 256 << 10, "4 MiB": 4 << 20, "25 MiB": 25 << 20}
TURNS, WARM_UP = 40, 3
BATCH_BYTES, LONGEST_BATCH = 16 << 20, 200
CPU = torch.device("cpu")


def all_reduce(x, mine):
    dist.all_reduce(x)


def reduce_scatter_tensor(x, mine):
    dist.reduce_scatter_tensor(mine, x)


def all_gather_into_tensor(x, mine):
    dist.all_gather_into_tensor(x, mine)


def check(operation, x, mine, rank, world_size):
    x.fill_(rank + 1.0)
    operation(x, mine)
    total = world_size * (world_size + 1) / 2
    if operation is all_gather_into_tensor:
        right = all((part == p + 1.0).all() for p, part in enumerate(x.chunk(world_size)))
    else:
        right = ((x if operation is all_reduce else mine) == total).all()
    if not right:
        raise RuntimeError(f"rank {rank}: {operation.__name__} of {x.numel()} elements is wrong")


def batch_us(operation, x, mine, calls):
    """Microseconds of one call on the slowest rank."""
    x.zero_()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        operation(x, mine)
    took = torch.tensor((time.perf_counter() - start) / calls * 1e6)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measure(rank, world_size):
    """Rows (operation, size, us ordinary, us registered)."""
    backend, rows = dist.group.WORLD._get_backend(CPU), []
    for size, nbytes in SIZES.items():
        count = nbytes // 4 // world_size * world_size
        tensors = [torch.zeros(count), backend.allocate_tensor(count, dtype=torch.float32, device=CPU)]
        calls = max(1, min(LONGEST_BATCH, BATCH_BYTES // nbytes))
        for operation in (all_reduce, reduce_scatter_tensor, all_gather_into_tensor):
            pairs = [(x, x.chunk(world_size)[rank]) for x in tensors]
            for pair in pairs:
                check(operation, *pair, rank, world_size)
            turns = [[batch_us(operation, *pair, calls) for pair in pairs] for _ in range(WARM_UP + TURNS)]
            rows.append((operation.__name__, size, *map(statistics.median, zip(*turns[WARM_UP:], strict=True))))
    return rows


def run(rank, world_size, path):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch renames the two functions; both names stay valid here
    dist.init_process_group("pycomm", store=dist.FileStore(path, world_size), rank=rank, world_size=world_size)
    rows = measure(rank, world_size)
    dist.destroy_process_group()
    if rank == 0:
        print("| operation | size | ordinary (us) | registered (us) | ratio |\n|---|---|---|---|---|")
        for name, size, ordinary, registered in rows:
            print(f"| {name} | {size} | {ordinary:.1f} | {registered:.1f} | {ordinary / registered:.2f} |")
        sys.stdout.flush()


def main():
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    run(rank, world_size, os.path.join(folder, "store"))
                    status = 0
                except Exception:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            children.append(pid)
        failed = [rank for rank, pid in enumerate(children) if os.waitpid(pid, 0)[1]]
    if failed:
        sys.exit(f"ranks {failed} failed")


if __name__ == "__main__":
    main()
