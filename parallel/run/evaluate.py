"""The mean loss of a batch without gradients, and other means: the stages one after the other, for each
microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from pycomm.parallel.checks.exchange import Cuts
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.losses import own_loss
from pycomm.parallel.run.loss import microbatch_loss, sharded_logits
from pycomm.parallel.run.passes import (
    Tensors,
    agree,
    forward_pass,
    gathering_in,
    handed_on,
    run_stage,
    shape_of_input,
)
from pycomm.parallel.run.prepare import Options, prepare
from pycomm.parallel.run.questions import Questions
from pycomm.parallel.zero.units import Phase

if TYPE_CHECKING:
    from pycomm.parallel.checks.measures import Measure
    from pycomm.parallel.given import Batch, Tree
    from pycomm.parallel.ground.batch import Microbatch
    from pycomm.parallel.ground.comm import Group
    from pycomm.parallel.parts import Parallelized

__all__ = ["each_stage", "run_evaluation"]


@torch.no_grad()
def run_evaluation(
    parts: Parallelized, batch: Batch, options: Options, metrics: Mapping[str, Measure] | None = None
) -> list[torch.Tensor]:
    """metrics: {name: (output, targets) -> mean}. Returns the loss and the metrics, in order: float64 tensors
    without dimensions, on every rank.
    """
    with parts.writes.inside("evaluate"):
        return _evaluated(parts, batch, options, metrics)


def _evaluated(
    parts: Parallelized, batch: Batch, options: Options, metrics: Mapping[str, Measure] | None
) -> list[torch.Tensor]:
    questions = Questions(parts, Cuts(options.microbatches, options.sharded), options, metrics)
    counted = prepare(parts, batch, options, questions.rows)
    questions.ask(*counted.batch, counted.first)
    measures = questions.measures
    found: dict[str, list[torch.Tensor]] = {name: [] for name in measures}
    with sharded_logits(parts.tensor.head, questions.takes_cut):
        pieces = {name: counted.by(questions.counter_of(name))[0] for name in measures}
        microbatches = pieces["loss_fn"]
        agree(parts, microbatches)
        for number, microbatch in enumerate(microbatches):

            def measure(output: Tree, number: int = number) -> None:
                for name, each in measures.items():
                    found[name].append(microbatch_loss(parts, output, pieces[name][number], each))

            with gathering_in(parts, microbatches):
                each_stage(parts, number, microbatch, measure)
    losses = [own_loss(values, parts.mesh, parts.device) for values in found.values()]
    losing = torch.full_like(losses[0], parts.writes.problem is not None)
    numbers = torch.stack([*losses, losing])
    comm.all_reduce(numbers, parts.mesh.world)
    *losses, losing = [each.clone() for each in numbers]
    if losing:
        parts.writes.refuse("evaluate", parts.mesh.world.rank)
    return losses


def each_stage(
    parts: Parallelized, number: int, microbatch: Microbatch, take: Callable[[Tree], object]
) -> None:
    """Forward of this rank's stages; take(output) on the ranks of the last one."""
    stages, pp = parts.stages, parts.mesh.group("pp")
    handed: Tensors | None = None
    for stage in stages.mine:
        if stage > 0 and stage - 1 not in stages.mine:
            likes = shape_of_input(parts, stage, microbatch)
            handed = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in likes)
            _wait_all(comm.irecv, handed, stages.placement[stage - 1], pp)
        with forward_pass(parts, Phase.EVALUATE, stage, number):
            handed = run_stage(parts, stage, microbatch, handed)
            if stage == stages.last:
                take(handed)
            else:
                handed = handed_on(parts, handed)
        if stage < stages.last and stage + 1 not in stages.mine:
            _wait_all(comm.isend, handed, stages.placement[stage + 1], pp)
            handed = None


def _wait_all(
    transfer: Callable[[torch.Tensor, int, Group, int], comm.Work],
    tensors: Iterable[torch.Tensor],
    peer: int,
    pp: Group,
) -> None:
    tensors = [tensor.contiguous() for tensor in tensors]
    for work in [transfer(tensor, peer, pp, number) for number, tensor in enumerate(tensors)]:
        work.wait()
