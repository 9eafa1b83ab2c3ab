"""A model's own forward, run for a part of its blocks.

Each rank keeps the whole module tree and runs the model's forward unchanged, so masks, rotary tables and
whatever else the forward makes for its blocks exist on every stage. Modules of other stages are absent: their
parameters are on the meta device.

    stage 1 of 3      tok_emb  pos_emb   block 0  block 1 | block 2   block 3 | block 4  block 5  norm  head
    does              absent: a tensor of the right shape | gets what         | its arguments are sent, and
                      without values (absent.py)          | was received      | the forward is left by an
                                                          |                   | exception

An absent module gives stand-ins in the shape of its result (absent_modules.py), so that the shape of what is
to be received is known before it arrives, for blocks that change the width too. Those that the first block of
a stage is given are replaced by what was received: the hidden state, and whatever else it takes from earlier
stages (handover.py). Any other that reaches a present module, a block's output or the loss is refused: it
would stand for values that are not here (a skip connection around blocks).

A stage runs until the forward calls the first block of the next stage, so what a model does between two
blocks is done by the stage of the first of them. Blocks run once each in the order in which they are
registered, which is checked in every pass (progress.py).

Several stages on one rank (interleaved, ZBV) are ranges of blocks of the one tree; `run` says which is
active.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from pycomm.parallel.given import Tree
from pycomm.parallel.models.modes import uncompiled
from pycomm.parallel.models.trunk import Side, hidden_of, hidden_out
from pycomm.parallel.pipeline.absent_modules import AbsentModules
from pycomm.parallel.pipeline.assumptions import Assumptions
from pycomm.parallel.pipeline.handover import Agreement, Deliveries, Wanted, absent_places, taken
from pycomm.parallel.pipeline.outer_state import OuterState
from pycomm.parallel.pipeline.pieces import Cut, Pieces
from pycomm.parallel.pipeline.progress import Place, Progress, in_backward
from pycomm.parallel.pipeline.refused import NoGradients, explained

__all__ = ["StageModel"]

Args: TypeAlias = Sequence[Tree]
Kwargs: TypeAlias = Mapping[str, Tree]
Tensors: TypeAlias = tuple[torch.Tensor, ...]


class _Reached(BaseException):
    """Carries what a block is given out of the model's forward."""

    def __init__(self, args: Args, kwargs: Kwargs) -> None:
        super().__init__()
        self.given = args, kwargs


class _Left(_Reached):
    """The first block of the next stage is called."""


class _Entered(_Reached):
    """A stage's own first block is called, in a run for shapes."""


class StageModel:
    """The model as its stages on this rank run it.

    on_pieces: see Pieces. Making it wraps forwards, those of blocks around what others have wrapped them in
    before.
    """

    def __init__(
        self, model: nn.Module, absent: AbsentModules, split: Cut | None, on_pieces: Callable[[], None]
    ) -> None:
        self.absent, self.stages, self.owners = absent, absent.stages, absent.owners
        self.trunk = absent.trunk.now(model)  # tp may have replaced some
        self.progress = Progress(self.stages, self.trunk.name)
        has_head = any(side is Side.AFTER for *_, side in self.owners)
        self.pieces = Pieces(split, self.trunk.name, has_head, on_pieces) if split is not None else None
        self.received: Tensors | None = None  # from the stage before; None in a run for shapes
        self.deliveries = Deliveries(self.progress)
        self.agreement = Agreement(self.stages.placement)
        self.assumptions = Assumptions(self.trunk, absent.templates, split)
        self.eager = contextlib.ExitStack()  # around what runs in front of a stage's blocks
        self.looked = False  # for gradients that the forward takes, see refused.py
        self.outside = OuterState(model, self.trunk.blocks)
        self._wrap(model)

    def _wrap(self, model: nn.Module) -> None:
        for index, block in enumerate(self.trunk.blocks):
            block.forward = uncompiled(functools.partial(self._block, index, block.forward))
        self.absent.mark_parameters(model)
        for name, _, side in self.owners:
            if side is not Side.AROUND:
                module = model.get_submodule(name)
                module.forward = uncompiled(functools.partial(self._outside, name, side, module.forward))

    def passes_over(self, side: Side) -> Callable[[], bool]:
        """For modules outside the blocks, on one side: whether a stage runs that comes after theirs."""
        (owner,) = self.stages.of(side)
        return functools.partial(self.progress.is_behind, owner)

    # A pass --------------------------------------------------------------------------

    def run(
        self,
        stage: int,
        call: Callable[[], Tree],
        received: Tensors | None = None,
        places: Callable[[], Sequence[int]] | None = None,
    ) -> Tree:
        """Calls `call()` (the model's forward with its inputs) for one stage: the tensors that leave it, at
        `places()` of what the next stage's first block is given, or the result. received: those that enter.
        """
        self._begin(stage, received)
        try:
            looks = not self.looked and 0 < stage == self.stages.last and torch.is_grad_enabled()
            with self.outside.written_once(stage, self.stages.mine):
                with NoGradients() if looks else contextlib.nullcontext():
                    out = self._call(call, places)
            self.looked = self.looked or looks
            return out
        finally:
            self.progress.end()
            self.received = None
            self._leave_compiled()

    def _call(self, call: Callable[[], Tree], places: Callable[[], Sequence[int]] | None) -> Tree:
        progress = self.progress
        _, end = progress.bounds
        try:
            out = call()
        except _Left as left:
            assert places is not None  # another stage follows
            args, kwargs = self.deliveries.present(left.given)
            return taken(args, kwargs, places(), f"block {end}")
        except RuntimeError as error:
            why: Exception | None = explained(error) if self.stages.last else None
            if why is None and self.pieces is not None:
                why = self.pieces.explained(error, progress.at, progress.in_block)
            if why is None or why is error:
                raise
            raise why from error
        if progress.stage < self.stages.last:
            raise ValueError(f"the forward never reached block {end} of {self.trunk.name!r}")
        return out

    def shape_of_input(self, stage: int, call: Callable[[], Tree]) -> list[Wanted]:
        """Of what `stage` receives, found without data."""
        first = self.stages.bounds[stage][0]
        self._begin(stage, None)
        try:
            with torch.no_grad(), self.outside.kept():
                call()
        except _Entered as entered:
            found = [
                Wanted(place, tuple(leaf.shape), leaf.dtype) for place, leaf in absent_places(*entered.given)
            ]
            return found if self.pieces is None else self.pieces.shape_of_input(entered.given, found, first)
        finally:
            self.progress.end()
            self._leave_compiled()
        raise RuntimeError(f"the forward never reached block {first} of {self.trunk.name!r}")

    def check_loss(self, loss: torch.Tensor) -> None:
        """For what a model does after its last module. The last stage has run."""
        self.deliveries.check_present(loss, "the loss is computed with")

    def end_pass(self) -> None:
        """The forward of a stage and its loss are over."""
        self.deliveries.end()

    def _begin(self, stage: int, received: Tensors | None) -> None:
        self._leave_compiled()
        if stage > 0 and "torch._dynamo" in sys.modules:
            self.eager.enter_context(torch.compiler.set_stance("force_eager"))
        self.received = received
        self.progress.begin(stage)

    def _leave_compiled(self) -> None:
        """From here on what is compiled runs compiled; before, it may be given Absent tensors."""
        self.eager.close()

    # In its forward ------------------------------------------------------------------

    def _block(self, index: int, forward: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> Tree:
        """In the place of the forward of a block."""
        self.progress.check_running()
        first, end = self.progress.bounds
        if index < first:
            out = self.absent.result_of_block(index, self.trunk.blocks[index], args, kwargs)
            hidden_out(out)  # where there is none, values inside of it would carry no mark
            return out
        self.progress.check_order(index)
        if index >= end:
            raise _Left(args, kwargs)
        self.progress.enter_block(index)
        if index == first and first > 0:
            self._receive(index, args, kwargs)
        self._leave_compiled()
        out = self._run_block(index, forward, args, kwargs)
        if self.progress.stage == self.stages.last and index == end - 1:
            self.progress.leave_blocks()
            if self.pieces is not None:
                out = self.pieces.leave(out)
        return out

    def _receive(self, index: int, args: Args, kwargs: Kwargs) -> None:
        """What was received takes the place of the stand-ins that the first block of a stage is given."""
        if self.pieces is not None:
            self.pieces.begin(args, kwargs)
        if self.received is None:
            raise _Entered(args, kwargs)
        places = absent_places(args, kwargs)
        self.deliveries.deliver(places, self.received, f"block {index} of {self.trunk.name!r}")

    def _run_block(self, index: int, forward: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree:
        """The result of a present block, and what is looked at around it."""
        progress, what = self.progress, f"block {index} of {self.trunk.name!r}"
        first, end = progress.bounds
        is_handed_on = progress.stage < self.stages.last
        args, kwargs = self.deliveries.check_present((args, kwargs), f"{what} is given")
        given = hidden_of(args, kwargs)
        if is_handed_on:
            self.assumptions.before(index, index == first, given, args, kwargs)
        if self.pieces is not None:
            args, kwargs, given = self.pieces.enter(index, index == first, args, kwargs, given)
            forward = functools.partial(self.pieces.run, what, forward)
        with progress.running_block():
            out = forward(*args, **kwargs)
        out = self.deliveries.check_present(out, f"{what} computes with")
        if is_handed_on:
            hidden_out(out)
            self.assumptions.after(index, args, kwargs, out)
            if index == end - 1:
                self.assumptions.end(progress.stage, given.shape)
        return out

    def _outside(
        self, name: str, side: Side, forward: Callable[..., Tree], *args: Tree, **kwargs: Tree
    ) -> Tree:
        """In the place of the forward of a module outside the blocks."""
        progress = self.progress
        if progress.place is Place.IDLE and in_backward():  # recomputed, with what it had in the forward
            what = f"{name!r}, which the model runs again in backward, is given"
            self.deliveries.check_present((args, kwargs), what)
            return forward(*args, **kwargs)
        progress.check_running()
        progress.check_side(name, side)
        (owner,) = self.stages.of(side)
        if progress.is_behind(owner):
            return self.absent.result_of(name, args, kwargs)
        if side is not Side.BEFORE:
            args, kwargs = self.deliveries.check_present((args, kwargs), f"{name!r} is given")
        return forward(*args, **kwargs)
