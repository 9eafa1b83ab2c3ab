"""What a variant is, and those of pycomm.parallel and of one process.

A variant is made on all ranks alike, trains the model of model.py from the same weights, and takes the whole
batch in step(), of which it uses its part. One step is forward, backward, summing of gradients, AdamW, and
the mean loss of the whole batch as a number on each rank; nothing clips. pycomm.parallel also finds the
gradient norm and compares the batches of the ranks in each step: it has no switch for that.
"""

from typing import NamedTuple

import torch.distributed as dist

from pycomm import parallel
from pycomm.benchmarks.strategies.model import loss_of, make_model, make_optimizer


class Spec(NamedTuple):
    """name: unique. family: "pycomm.parallel", "torch", "deepspeed", "one process". strategy: a plan, or a
    key of torch_variants.STRATEGIES. backend: of torch.distributed."""

    name: str
    family: str
    strategy: str
    backend: str


class Variant:
    """step(batch) -> mean loss of the batch, a float, on every rank."""

    def __init__(self, spec, size, group):
        """group: process group with all ranks, of spec.backend."""
        self.spec, self.size, self.group = spec, size, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def rows(self, tensor):
        """This rank's rows."""
        return tensor.tensor_split(self.world_size)[self.rank]

    def mean(self, loss, weight):
        """Sum over the ranks of weight * loss."""
        total = loss.detach() * weight
        dist.all_reduce(total, group=self.group)
        return total.item()

    def close(self):
        pass


class OneProcess(Variant):
    """Rank 0 alone, on the whole batch; the others wait. The losses of all variants are compared with its."""

    def __init__(self, spec, size, group):
        super().__init__(spec, size, group)
        if self.rank == 0:
            self.model = make_model(size)
            self.opt = make_optimizer(self.model.parameters())

    def step(self, batch):
        if self.rank:
            return 0.0
        self.opt.zero_grad()
        loss = loss_of(self.model(batch[0]), batch[1])
        loss.backward()
        self.opt.step()
        return loss.item()


class Ours(Variant):
    """pycomm.parallel with a plan; its groups are of the default process group's backend."""

    def __init__(self, spec, size, group):
        super().__init__(spec, size, group)
        plan = parallel.Plan.parse(spec.strategy)
        self.microbatches = size.microbatches if plan.pp > 1 else 1
        model = make_model(size)
        self.model, self.opt = parallel.parallelize(model, make_optimizer(model.parameters()), plan)

    def step(self, batch):
        return float(
            parallel.step(self.model, self.opt, batch, parallel.cross_entropy, microbatches=self.microbatches)
        )
