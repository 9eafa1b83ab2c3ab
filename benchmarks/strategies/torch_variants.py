"""torch's own strategies, as its documentation applies them to a plain model.

ddp              DistributedDataParallel, gradients as views of the buckets
ddp-zero1        the same with ZeroRedundancyOptimizer
fsdp2-zero2      fully_shard of every block and of the model, reshard_after_forward=False: parameters stay
                 from forward to backward
fsdp2            fully_shard of every block and of the model
pp-gpipe, -1f1b  torch.distributed.pipelining over stages that are cut by hand: PipelineStage takes modules
tp               parallelize_module, column and row parallel, logits cut by vocabulary with loss_parallel
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from pycomm.benchmarks.strategies.model import (
    GPT,
    LEARNING_RATE,
    Batch,
    Size,
    loss_of,
    make_model,
    make_optimizer,
)
from pycomm.benchmarks.strategies.variants import Spec, Variant

CPU = torch.device("cpu")


class DataParallel(Variant):
    """What is common to DDP and FSDP2: each rank takes its rows; subclasses set model and opt."""

    model: nn.Module
    opt: torch.optim.Optimizer

    def step(self, batch: Batch) -> float:
        inputs, targets = map(self.rows, batch)
        self.opt.zero_grad()
        loss = loss_of(self.model(inputs), targets)
        loss.backward()
        self.opt.step()
        return self.mean(loss, 1 / self.world_size)


class DDP(DataParallel):
    def __init__(self, spec: Spec, size: Size, group: dist.ProcessGroup) -> None:
        super().__init__(spec, size, group)
        self.model = DistributedDataParallel(
            make_model(size), process_group=group, gradient_as_bucket_view=True
        )
        self.opt = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model.parameters())


class DDPZero1(DDP):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class=torch.optim.AdamW,
            process_group=self.group,
            parameters_as_bucket_view=True,
            lr=LEARNING_RATE,
        )


class FSDP2(DataParallel):
    reshard = True

    def __init__(self, spec: Spec, size: Size, group: dist.ProcessGroup) -> None:
        super().__init__(spec, size, group)
        mesh = DeviceMesh.from_group(group, "cpu")
        self.model = model = make_model(size)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=self.reshard)
        self.opt = make_optimizer(self.model.parameters())


class FSDP2Zero2(FSDP2):
    reshard = False


class Stage(nn.Module):
    """Some blocks; the first stage has the embedding, the last the norm and the head."""

    def __init__(self, model: GPT, first: bool, last: bool, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.embed = model.embed if first else nn.Identity()
        self.blocks = blocks
        self.norm = model.norm if last else nn.Identity()
        self.head = model.head if last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GPipe(Variant):
    schedule_class: type[PipelineScheduleSingle] = ScheduleGPipe

    def __init__(self, spec: Spec, size: Size, group: dist.ProcessGroup) -> None:
        super().__init__(spec, size, group)
        model, n, rank = make_model(size), self.world_size, self.rank
        bounds = [stage * size.layers // n for stage in range(n + 1)]
        stage = Stage(model, rank == 0, rank == n - 1, model.blocks[bounds[rank] : bounds[rank + 1]])
        self.opt = make_optimizer(stage.parameters())
        placed = PipelineStage(stage, rank, n, CPU, group=group)
        self.schedule = self.schedule_class(placed, size.microbatches, loss_fn=loss_of)

    def step(self, batch: Batch) -> float:
        inputs, targets = batch
        self.opt.zero_grad()
        losses, last = list[torch.Tensor](), self.rank == self.world_size - 1
        given = [inputs] if self.rank == 0 else []
        if last:
            self.schedule.step(*given, target=targets, losses=losses)
        else:
            self.schedule.step(*given)
        self.opt.step()
        return self.mean(
            torch.stack([loss.detach() for loss in losses]).mean() if last else torch.zeros(()), 1.0
        )


class OneFOneB(GPipe):
    schedule_class = Schedule1F1B


class TP(Variant):
    def __init__(self, spec: Spec, size: Size, group: dist.ProcessGroup) -> None:
        super().__init__(spec, size, group)
        mesh = DeviceMesh.from_group(group, "cpu")
        self.model = make_model(size)
        column, row = ColwiseParallel, RowwiseParallel
        block_plan = {f"attn.{name}_proj": column() for name in "qkv"} | {
            "attn.o_proj": row(),
            "up": column(),
            "down": row(),
        }
        for block in self.model.blocks:
            parallelize_module(block, mesh, block_plan)
        outer = {
            "embed.tok": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(self.model, mesh, outer)
        self.opt = torch.optim.AdamW(
            self.model.parameters(), LEARNING_RATE, foreach=False
        )  # foreach cannot mix DTensors and tensors

    def step(self, batch: Batch) -> float:
        inputs, targets = batch
        self.opt.zero_grad()
        with loss_parallel():
            loss = loss_of(self.model(inputs), targets)
            loss.backward()
        self.opt.step()
        return loss.full_tensor().item() if hasattr(loss, "full_tensor") else loss.item()


STRATEGIES: dict[str, type[Variant]] = {
    "ddp": DDP,
    "ddp-zero1": DDPZero1,
    "fsdp2-zero2": FSDP2Zero2,
    "fsdp2": FSDP2,
    "pp-gpipe": GPipe,
    "pp-1f1b": OneFOneB,
    "tp": TP,
}
