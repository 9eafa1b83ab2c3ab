"""The trial of rows_trial.py in the steps of a plan: once, before the first update with a batch that is cut.

    each rank    two rows of the batch; for sharded batches of ZeRO-3 those of the first data rank
    each rank    after the passes the trial
    all ranks    one all_reduce: whether a rank has found something; then the trial again, and this
    all ranks    where it is found each time: the sentence of the first rank that has one

[Note: equal forwards] Under zero=3 and tp a forward is collective, so a rank may not raise in it while others
wait. Where all have the whole batch, all take the same rows in the same shapes, so they raise alike. Where
ranks of zero=3 have rows of their own, those of the first are sent to all, or nothing is tried if their
shapes differ. Ranks of tp have the same rows anyway.

It is for whole models on whole sequences: not with pp, ep, ring, ulysses and megatron_sp.

Cost: three forwards of a few rows (two, as a rule) without gradients, and one all_reduce.
"""

import weakref
import zlib

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pycomm.parallel.ground import comm
from pycomm.parallel.run.prove_loss import raise_together
from pycomm.parallel.run.rows_trial import RowsTrial, leaves_of, tensors_in, two_rows

__all__ = ["RowsProof"]

AGAIN = 15  # with other random numbers, for a model that draws some

_tried = weakref.WeakSet()  # of Parallelized


class RowsProof:
    """Of one step. parts: Parallelized. options: of the step. inputs, targets: of the whole batch, or of this
    rank's rows.
    """

    def __init__(self, parts, options, inputs, targets):
        self.parts, self.options, self.batch = parts, options, (inputs, targets)
        several = parts.mesh.data.size * options.microbatches > 1
        is_cut = several or not options.update or not parts.window.is_empty
        is_whole = parts.stage_model is None and parts.split is None and parts.plan.ep == 1
        self.is_wanted = is_cut and is_whole and parts not in _tried
        self.rows, self.shapes = 0, {}  # of the first microbatch, and of what the model gave for it

    def note(self, output, microbatch):
        """What the model gave for a microbatch; the first is looked at."""
        if self.is_wanted and not self.rows:
            self.rows = _rows_in((microbatch.inputs, microbatch.targets))
            leaves = leaves_of(output, self.options.loss_fn)
            self.shapes = {where: leaf.shape for where, leaf in leaves.items()}

    def end(self):
        """After the passes. Collective over all ranks. Raises ValueError on all of them where the model mixes
        rows.
        """
        if not self.is_wanted:
            return
        parts, number = self.parts, 0
        trial = self._trial()
        found, draws = trial.run(number) if trial else (None, False)
        while self._is_found(found, draws, number):
            number += 1
            again, draws = trial.run(number) if trial else (None, False)
            found = found and again
        _tried.add(parts)

    def _is_found(self, found, draws, number):
        """Whether a rank has found something. Collective. Raises ValueError where it was found each time."""
        parts = self.parts
        told = torch.tensor([found is not None, draws], dtype=torch.float64, device=parts.device)
        comm.all_reduce(told, parts.mesh.world, dist.ReduceOp.MAX)
        is_found, draws = told.tolist()
        if is_found and number >= (AGAIN if draws else 1):
            raise_together(parts, found and self._sentence(found))
        return bool(is_found)

    def _trial(self):
        """None where nothing can be tried, on all ranks alike where forwards are collective."""
        parts, options = self.parts, self.options
        rows = _rows_in(self.batch)
        ends, few = two_rows(self.batch[0], rows), self._few(rows)
        batch = tree_map(
            lambda leaf: leaf[list(ends)] if isinstance(leaf, torch.Tensor) else leaf, self.batch
        )
        if options.sharded and parts.units is not None:
            batch = _shared(batch, few, parts)
        if batch is None:
            return None
        return RowsTrial(parts, options.loss_fn, batch, self.rows, self.shapes, few)

    def _few(self, rows):
        """Another number than that of a microbatch has, on this rank or another."""
        cuts = self.options.microbatches * (1 if self.options.sharded else self.parts.mesh.rows[0])
        return next(few for few in (2, 3, 4) if few not in (rows // cuts, -(-rows // cuts)))

    def _sentence(self, found):
        data, microbatches = self.parts.mesh.data.size, self.options.microbatches
        cuts = [
            *([f"over {data} ranks"] if data > 1 else []),
            *([f"into {microbatches} microbatches"] if microbatches > 1 else []),
        ]
        cuts = " and ".join(cuts) or "into calls"
        return (
            f"the model mixes rows of the batch: {found}. The batch is cut {cuts}, so each part would be "
            "mixed by itself, which is not what one process computes. Look for what goes over dim 0 (a "
            "mean, a softmax, a sort, statistics of the batch) or decides by all values (if x.mean() > "
            "0); par.verify names the module. Use nn.BatchNorm; or compute it before the step and give it "
            "to the model, a row for each row; or let the model compute it over all ranks, by a "
            "differentiable all_reduce and without microbatches; or use a plan that does not cut the "
            "batch. No parameter was changed"
        )


def _rows_in(batch):
    return len(tensors_in(batch)[0])


def _shared(batch, few, parts):
    """The rows of the first data rank on all of them, or None where shapes differ. Collective over them."""
    leaves, tree = tree_flatten(batch)
    tensors = tensors_in(leaves)
    shapes = repr((few, tree, [(tensor.dtype, tensor.shape) for tensor in tensors]))
    mark = zlib.crc32(shapes.encode())
    ends = torch.tensor([mark, -mark], dtype=torch.float64, device=parts.device)
    comm.all_reduce(ends, parts.mesh.data, dist.ReduceOp.MIN)
    if ends.sum() != 0:
        return None
    for tensor in tensors:
        comm.broadcast(tensor.reshape(-1).view(torch.uint8), 0, parts.mesh.data)
    return tree_unflatten(leaves, tree)
