"""Whether all ranks were given the same batch, found out by a sum that travels with other numbers.

Each rank makes a number m of its batch. Over n ranks, the numbers are equal exactly where
n * sum(m^2) = sum(m)^2, so the sums of m and of m^2 say it, and no rank needs a gather.
"""

import torch
from torch.utils._pytree import tree_leaves

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.batch import inputs_and_targets

__all__ = ["SameBatch"]

WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SameBatch:
    """The check of one step. batch: None where ranks have batches of their own, and nothing is checked; the
    numbers are summed all the same, so that ranks that were called in two ways do not wait for each other.
    """

    def __init__(self, batch, world, device):
        self.world = world  # Group of all ranks
        self.mark = None if batch is None else mark_of(batch)
        mark = float(self.mark or 0)
        self.numbers = torch.tensor([mark, mark**2], dtype=torch.float64, device=device)
        self.work = None  # the sum under way

    def start(self):
        """Sums the numbers over all ranks, for callers that do not send them along with others."""
        self.work = comm.all_reduce(self.numbers, self.world, async_op=True)

    def check(self, sums=None):
        """Raises ValueError, on every rank, where batches differ. sums: of `numbers`; None: after start()."""
        if sums is None:
            self.work.wait()
            sums = self.numbers
        if self.mark is not None and self.world.size * float(sums[1]) != float(sums[0]) ** 2:
            raise ValueError(
                f"[rank {self.world.rank}] step: the ranks were given different batches. Give every rank the "
                "whole batch, or say sharded=True when each data rank has its own; no parameter was changed"
            )


def mark_of(batch):
    """A number below 2^20 that two different batches hardly share: from the bits of all values, so that no
    rounding and no nan is in it.
    """
    mark = 0
    for leaf in tree_leaves(inputs_and_targets(batch)):
        if isinstance(leaf, torch.Tensor):
            values = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            bits = values.reshape(-1).contiguous().view(WHOLE[values.element_size()]).long()
            places = torch.arange(1, bits.numel() + 1, device=bits.device)
            # The product and the sum wrap around, in the same way everywhere.
            mark = mark * 31 + int((bits * (2 * places * places + 1)).sum())
    return (mark ^ mark >> 23 ^ mark >> 44) % (1 << 20)
