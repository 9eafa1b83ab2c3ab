"""The check of checks/positions.py in a step, an evaluation and a prediction: before the passes, once.

Before them, because they change buffers, and because what the plan cannot do is refused before it costs time.
In a prediction there is no loss, so the first step or evaluation asks again.
"""

from collections.abc import Callable
from typing import Any

import torch

from pycomm.parallel.checks.agree import raise_together
from pycomm.parallel.checks.positions import Asked, try_positions
from pycomm.parallel.ground.answers import State
from pycomm.parallel.ground.batch import Microbatch
from pycomm.parallel.parts import Parallelized
from pycomm.parallel.run.aside import Aside
from pycomm.parallel.run.loss import microbatch_loss
from pycomm.parallel.run.router_loss import plain_loss

__all__ = ["prove_positions"]

NAME = "positions"
_ADVICE = (
    "par.verify compares the plan with one process. If a piece of a sequence gives what the whole gives, you "
    f'may say so: Plan(trust=("{NAME}",))'
)


def prove_positions(
    parts: Parallelized, microbatch: Microbatch, loss_fn: Callable[[Any, Any], torch.Tensor] | None
) -> None:
    """Collective over all ranks. loss_fn: None in a prediction. Raises ValueError on all of them where pieces
    of the sequence give something else than the whole.
    """
    known = parts.checks.of
    name = NAME if loss_fn is not None else f"{NAME} in predict"
    if parts.split is None or not parts.checks.asks or NAME in known or name in known:
        return
    if NAME in parts.plan.trust:
        parts.checks.note(NAME, State.TRUSTED, "Plan(trust=...)")
        return

    def loss(output: Any, batch: Microbatch) -> torch.Tensor:
        return microbatch_loss(parts, output, batch, plain_loss(loss_fn))

    asked = Asked(Aside(parts, loss_fn), loss if loss_fn is not None else None)
    answer = try_positions(parts, microbatch, asked)
    if answer.state is State.BROKEN:
        raise_together(parts, answer.why)
    parts.checks.note(name, answer.state, answer.why, parts.mesh.world.rank, _ADVICE)
