"""The trials of rows_trial.py and loss_of_rows.py in a step, an evaluation and a prediction: once for each
mode of the model (training, eval) and each kind of result, with the first batch that is cut.

    each rank    two rows of the batch; for sharded batches of ZeRO-3 those of the first data rank
    each rank    the trial of rows; it also tells where outputs have their rows
    all ranks    after the passes one all_reduce: whether a rank has found something; then again, and this
    all ranks    where numbers in the output may be losses the trial of the loss, in the same way
    all ranks    where it is found each time: the sentence of the first rank that has one

[Note: equal forwards] Under zero=3 and tp a forward is collective, so a rank may not raise in it while others
wait. Where all have the whole batch, all take the same rows in the same shapes, so they raise alike. Where
ranks of zero=3 have rows of their own, those of the first are sent to all, or nothing is tried if their
shapes differ. Ranks of tp have the same rows anyway.

[Note: before or after] The trial is made before the passes, which change buffers, and whose outputs are cut
into rows where it tells; where forwards are collective (tp, pp, zero=3) after them: a rank that raises
in its forward does so in its pass, and not in a trial that others wait for. Then outputs are cut into rows
where their sizes allow.

Under pp the rows go through all stages (rows_stages.py). It is for whole sequences and all experts: not with
ep, ring, ulysses and megatron_sp.

Cost: three forwards of a few rows without gradients, and one all_reduce; five forwards and one all_reduce
more where the output has numbers of all rows. Later a look into a set.
"""

import weakref
import zlib

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.batch import count_targets
from pycomm.parallel.run.loss_of_rows import LossOfRows
from pycomm.parallel.run.prove_loss import raise_together
from pycomm.parallel.run.rows_layout import note_layouts
from pycomm.parallel.run.rows_trial import RowsTrial, tensors_in, two_rows

__all__ = ["RowsProof"]

AGAIN = 15  # with other random numbers, for a model that draws some

_tried = weakref.WeakKeyDictionary()  # Parallelized -> {(whether in training, names of the results)}


class RowsProof:
    """Of one step, evaluation or prediction. parts: Parallelized. options: of it. measures: {name: (output,
    targets) -> number} of what comes of it; None: the output itself. is_cut: whether other batches take part,
    too.
    """

    def __init__(self, parts, options, measures, is_cut=False):
        self.parts, self.options, self.measures = parts, options, measures
        # Stages run together before it is known that all ranks were called alike (update=).
        is_cut = is_cut and parts.stage_model is None or parts.mesh.data.size * options.microbatches > 1
        is_whole = parts.split is None and parts.plan.ep == 1
        self.key = parts.model.training, None if measures is None else tuple(measures)
        self.is_wanted = is_cut and is_whole and self.key not in _tried.get(parts, ())
        self.trial, self.of_loss = None, None
        self.is_early = parts.stage_model is None and parts.units is None and parts.plan.tp == 1

    def begin(self, inputs, targets):
        """Before the passes. inputs, targets: of the whole batch, or of this rank's rows. Collective where
        the step is sharded. See [Note: before or after].
        """
        if not self.is_wanted:
            return
        parts, options = self.parts, self.options
        rows, counter = len(tensors_in((inputs, targets))[0]), options.count or count_targets
        ends, few = two_rows(inputs, rows), self._few(rows)
        batch = tree_map(
            lambda leaf: leaf[list(ends)] if isinstance(leaf, torch.Tensor) else leaf, (inputs, targets)
        )
        if options.sharded and parts.units is not None:
            batch = _shared(batch, few, parts)
        if batch is not None:
            measures = None if self.measures is None else tuple(self.measures.values())
            self.trial = RowsTrial(parts, measures, batch, few)
            self.of_loss = LossOfRows(self.trial, counter, self.measures or {})
            if self.is_early:
                self.trial.begin()

    def note(self, output, microbatch):
        """What the model gave for a microbatch; the first is looked at."""
        if self.trial and not self.trial.rows:
            self.trial.see(output, len(tensors_in((microbatch.inputs, microbatch.targets))[0]))
            if self.is_early:
                self._find_layouts()

    def end(self):
        """After the passes. Collective over all ranks. Raises ValueError on all of them where the model mixes
        rows.
        """
        if not self.is_wanted:
            return
        if self.trial and not self.is_early:
            self.trial.begin()
            self._find_layouts()
        if self._confirm(self.trial, bool(self.of_loss and self.of_loss.is_wanted)):
            self._confirm(self.of_loss)
        _tried.setdefault(self.parts, set()).add(self.key)

    def _find_layouts(self):
        self.trial.find_layouts()
        if self.trial.layouts is not None:
            note_layouts(self.parts, self.trial.layouts)

    def _confirm(self, trial, wants_more=False):
        """Runs a trial, and again as long as a rank has found something. trial: None where there is none.
        Returns whether a rank wants more. Collective. Raises ValueError where it was found each time.
        """
        parts, number, found = self.parts, 0, None
        while True:
            again, draws = trial.run(number) if trial else (None, False)
            found = found and again if number else again
            told = [found is not None, draws, wants_more]
            told = torch.tensor(told, dtype=torch.float64, device=parts.device)
            comm.all_reduce(told, parts.mesh.world, dist.ReduceOp.MAX)
            is_found, draws, wanted = told.tolist()
            if not is_found:
                return bool(wanted)
            if number >= (AGAIN if draws else 1):
                raise_together(parts, found and self._sentence(found, trial is self.of_loss))
            number += 1

    def _few(self, rows):
        """Another number than that of a microbatch has, on this rank or another."""
        cuts = self.options.microbatches * (1 if self.options.sharded else self.parts.mesh.rows[0])
        return next(few for few in (2, 3, 4) if few not in (rows // cuts, -(-rows // cuts)))

    def _sentence(self, found, of_loss):
        data, microbatches = self.parts.mesh.data.size, self.options.microbatches
        cuts = [
            *([f"over {data} ranks"] if data > 1 else []),
            *([f"into {microbatches} microbatches"] if microbatches > 1 else []),
        ]
        cuts = f"The batch is cut {' and '.join(cuts) or 'into calls'}"
        unchanged = "" if self.measures is None else ". No parameter was changed"
        if of_loss:
            return (
                f"the loss of a batch cannot be put together from those of its parts: {found}. {cuts}, and "
                "each part would have a number of its own. Let the model return what the number is computed "
                "from, with a row for each row, and compute a mean over the targets that count in loss_fn; "
                f"or use a plan that does not cut the batch{unchanged}"
            )
        return (
            f"the model mixes rows of the batch: {found}. {cuts}, so each part would be "
            "mixed by itself, which is not what one process computes. Look for what goes over dim 0 (a "
            "mean, a softmax, a sort, statistics of the batch) or decides by all values (if x.mean() > "
            "0); par.verify names the module. Use nn.BatchNorm; or compute it before the step and give it "
            "to the model, a row for each row; or let the model compute it over all ranks, by a "
            "differentiable all_reduce and without microbatches; or use a plan that does not cut the "
            f"batch{unchanged}"
        )


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
