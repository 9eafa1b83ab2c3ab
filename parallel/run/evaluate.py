"""The mean loss of a batch without gradients: the stages one after the other, for each microbatch."""

import torch

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.losses import sum_losses
from pycomm.parallel.run.loss import microbatch_loss, sharded_logits
from pycomm.parallel.run.passes import agree, forward_pass, run_stage, shape_of_input
from pycomm.parallel.run.prepare import prepare
from pycomm.parallel.zero.units import Phase

__all__ = ["run_evaluation"]


@torch.no_grad()
def run_evaluation(parts, batch, options):
    """parts: Parallelized. Returns the loss, a float64 tensor without dimensions, on every rank."""
    losses = []
    microbatches, _ = prepare(parts, batch, options)
    agree(parts, microbatches)
    with sharded_logits(parts.tensor.head, options.loss_fn):
        for number, microbatch in enumerate(microbatches):
            losses += _evaluate(parts, number, microbatch, options.loss_fn)
        return sum_losses(losses, parts.mesh, parts.device)


def _evaluate(parts, number, microbatch, loss_fn):
    """[loss] on the ranks of the last stage, [] on others."""
    stages, pp = parts.stages, parts.mesh.group("pp")
    losses, handed = [], None
    for stage in stages.mine:
        if stage > 0 and stage - 1 not in stages.mine:
            likes = shape_of_input(parts, stage, microbatch)
            handed = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in likes]
            _wait_all(comm.irecv, handed, stages.placement[stage - 1], pp)
        with forward_pass(parts, Phase.EVALUATE, stage, number):
            handed = run_stage(parts, stage, microbatch, handed)
            if stage == stages.last:
                losses.append(microbatch_loss(parts, handed, microbatch, loss_fn))
        if stage < stages.last and stage + 1 not in stages.mine:
            handed = _wait_all(comm.isend, handed, stages.placement[stage + 1], pp)
    return losses


def _wait_all(transfer, tensors, peer, pp):
    tensors = [tensor.contiguous() for tensor in tensors]
    for work in [transfer(tensor, peer, pp, place) for place, tensor in enumerate(tensors)]:
        work.wait()
