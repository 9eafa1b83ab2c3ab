"""The check of checks/positions.py in a step, an evaluation and a prediction: before the passes, once.

Before them, because they change buffers, and because what the plan cannot do is refused before it costs time.
In a prediction there is no loss, so the first step or evaluation asks again.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from pycomm.parallel.checks.kept import kept
from pycomm.parallel.checks.positions import Runs, try_positions
from pycomm.parallel.ground import drawn
from pycomm.parallel.ground.batch import Microbatch
from pycomm.parallel.ground.modes import eager
from pycomm.parallel.ground.shared_state import SharedState
from pycomm.parallel.parts import Parallelized
from pycomm.parallel.run.loss import microbatch_loss
from pycomm.parallel.run.prove_loss import raise_together
from pycomm.parallel.run.router_loss import plain_loss
from pycomm.parallel.run.rows_stages import kept_stages, run_rows

__all__ = ["prove_positions"]

NAME = "positions"


def prove_positions(
    parts: Parallelized, microbatch: Microbatch, loss_fn: Callable[[Any, Any], torch.Tensor] | None
) -> None:
    """Collective over all ranks. loss_fn: None in a prediction. Raises ValueError on all of them where pieces
    of the sequence give something else than the whole.
    """
    known = parts.checks.of
    name = NAME if loss_fn is not None else f"{NAME} in predict"
    if parts.split is None or NAME in known or name in known:
        return

    def loss(output: Any, batch: Microbatch) -> torch.Tensor:
        return microbatch_loss(parts, output, batch, plain_loss(loss_fn))

    forward = functools.partial(_forward, parts, SharedState(parts.model.modules()))
    answer = try_positions(parts, microbatch, Runs(forward, loss if loss_fn is not None else None))
    if answer.state == "broken":
        raise_together(parts, answer.why)
    if answer.state == "held":
        parts.checks.held(name)
    else:
        why = (
            f"whether the model computes from pieces of the sequence what it computes from the whole: "
            f"{answer.why}. Compare the plan with one process by par.verify"
        )
        parts.checks.not_tried(name, why, parts.mesh.world.rank)


def _forward(
    parts: Parallelized, shared: SharedState, batch: Microbatch, number: int, take: Callable[[Any], None]
) -> list[Any]:
    """As checks/positions.py asks for it: in eval mode, and without a trace."""

    def around(run: Callable[[], Any], is_last: bool) -> tuple[Any]:
        drawn.pass_over(number, parts.device)
        output = run()
        if is_last:
            take(output)
        return (output,)

    with (
        kept_stages(parts),
        shared.kept(),
        kept(parts.model),
        parts.streams.kept(),
        parts.streams.recomputation(),
        drawn.kept(),
        eager(),
    ):
        for module in parts.model.modules():
            module.training = False
        return [given for (given,) in run_rows(parts, batch, around)]
