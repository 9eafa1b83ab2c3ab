"""What torch builds on its backends, over pycomm: DDP, ZeRO, FSDP2, DTensor, pipelining, DCP train to the
same bits as over Gloo.
"""

import os
import signal
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from tiers import tier
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_ranks import data, equal, meeting, spawn


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))


def train(net, optimizer, rank, steps=4, forward=None):
    torch.manual_seed(100 + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        (forward or net)(torch.randn(6, 12)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def plain_ddp(r, n, prepare=None, bucket_cap_mb=0.005, **options):
    net = model()
    ddp = DDP(net, bucket_cap_mb=bucket_cap_mb, **options)
    if prepare:
        prepare(ddp)
    return train(net, torch.optim.SGD(net.parameters(), 0.1), r, forward=ddp)


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 4), nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x):
        return self.a(x) + (self.b(x) if dist.get_rank() == 0 else 0)


def unused(r, n):
    torch.manual_seed(0)
    net = HalfUsed()
    return train(
        net, torch.optim.SGD(net.parameters(), 0.1), r, forward=DDP(net, find_unused_parameters=True)
    )


def join(r, n):
    net = model()
    ddp = DDP(net)
    with Join([ddp]):
        return train(net, torch.optim.SGD(net.parameters(), 0.1), r, steps=2 + 2 * r, forward=ddp)


def zero(r, n):
    net = model()
    ddp = DDP(net)
    return train(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01), r, forward=ddp)


def hook(which, state=None):
    return lambda ddp: ddp.register_comm_hook(state() if state else None, which)


def python_hook(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


def power_sgd(r, n):
    """The callbacks of this hook issue operations and wait for them. One bucket: more would issue them in
    another order on every rank.
    """

    def state():
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)

    return plain_ddp(r, n, hook(powerSGD_hook.powerSGD_hook, state), bucket_cap_mb=25)


def test_power_sgd():
    """No comparison with Gloo, which crashes here: its worker thread ends the group whose callback
    it runs.
    """
    first, second = spawn(2, power_sgd)
    equal(first, second)


def fsdp(r, n):
    net = model()
    mesh = init_device_mesh("cpu", (n,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, torch.optim.Adam(net.parameters(), 0.01), r)
    return [p.full_tensor() for p in net.parameters()]


def tensor_parallel(r, n):
    mesh = init_device_mesh("cpu", (n,))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(net, torch.optim.SGD(net.parameters(), 0.1), 0)
    x = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0)])
    moved = [x.redistribute(mesh, [placement]) for placement in (Replicate(), Shard(1))]
    return [
        p.full_tensor() if isinstance(p, DTensor) else p.detach()
        for p in [*net.parameters(), *moved, x.sum(), x @ x.t()]
    ]


def functional(r, n):
    x, group = data(r, n * 4, 3), dist.group.WORLD
    outs = [
        funcol.all_reduce(x, "sum", group),
        funcol.all_gather_tensor(x, 0, group),
        funcol.reduce_scatter_tensor(x, "sum", 0, group),
        funcol.all_to_all_single(x, None, None, group),
        funcol.broadcast(x, 0, group),
        *funcol.all_reduce_coalesced([x, x + 1], "max", group),
        *funcol.all_gather_into_tensor_coalesced([x, x + 1], group),
    ]
    return [out + 0 for out in outs]


def pipeline(r, n):
    layers = [nn.Linear(8, 8) for _ in range(n)]
    for i, layer in enumerate(layers):
        torch.manual_seed(i)
        nn.init.normal_(layer.weight)
    mine = layers[r]
    stage = PipelineStage(mine, r, n, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=F.mse_loss)
    for step in range(2):
        torch.manual_seed(step)
        x, target = torch.randn(8, 8), torch.randn(8, 8)
        schedule.step(*([x] if r == 0 else []), **({"target": target} if r == n - 1 else {}))
    return [mine.weight.grad]


def checkpoint(r, n):
    net = model(seed=r)
    mesh = init_device_mesh("cpu", (n,))
    fully_shard(net, mesh=mesh)
    state = {"net": net.state_dict(), "step": 7}
    folder = [tempfile.mkdtemp(prefix="pycomm-")] if r == 0 else [None]
    dist.broadcast_object_list(folder, src=0)
    dcp.save(state, checkpoint_id=folder[0])
    saved = [p.full_tensor().detach().clone() for p in net.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    dcp.load(state, checkpoint_id=folder[0])
    equal([p.full_tensor() for p in net.parameters()], saved)
    return saved


def gathered_shards(r, n):
    """A ShardedTensor of the CPU stays there, also on a machine without an accelerator."""
    torch.manual_seed(r)
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{p}/cpu" for p in range(n)])
    sharded = sharded_tensor.rand(spec, 5, 3)
    whole = torch.zeros(5, 3) if r == 0 else None
    sharded.gather(out=whole)
    return [whole] if r == 0 else [shard.tensor for shard in sharded.local_shards()]


TRAINERS = {
    "ddp": lambda r, n: plain_ddp(r, n),
    "ddp_static_graph": lambda r, n: plain_ddp(r, n, static_graph=True),
    "ddp_bucket_view": lambda r, n: plain_ddp(r, n, gradient_as_bucket_view=True),
    "ddp_unused_parameters": unused,
    "ddp_join": join,
    "ddp_allreduce_hook": lambda r, n: plain_ddp(r, n, hook(default_hooks.allreduce_hook)),
    "ddp_fp16_hook": lambda r, n: plain_ddp(r, n, hook(default_hooks.fp16_compress_hook)),
    "ddp_python_hook": lambda r, n: plain_ddp(r, n, hook(python_hook)),
    "ddp_builtin_hook": lambda r, n: plain_ddp(
        r, n, lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    ),
    "zero_redundancy_optimizer": zero,
    "fsdp2": fsdp,
    "tensor_parallel": tensor_parallel,
    "functional_collectives": functional,
    "pipeline_1f1b": pipeline,
    "distributed_checkpoint": checkpoint,
    "sharded_tensor_gather": gathered_shards,
}


def dies(r, n, together):
    net = model()
    ddp = DDP(net)
    together.wait()
    if r == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="rank 1 died"):
        train(net, torch.optim.SGD(net.parameters(), 0.1), r, forward=ddp)


def test_backward_names_the_dead_rank():
    spawn(3, dies, meeting(3), expect_deaths=[1])


@tier(quick=1 / 2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer", TRAINERS)
def test_same_as_gloo(trainer):
    """Two ranks: a sum of two numbers has one order, so the bits must agree."""
    ours, theirs = (spawn(2, TRAINERS[trainer], backend=backend) for backend in ("pycomm", "gloo"))
    for mine, reference in zip(ours, theirs, strict=True):
        for a, b in zip(mine, reference, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
