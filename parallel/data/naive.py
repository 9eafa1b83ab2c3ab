"""Data parallelism as one would first write it, the baseline that explains why the others exist: one process
does all the work.

    rank 0   g0 <-- g1, g2, g3 (gather)      g0 + g1 + g2 + g3      --> g, g, g (broadcast)
    rank 1   g1 -->                                                 --> g
    rank 2   g2 -->                                                 --> g
    rank 3   g3 -->                                                 --> g

Order: rank 0 adds in order of rank, after backward has ended; nothing overlaps with anything.
Cost, P bytes of gradients, n ranks: (n-1) P into rank 0 and (n-1) P out of it, and n P of memory there; every
other rank sends P and receives P. The time grows with n, where that of an all-reduce (2 (n-1)/n P into and
out of each rank) does not: Li et al. 2014 (parameter server) spread the sum over several servers, Patarasuk
and Yuan 2009 over all ranks.
What can go wrong: ranks with different models. Their sizes are compared when the module is wrapped.
"""

from collections.abc import Sequence

import torch
from torch import nn

from pycomm.parallel.given import Tree
from pycomm.parallel.ground import comm

__all__ = ["NaiveDataParallel", "gather_and_broadcast"]


def gather_and_broadcast(flat: torch.Tensor, group: comm.Group) -> None:
    """In place: flat := sum over the group, added up by rank 0 in order of rank. flat: contiguous.
    Collective.
    """
    parts = comm.gather(flat, 0, group)
    if parts is not None:
        total = parts[0].to(torch.promote_types(flat.dtype, torch.float32), copy=True)  # 16 bits: round once
        for part in parts[1:]:
            total += part
        flat.copy_(total)
    comm.broadcast(flat, 0, group)


class NaiveDataParallel(nn.Module):
    """Wraps a module that every rank of the group has; forward is the module's own.

    At construction rank 0's parameters and buffers are copied to all (buffers are not followed afterwards).
    After backward, and before the optimizer's step, call `sync_gradients()`. Names in state_dict() begin with
    "module.", as with torch's DistributedDataParallel.
    group: None for the default one. Raises ValueError where the ranks' modules differ in size.
    """

    def __init__(self, module: nn.Module, group: comm.GroupLike = None) -> None:
        super().__init__()
        self.module, self.group = module, comm.as_group(group, "dp")
        tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
        self._check_equal_sizes(tensors)
        for tensor in tensors:
            whole = tensor.contiguous()
            comm.broadcast(whole, 0, self.group)
            if whole is not tensor:
                tensor.copy_(whole)

    def _check_equal_sizes(self, tensors: Sequence[torch.Tensor]) -> None:
        device = tensors[0].device if tensors else "cpu"
        own = torch.tensor([len(tensors), sum(tensor.numel() for tensor in tensors)], device=device)
        sizes = own.new_empty(2 * self.group.size)
        comm.all_gather(sizes, own, self.group)
        for rank, theirs in enumerate(sizes.view(-1, 2).tolist()):
            if theirs != own.tolist():
                raise ValueError(
                    f"[rank {self.group.rank}/{self.group.size}] NaiveDataParallel: {own[0]} parameters and "
                    f"buffers with {own[1]} elements here, {theirs[0]} with {theirs[1]} on rank {rank}. All "
                    "ranks must wrap the same module."
                )

    def forward(self, *args: Tree, **kwargs: Tree) -> Tree:
        return self.module(*args, **kwargs)

    def sync_gradients(self) -> None:
        """Gradients := their mean over the group. Collective, one gather and one broadcast for each dtype.

        A parameter without a gradient on some ranks counts as zero there; without one on all ranks it stays
        without.
        """
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for parameters in kinds.values():
            self._sync(parameters)

    @torch.no_grad()
    def _sync(self, parameters: Sequence[torch.Tensor]) -> None:
        first = parameters[0]
        used = torch.tensor([p.grad is not None for p in parameters], dtype=first.dtype, device=first.device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        # Who has a gradient travels in the same message.
        flat = torch.cat([used] + [grad.reshape(-1) for grad in grads])
        gather_and_broadcast(flat, self.group)
        used, *grads = flat.split([len(parameters)] + [parameter.numel() for parameter in parameters])
        for parameter, is_used, grad in zip(parameters, used.tolist(), grads, strict=True):
            if is_used:
                mean = grad.div_(self.group.size).view(parameter.shape)
                if parameter.grad is None:
                    parameter.grad = mean.clone()
                else:
                    parameter.grad.copy_(mean)
