"""Units of ZeRO 3: parameters that exist whole only while a part of the model computes with them.

A unit is one block of the trunk, or outside the trunk one module with parameters of its own; parameters that
two modules share are one unit with two places. Life of a unit's values (n ranks, P bytes), three transfers of
(n-1)/n P per microbatch:

    forward     all_gather | compute | free      the next unit's all_gather starts before the compute
    backward    all_gather | compute | free      starts when the gradient of the unit's output arrives, and
                                                 the unit before it is fetched ahead
                             reduce_scatter      of the gradients, see streamed.py

The order in which units are used is recorded in the first pass, and a later pass fetches ahead by that
record; a wrong guess costs memory and is dropped at the end of the pass. The guess must be the same on all
ranks of the group (ranks that take different branches in forward would wait for each other; the collective's
error then names the operation).

[Note: order of backward] In backward a unit is fetched when the gradient of a tensor arrives that its forward
has made, and freed when the next unit begins: autograd runs nodes in the reverse of the order in which they
were made. A tensor that only passes through a unit (a bias of positions that the first block makes for all)
was made by another, and its gradient says nothing of this one. A unit inside of whose forward another one
runs ("sticky", as shared units are) stays until the pass ends, and frees nobody.

Parameters that lie directly in a module that contains the trunk stay whole through every pass, and so do
those of a unit that was read while it was sharded (reading.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd import _get_sequence_nr
from torch.utils._pytree import tree_leaves

from pycomm import trace
from pycomm.parallel.given import Tree
from pycomm.parallel.ground.differentiable import in_graph
from pycomm.parallel.models.modes import uncompiled
from pycomm.parallel.zero.reading import Reading

if TYPE_CHECKING:
    from pycomm.parallel.zero.streamed import StreamedShards

__all__ = ["Phase", "Unit", "Units"]


class Phase(enum.Enum):
    """What a rank is doing with its model."""

    IDLE = "idle"  # nothing: the values are sharded
    FORWARD = "forward"
    BACKWARD = "backward"
    EVALUATE = "evaluate"  # a forward without gradients


class State(enum.Enum):
    """Of the whole values of a unit."""

    SHARDED = enum.auto()  # they do not exist
    GATHERING = enum.auto()  # the all_gather is under way
    GATHERED = enum.auto()


def _each(actions: Iterable[Callable[[], None]]) -> None:
    """Calls all of them, then raises what the first has raised."""
    raised = None
    for action in actions:
        try:
            action()
        except ValueError as error:
            raised = raised or error
    if raised is not None:
        raise raised


def _nothing() -> None:
    pass


class Unit:
    """Buckets that are gathered and freed together. sticky: kept to the end of a backward pass."""

    def __init__(self, name: str, shards: Sequence[StreamedShards], sticky: bool = False) -> None:
        self.name, self.shards, self.sticky = name, shards, sticky
        self.state = State.SHARDED
        # called when the parameters have become whole
        self.after_gather: Callable[[list[torch.nn.Parameter]], None] | None = None

    @property
    def is_whole(self) -> bool:
        return self.state == State.GATHERED

    def start(self) -> None:
        if self.state == State.SHARDED:
            for shards in self.shards:
                shards.start_gather()
            self.state = State.GATHERING

    def gather(self) -> None:
        self.start()
        if self.state == State.GATHERING:
            with trace.span(f"gather {self.name}"):
                for shards in self.shards:
                    shards.finish_gather()
            self.state = State.GATHERED
            if self.after_gather is not None:
                self.after_gather([info.param for shards in self.shards for info in shards.bucket.infos])

    def free(self) -> None:
        if self.state == State.GATHERING:
            self.gather()
        if self.state == State.GATHERED:
            self.state = State.SHARDED
            _each(shards.free for shards in self.shards)


class Units:
    """All units of a rank. begin(phase, stage) starts the forward or backward of one microbatch, end() frees
    what is left.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.always: list[Unit] = []  # those that are gathered from the beginning of every pass to its end
        self.phase = Phase.IDLE
        self.orders: dict[tuple[Phase, Hashable], list[Unit]] = {}  # (phase, stage) -> in order of use
        self.order: list[Unit] = []  # that of the pass that is running
        self.position = 0  # how many of `order` have been used
        self.recording = False  # this is the first pass of its kind: it writes `order`
        self.active: Unit | None = None  # its backward is running
        self.inside: list[Unit] = []  # their forwards are running, outer to inner
        # Around a pass: what the parameters are between passes (writes.py) ends, and begins again.
        self.opens: Callable[[], None] = _nothing
        self.closes: Callable[[], None] = _nothing
        # Before a gradient that comes while no pass is running: run/own_loop.py begins one.
        self.begins: Callable[[], None] = _nothing

    def add(self, unit: Unit, modules: Iterable[torch.nn.Module] = (), always: bool = False) -> None:
        """modules: those whose forward uses the unit."""
        self.units.append(unit)
        if always:
            self.always.append(unit)
        for module in modules:
            module.forward = uncompiled(functools.partial(self._call, unit, module.forward))

    def begin(self, phase: Phase, stage: Hashable = 0) -> None:
        self.opens()
        self.phase, self.active, self.inside = phase, None, []
        key = self.phase, stage
        self.recording = key not in self.orders
        self.order = self.orders.setdefault(key, [])
        self.position = 0
        for unit in self.always:
            unit.gather()

    def end(self) -> None:
        self.phase = Phase.IDLE
        try:
            _each(unit.free for unit in self.units)
        finally:
            self.closes()

    def forget_orders(self) -> None:
        """After a pass that was interrupted: its record is incomplete."""
        self.orders.clear()

    @contextlib.contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Between passes, for a forward that is run for shapes: parameters around the trunk are zeros that
        take no memory.
        """
        with contextlib.ExitStack() as stack:
            for unit in self.always:
                for shards in unit.shards:
                    stack.enter_context(shards.stand_ins())
            yield

    def use(self, unit: Unit) -> None:
        unit.gather()
        if self.recording:
            if not self.order or self.order[-1] is not unit:
                self.order.append(unit)
            return
        if unit in self.order[self.position :]:
            self.position = self.order.index(unit, self.position) + 1
            if self.position < len(self.order):
                self.order[self.position].start()

    def _call(self, unit: Unit, forward: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> Tree:
        if self.phase == Phase.IDLE:
            raise ValueError(
                f"zero=3: the parameters of {unit.name!r} are sharded, and it is called by itself. Call the "
                "model, whose forward gathers them; or use a plan without zero=3"
            )
        # of activations; the second where the model or the loss takes a gradient
        is_recomputation = self.phase == Phase.BACKWARD or torch._C._current_graph_task_id() >= 0
        for outer in self.inside:
            outer.sticky = outer.sticky or outer is not unit
        self.use(unit)
        first = _get_sequence_nr()  # of the nodes that the forward makes
        self.inside.append(unit)
        try:
            out = forward(*args, **kwargs)
        finally:
            self.inside.pop()
        if is_recomputation:
            return out
        if torch.is_grad_enabled():
            leaves = tree_leaves(out)
            _check_seen(unit, leaves)
            for tensor in map(in_graph, leaves):
                for each in _with_base(tensor):
                    if _made_since(first, each):
                        each.register_hook(functools.partial(self._before_backward, unit))
        if unit not in self.always and unit not in self.inside:
            unit.free()
        return out

    @functools.cached_property
    def reading(self) -> Reading:
        """A context for forwards, in which parameters may be read at any place."""
        ids = {id(info.param): unit for unit in self.units for s in unit.shards for info in s.bucket.infos}
        return Reading(ids, self._keep)

    def _keep(self, unit: Unit) -> None:
        """From now on it is whole through every pass, this one included."""
        self.always.append(unit)
        unit.gather()

    def _before_backward(self, unit: Unit, grad: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # create_graph=True: that graph would want values when they are gone
            raise ValueError(
                f"zero=3: a gradient that goes through {unit.name!r} is to be differentiated again "
                "(create_graph=True), and its parameters would be gone by then: use a plan with zero=2"
            )
        if self.phase == Phase.IDLE:
            self.begins()
        if unit.sticky:
            self.use(unit)
        elif self.active is not unit:
            if self.active is not None and not self.active.sticky and self.active not in self.always:
                self.active.free()
            self.active = unit
            self.use(unit)


def _check_seen(unit: Unit, leaves: Sequence[Tree]) -> None:
    """Raises ValueError for an object that hides its tensors: their gradients would not be seen to come."""
    hiding = [x for x in leaves if not isinstance(x, torch.Tensor) and dataclasses.is_dataclass(x)]
    if hiding:
        raise ValueError(
            f"zero=3: {unit.name!r} returns a {type(hiding[0]).__name__}, whose tensors are not seen: return "
            "a tuple or a dict, or torch.utils._pytree.register_dataclass it"
        )


def _with_base(tensor: Tree) -> Sequence[torch.Tensor]:
    """Also what it is a view of, as a Linear's output is: where the model writes into a view (q /= 2),
    autograd replaces the view's node, and hooks on that are gone.
    """
    if not isinstance(tensor, torch.Tensor):
        return ()
    return (tensor,) if tensor._base is None else (tensor, tensor._base)


def _made_since(first: int, tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= first
