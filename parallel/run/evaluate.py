"""The mean loss of a batch without gradients, and other means: the stages one after the other, for each
microbatch.
"""

import torch

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.batch import count_targets
from pycomm.parallel.ground.losses import own_loss
from pycomm.parallel.run.loss import microbatch_loss, sharded_logits
from pycomm.parallel.run.loss_trial import Verdict, try_loss
from pycomm.parallel.run.passes import agree, forward_pass, handed_on, run_stage, shape_of_input
from pycomm.parallel.run.prepare import place, prepare
from pycomm.parallel.run.prove_loss import faults_of, kept_rows, numbers_of, refuse_no_mean
from pycomm.parallel.run.prove_positions import prove_positions
from pycomm.parallel.run.prove_rows import RowsProof
from pycomm.parallel.run.router_loss import plain_loss
from pycomm.parallel.tensor import cross_entropy
from pycomm.parallel.zero.units import Phase

__all__ = ["each_stage", "run_evaluation"]


@torch.no_grad()
def run_evaluation(parts, batch, options, metrics=None):
    """parts: Parallelized. metrics: {name: (output, targets) -> mean}. Returns the loss and the metrics, in
    order: float64 tensors without dimensions, on every rank.
    """
    metrics = metrics or {}
    measures = {"loss_fn": options.loss_fn}
    measures |= {f"the metric {name!r}": _as_tensor(metric) for name, metric in metrics.items()}
    found = [[] for _ in measures]
    microbatches, _ = prepare(parts, batch, options)
    trial, rows = _Trial(parts, options, measures), RowsProof(parts, options, measures)
    prove_positions(parts, microbatches[0], options.loss_fn)
    agree(parts, microbatches)
    with sharded_logits(parts.tensor.head, options.loss_fn if not metrics else None):
        rows.begin(*place(parts, batch))
        for number, microbatch in enumerate(microbatches):

            def measure(output, microbatch=microbatch):
                rows.note(output, microbatch)
                trial.note(output, microbatch)
                for measure, values in zip(measures.values(), found, strict=True):
                    values.append(microbatch_loss(parts, output, microbatch, measure))

            each_stage(parts, number, microbatch, measure)
        rows.end()
    verdict = trial.verdict(place(parts, batch)[1])
    faults = torch.tensor(faults_of(verdict), dtype=torch.float64, device=parts.device)
    losses = torch.stack([own_loss(values, parts.mesh, parts.device) for values in found])
    sums = torch.cat([losses, faults])
    comm.all_reduce(sums, parts.mesh.world)
    refuse_no_mean(parts, verdict, sums[-2:].tolist(), trial.numbers)
    return [each.clone() for each in sums[:-2]]


class _Trial:
    """Whether the loss and the metrics are means (loss_trial.py). measures: {name: loss or metric}."""

    def __init__(self, parts, options, measures):
        self.parts, self.counter, self.rows = parts, options.count or count_targets, None
        self.numbers = []  # in the outputs of the microbatches
        is_cut = parts.mesh.data.size * options.microbatches > 1
        pairs = measures.items() if is_cut else ()
        self.pairs = [pair for pair in pairs if plain_loss(pair[1]) is not cross_entropy]

    def note(self, output, microbatch):
        """What the model gave for a microbatch; two rows of the first are kept."""
        if self.pairs:
            self.numbers.append(numbers_of(self.parts, output, microbatch))
            self.rows = self.rows or kept_rows(self.parts, output, microbatch)

    def verdict(self, targets):
        """The first that has a fault, for `targets` as the caller of evaluate gave them."""
        verdicts = []
        if self.rows is not None:
            with self.parts.streams.kept():
                verdicts = [
                    try_loss(each, self.rows, targets, self.counter, name) for name, each in self.pairs
                ]
        return next((each for each in verdicts if each.fault is not None), Verdict())


def _as_tensor(measure):
    """A metric may give a number too."""
    return lambda output, targets: torch.as_tensor(measure(output, targets), dtype=torch.float64)


def each_stage(parts, number, microbatch, take):
    """Forward of this rank's stages; take(output) on the ranks of the last one."""
    stages, pp = parts.stages, parts.mesh.group("pp")
    handed = None
    for stage in stages.mine:
        if stage > 0 and stage - 1 not in stages.mine:
            likes = shape_of_input(parts, stage, microbatch)
            handed = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in likes]
            _wait_all(comm.irecv, handed, stages.placement[stage - 1], pp)
        with forward_pass(parts, Phase.EVALUATE, stage, number):
            handed = run_stage(parts, stage, microbatch, handed)
            if stage == stages.last:
                take(handed)
            else:
                handed = handed_on(parts, handed)
        if stage < stages.last and stage + 1 not in stages.mine:
            handed = _wait_all(comm.isend, handed, stages.placement[stage + 1], pp)


def _wait_all(transfer, tensors, peer, pp):
    tensors = [tensor.contiguous() for tensor in tensors]
    for work in [transfer(tensor, peer, pp, number) for number, tensor in enumerate(tensors)]:
        work.wait()
