"""A model's own forward, run for a part of its blocks.

Each rank keeps the whole module tree and runs the model's forward unchanged, so masks, rotary tables and
whatever else the forward makes for its blocks exist on every stage. Modules of other stages are absent: their
parameters are on the meta device.

    stage 1 of 3      tok_emb  pos_emb   block 0  block 1 | block 2   block 3 | block 4  block 5  norm  head
    does              absent: a tensor of the right shape | gets what         | its arguments are sent, and
                      without values (absent.py)          | was received      | the forward is left by an
                                                          |                   | exception

An absent module gives stand-ins in the shape that its forward computes on the meta device (once for each
shape of the input), so that the shape of what is to be received is known before it arrives, for blocks that
change the width too. Those that the first block of a stage is given are replaced by what was received: the
hidden state, and whatever else it takes from earlier stages (handover.py). Any other that reaches a present
module, a block's output or the loss is refused: it would stand for values that are not here (a skip
connection around blocks).

A stage runs until the forward calls the first block of the next stage, so what a model does between two
blocks is done by the stage of the first of them. Blocks run once each in the order in which they are
registered, which is checked in every pass.

Several stages on one rank (interleaved, ZBV) are ranges of blocks of the one tree; `run` says which is
active.
"""

import contextlib
import enum
import functools
import sys

import torch

from pycomm.parallel.ground.leaves import leaves
from pycomm.parallel.ground.mesh import device_of
from pycomm.parallel.ground.modes import uncompiled
from pycomm.parallel.ground.trunk import Side, hidden_of, hidden_out
from pycomm.parallel.pipeline.absent import absent_like, absent_parameter, first_absent
from pycomm.parallel.pipeline.assumptions import Assumptions
from pycomm.parallel.pipeline.handover import Agreement, Deliveries, absent_places, taken
from pycomm.parallel.pipeline.outer_state import OuterState
from pycomm.parallel.pipeline.templates import Templates

__all__ = ["StageModel"]


class _Place(enum.Enum):
    """Where in the model its forward is."""

    IDLE = "not running"
    BEFORE = "before the blocks of this stage"
    INSIDE = "in a block of this stage"
    AFTER = "behind the last block of this stage"


class _Left(BaseException):
    """Carries what the first block of the next stage is given out of the model's forward."""

    def __init__(self, args, kwargs):
        super().__init__()
        self.given = args, kwargs


class _Entered(BaseException):
    """The same for a stage's own first block, in a run for shapes."""

    def __init__(self, args, kwargs):
        super().__init__()
        self.given = args, kwargs


class StageModel:
    """The model with the stages that this rank holds.

    stages: Stages. split: SequenceSplit or None. Making it takes the other stages' parameters away;
    install() then changes the forwards, after others have wrapped the blocks.
    """

    def __init__(self, model, trunk, stages, split, found):
        """found: owners() of the model."""
        self.model, self.trunk, self.stages, self.split = model, trunk, stages, split
        self.stage = 0  # the one that runs
        self.place = _Place.IDLE
        self.received = None  # tensors from the stage before; None in a run for shapes
        self.deliveries = Deliveries()
        self.agreement = Agreement(stages.placement)
        self.at = None  # index of the block that ran last in this pass
        self.in_block = False  # whether it has not returned
        self.on_pieces = None  # see install()
        self.elsewhere = set()  # indices of the blocks that other ranks have
        self.templates = Templates()  # results of blocks (by index) and of modules in front of them (by name)
        self.eager = contextlib.ExitStack()  # around what runs in front of a stage's blocks
        self.outside = None  # OuterState, from install()
        self.owners = found
        self.assumptions = Assumptions(model, trunk, self.templates, split)
        self._leave_blocks()
        self._leave_owners()
        if self.last > 0:
            _untie(trunk, found, stages)

    def _leave_blocks(self):
        bounds, mine = self.stages.bounds, self.stages.mine
        present = {index for stage in mine for index in range(*bounds[stage])}
        self.elsewhere = {index for index in range(len(self.trunk.blocks)) if index not in present}
        for index, block in enumerate(self.trunk.blocks):
            if index in self.elsewhere:
                block.to("meta")
            if index < bounds[-1][0]:
                self.templates.keep(index, block, guess=True)

    def _leave_owners(self):
        device = device_of(self.model)
        for name, module, side in self.owners:
            if not self.stages.here(side):
                # Not module.to("meta"): its children have entries of their own.
                for key, parameter in module._parameters.items():
                    if parameter is None:
                        continue
                    full = f"{name}.{key}" if name else key
                    around = side is Side.AROUND
                    module._parameters[key] = (
                        absent_parameter(parameter, repr(full), device) if around else _to_meta(parameter)
                    )
            if side in (Side.BEFORE, Side.BETWEEN):
                self.templates.keep(name, module)

    def is_behind(self, stage):
        """Whether the stage that runs comes after this one."""
        return self.stage > stage

    def install(self, on_pieces):
        """on_pieces: called when a forward goes on with this rank's piece of the sequence over tp."""
        self.on_pieces = on_pieces
        self.trunk = self.assumptions.trunk = self.trunk.now(self.model)  # tp may have replaced some
        self.outside = OuterState(self.model, self.trunk.blocks)
        for index, block in enumerate(self.trunk.blocks):
            block.forward = uncompiled(functools.partial(self._block, index, block.forward))
        device = device_of(self.model)
        for name, module, side in self.owners:
            if side is not Side.AROUND:
                module = self.model.get_submodule(name)
                _mark_parameters(name, module, device)
                module.forward = uncompiled(functools.partial(self._outside, name, side, module.forward))

    @property
    def last(self):
        return self.stages.last

    def run(self, stage, call, received=None, places=None):
        """Calls `call()` (the model's forward with its inputs) for one stage: the tensors that leave it, at
        `places()` of what the next stage's first block is given, or the result. received: those that enter.
        """
        self._begin(stage, received)
        try:
            with self.outside.written_once(stage, self.stages.mine):
                return self._call(call, places)
        finally:
            self.place, self.received = _Place.IDLE, None
            self._leave_compiled()

    def _call(self, call, places):
        block = self.stages.bounds[self.stage][1]
        try:
            out = call()
        except _Left as left:
            return taken(*self.deliveries.present(left.given), places(), f"block {block}")
        except RuntimeError as error:
            if self.split is None or self.split.is_whole or self.at is None:
                raise
            raise _of_pieces(error, f"block {self.at} of {self.trunk.name!r}", self.in_block) from error
        if self.stage < self.last:
            raise ValueError(f"the forward never reached block {block} of {self.trunk.name!r}")
        return out

    def end_pass(self):
        """The forward of a stage and its loss are over."""
        self.deliveries.end()

    def check_loss(self, loss):
        """For what a model does after its last module. The last stage has run."""
        self._check_present(loss, "the loss is computed with")

    def _begin(self, stage, received):
        self._leave_compiled()
        if stage > 0 and "torch._dynamo" in sys.modules:
            self.eager.enter_context(torch.compiler.set_stance("force_eager"))
        self.stage, self.received, self.place, self.at = stage, received, _Place.BEFORE, None
        self.in_block = False

    def _leave_compiled(self):
        """From here on what is compiled runs compiled; before, it may be given Absent tensors."""
        self.eager.close()

    def shape_of_input(self, stage, call):
        """[(place among what its first block is given, shape, dtype)] of what `stage` receives, found without
        data.
        """
        first = self.stages.bounds[stage][0]
        self._begin(stage, None)
        try:
            with torch.no_grad(), self.outside.kept():
                call()
        except _Entered as entered:
            found = [(place, tuple(leaf.shape), leaf.dtype) for place, leaf in absent_places(*entered.given)]
            return found if self.split is None else self._cut_shape(entered.given, found, first)
        finally:
            self.place = _Place.IDLE
            self._leave_compiled()
        raise RuntimeError(f"the forward never reached block {first} of {self.trunk.name!r}")

    def _cut_shape(self, given, found, first):
        """The hidden state alone, of which this rank has a piece."""
        absent = [leaf for _, leaf in absent_places(*given)]
        if len(absent) != 1 or absent[0] is not hidden_of(*given):
            raise ValueError(
                f"block {first} of {self.trunk.name!r} is given {len(absent)} tensors that earlier pipeline "
                "stages compute, and the plan cuts the sequence, which can be done where the hidden state is "
                "the only one. Use pp=1, or a plan without ring, ulysses and megatron_sp"
            )
        place, shape, dtype = found[0]
        return [(place, (shape[0], self.split.local_length(shape[1]), *shape[2:]), dtype)]

    def _block(self, index, forward, *args, **kwargs):
        self._check_running()
        first, end = self.stages.bounds[self.stage]
        if index < first:
            out = self._absent(index, f"block {index}", args, kwargs)
            hidden_out(out)  # where there is none, values inside of it would carry no mark
            return out
        self._check_order(index, first, end)
        if index >= end:
            raise _Left(args, kwargs)
        self.at = index
        if index == first and first > 0:
            self._receive(index, args, kwargs)
        self._leave_compiled()
        self.place = _Place.INSIDE
        what = f"block {index} of {self.trunk.name!r}"
        args, kwargs = self._check_present((args, kwargs), f"{what} is given")
        given = hidden_of(args, kwargs)
        if self.stage < self.last:
            self.assumptions.before(index, index == first, given, args, kwargs)
        if self.split is not None:
            args, kwargs, given = self.split.enter(index == first, index == 0, args, kwargs, given)
            if index == first and self.split.megatron:
                self.on_pieces()
        handed = _ids(args, kwargs) if self.split is not None else None
        self.in_block = True
        out = forward(*args, **kwargs)
        self.in_block = False
        if self.split is not None and handed != _ids(args, kwargs):
            raise _changed_list(what)
        out = self._check_present(out, f"{what} computes with")
        if self.stage < self.last:
            hidden_out(out)
            self.assumptions.after(index, args, kwargs, out)
            if index == end - 1:
                self.assumptions.end(self.stage, given.shape)
        elif index == end - 1:
            self.place = _Place.AFTER
            if _gathers_itself(self):
                out = self.split.leave(out)
        return out

    def _check_order(self, index, first, end):
        """A stage runs all of its blocks, if any, and leaves at the one that follows."""
        expected = first if self.at is None else self.at + 1
        if index == expected or self.at is not None and self.at < index < end:
            return
        raise ValueError(
            f"block {index} of {self.trunk.name!r} runs "
            f"{'first' if self.at is None else f'after block {self.at}'}: pipeline stages "
            "and a split sequence need the blocks to run once each, in the order in which they are "
            "registered"
        )

    def _receive(self, index, args, kwargs):
        """What was received takes the place of the stand-ins that the first block of a stage is given."""
        if self.split is not None:
            self.split.begin(hidden_of(args, kwargs).shape[1])  # the placeholder is whole
        if self.received is None:
            raise _Entered(args, kwargs)
        places = absent_places(args, kwargs)
        self.deliveries.deliver(places, self.received, f"block {index} of {self.trunk.name!r}")

    def _check_present(self, values, what):
        """values with what was delivered. Raises ValueError for what is absent."""
        values = self.deliveries.present(values)
        absent = first_absent(values) if self.last > 0 else None
        if absent is not None and self.stage == 0 and len(self.stages.mine) == 1:
            raise ValueError(
                f"{what} a tensor that comes from {absent.origin}, which is registered after the blocks of "
                f"{self.trunk.name!r} but used before them: register it before them"
            )
        if absent is not None and self.stage == 0:
            raise ValueError(
                f"{what} a tensor that the model has kept from the pass of another stage on this rank. "
                "Choose a schedule with one stage on a rank (1f1b, gpipe, zb-h1), or use a plan with pp=1"
            )
        if absent is not None:
            raise ValueError(
                f"{what} a tensor of shape {tuple(absent.shape)} that comes from {absent.origin}, which an "
                f"earlier pipeline stage runs, not stage {self.stage} of {self.last + 1}: a stage hands on "
                "what the first block of the next one is given. Give it to all blocks, compute it inside "
                "them, name another list with Plan(blocks=...), or use a plan with pp=1"
            )
        return values

    def _check_running(self):
        if self.place is _Place.IDLE and _in_backward():
            raise ValueError(
                "a checkpoint in the model's own code runs blocks again in backward, where the plan cannot "
                "cut them: take it out, and use Plan(checkpoint=True)"
            )
        if self.place is _Place.IDLE:
            raise RuntimeError(
                "this model is cut into pipeline stages or along the sequence: call it through parallel.step "
                "or parallel.evaluate"
            )

    def _outside(self, name, side, forward, *args, **kwargs):
        if self.place is _Place.IDLE and _in_backward():  # recomputed, with what it was given in the forward
            self._check_present((args, kwargs), f"{name!r}, which the model runs again in backward, is given")
            return forward(*args, **kwargs)
        self._check_running()
        (owner,) = self.stages.of(side)
        if self.place is _Place.AFTER and side in (Side.BEFORE, Side.BETWEEN):
            raise ValueError(
                f"{name!r} is registered {side.value} the blocks of {self.trunk.name!r} but called after "
                "them: register it after them"
            )
        if side is Side.AFTER and self.place is _Place.BEFORE:
            raise ValueError(
                f"{name!r} is registered after the blocks of {self.trunk.name!r} but called before them: "
                "register it before them"
            )
        if self.stage < owner:
            what, called = (
                ("after", "between them") if side is Side.AFTER else ("between", "before the second")
            )
            raise ValueError(
                f"{name!r} is registered {what} the blocks of {self.trunk.name!r} but called {called}: "
                "move it into a block, or register it where it is called"
            )
        if self.stage > owner:
            return self._absent(name, repr(name), args, kwargs)
        if side is not Side.BEFORE:
            args, kwargs = self._check_present((args, kwargs), f"{name!r} is given")
        return forward(*args, **kwargs)

    def _absent(self, key, origin, args, kwargs):
        """Stand-ins in the shape of what the module would return."""
        tensors = (leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        device = next((leaf.device for leaf in tensors), "cpu")
        out = self.templates.of(key, origin, args, kwargs)
        if key in self.elsewhere:
            for (name, attribute), value in self.templates.left[key].items():
                module = self.trunk.blocks[key].get_submodule(name)
                module.__dict__[attribute] = absent_like(value, f"{origin} ({attribute!r})", device)
        return absent_like(out, origin, device)


def _gathers_itself(model):
    """Whether the sequence is whole behind the last block: under megatron_sp, where no head comes."""
    split = model.split
    return split is not None and split.megatron and all(side is not Side.AFTER for *_, side in model.owners)


def _ids(args, kwargs):
    return [id(leaf) for leaf in leaves((args, kwargs))]


def _changed_list(what):
    return ValueError(
        f"{what} changes a list or dict that it is given, where the sequence is cut: the model's own would "
        "not have it. Return it, or use a plan without ring, ulysses and megatron_sp"
    )


def _of_pieces(error: RuntimeError, block: str, is_inside: bool) -> Exception:
    """What a model raised in a block, or behind it, in words where sizes do not fit."""
    if type(error) is not RuntimeError or "size" not in str(error).lower():
        return error
    if is_inside:
        return ValueError(
            f"{block} does not run on pieces of the sequence ({error}). Something in it looks at other "
            "positions or at their number (a convolution, attention under a name that is not known: name it "
            "in Plan(rules=...)). Use a plan without ring, ulysses and megatron_sp"
        )
    return ValueError(
        f"the model does not run behind {block}, where it has a piece of the sequence ({error}). What it has "
        "kept from before the blocks is that of the whole: give it to the blocks, or use a plan without "
        "ring, ulysses and megatron_sp"
    )


def _untie(trunk, owners, stages):
    """Of a weight that several stages on this rank use each gets its own copy, as on several ranks, so that
    gradients add up alike.
    """
    keepers, copies = {}, {}
    for stage in stages.mine:
        blocks = trunk.blocks[slice(*stages.bounds[stage])]
        outside = [m for _, m, side in owners if side is not Side.AROUND and stages.of(side) == (stage,)]
        for module in [part for block in blocks for part in block.modules()] + outside:
            for key, parameter in module._parameters.items():
                if parameter is None or keepers.setdefault(id(parameter), stage) == stage:
                    continue
                own = copies.setdefault((id(parameter), stage), _copy_of(parameter))
                module._parameters[key], keepers[id(own)] = own, stage


def _copy_of(parameter):
    return torch.nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


def _in_backward():
    return torch._C._current_graph_task_id() >= 0


def _to_meta(parameter):
    return torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


def _mark_parameters(name, module, device):
    """Of an absent module, for a forward that reads them itself (a head that is tied by hand), or asks for
    their sizes: those of one process, also where tensor parallelism has cut them.
    """
    layouts = module.layouts() if hasattr(module, "layouts") else {}
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            if key in layouts:
                parameter = torch.empty(layouts[key].full_shape, dtype=parameter.dtype, device="meta")
            module._parameters[key] = absent_parameter(parameter, repr(f"{name}.{key}"), device)
