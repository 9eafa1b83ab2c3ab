"""What is predicted: a model under a plan on a machine, with the program that runs it."""

import functools
from typing import Literal, NamedTuple, TypeAlias

from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.pipeline.placement import cut_blocks
from pycomm.parallel.planning.machine import Machine
from pycomm.parallel.planning.model import Model

__all__ = ["MEGATRON_2021", "MEGATRON_2022", "PYCOMM", "Job", "Recompute", "Software", "recompute_of"]

# nothing, the inside of attention, or each block from its input
Recompute: TypeAlias = Literal["none", "selective", "full"]


class Software(NamedTuple):
    """What a program does, as its source or paper says; no number here is fitted.

    hides_tp: sums over tp in backward run beside the products for weights. hides_dp: gradients are summed
    while backward goes on. fused_sums: gradients are added up inside of products. gradient: bytes of a
    gradient that is kept; summed: of one that is sent; state: of the optimizer per parameter. update: bytes
    that a step of the optimizer reads and writes per parameter. cuts_messages: stages send 1/tp of the
    hidden state each and gather it. waits: a message occupies the rank that sends and the one that
    receives, as a call that blocks does. copies: what is read and written beside a sum of the hidden state
    over tp, and beside a gather or reduce_scatter of it, in hidden states: see [Note: copies].
    """

    name: str
    hides_tp: bool
    hides_dp: bool
    fused_sums: bool
    gradient: int
    summed: int
    state: int
    update: int
    cuts_messages: bool
    waits: bool
    copies: tuple[float, float] = (0.0, 0.0)


# pycomm.parallel with precision="bf16": gradients are cast to fp32 for the masters (2 + 4), scaled (8),
# their norm (2), Adam (4 + 12 + 12), masters are copied back (4 + 2).
# [Note: copies] Counted in steps of the strategies' benchmark. Of a block, for 4 sums: 4 hidden states in
# copies and 4 in the biases that are added after a sum. For 8 gathers and reduce_scatters: 28 and 2, since
# ranks hold pieces of dim 1, and a gather lays them one behind the other along dim 0.
# tests/planning/test_copies.py counts. Megatron-LM sums in place, and its sequence is dim 0.
PYCOMM = Software("pycomm", False, True, False, 2, 2, 12, 50, False, False, (2.0, 3.75))
# Megatron-LM 2.6 (April 2021), local DDP: fp16 gradients, one all_reduce at the end of the step; the
# optimizer copies them to fp32 (2 + 4), unscales (8), norm (4), clip (8), Adam (28), copy back (6), clears
# (2).
MEGATRON_2021 = Software("Megatron-LM 2021", False, False, False, 2, 2, 16, 62, True, True)
# Megatron-LM of Korthikanti et al. 2022: fp32 main gradients summed inside of products, sums over tp beside
# products for weights; unscale (8), norm (4), clip (8), Adam (28), copy back (6), clear (4).
MEGATRON_2022 = Software("Megatron-LM 2022", True, False, True, 4, 4, 12, 58, True, True)


class Job(NamedTuple):
    """rows: sequences of a step, over all ranks. microbatches: parts of a data rank's rows."""

    model: Model
    machine: Machine
    plan: Plan
    rows: int
    microbatches: int
    recompute: Recompute = "none"
    software: Software = PYCOMM

    @property
    def data_ranks(self) -> int:
        """Those among which rows are dealt."""
        return self.plan.dp * self.plan.ep

    @property
    def microbatch_rows(self) -> int:
        """Of the largest microbatch of one data rank."""
        return -(-self.rows // (self.data_ranks * self.microbatches))

    @property
    def parts(self) -> int:
        return self.plan.ring * self.plan.ulysses

    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(first, last + 1) block of every virtual stage, as parallelize() cuts them."""
        return _bounds(self.model.layers, self.plan.virtual_stages, self.plan.stages)


def recompute_of(plan: Plan) -> Recompute:
    return "full" if plan.checkpoint else "none"


@functools.lru_cache(maxsize=4096)
def _bounds(layers: int, stages: int, sizes: tuple[int, ...] | None) -> tuple[tuple[int, int], ...]:
    return tuple(cut_blocks(layers, stages, sizes))
