"""Parameters that are frozen or begin to be trained between steps: requires_grad_() after parallelize.

    step      what a rank does
    look      before the passes: compares requires_grad of all parameters with the step before
                frozen now            it stays in its bucket, where it counts as zero. No rank has a gradient
                                      of it, so the optimizer passes over it, and keeps its state
                trained again         nothing else is needed
                trained first now     frozen since parallelize, it is in no bucket: its gradient is kept apart
                                      (data/reducer.py)
    mark      rides in the sum that a step sends anyway: whether all ranks look alike
    take_in   behind that sum: what is trained first gets buckets, shards and its place in the optimizer. They
              are made by all its ranks together. Then what was kept apart moves in, and is summed

So a change costs nothing but in the first step of a parameter, whose gradients are whole on every rank until
the end of its passes. What is never trained has no buffer, master copy or state. Gradients that wait for an
update (update=False) when their parameter is frozen are updated with, as in one process.

With ZeRO-3 the values of frozen parameters are in buckets too, without gradients. Such a bucket becomes one
of trained parameters, or is cut in two where only some are.

Under precision="bf16" what is frozen is held in bf16 alone, so its master copy begins with these values.

What lost: a sum of flags before the passes, which every step would wait for; new buckets at each change,
which code that freezes and unfreezes in every step (GAN) would pay for.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import torch

from pycomm.parallel.ground import comm
from pycomm.parallel.zero.apply import buckets_of, master_options, one_bucket
from pycomm.parallel.zero.kinds import kind_of
from pycomm.parallel.zero.shards import Shards
from pycomm.parallel.zero.streamed import StreamedShards

if TYPE_CHECKING:
    from pycomm.parallel.data.bucket import Bucket, ParamInfo
    from pycomm.parallel.data.reducer import Reducer
    from pycomm.parallel.ground.plan import Plan
    from pycomm.parallel.zero.optimizer import Owner
    from pycomm.parallel.zero.units import Units

__all__ = ["Flags", "Held", "Names", "Trained"]

Flags: TypeAlias = dict[str, str]  # name -> text of requires_grad


@dataclasses.dataclass(frozen=True)
class Held:
    """What of a rank changes with what is trained."""

    plan: Plan
    rank: int  # of all
    infos_of: Mapping[int, Sequence[ParamInfo]]  # stage of this rank -> its infos
    reducers: Mapping[int, Reducer]
    shards: dict[int, tuple[Shards, ...]]
    owner: Owner | None  # of the optimizer
    units: Units | None  # ZeRO-3 only
    after: Callable[[], None] = lambda: None  # called when there are more buckets


@dataclasses.dataclass(frozen=True)
class Names:
    """Of the model's parameters."""

    first: Mapping[str, str]  # every name -> the first name of the same parameter
    trained: frozenset[str]  # at the beginning
    experts: tuple[str, ...]  # prefixes of experts, which differ between ranks
    refused: Mapping[str, str]  # what cannot be trained from now on -> why


class Trained:
    """model: its parameters by name, other stages' too. ask: this rank's Flags -> the Flags of all ranks,
    collective over all.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        names: Names,
        held: Held,
        ask: Callable[[Flags], list[Flags]],
    ) -> None:
        self.names, self.held, self.ask = names, held, ask
        self.before_cut: Callable[[Shards], None] = lambda shards: None  # what else is cut like them
        self.copies: dict[str, list[torch.nn.Parameter]] = {}  # first name -> all that stand for it here
        for name, param in parameters:
            copies = self.copies.setdefault(names.first[name], [])
            if not any(param is copy for copy in copies):
                copies.append(param)
        self.params = [param for copies in self.copies.values() for param in copies]
        for name, copies in self.copies.items():
            for param in copies:  # stand-ins for parameters of other stages have none of their own
                if param.requires_grad != (name in names.trained):
                    param.requires_grad_(name in names.trained)
        self._seen = [param.requires_grad for param in self.params]
        self._now = self._start = {name for name in self.copies if name in names.trained}
        self._groups: dict[str, int] = {}  # of names that joined the optimizer later
        self._flags = self._flags_now()
        self._ever = _wanted(self._flags)  # what has got its buckets, alike on all ranks
        self._mark = _mark_of(self._told())
        self._changed = self._forgets = False  # since the last step; before it
        self.held_names = set(self._now)  # of what has got its buckets on the ranks that hold it
        self.open = self._now  # names of what was trained in some call since the last update

    def look(self, begins: bool) -> None:
        """Before the passes. begins: no gradient waits for an update. No communication."""
        if self._forgets and self.held.units is not None:
            self.held.units.forget_orders()  # not in the step that changes: all ranks must forget alike
        self._notice()
        self._forgets, self._changed = self._changed, False
        self.open = self._now if begins or self.open is self._now else self.open | self._now

    def _note_flags(self) -> None:
        self._flags = self._flags_now()
        self._mark = _mark_of(self._told())

    def now(self) -> dict[str, bool]:
        """By first name: whether it is trained."""
        self._notice()
        return {name: name in self._now for name in self.copies}

    def set(self, flags: Mapping[str, bool]) -> None:
        """As now() gave them, here or on another rank."""
        if flags != self.now():
            for name, flag in flags.items():
                for param in self.copies.get(name, ()):
                    param.requires_grad_(flag)

    def _notice(self) -> None:
        if [param.requires_grad for param in self.params] != self._seen:
            self._note(dict(zip(map(id, self.params), self._seen, strict=True)))

    def _note(self, before: Mapping[int, bool]) -> None:
        """Flags have changed. before: by the id of a parameter."""
        now = set()
        for name, copies in self.copies.items():
            flag = copies[0].requires_grad
            changed = [param for param in copies if param.requires_grad != before[id(param)]]
            if changed:  # a tied weight follows the name by which it was changed
                flag = changed[0].requires_grad
                for param in copies:
                    param.requires_grad_(flag)
            if flag:
                now.add(name)
        self._changed = True
        self._now, self._seen = now, [param.requires_grad for param in self.params]
        self._note_flags()
        for stage, reducer in self.held.reducers.items():
            reducer.note_trained()
            for info in self.held.infos_of[stage]:
                if info.param.requires_grad and not reducer.has(info.param):
                    reducer.expect(info.param)
        for shards in self._all_shards():
            shards.note_trained()

    def check_kept_apart(self) -> None:
        """After the passes. Raises ValueError where a parameter began to be trained in them, of whose
        gradient nothing would be known.
        """
        if [param.requires_grad for param in self.params] == self._seen:
            return
        for stage, infos in self.held.infos_of.items():
            for info in infos:
                if info.param.requires_grad and not self.held.reducers[stage].has(info.param):
                    raise ValueError(
                        f"step: {info.name!r} was frozen when the step began, and is not now: call "
                        "requires_grad_(True) between two steps, and not in the forward or the loss"
                    )

    def regroup(self, option: dict[str, int], params: Sequence[torch.Tensor], number: int) -> None:
        """opt.add_param_group(): parameters that the optimizer did not have join its group `number`. option:
        as in Original. No communication; the next step tells whether all ranks do so.
        """
        name_of = {id(param): name for name, copies in self.copies.items() for param in copies}
        for param in params:
            name = name_of.get(id(param))
            if name is None or name in option:
                what = "a tensor that is not a parameter of the model" if name is None else f"{name!r}"
                raise ValueError(
                    f"add_param_group: {what} cannot join the optimizer of a model under a plan, which takes "
                    "parameters of the model that it does not have. Give it all groups before parallelize "
                    "(lr=0 for those that are to wait)"
                )
        names = {name_of[id(param)] for param in params}
        option.update(dict.fromkeys(names, number))
        self._groups |= dict.fromkeys(names, number)
        for info in self._infos():
            if info.name in names:
                info.option = number
        for shards in self._all_shards():
            for shard in shards.updated:
                if shard.info.name in names and self.held.owner is not None:
                    self.held.owner.add_one(shard)
        self._note_flags()

    def is_held(self, name: str) -> bool:
        """Whether it has got its buckets on the ranks that hold it. Of experts that only others hold, too:
        those of a layer change together.
        """
        if name in self.copies:
            return name in self.held_names
        joined = self.held_names - self.names.trained
        return name in self.names.trained or any(self._key(each) == self._key(name) for each in joined)

    # --- whether all ranks look alike --------------------

    def _key(self, name: str) -> str:
        """Experts of a layer, of which ranks hold different ones, have one key."""
        prefix = next((each for each in self.names.experts if name.startswith(each)), None)
        return name if prefix is None else f"{prefix}*.{name[len(prefix) :].partition('.')[2]}"

    def _flags_now(self) -> Flags:
        """By key; of experts whether they have changed."""
        flags: Flags = {}
        for name in self.copies:
            key = self._key(name)
            text = str(name in self._now)
            if key != name:
                text = "changed" if (name in self._now) != (name in self._start) else "as at parallelize"
                if flags.get(key, text) != text:
                    text = f"changed for some experts of rank {self.held.rank}"
            flags[key] = text
        return flags

    def _told(self) -> Flags:
        """What all ranks are to have alike."""
        groups = {f"the parameter group of {name!r}": str(number) for name, number in self._groups.items()}
        return groups | {f"requires_grad of {key!r}": text for key, text in self._flags.items()}

    def mark(self) -> int:
        """A number below 2^20, which as a rule differs where a flag has been changed on some ranks only."""
        return self._mark

    def refuse(self, rank: int) -> None:
        """Raises ValueError, on all ranks, where flags differ. Collective over all ranks; rank: this one."""
        told = self.ask(self._told())
        for other, flags in enumerate(told):
            for key in sorted({*told[0], *flags}):
                here, there = told[0].get(key), flags.get(key)
                if here != there:
                    raise ValueError(
                        f"[rank {rank}] step: {key} is {here} on rank 0 and {there} on rank {other}. "
                        "Freeze, unfreeze and add groups alike on all ranks, experts of a layer together; no "
                        "parameter was changed"
                    )

    # --- what is trained for the first time --------------------

    @property
    def has_new(self) -> bool:
        """Whether take_in() has anything to do on some rank: alike on all, once they look alike."""
        return not _wanted(self._flags) <= self._ever

    def take_in(self, sync: bool, also: Iterable[str] = ()) -> list[Bucket]:
        """What is trained, and what is named in `also`, gets buckets: those that were made. When all ranks
        look alike; collective over the ranks of each bucket.

        sync: their gradients become an update now. Raises ValueError for what cannot be trained.
        """
        also = set(also)
        wanted = (_wanted(self._flags) | {f"{self._key(name)} True" for name in also}) - self._ever
        if not wanted:
            return []
        for name in sorted(self._now | also):
            if name in self.names.refused:
                raise ValueError(self.names.refused[name])
        made: list[Bucket] = []
        for stage, infos in self.held.infos_of.items():
            reducer = self.held.reducers[stage]
            wanted_here = [info for info in infos if info.param.requires_grad or info.name in also]
            fresh = [info for info in wanted_here if id(info.param) not in reducer.places]
            if fresh:
                shards = (
                    self._split(stage, fresh) if self.held.units is not None else self._make(stage, fresh)
                )
                buckets = [each.bucket for each in shards]
                reducer.add(buckets)
                reducer.catch_up(buckets, sync)
                if self.held.owner is not None:
                    self.held.owner.add(shards)
                made += buckets
        self._ever |= wanted
        self.held_names |= self._now | also
        self.held.after()
        return made

    def _make(self, stage: int, fresh: Sequence[ParamInfo]) -> list[Shards]:
        """Shards of parameters that are whole on this rank."""
        plan, opt = self.held.plan, None if self.held.owner is None else self.held.owner.opt
        values = {info.param: info.param.detach() for info in fresh}
        shards = [
            kind_of(plan).shards(bucket, values, master_options(bucket, plan))
            for bucket in buckets_of(fresh, None, opt, plan)
        ]
        self.held.shards[stage] += tuple(shards)
        return self._trained(shards)

    def _split(self, stage: int, fresh: Sequence[ParamInfo]) -> list[Shards]:
        """ZeRO-3: the shards of these parameters, which were in buckets of frozen ones."""
        names = {info.name for info in fresh}
        found: list[Shards] = []
        kept: list[Shards] = []
        for shards in self.held.shards[stage]:
            parts = [shards]
            infos = shards.bucket.infos
            mine = [info for info in infos if info.name in names and not shards.is_trained]
            if len(mine) == len(infos):
                found.append(shards)
            elif mine:
                parts = self._cut(cast(StreamedShards, shards), mine)
                found.append(parts[0])
            kept += parts
        self.held.shards[stage] = tuple(kept)
        return self._trained(found)

    def _cut(self, shards: StreamedShards, mine: Sequence[ParamInfo]) -> list[Shards]:
        """[shards of `mine`, shards of the others]"""
        bucket, plan = shards.bucket, self.held.plan
        opt = None if self.held.owner is None else self.held.owner.opt
        assert shards.master is not None and self.held.units is not None  # ZeRO-3
        self.before_cut(shards)
        own = shards.master.to(bucket.device)
        full = own.new_empty(bucket.spec.numel)
        comm.all_gather(full, own, bucket.group)
        values = dict(zip([info.param for info in bucket.infos], bucket.spec.views(full), strict=True))
        others = [info for info in bucket.infos if info not in mine]
        buckets = [one_bucket(infos, opt, plan) for infos in (mine, others)]
        parts = [StreamedShards(each, values, master_options(each, plan)) for each in buckets]
        for unit in self.held.units.units:
            if shards in unit.shards:
                unit.shards = [part for each in unit.shards for part in (parts if each is shards else [each])]
        return list(parts)

    def _trained(self, shards: list[Shards]) -> list[Shards]:
        for each in shards:
            each.is_trained = True
            each.note_trained()
        return shards

    def _infos(self) -> list[ParamInfo]:
        return [info for infos in self.held.infos_of.values() for info in infos]

    def _all_shards(self) -> list[Shards]:
        return [shards for some in self.held.shards.values() for shards in some]


def _mark_of(flags: Flags) -> int:
    return zlib.crc32(repr(sorted(flags.items())).encode()) % (1 << 20)


def _wanted(flags: Flags) -> set[str]:
    """What has, or is to have, buckets."""
    return {f"{key} {text}" for key, text in flags.items() if text != "False"}
