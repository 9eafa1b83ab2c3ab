"""PipeDream's updates: each stage takes a step after every backward, with the gradient of one microbatch.

    rank 0 of 2     F0 F1 B0 U0 F2 B1 U1 F3 ...        U: sum over the data ranks, optimizer of this stage

Each microbatch is a batch of its own, and goes backward through the weights of its forward (pipedream.py).
The check that all ranks have the same batch and the same hyperparameters comes before the first update, which
could not be taken back.

Refused are what needs the whole gradient at one time, or weights that are equal on two stages.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pycomm.parallel.ground.losses import Result, sum_losses
from pycomm.parallel.pipeline.pipedream import WeightStash

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from pycomm.parallel.data.reducer import Reducer
    from pycomm.parallel.ground.mesh import Mesh
    from pycomm.parallel.ground.same_batch import SameBatch
    from pycomm.parallel.run.prepare import Options

__all__ = ["PipeDreamUpdates", "refuse_tied_weights"]


def refuse_tied_weights(model: nn.Module) -> None:
    parameters = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    if len({id(parameter) for parameter in parameters}) != len(parameters):
        raise ValueError(
            'Plan(schedule="pipedream"): stages update at different times, so weights tied between modules '
            "cannot stay equal"
        )


class PipeDreamUpdates:
    """What a step asks of updates (run/updates.py), for one step.

    reducers: stage -> Reducer. take_step: stage -> None, one step of the stage's optimizer. Raises ValueError
    for a clip and for gradients that are to wait.
    """

    separate = True
    weight = scale = 1.0  # of the loss
    microbatches: int  # from begin() on

    def __init__(
        self,
        reducers: Mapping[int, Reducer],
        take_step: Callable[[int], object],
        mesh: Mesh,
        device: torch.device,
        options: Options,
    ) -> None:
        if options.clip is not None:
            raise ValueError(
                f'step(clip={options.clip!r}): with schedule "pipedream" the stages step one by one, so '
                "there is no norm of the whole gradient. Use clip=None, or another schedule"
            )
        if not options.update:
            raise ValueError(
                'step(update=False): with schedule "pipedream" every microbatch is an update of its own, so '
                "no gradients wait for a later call. Give one call all microbatches, or use another schedule"
            )
        if options.scaler is not None and options.scaler.is_enabled():
            raise ValueError(
                'step(scaler=...): with schedule "pipedream" the stages step one by one, so that they cannot '
                "leave a step out together. Use bf16 without a scaler, or another schedule"
            )
        self.reducers, self.take_step = reducers, take_step
        self.mesh, self.device = mesh, device

    @functools.cached_property
    def stashes(self) -> dict[int, WeightStash]:
        """Made by the first pass."""
        return {stage: WeightStash(reducer.params) for stage, reducer in self.reducers.items()}

    def begin(self, same: SameBatch, targets: float, microbatches: int) -> None:
        self.microbatches = microbatches
        same.start()
        same.check()

    def saving(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        return self.stashes[stage].saving(microbatch)

    def using(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        return self.stashes[stage].using(microbatch)

    def sums_after(self, microbatch: int) -> bool:
        return True

    def update(self, stage: int, microbatch: int) -> None:
        self.reducers[stage].wait()
        self.stashes[stage].drop(microbatch)
        self.stashes[stage].detach_from_stash()
        self.take_step(stage)
        self.reducers[stage].zero_grad()

    def end(self, losses: Sequence[torch.Tensor]) -> Result:
        """The loss is the mean of the microbatches' means."""
        return Result(sum_losses(losses, self.mesh, self.device) / self.microbatches)
