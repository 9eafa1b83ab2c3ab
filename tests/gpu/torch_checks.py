"""torch.distributed with backend "pycomm" and CUDA tensors: its collectives, asynchronous ones, and DDP.
Ranks are processes.
"""

import datetime
import os
import tempfile

import torch
import torch.distributed as dist

from gpu.ranks import differs, wait
from pycomm import _autoload


def collectives(check):
    for n in (2, 4):
        with tempfile.TemporaryDirectory(prefix="pycomm-") as folder:
            check.each(
                "torch.distributed, every collective",
                n,
                _collectives,
                os.path.join(folder, "torch"),
                mode="processes",
            )
        with tempfile.TemporaryDirectory(prefix="pycomm-") as folder:
            check.each(
                "DistributedDataParallel, one step", n, _ddp, os.path.join(folder, "torch"), mode="processes"
            )


def _begin(comm, path):
    _autoload.register()  # nothing is installed where this runs, so torch has not called it
    store = dist.FileStore(path, comm.world_size)
    limit = datetime.timedelta(seconds=30)
    dist.init_process_group("pycomm", store=store, rank=comm.rank, world_size=comm.world_size, timeout=limit)


def _collectives(comm, check, path):
    _begin(comm, path)
    n, rank, k, problems = comm.world_size, comm.rank, 1027, []
    ranks = torch.arange(float(n)).repeat_interleave(k)

    def tensor(count, value):
        return check.tensor(torch.full((count,), float(value)))

    def expect(name, got, want):
        wait(check)
        dist.barrier()
        problems.append(differs(got, want, name))

    x = tensor(k, rank)
    dist.all_reduce(x)
    expect("all_reduce", x, n * (n - 1) / 2)
    x = tensor(k, rank)
    work = dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True)
    work.wait()
    expect("all_reduce, async", x, n - 1.0)
    x = tensor(k, rank)
    dist.broadcast(x, 1)
    expect("broadcast", x, 1.0)
    out = tensor(n * k, -1)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(out, tensor(k, rank))
    expect("all_gather", out, ranks)
    parts = [tensor(k, -1) for _ in range(n)]
    dist.all_gather(parts, tensor(k, rank))
    expect("all_gather, list", torch.cat(parts), ranks)
    out = tensor(k, -1)
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(out, check.tensor(ranks))
    expect("reduce_scatter", out, float(n * rank))
    out = tensor(n * k, -1)
    dist.all_to_all_single(out, tensor(n * k, rank))
    expect("all_to_all", out, ranks)
    x = tensor(k, rank)
    dist.reduce(x, n - 1)
    expect("reduce", x if rank == n - 1 else x[:0], n * (n - 1) / 2)
    y = tensor(k, -1)
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor(k, rank), (rank + 1) % n), dist.P2POp(dist.irecv, y, (rank - 1) % n)]
    )
    for request in requests:
        request.wait()
    expect("batch_isend_irecv", y, float((rank - 1) % n))
    dist.destroy_process_group()
    return "; ".join(filter(None, problems))


def _ddp(comm, check, path):
    _begin(comm, path)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32).to(check.on)
    alone = torch.nn.Linear(64, 32).to(check.on)
    alone.load_state_dict(model.state_dict())
    data = check.tensor(torch.randn(comm.world_size, 16, 64, generator=torch.Generator().manual_seed(1)))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    parallel(data[comm.rank]).square().mean().backward()
    alone(data.view(-1, 64)).square().mean().backward()
    wait(check)
    close = torch.allclose(
        model.weight.grad.cpu(), alone.weight.grad.cpu(), rtol=1e-3, atol=1e-5
    )  # tf32 or f32
    dist.barrier()
    dist.destroy_process_group()
    return "" if close else "gradients differ from those of one process with the whole batch"
