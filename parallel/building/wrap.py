"""The wrappers around forwards, inside to outside:

block.forward
  recomputation       activations are made again in backward (recompute.py)
  ZeRO-3 unit         parameters are gathered before and freed after
  random streams      hooks at the edges of what tensor parallelism has cut
  stage               passes over absent blocks, cuts and hands on the hidden state
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import nn

from pycomm.parallel.building.cut import Cut
from pycomm.parallel.building.recompute import recompute_blocks
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.ground.split_backward import WeightStore
from pycomm.parallel.ground.streams import RandomStreams, Stream
from pycomm.parallel.models.keys import forget_keys
from pycomm.parallel.pipeline.stage import StageModel
from pycomm.parallel.tensor.narrow import SublayerForward
from pycomm.parallel.tensor.stream_edges import switch_at_edges
from pycomm.parallel.zero.apply import make_units
from pycomm.parallel.zero.kinds import kind_of
from pycomm.parallel.zero.shards import Shards
from pycomm.parallel.zero.units import Units

if TYPE_CHECKING:
    from types import TracebackType

    from pycomm.parallel.sequence.attention import SequenceAttention

__all__ = ["wrap", "wrap_stages"]


def wrap(
    model: nn.Module,
    plan: Plan,
    cut: Cut,
    streams: RandomStreams,
    deferred: WeightStore | None,
    shards: Mapping[int, Sequence[Shards]],
) -> Units | None:
    """Wraps in the order above, but for stages. Returns the Units of ZeRO-3, or None."""
    trunk = cut.trunk
    if trunk:
        attention = cut.split.attention if cut.split is not None else None
        contexts = functools.partial(_recomputation_contexts, streams, attention, deferred)
        recompute_blocks(model, trunk, plan, contexts)
    if trunk and (plan.pp > 1 or cut.split is not None):
        forget_keys(model)
    units = make_units(model, trunk, shards) if kind_of(plan).by_unit else None
    switch_at_edges(model, streams, cut.split is not None and cut.split.megatron)
    return units


def wrap_stages(
    model: nn.Module, cut: Cut, streams: RandomStreams, sublayers: Mapping[str, SublayerForward]
) -> StageModel | None:
    """The wrapper around all others. sublayers: {name of a layer: the forward around it} of what tp has cut.
    A stage that passes over such a layer runs it whole.
    """
    if cut.absent is None:
        return None
    stage_model = StageModel(model, cut.absent, cut.split, on_pieces=lambda: streams.switch(Stream.OWN))
    for name, _, side in stage_model.owners:
        for layer, forward in sublayers.items():
            if name == layer or name.startswith(layer + "."):  # an adapter has its layers inside
                forward.run_whole_while(stage_model.passes_over(side))
    return stage_model


def _recomputation_contexts(
    streams: RandomStreams, attention: SequenceAttention | None, deferred: WeightStore | None
) -> tuple[AbstractContextManager[None], AbstractContextManager[object]]:
    """For torch.utils.checkpoint: nothing more around the forward, and around the recomputation what was
    around the forward.
    """
    contexts: list[AbstractContextManager[object]] = [streams.recomputation()]
    if attention is not None:
        contexts.append(attention.context_fn()[1])
    if deferred is not None:
        contexts.append(deferred.checkpoint_contexts()[1])
    return contextlib.nullcontext(), _All(contexts)


class _All:
    """Several contexts as one."""

    def __init__(self, contexts: Sequence[AbstractContextManager[object]]) -> None:
        self.contexts, self.stack = contexts, contextlib.ExitStack()

    def __enter__(self) -> None:
        for context in self.contexts:
            self.stack.enter_context(context)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self.stack.__exit__(kind, error, traceback)
