"""What the user writes to the model's parameters between two calls, and whether the plan would lose it.

    written                                  reaches the optimizer         otherwise
    p.mul_(), p.data.clamp_()                where it has p itself, or a   Noted counts it (bf16, offload),
                                             view of the same memory       Sharded refuses it (zero=3)
    p.data = ...                             where it has p itself         p lies in another place than its
                                                                           buffer (zero 1 and 2, bf16)
    p.data = ..., other shape or dtype       never                         p has these
    m.weight = nn.Parameter(), or another    never                         the place in the module holds
    module in the place of m                                               another object

What is lost is found when the next call begins: comparisons of Python objects and of numbers, about 0.1 us
for each parameter and module; no value is looked at, and nothing is sent. In a step the finding travels with
its other numbers (ground/same_batch.py), and where something was found, another collective says what. All
ranks then raise, and the write is taken back: the model is as it was before it. Only a shape or a dtype stays
what the user has made of it, as its values from before are gone.

The call that is going to raise runs with what it needs (_make_fit), so that no rank fails in its passes
alone while others wait for it there.

Calls run inside(), where all parameters are of the plain class, see sharded.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from pycomm.parallel.data.bucket import BufferedBucket
from pycomm.parallel.zero.sharded import Known, Noted, Sharded, way_out
from pycomm.parallel.zero.streamed import StreamedShards

if TYPE_CHECKING:
    from pycomm.parallel.data.bucket import ParamInfo
    from pycomm.parallel.zero.shards import Shards
    from pycomm.parallel.zero.units import Units

__all__ = ["Writes"]


class _Slot(NamedTuple):
    """A place of a parameter in a module, or of a module in another."""

    table: dict[str, nn.Parameter | None]
    key: str
    value: nn.Parameter
    name: str


class _Child(NamedTuple):
    table: dict[str, nn.Module | None]
    key: str
    value: nn.Module


class _Place(NamedTuple):
    """Where the values of a parameter must lie. data: a view of that memory."""

    param: nn.Parameter
    pointer: int
    data: torch.Tensor
    name: str


class _Form(NamedTuple):
    """What other parameters must look like."""

    param: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    name: str


class _Views:
    """Views of gradients into the buffer of a bucket: half() of a module gives `.grad.data` other memory."""

    def __init__(self, bucket: BufferedBucket) -> None:
        self.bucket = bucket
        self.pointers = [view.data_ptr() for view in bucket.views]

    def mend(self) -> None:
        if [view.data_ptr() for view in self.bucket.views] != self.pointers:
            self.bucket.views = self.bucket.spec.views(self.bucket.flat)


class Writes:
    """Of one parallelized model; survey() comes next. plan: its text. ask: an object of this rank -> the
    objects of all ranks; collective.
    """

    def __init__(
        self,
        model: nn.Module,
        infos: Sequence[ParamInfo],
        plan: str,
        ask: Callable[[str | None], Sequence[str | None]],
    ) -> None:
        self.model, self.infos, self.plan, self.ask = model, infos, plan, ask
        self.problem: str | None = None  # what this rank would lose; inside of a call
        self.gathered = False  # inside of par.gathered()
        self.held = 0  # how many calls are running, one in the other
        self.is_open = True
        self.slots, self.children = _tree(model)

    def survey(self, all_shards: Sequence[Shards]) -> None:
        """At the end of parallelize(), and inside of a call when parameters have got other shards."""
        self.shards = [shards for shards in all_shards if not isinstance(shards, StreamedShards)]
        streamed = [shards for shards in all_shards if isinstance(shards, StreamedShards)]
        self.sharded = [info for shards in streamed for info in shards.bucket.infos]
        copied = [shards for shards in self.shards if _is_copied(shards)]
        self.noted = [info for shards in copied for info in shards.bucket.infos]
        self.note()
        in_buffers = [shards for shards in self.shards if shards.values_here is not None or shards in copied]
        self.places = _places([info for shards in in_buffers for info in shards.bucket.infos])
        elsewhere = {id(info.param) for info in self.sharded} | {id(place.param) for place in self.places}
        self.forms = _forms(info for info in self.infos if id(info.param) not in elsewhere)
        self.buffers = [_Views(bucket) for bucket in _buffered(all_shards)]
        known = {id(info.param): Known(info.name, torch.Size(info.shape)) for info in self.sharded}
        self.kind = type("Parameter", (Sharded,), {"known": known})
        self.close()

    def follow(self, units: Units | None) -> None:
        """Passes of ZeRO-3 begin and end like calls."""
        if units is not None:
            units.opens, units.closes = self.open, self.close

    def note(self) -> None:
        """What was written up to now has reached the optimizer. Inside of a call."""
        self.versions = [info.param._version for info in self.noted]

    def note_of(self, parameter: nn.Parameter) -> None:
        """The same of one parameter, between calls."""
        for number, info in enumerate(self.noted):
            if info.param is parameter:
                self.versions[number] = parameter._version

    # The classes of parameters ------------------------------------------------------------

    def open(self) -> None:
        """All parameters are plain."""
        if self.is_open:
            return
        self.is_open = True
        for info in self.sharded:
            info.param.__class__ = nn.Parameter
        for info in self.noted:
            info.param.__class__ = nn.Parameter

    def reopen(self) -> None:
        """The same after some have been made plain by others."""
        self.is_open = False
        self.open()

    def close(self) -> None:
        """They are the user's, if no call is running."""
        if not self.is_open or self.held:
            return
        self.is_open = False
        for info in self.sharded:
            info.param.__class__ = self.kind
        for info in self.noted:
            info.param.__class__ = Noted

    @contextlib.contextmanager
    def inside(self, call: str) -> Iterator[None]:
        """Around a call of the user's, which may be inside of another. Raises ValueError within gathered(),
        and instead of an error that comes of a write that is lost.
        """
        if self.gathered:
            raise ValueError(
                f"{call} within par.gathered: the model has whole parameters there, which are no part of "
                "the plan. Leave the `with` block before"
            )
        self.held += 1
        first = self.held == 1
        if first:
            self.open()
            self.problem = self._find()
        lent = [] if self.problem is None or not first else self._make_fit()
        try:
            yield
        except dist.DistError:
            raise
        except Exception as error:
            if not first or self.problem is None:
                raise
            raise ValueError(f"{call}: {self.problem}") from error
        finally:
            for param, data in lent:
                param.data = data
            self.held -= 1
            if first:
                self.problem = None
                self.close()

    # What is lost -------------------------------------------------------------------------

    def check(self, call: str, rank: int) -> None:
        """Inside of a call. Raises ValueError on every rank where one would lose a write. Collective."""
        self.refuse_told(call, rank, self.ask(self.problem))

    def refuse(self, call: str, rank: int) -> NoReturn:
        """The same where it is known that one would."""
        self.check(call, rank)
        raise AssertionError("a rank has said that it would lose a write")

    def refuse_told(self, call: str, rank: int, told: Sequence[str | None]) -> None:
        """told: `problem` of all ranks. Collective where there is one."""
        who = next((number for number, problem in enumerate(told) if problem is not None), None)
        if who is None:
            return
        self.problem = None
        if any(_is_copied(shards) for shards in self.shards):
            for shards in self.shards:
                shards.publish()
            for shards in self.shards:
                shards.wait()
            self.note()
        count = sum(problem is not None for problem in told)
        ranks = f"rank {who}" if count == 1 else f"{count} ranks, the first of which is {who},"
        raise ValueError(f"[rank {rank}] {call}: on {ranks} {told[who]}. No parameter was changed")

    def _find(self) -> str | None:
        """The first write that would be lost on this rank."""
        for views in self.buffers:
            views.mend()
        for table, key, child in self.children:
            if table.get(key) is not child:
                lost = self._lost_modules()
                if lost is not None:
                    return lost
                break
        for slot in self.slots:
            if slot.table.get(slot.key) is not slot.value:
                return (
                    f"{slot.name!r} is another Parameter than parallelize found there (model.x.weight = "
                    "nn.Parameter(...), or weights shared afterwards), and the plan and its optimizer go on "
                    f"with the one before: {way_out(slot.name)}; share weights before parallelize. The one "
                    "before is in its place again"
                )
        for place in self.places:
            if place.param.data_ptr() != place.pointer:
                return (
                    f"{place.name!r} was given other memory (p.data = ...), and under Plan({self.plan}) the "
                    f"optimizer's values lie in a buffer, which does not see it: {way_out(place.name)}. It "
                    "has the memory from before again"
                )
        for form in self.forms:
            if form.param.shape != form.shape or form.param.dtype != form.dtype:
                return (
                    f"{form.name!r} is {tuple(form.param.shape)}, {form.param.dtype} now, and was "
                    f"{tuple(form.shape)}, {form.dtype} under Plan({self.plan}): give it these again; "
                    f"{way_out(form.name)}; change dtypes before parallelize"
                )
        for info, version in zip(self.noted, self.versions, strict=True):
            if info.param._version != version:
                return (
                    f"{info.name!r} was written to, and under Plan({self.plan}) the optimizer has a copy "
                    f"(of full precision, or on the host), which undoes it: {way_out(info.name)}"
                )
        return None

    def _lost_modules(self) -> str | None:
        """A module was replaced. Around the one before, as torch.compile has it, it may be."""
        reached = {id(parameter) for parameter in self.model.parameters()}
        lost = [slot.name for slot in self.slots if id(slot.value) not in reached]
        if lost:
            return (
                f"the module of {lost[0]!r} was replaced or removed after parallelize, and the plan and its "
                "optimizer go on with the one before: change modules before parallelize, or write values "
                f"into those that are there: {way_out(lost[0])}. The one before is in its place again"
            )
        self.slots, self.children = _tree(self.model)
        return None

    def _make_fit(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Takes back what can be taken back without other ranks, so that this call fails for no rank before
        all have heard of it. Returns what the user has made of parameters that are something else meanwhile.
        """
        for table, key, child in self.children:
            table[key] = child
        for slot in self.slots:
            slot.table[slot.key] = slot.value
        for place in self.places:
            if place.param.data_ptr() != place.pointer:
                place.param.data = place.data
        lent = []
        for form in self.forms:
            if form.param.shape != form.shape or form.param.dtype != form.dtype:
                lent.append((form.param, form.param.data))
                form.param.data = form.param.new_zeros(form.shape, dtype=form.dtype)
        return lent


def _buffered(all_shards: Sequence[Shards]) -> list[BufferedBucket]:
    buckets = [shards.bucket for shards in all_shards]
    return [bucket for bucket in buckets if isinstance(bucket, BufferedBucket)]


def _is_copied(shards: Shards) -> bool:
    """Whether the optimizer has a copy of the values."""
    return shards.master is not None and shards.master is not shards.values_here


def _places(infos: Iterable[ParamInfo]) -> list[_Place]:
    params = [(info.param, info.param.data, info.name) for info in infos if info.numel]
    return [_Place(param, data.data_ptr(), data, name) for param, data, name in params]


def _forms(infos: Iterable[ParamInfo]) -> list[_Form]:
    return [_Form(info.param, info.param.shape, info.param.dtype, info.name) for info in infos]


def _tree(model: nn.Module) -> tuple[list[_Slot], list[_Child]]:
    """Where parameters, and modules, are now."""
    slots: list[_Slot] = []
    children: list[_Child] = []
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{key}" if prefix else key
                slots.append(_Slot(module._parameters, key, parameter, name))
        for key, child in module._modules.items():
            if child is not None:
                children.append(_Child(module._modules, key, child))
    return slots, children
