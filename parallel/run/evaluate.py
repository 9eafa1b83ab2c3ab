"""The mean loss of a batch without gradients, and other means: the stages one after the other, for each
microbatch.
"""

import torch

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.losses import own_loss
from pycomm.parallel.run.loss import microbatch_loss, sharded_logits
from pycomm.parallel.run.passes import agree, forward_pass, handed_on, run_stage, shape_of_input
from pycomm.parallel.run.prepare import prepare
from pycomm.parallel.run.prove_glue import prove_glue
from pycomm.parallel.zero.units import Phase

__all__ = ["each_stage", "run_evaluation"]


@torch.no_grad()
def run_evaluation(parts, batch, options, metrics=None):
    """parts: Parallelized. metrics: {name: (output, targets) -> mean}. Returns the loss and the metrics, in
    order: float64 tensors without dimensions, on every rank.
    """
    measures = [options.loss_fn, *(_as_tensor(measure) for measure in (metrics or {}).values())]
    found = [[] for _ in measures]
    microbatches, _ = prepare(parts, batch, options)
    agree(parts, microbatches)
    with sharded_logits(parts.tensor.head, options.loss_fn if not metrics else None):
        for number, microbatch in enumerate(microbatches):

            def measure(output, microbatch=microbatch):
                for measure, values in zip(measures, found, strict=True):
                    values.append(microbatch_loss(parts, output, microbatch, measure))

            each_stage(parts, number, microbatch, measure)
    sums = torch.stack([own_loss(values, parts.mesh, parts.device) for values in found])
    comm.all_reduce(sums, parts.mesh.world)
    return [each.clone() for each in sums]


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
    prove_glue(parts, microbatch)


def _wait_all(transfer, tensors, peer, pp):
    tensors = [tensor.contiguous() for tensor in tensors]
    for work in [transfer(tensor, peer, pp, place) for place, tensor in enumerate(tensors)]:
        work.wait()
