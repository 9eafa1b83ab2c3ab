"""What is asked of the model and of its losses before a batch is cut: all that a step, an evaluation and a
prediction know of the checks.

    heard          numbers of this rank's rows travel with the counts of targets         prepare.py
    ask            positions first (checks/positions.py): a plan that cannot cut the sequence needs no rows;
                   then rows and losses (checks/cut.py)
    counter_of     what the mean of a measure runs over, from then on

Both before the passes: these change buffers, and what the plan cannot do is refused before it costs time.
In a prediction there is no loss, so the first step or evaluation asks for positions again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from pycomm.parallel.checks.agree import raise_together
from pycomm.parallel.checks.cut import BatchCheck
from pycomm.parallel.checks.exchange import Cuts
from pycomm.parallel.checks.measures import Measure
from pycomm.parallel.checks.positions import try_positions
from pycomm.parallel.ground.answers import State
from pycomm.parallel.ground.batch import Microbatch
from pycomm.parallel.parts import Parallelized
from pycomm.parallel.run.aside import Aside
from pycomm.parallel.run.loss import microbatch_loss, sharded_logits
from pycomm.parallel.run.prepare import Options
from pycomm.parallel.run.router_loss import Loss, plain_loss

if TYPE_CHECKING:
    from pycomm.parallel.checks.choice import Count
    from pycomm.parallel.given import LossFunction, Tree

__all__ = ["Questions"]

NAME = "positions"
_ADVICE = (
    "par.verify compares the plan with one process. If a piece of a sequence gives what the whole gives, you "
    f'may say so: Plan(trust=("{NAME}",))'
)


class Questions:
    """options: None in a prediction, whose result is the output itself. metrics: {name: (output, targets) ->
    number}, beside the loss. measures: {what a sentence calls it: the loss, or a metric}.
    """

    def __init__(
        self, parts: Parallelized, cuts: Cuts, options: Options | None, metrics: Mapping[str, Measure] | None
    ) -> None:
        self.parts, self.loss_fn = parts, options.loss_fn if options else None
        self.measures: dict[str, Loss] = {"loss_fn": options.loss_fn} if options else {}
        self.measures |= {f"the metric {name!r}": _as_tensor(each) for name, each in (metrics or {}).items()}
        # A head that tp has cut leaves its logits cut for a loss that takes them, if nobody else wants them.
        self.takes_cut = None if metrics else self.loss_fn
        plain = {name: plain_loss(measure) for name, measure in self.measures.items()}
        aside = Aside(parts, self.loss_fn, *(metrics or {}).values())
        count = options.count if options else None
        self.rows = BatchCheck(parts, aside, plain if options else None, count, cuts)

    def ask(self, inputs: Tree, targets: Tree, microbatch: Microbatch) -> None:
        """inputs, targets: the whole batch, or this rank's rows. microbatch: the first of this rank.
        Collective over all ranks. Raises ValueError on all of them where the batch must not be cut.
        """
        self._ask_positions(microbatch)
        with sharded_logits(self.parts.tensor.head, self.takes_cut):
            self.rows.ask(inputs, targets)

    def counter_of(self, name: str) -> Count:
        return self.rows.counter_of(name)

    def _ask_positions(self, microbatch: Microbatch) -> None:
        parts, loss_fn = self.parts, plain_loss(self.loss_fn)
        name = NAME if loss_fn is not None else f"{NAME} in predict"
        if parts.split is None or not parts.checks.asks or {NAME, name} & parts.checks.of.keys():
            return
        if NAME in parts.plan.trust:
            parts.checks.note(NAME, State.TRUSTED, "Plan(trust=...)")
            return

        loss = None if loss_fn is None else _part_of(parts, loss_fn)
        answer = try_positions(parts, microbatch, self.rows.run, loss)
        if answer.state is State.BROKEN:
            raise_together(parts, answer.why)
        parts.checks.note(name, answer.state, answer.why, parts.mesh.world.rank, _ADVICE)


def _part_of(parts: Parallelized, loss_fn: LossFunction) -> Callable[[Tree, Microbatch], torch.Tensor]:
    """(output, microbatch) -> its part of the mean."""
    return lambda output, microbatch: microbatch_loss(parts, output, microbatch, loss_fn)


def _as_tensor(measure: Measure) -> LossFunction:
    """A metric may give a number too."""
    return lambda output, targets: torch.as_tensor(measure(output, targets), dtype=torch.float64)
