"""What a variant is, and those of pycomm.parallel and of one process.

A variant is made on all ranks alike, trains the model of model.py from the same weights, and takes the whole
batch in step(), of which it uses its part. One step is forward, backward, summing of gradients, AdamW, and
the mean loss of the whole batch as a number on each rank; nothing clips. pycomm.parallel also finds the
gradient norm and compares the batches of the ranks in each step: it has no switch for that.
"""

import abc
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from pycomm import parallel
from pycomm.benchmarks.strategies.model import Batch, Size, loss_of, make_model, make_optimizer

Family: TypeAlias = Literal["pycomm.parallel", "torch", "deepspeed", "one process"]


class Spec(NamedTuple):
    """name: unique. strategy: a plan, or a
    key of torch_variants.STRATEGIES. backend: of torch.distributed."""

    name: str
    family: Family
    strategy: str
    backend: str


class Variant(abc.ABC):
    def __init__(self, spec: Spec, size: Size, group: dist.ProcessGroup) -> None:
        """group: with all ranks, of spec.backend."""
        self.spec, self.size, self.group = spec, size, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    @abc.abstractmethod
    def step(self, batch: Batch) -> float:
        """Returns the mean loss of the batch, on every rank."""

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows."""
        return tensor.tensor_split(self.world_size)[self.rank]

    def mean(self, loss: torch.Tensor, weight: float) -> float:
        """Sum over the ranks of weight * loss."""
        total = loss.detach() * weight
        dist.all_reduce(total, group=self.group)
        return total.item()


class OneProcess(Variant):
    """Rank 0 alone, on the whole batch; the others wait. The losses of all variants are compared with its."""

    def __init__(self, spec: Spec, size: Size, group: dist.ProcessGroup) -> None:
        super().__init__(spec, size, group)
        if self.rank == 0:
            self.model = make_model(size)
            self.opt = make_optimizer(self.model.parameters())

    def step(self, batch: Batch) -> float:
        if self.rank:
            return 0.0
        self.opt.zero_grad()
        loss = loss_of(self.model(batch[0]), batch[1])
        loss.backward()
        self.opt.step()
        return loss.item()


class Ours(Variant):
    """pycomm.parallel with a plan; its groups are of the default process group's backend."""

    def __init__(self, spec: Spec, size: Size, group: dist.ProcessGroup) -> None:
        super().__init__(spec, size, group)
        plan = parallel.Plan.parse(spec.strategy)
        self.microbatches = size.microbatches if plan.pp > 1 else 1
        model = make_model(size)
        self.model, self.opt = parallel.parallelize(model, make_optimizer(model.parameters()), plan)

    def step(self, batch: Batch) -> float:
        return float(
            parallel.step(self.model, self.opt, batch, parallel.cross_entropy, microbatches=self.microbatches)
        )
