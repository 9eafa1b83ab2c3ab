"""DistributedDataParallel alone: torch's class of that name, over replicated buckets. Li et al. 2020.

    forward     rank 0: rows a      rank 1: rows b        same parameters everywhere
    backward    gradients of a      gradients of b        buckets are summed while backward goes on
    after it    mean of both        mean of both          in param.grad, views of the buckets

Bytes per step and rank: 2(n-1)/n P for gradients of P bytes, and the module's buffers from rank 0 before a
forward, where it has any.

A backward begins, for us, when a gradient reaches an output of the module, and ends with a callback that
autograd runs when it is done; buckets that are not complete by then (parameters that this rank did not use)
are started there, so that unused parameters need no search through the graph and may differ between ranks.
The callback belongs to the backward in which it is queued. Recomputation with use_reentrant=True runs
backwards inside that of the output, which is why the first gradient of a parameter would be too late to
begin; it serves only where no output was recognised.

What can go wrong: a rank that runs a backward more than others is reported by the collectives. A backward
that raises ends nothing; the next forward notices. A parameter in two recomputed parts with
use_reentrant=True has two final gradients: reported by the Reducer.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from pycomm.parallel.data.bucket import ParamInfo, cut_into_buckets
from pycomm.parallel.data.compression import MakeCompression
from pycomm.parallel.data.reducer import Reducer, weak_hook
from pycomm.parallel.data.replicated import ReplicatedBucket, way_to_sum
from pycomm.parallel.given import Tree
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.layout import whole
from pycomm.parallel.ground.plan import CompressionName

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(nn.Module):
    """A module whose gradients are averaged over a group.

    Args:
        module: the same module on every rank; rank 0's parameters and buffers are taken.
        group: None: the default one.
        bucket_mb: size of a bucket in MB (1e6 bytes).
        broadcast_buffers: take rank 0's buffers (running statistics) before each forward in training mode.
        compression: a factory is made by make_compression.

    After backward param.grad is the mean over the ranks of what each computed; `with ddp.no_sync():`
    accumulates without communication. Parameters that got no gradient on any rank have a gradient of zeros.
    Raises ValueError for a module without parameters to train.
    """

    def __init__(
        self,
        module: nn.Module,
        group: comm.GroupLike = None,
        *,
        bucket_mb: float = 25.0,
        broadcast_buffers: bool = True,
        compression: CompressionName | MakeCompression | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.group = comm.as_group(group, "dp")
        self.broadcast_buffers = broadcast_buffers
        trained = [
            (name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad
        ]
        if not trained:
            raise ValueError("DistributedDataParallel: the module has no parameter that requires a gradient")
        comm.broadcast_values(module.parameters(), self.group)
        comm.broadcast_values(module.buffers(), self.group)
        infos = [
            ParamInfo(name, parameter, whole(parameter), self.group) for name, parameter in reversed(trained)
        ]
        make_sum = way_to_sum(compression)
        cut = cut_into_buckets(infos, bucket_mb * 1e6)
        self.buckets = [ReplicatedBucket(part, make_sum=make_sum) for part in cut]
        self.reducer = Reducer(self.buckets)
        self.sync = True  # False inside no_sync()
        self.queued = False  # a backward is under way: autograd will call _end
        begin = weak_hook(self._begin)
        for _, parameter in trained:
            parameter.register_hook(begin)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside accumulates gradients on this rank; the next one outside sums them all. All ranks
        alike.
        """
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def forward(self, *args: Tree, **kwargs: Tree) -> Tree:
        if self.queued and torch._C._current_graph_task_id() == -1:  # the last backward raised
            self.queued = False
            self.reducer.wait()
        if self.training and self.broadcast_buffers and self.group.size > 1:
            comm.broadcast_values(self.module.buffers(), self.group)
        out = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._begin)
        return out

    def _begin(self, grad: torch.Tensor) -> None:
        """The first gradient of a backward; hooks of tensors run before accumulation."""
        if not self.queued:
            self.queued = True
            Variable._execution_engine.queue_callback(self._end)
            for bucket in self.buckets:
                bucket.restore()
            self.reducer.begin_microbatch(self.sync)

    def _end(self) -> None:
        self.queued = False
        self.reducer.finish_microbatch(self.sync)
        if self.sync:
            self.reducer.wait()
            for bucket in self.reducer.buckets:
                bucket.gradient().div_(self.group.size)
