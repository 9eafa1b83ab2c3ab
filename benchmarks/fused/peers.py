"""A group as a user has it, native or torch's, with the four calls that the unfused forms need. Parts are equal."""

import torch.distributed as dist


class Native:
    """A pycomm.Communicator."""

    def __init__(self, comm):
        self.handle, self.rank, self.size = comm, comm.rank, comm.world_size

    def all_gather(self, x, out):
        self.handle.all_gather(x, out)

    def reduce_scatter(self, x, out):
        self.handle.reduce_scatter(x, out)

    def all_reduce(self, x):
        self.handle.all_reduce(x)

    def broadcast(self, x):
        self.handle.broadcast(x)

    def barrier(self):
        self.handle.barrier()


class Torch:
    """A torch process group."""

    def __init__(self, group):
        self.handle, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        # torch 2.13 renames these two.
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def all_gather(self, x, out):
        self._gather(out, x, group=self.handle)

    def reduce_scatter(self, x, out):
        self._scatter(out, x, group=self.handle)

    def all_reduce(self, x):
        dist.all_reduce(x, group=self.handle)

    def broadcast(self, x):
        dist.broadcast(x, dist.get_global_rank(self.handle, 0), group=self.handle)

    def barrier(self):
        dist.barrier(self.handle)


class Apart:
    """Collectives that wait for nobody: results of the right shape."""

    def __init__(self, size):
        self.size = size

    def all_gather(self, x, out):
        for part in out.chunk(self.size):
            part.copy_(x)

    def reduce_scatter(self, x, out):
        out.copy_(x.chunk(self.size)[0])

    def all_reduce(self, x):
        pass


class Peers:
    """A rank's groups. ours: of pycomm; torch's: by the name of their backend, "gloo" or "nccl". device: of the tensors."""

    def __init__(self, ours, others, device, *, own_gpu=False):
        """own_gpu: no other rank of the group uses this rank's GPU."""
        self.ours, self.others, self.device, self.own_gpu = ours, others, device, own_gpu
        self.rank, self.size = ours.rank, ours.size
