"""One update at the end of a step, which is how every schedule but PipeDream's works.

    gradients     the last buckets arrive; tied weights of two stages are exchanged        pipeline/ties.py
    trained       what is trained for the first time gets buckets, when all ranks are known to look alike:
                  here where the checks travel early, else behind the numbers            zero/trained.py
    numbers       one all_reduce over all ranks of: squares of the gradient, loss, gradients that are not
                  finite, users of each parameter, checks of buffers that were written, of the batch and of
                  the optimizer's hyperparameters
    factor        of what the sum of several calls' gradients is a mean over               ground/window.py
                  1 / scale, where the loss was scaled                                     scaling.py
    clip          factor = min(1, clip / norm)
    optimizer     on what this rank owns; new values go to where they are computed with    zero/optimizer.py

Every element of the model is counted by exactly one rank in the norm.

[Note: alone] Where there is no norm and no other rank has gradients of this rank's parameters, the optimizer
waits for nobody, so a pipeline's ranks take their steps while others still work. The check of the batch and
of hyperparameters then travels during the passes. So it does in every pipeline: its ends exchange gradients
of tied weights, where one that does not update would be waited for.

A call with update=False ends after its passes: it adds gradients and sends none but those that are summed
after every microbatch (ZeRO 2 and 3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.losses import Result, own_loss, sum_losses
from pycomm.parallel.pipeline.ties import exchange_ties
from pycomm.parallel.run.scaling import Scaling
from pycomm.parallel.run.written_buffers import WrittenBuffers
from pycomm.parallel.zero.optimizer import step_optimizer

if TYPE_CHECKING:
    from pycomm.parallel.data.bucket import Bucket
    from pycomm.parallel.ground.same_batch import SameBatch
    from pycomm.parallel.parts import Parallelized
    from pycomm.parallel.run.prepare import Options

__all__ = ["OneUpdate"]


class Updates(Protocol):
    """What a step asks of updates: of OneUpdate, and of PipeDreamUpdates in pipeline/updates.py."""

    separate: bool  # each microbatch is a batch of its own
    scale: float  # of the loss, by a GradScaler
    weight: float  # what the loss is multiplied by before its backward, with the scale in it; from begin() on

    def begin(self, same: SameBatch, targets: float, microbatches: int) -> None:
        """Before the first pass. targets: how many count. microbatches: as many as there are."""

    def saving(self, stage: int, microbatch: int) -> contextlib.AbstractContextManager[None]:
        """Around a forward."""

    def using(self, stage: int, microbatch: int) -> contextlib.AbstractContextManager[None]:
        """Around a backward."""

    def sums_after(self, microbatch: int) -> bool:
        """Whether gradients are summed over the ranks after it."""

    def update(self, stage: int, microbatch: int) -> None:
        """After each backward."""

    def end(self, losses: Sequence[torch.Tensor]) -> Result:
        """After the last pass. losses: of this rank's microbatches."""


class _Sums(NamedTuple):
    """Over all ranks."""

    squares: torch.Tensor  # of the gradient
    bad: torch.Tensor  # gradients that are not finite
    loss: torch.Tensor
    used: list[float]  # by how many ranks, each parameter of the model


class OneUpdate:
    """options: of the step."""

    separate = False
    # From begin() on.
    same: SameBatch
    buffers: WrittenBuffers | None  # None where it is alone
    targets: float  # how many count
    last: int  # microbatch

    def __init__(self, parts: Parallelized, options: Options) -> None:
        self.parts, self.options = parts, options
        self.scaling = Scaling(options.scaler, parts.plan, parts.device)
        self.scale = self.scaling.scale
        self.weight = 1.0  # of the loss; from begin() on
        # see [Note: alone]
        self.alone = options.clip is None and parts.mesh.data.size == 1 and not self.scaling.is_on
        self.checks_early = self.alone or parts.plan.pp > 1

    def begin(self, same: SameBatch, targets: float, microbatches: int) -> None:
        self.same, self.targets, self.last = same, targets, microbatches - 1
        self.buffers = None if self.alone else WrittenBuffers(self.parts)
        self.weight = self.scale * self.parts.window.weight(targets, self.options.update, self.scale)
        if self.checks_early:
            same.start()

    def saving(self, stage: int, microbatch: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    using = saving

    def sums_after(self, microbatch: int) -> bool:
        return self.options.update and microbatch == self.last

    def update(self, stage: int, microbatch: int) -> None:
        """Nothing: the update comes in end()."""

    def end(self, losses: Sequence[torch.Tensor]) -> Result:
        for _, reducer in sorted(self.parts.reducers.items()):
            reducer.wait()
        self.parts.trained.check_kept_apart()
        if self.checks_early:
            self.same.check()
            self.parts.trained.take_in(self.options.update)
        window = self.parts.window
        if not self.options.update:
            result = self._end_waiting(losses)
            window.add(self.targets, self.scale)
            return result
        exchange_ties(self.parts.ties, self.parts.mesh.group("pp"))
        result = self._end_alone(losses) if self.alone else self._end_together(losses)
        window.discard()
        return result

    def _end_waiting(self, losses: Sequence[torch.Tensor]) -> Result:
        """No update: the gradients stay where they are."""
        if self.alone:
            return Result(sum_losses(losses, self.parts.mesh, self.parts.device))
        nothing = torch.zeros((), dtype=torch.float64, device=self.parts.device)
        loss = self._sum_numbers(nothing, nothing, losses).loss
        self.parts.trained.take_in(False)
        return Result(loss.clone())

    def _end_together(self, losses: Sequence[torch.Tensor]) -> Result:
        buckets = [bucket for reducer in self.parts.reducers.values() for bucket in reducer.buckets]
        squares, bad, loss, used = self._sum_numbers(*self._found_in(buckets), losses)
        if self.parts.trained.has_new:
            more = torch.stack(self._found_in(self.parts.trained.take_in(True)))
            comm.all_reduce(more, self.parts.mesh.world)
            squares, bad = squares + more[0], bad + more[1]
        norm = None if self.options.clip is None else squares.sqrt() * self._factor
        skipped = self.scaling.is_on and bool(bad > 0)
        if not skipped:
            # Like a single process, the optimizer passes over parameters that got no gradient on any rank.
            names = zip(self.parts.original.names, used, strict=True)
            self._step_optimizer({name for name, users in names if not users}, norm)
        if self.scaling.is_on:
            self.scaling.end(skipped)
        return Result(loss.clone(), norm)

    def _sum_numbers(self, squares: torch.Tensor, bad: torch.Tensor, losses: Sequence[torch.Tensor]) -> _Sums:
        assert self.buffers is not None  # what is alone sums nothing
        head = torch.stack([squares, bad, own_loss(losses, self.parts.mesh, self.parts.device)])
        pieces = [head, self._used(), self.buffers.numbers(), self.same.numbers]
        numbers = torch.cat(pieces)
        comm.all_reduce(numbers, self.parts.mesh.world)
        head, used, buffers, same = numbers.split([len(piece) for piece in pieces])
        if not self.checks_early:
            self.same.check(same)
        self.buffers.check(buffers)
        squares, bad, loss = head
        return _Sums(squares, bad, loss, used.tolist())

    def _found_in(self, buckets: Sequence[Bucket]) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of squares of the gradients, how many are not finite), 0 where they are not asked for: 0-dim
        float64 tensors.
        """
        squares, bad = torch.zeros(2, dtype=torch.float64, device=self.parts.device)
        for bucket in buckets:
            if self.options.clip is not None:
                squares += bucket.norm_squared()
            if self.scaling.is_on:
                bad += bucket.not_finite()
        return squares, bad

    @property
    def _factor(self) -> float:
        """From the sums of gradients as they are to the gradient of the mean loss."""
        return self.parts.window.factor(self.targets) / self.scale

    def _end_alone(self, losses: Sequence[torch.Tensor]) -> Result:
        parts = self.parts
        # The other stage may have used what is tied.
        kept = {info.name for info in parts.infos if info.tied} & parts.trained.open
        names = zip(parts.original.names, self._used().tolist(), strict=True)
        self._step_optimizer({name for name, used in names if not used} - kept)
        return Result(sum_losses(losses, parts.mesh, parts.device))

    def _step_optimizer(self, unused: set[str], norm: torch.Tensor | None = None) -> None:
        clip = self.options.clip
        factor = None if norm is None or clip is None else clip_factor(norm, clip)
        if self._factor != 1.0:
            one = torch.ones((), dtype=torch.float64, device=self.parts.device)
            factor = (one if factor is None else factor) * self._factor
        opt = self.parts.opt
        assert opt is not None  # a step has one
        step_optimizer(opt, self.parts.all_shards, factor, unused)

    def _used(self) -> torch.Tensor:
        """1 for each parameter of the model that got a gradient on this rank, in the order of the names."""
        used = set[int]().union(*(reducer.used for reducer in self.parts.reducers.values()))
        names = {info.name for info in self.parts.infos if id(info.param) in used}
        flags = [name in names for name in self.parts.original.names]
        return torch.tensor(flags, dtype=torch.float64, device=self.parts.device)


def clip_factor(norm: torch.Tensor, clip: float) -> torch.Tensor | None:
    """What gradients are multiplied by, 0-dim; None: by nothing."""
    factor = (clip / (norm + 1e-6)).clamp(max=1.0)
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return None  # saves a pass over all gradients. On a device, finding out would mean to wait for it.
    return factor
