"""One update at the end of a step, which is how every schedule but PipeDream's works.

    gradients     the last buckets arrive; tied weights of two stages are exchanged        pipeline/ties.py
    numbers       one all_reduce over all ranks of: squares of the gradient, loss, check of the batch,
                  users of each parameter
    clip          factor = min(1, clip / norm)
    optimizer     on what this rank owns; new values go to where they are computed with    zero/optimizer.py

Every element of the model is counted by exactly one rank in the norm.

[Note: alone] Where there is no norm and no other rank has gradients of this rank's parameters, the optimizer
waits for nobody, so a pipeline's ranks take their steps while others still work. The check of the batch then
travels during the passes.

What a step asks of updates, here and in pipeline/updates.py:

    separate               each microbatch is a batch of its own
    begin(same)            before the first pass; same: SameBatch
    saving, using          contexts around the forward and the backward of (stage, microbatch)
    sums_after(microbatch) whether gradients are summed over the ranks after it
    update(stage, microbatch)   after each backward
    end(losses)            after the last pass: Result
"""

import contextlib

import torch

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.losses import Result, own_loss, sum_losses
from pycomm.parallel.pipeline.ties import exchange_ties
from pycomm.parallel.zero.optimizer import step_optimizer

__all__ = ["OneUpdate"]


class OneUpdate:
    """parts: Parallelized. options: of the step."""

    separate = False

    def __init__(self, parts, options):
        self.parts, self.options = parts, options
        self.alone = options.clip is None and parts.mesh.data.size == 1  # see [Note: alone]
        self.same = None  # SameBatch, from begin()

    def begin(self, same):
        self.same = same
        if self.alone:
            same.start()

    def saving(self, stage, microbatch):
        return contextlib.nullcontext()

    using = saving

    def sums_after(self, microbatch):
        return microbatch == self.options.microbatches - 1

    def update(self, stage, microbatch):
        """Nothing: the update comes in end()."""

    def end(self, losses):
        for _, reducer in sorted(self.parts.reducers.items()):
            reducer.wait()
        exchange_ties(self.parts.ties, self.parts.mesh.group("pp"))
        return self._end_alone(losses) if self.alone else self._end_together(losses)

    def _end_together(self, losses):
        parts = self.parts
        squares = torch.zeros((), dtype=torch.float64, device=parts.device)
        if self.options.clip is not None:
            for reducer in parts.reducers.values():
                for bucket in reducer.buckets:
                    squares += bucket.norm_squared()
        head = torch.stack([squares, own_loss(losses, parts.mesh, parts.device)])
        numbers = torch.cat([head, self.same.numbers, self._used()])
        comm.all_reduce(numbers, parts.mesh.world)
        self.same.check(numbers[2:4])
        norm = None if self.options.clip is None else numbers[0].sqrt()
        # Like a single process, the optimizer passes over parameters that got no gradient on any rank.
        names = zip(parts.original.names, numbers[4:].tolist(), strict=True)
        self._step_optimizer({name for name, users in names if not users}, norm)
        return Result(numbers[1].clone(), norm)

    def _end_alone(self, losses):
        parts = self.parts
        self.same.check()
        kept = {info.name for info in parts.infos if info.tied}  # the other stage may have used it
        names = zip(parts.original.names, self._used().tolist(), strict=True)
        self._step_optimizer({name for name, used in names if not used} - kept)
        return Result(sum_losses(losses, parts.mesh, parts.device))

    def _step_optimizer(self, unused, norm=None):
        factor = None if norm is None else clip_factor(norm, self.options.clip)
        step_optimizer(self.parts.opt, self.parts.all_shards, factor, unused)

    def _used(self):
        """1 for each parameter of the model that got a gradient on this rank, in the order of the names."""
        used = set().union(*(reducer.used for reducer in self.parts.reducers.values()))
        names = {info.name for info in self.parts.infos if id(info.param) in used}
        flags = [name in names for name in self.parts.original.names]
        return torch.tensor(flags, dtype=torch.float64, device=self.parts.device)


def clip_factor(norm, clip):
    """What gradients are multiplied by, 0-dim; None: by nothing."""
    factor = (clip / (norm + 1e-6)).clamp(max=1.0)
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return None  # saves a pass over all gradients. On a device, finding out would mean to wait for it.
    return factor
