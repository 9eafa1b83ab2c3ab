"""Forward and backward of the stages of this rank. Without a pipeline the whole model is stage 0.

around a forward, outside to inside        what for
weights of this microbatch's version       PipeDream (pipeline/updates.py)
a pass of the units                        ZeRO-3 gathers and frees parameters (zero/units.py)
no cache of casts                          autocast casts weights where they are used: a copy of one that
                                           ZeRO-3 has freed, or a step has updated, is of no use
modes of torch functions                   attention over the whole sequence; weight gradients for later;
                                           ZeRO-3 gathers what is read beside its module (zero/reading.py);
                                           what tp has cut is not read beside its layer (tensor/reads.py)
this model's random numbers                equal or different on the ranks of tp (ground/streams.py)
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._pytree import tree_flatten

from pycomm import trace
from pycomm.parallel.data.gather_rows import gathering
from pycomm.parallel.ground.batch import Microbatch
from pycomm.parallel.parts import Parallelized
from pycomm.parallel.pipeline import DeferWeights
from pycomm.parallel.pipeline.absent import is_absent
from pycomm.parallel.pipeline.executor import Handed
from pycomm.parallel.run.loss import microbatch_loss
from pycomm.parallel.sequence.attention import UNASKING
from pycomm.parallel.zero.units import Phase

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree
    from pycomm.parallel.pipeline.handover import Wanted
    from pycomm.parallel.pipeline.stage import StageModel
    from pycomm.parallel.run.router_loss import Loss
    from pycomm.parallel.run.updates import Updates

__all__ = [
    "StagePasses",
    "agree",
    "find_input",
    "forget_passes",
    "forward_pass",
    "gathering_in",
    "handed_on",
    "run_stage",
    "shape_of_input",
]

Tensors = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]  # None for what is not floating

_backward = UNASKING[torch.autograd.backward]  # modes stay active in it, for what it recomputes


class _Saved(NamedTuple):
    """Of a forward, for its backward."""

    x: Tensors | None
    y: Tensors | torch.Tensor  # of the last stage the loss
    length: int | None  # of the sequence, where it is cut


@contextlib.contextmanager
def uncounted(parts: Parallelized, microbatch: Microbatch) -> Iterator[None]:
    """Around what runs of a microbatch, in forward and in backward, where its blocks may run again: modules
    that compute over all rows leave out what stands in for none.
    """
    if microbatch.counts:
        yield
        return
    parts.mesh.counts_rows = False
    for moe in parts.moes:
        moe.is_counted = False
    try:
        yield
    finally:
        parts.mesh.counts_rows = True
        for moe in parts.moes:
            moe.is_counted = True


def run_stage(
    parts: Parallelized, stage: int, microbatch: Microbatch, received: Tensors | None = None
) -> Tree:
    """The model's forward for one stage: the tensors that leave it, or the model's output.

    received: the tensors of the stage before, None for the first.
    """
    with uncounted(parts, microbatch):
        return _run_stage(parts, stage, microbatch, received)


def _run_stage(
    parts: Parallelized, stage: int, microbatch: Microbatch, received: Tensors | None = None
) -> Tree:
    if parts.stage_model is None:
        return microbatch.call(parts.model)
    attention = parts.split.attention if parts.split is not None else None
    before = attention.calls if attention else 0
    if parts.split is not None:
        parts.split.note_inputs(microbatch.inputs)
    model = parts.stage_model
    out = model.run(
        stage,
        lambda: microbatch.call(parts.model),
        received,
        lambda: model.agreement.places(stage + 1, _key(parts, microbatch)),
    )
    if attention and attention.calls == before:
        raise ValueError(
            f"[rank {parts.mesh.world.rank}] sequence parallelism: the blocks of "
            f"{parts.stage_model.trunk.name!r} did not call F.scaled_dot_product_attention, so their "
            "attention saw this rank's positions only; write attention with it, or do without ring and "
            "ulysses"
        )
    return out


def handed_on(parts: Parallelized, tensors: Tensors) -> Tensors:
    """What a stage leaves, as the next one expects it: in the dtype that it has without autocast, which does
    not act in the run for shapes. No bit is lost.
    """
    kind = parts.device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    low = torch.get_autocast_dtype(kind)
    present = (p for p in parts.model.parameters() if not is_absent(p) and p.is_floating_point())
    own = next((p.dtype for p in present), low)
    return tuple(tensor.to(own) if tensor.dtype == low else tensor for tensor in tensors)


@contextlib.contextmanager
def _without_cached_casts() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def unit_pass(parts: Parallelized, phase: Phase, stage: Hashable) -> Iterator[None]:
    """Around one pass of a stage: ZeRO-3 gathers the parameters that it uses."""
    if parts.units is None:
        yield
        return
    parts.units.begin(phase, stage)
    try:
        yield
    finally:
        parts.units.end()


@contextlib.contextmanager
def recomputing(parts: Parallelized, length: int | None, key: Hashable) -> Iterator[None]:
    """Around a backward, for checkpoints of the model's own inside of its blocks: what they run again attends
    over the whole sequence and postpones weight gradients, as it did in the forward.

    length: that of the microbatch. key: (stage, microbatch). The plan's own recomputation brings this along
    (building/recompute.py).
    """
    with contextlib.ExitStack() as stack:
        if parts.split is not None and parts.split.attention is not None and length is not None:
            parts.split.begin(length)
            stack.enter_context(parts.split.attention)
        if parts.deferred is not None:
            stack.enter_context(DeferWeights(parts.deferred, key))
        yield


@contextlib.contextmanager
def forward_pass(parts: Parallelized, phase: Phase, stage: Hashable, number: int) -> Iterator[None]:
    """Around the forward of microbatch `number`; see the head of the file."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(parts.passes.forward())
        stack.enter_context(unit_pass(parts, phase, stage))
        stack.enter_context(_without_cached_casts())
        for mode in parts.split.modes() if parts.split is not None else ():
            stack.enter_context(mode)
        if parts.deferred is not None and torch.is_grad_enabled():
            stack.enter_context(DeferWeights(parts.deferred, (stage, number)))
        if parts.units is not None:
            stack.enter_context(parts.units.reading)
        if parts.reads is not None:
            stack.enter_context(parts.reads.refused())
        # A single process draws from the user's stream, as it always did.
        if parts.mesh.world.size > 1 and parts.model.training:
            stack.enter_context(parts.streams.active())
        if parts.stage_model is not None:
            stack.callback(parts.stage_model.end_pass)
        yield


def gathering_in(
    parts: Parallelized, microbatches: Sequence[Microbatch], is_whole: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Around the passes of a step: gather_rows() gives the rows of all data ranks. is_whole: no other call
    adds to the same update.
    """
    refusal = None
    if len(microbatches) > 1:
        refusal = f"the rows of a batch are those of one microbatch; there are {len(microbatches)}"
    elif not is_whole:
        refusal = "several calls make one update (update=False), and each would have its own rows"
    elif parts.plan.ring * parts.plan.ulysses > 1:
        refusal = f"Plan({parts.plan}) cuts the sequence. Use a plan without ring and ulysses"
    return gathering(parts.mesh.data, refusal, counts=microbatches[0].counts)


def forget_passes(parts: Parallelized) -> None:
    """After a step that raised: forgets what its passes left for later ones. Gradients are cleared at the
    next step, those of earlier calls that waited for this one too.
    """
    parts.window.discard()
    if parts.units is not None:
        parts.units.forget_orders()
    if parts.deferred is not None:
        parts.deferred.forget()


def shape_of_input(parts: Parallelized, stage: int, microbatch: Microbatch) -> list[Handed]:
    """What `stage` receives. No communication, no memory, and no random number is used up. Raises ValueError
    where it is not what the stage before was told.
    """
    found, known = find_input(parts, stage, microbatch), _stages_of(parts).agreement
    places = tuple(place for place, _, _ in found)
    if places != known.places(stage, _key(parts, microbatch)):
        raise ValueError(
            f"[rank {parts.mesh.world.rank}] the first block of pipeline stage {stage} is given tensors of "
            "earlier stages in other places than it was for such inputs before. The forward must do the same "
            "for equal shapes; or use a plan with pp=1"
        )
    return [Handed(shape, dtype, parts.device) for _, shape, dtype in found]


def _stages_of(parts: Parallelized) -> StageModel:
    """Of a plan with a pipeline."""
    assert parts.stage_model is not None
    return parts.stage_model


def find_input(parts: Parallelized, stage: int, microbatch: Microbatch) -> list[Wanted]:
    """What `stage` is to be handed, found without data."""
    stand_ins = parts.units.stand_ins() if parts.units is not None else contextlib.nullcontext()
    reads = contextlib.nullcontext() if parts.reads is None else parts.reads.refused()
    with parts.streams.kept(), stand_ins, reads, parts.passes.forward():
        return _stages_of(parts).shape_of_input(stage, lambda: microbatch.call(parts.model))


def agree(parts: Parallelized, microbatches: Sequence[Microbatch]) -> None:
    """Before the passes of a step or an evaluation: the stages tell what they are to be handed."""
    if parts.plan.pp == 1:
        return

    def find(stage: int, microbatch: Microbatch) -> list[int]:
        return [place for place, _, _ in find_input(parts, stage, microbatch)]

    inputs = {_key(parts, microbatch): microbatch for microbatch in reversed(microbatches)}
    inputs = dict(reversed(inputs.items()))
    _stages_of(parts).agreement.tell(inputs, find, parts.mesh.group("pp"), parts.device)


def _key(parts: Parallelized, microbatch: Microbatch) -> Hashable:
    """Of inputs for which the forward does the same, alike on the ranks of a pipeline."""
    leaves, tree = tree_flatten(microbatch.inputs)
    plain = tuple(leaf if isinstance(leaf, (bool, int, float, str)) else None for leaf in leaves)
    return microbatch.shapes(), plain, repr(tree), parts.model.training


class StagePasses:
    """The passes of one training step, as pipeline/executor.py asks for them (StageOps).

    microbatches: those of this rank. updates: when the optimizer steps, see updates.py.
    """

    def __init__(
        self, parts: Parallelized, microbatches: Sequence[Microbatch], loss_fn: Loss, updates: Updates
    ) -> None:
        self.parts, self.microbatches, self.loss_fn, self.updates = parts, microbatches, loss_fn, updates
        self.last = parts.stages.last  # the stage that computes the loss
        self.saved: dict[tuple[int, int], _Saved] = {}  # (stage, microbatch), from forward to backward
        self.losses: list[torch.Tensor] = []  # of the microbatches, detached; on the ranks of the last stage
        self.shapes: dict[Hashable, list[Handed]] = {}  # (stage, shapes of the inputs) -> of x

    def forward(self, stage: int, microbatch: int, x: Tensors | None) -> Tensors | None:
        parts, piece = self.parts, self.microbatches[microbatch]
        for tensor in x or ():
            tensor.requires_grad_(tensor.is_floating_point())
        with (
            trace.span("forward", stage, microbatch),
            self.updates.saving(stage, microbatch),
            forward_pass(parts, Phase.FORWARD, stage, microbatch),
        ):
            y = run_stage(parts, stage, piece, x)
            if stage == self.last:
                used = len(parts.reducers[stage].used)
                y = microbatch_loss(parts, y, piece, self.loss_fn)
                if len(parts.reducers[stage].used) != used:
                    raise ValueError(
                        f"[rank {parts.mesh.world.rank}] step: loss_fn calls backward(), whose gradients "
                        "would count for this rank alone: return the loss, and ask torch.autograd.grad"
                    )
                self.losses.append(y.detach())
                y = y if self.updates.weight == 1.0 else y * self.updates.weight
            else:
                y = handed_on(parts, y)
        length = parts.split.length if parts.split is not None else None
        self.saved[stage, microbatch] = _Saved(x, y, length)
        return None if stage == self.last else tuple(tensor.detach() for tensor in y)

    def backward(self, stage: int, microbatch: int, dy: Gradients | None) -> Gradients | None:
        parts, reducer = self.parts, self.parts.reducers[stage]
        x, y, length = self.saved.pop((stage, microbatch))
        if reducer.eager:
            reducer.begin_microbatch(self.updates.sums_after(microbatch))
        pairs = [(y, None)] if isinstance(y, torch.Tensor) else zip(y, dy or (), strict=True)
        ends = [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]
        if ends:  # not where all up to here is frozen
            with (
                trace.span("backward", stage, microbatch),
                self.updates.using(stage, microbatch),
                unit_pass(parts, Phase.BACKWARD, stage),
                recomputing(parts, length, (stage, microbatch)),
                uncounted(parts, self.microbatches[microbatch]),
            ):
                _backward(*zip(*ends, strict=True))
        elif stage == self.last:
            raise ValueError(
                f"[rank {parts.mesh.world.rank}] step: the loss depends on no parameter that is trained"
            )
        return None if x is None else tuple(map(_gradient_of, x))

    def weight(self, stage: int, microbatch: int) -> None:
        if self.parts.deferred is not None:
            with trace.span("weight", stage, microbatch):
                self.parts.deferred.flush((stage, microbatch))
        self.parts.reducers[stage].finish_microbatch(self.updates.sums_after(microbatch))

    def update(self, stage: int, microbatch: int) -> None:
        self.updates.update(stage, microbatch)

    def input_like(self, stage: int, microbatch: int) -> list[Handed]:
        piece = self.microbatches[microbatch]
        key = stage, piece.shapes()
        if key not in self.shapes:
            self.shapes[key] = shape_of_input(self.parts, stage, piece)
        return self.shapes[key]


def _gradient_of(x: torch.Tensor) -> torch.Tensor | None:
    """None for what has none."""
    if not x.is_floating_point():
        return None
    return torch.zeros_like(x) if x.grad is None else x.grad
