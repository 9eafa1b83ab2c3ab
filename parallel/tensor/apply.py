"""Tensor parallelism for a plain model, in place: finds what can be cut (find.py), checks it (probe.py), cuts
it (cut_sublayer.py), and says what each rank now holds (layouts).

    per block, N ranks, B bytes of the hidden state   forward                          backward
    tp                                                2 all_reduce of B                2 all_reduce of B
    tp with sequence (Megatron sequence parallelism)  2 all_gather + 2 reduce_scatter  the same
    embedding cut by vocabulary                       1 all_reduce                     nothing
    head cut by vocabulary                            gather of the logits, or nothing 1 all_reduce of B

With `sequence` see [Note: sequence] in whole_sequence.py. No communication here: the result depends on the
model, the rules and the rank alone. Sources: Shoeybi 2019, Korthikanti 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.layout import Layout, whole
from pycomm.parallel.tensor.cut_sublayer import Cutter, cut_sublayer, swap
from pycomm.parallel.tensor.find import Ties, find
from pycomm.parallel.tensor.heads import split_heads
from pycomm.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from pycomm.parallel.tensor.modules import base_of, is_linear, within
from pycomm.parallel.tensor.narrow import SublayerForward
from pycomm.parallel.tensor.probe import Verdict, probe
from pycomm.parallel.tensor.slices import cut, even_slices
from pycomm.parallel.tensor.sublayers import Cuts, Found, SingleRule, Sublayer
from pycomm.parallel.tensor.tables import cut_table
from pycomm.parallel.tensor.whole_sequence import WholeSequence, after_trunk, check_order

if TYPE_CHECKING:
    import torch.distributed as dist

    from pycomm.parallel.ground.comm import Group
    from pycomm.parallel.tensor.edges import CutSequence

__all__ = ["Head", "TensorParallel", "parallelize_tensor"]


class Head:
    """The head that is cut by vocabulary. sharded_output = True leaves its logits cut, for
    pycomm.parallel.cross_entropy.
    """

    def __init__(self, fqn: str, layer: ColumnParallelLinear) -> None:
        self.fqn, self.layer = fqn, layer
        self.full_size, self.local_size = layer.full_size, layer.local_size

    @property
    def sharded_output(self) -> bool:
        return not self.layer.gather_output

    @sharded_output.setter
    def sharded_output(self, value: bool) -> None:
        self.layer.leave_cut(value)


class TensorParallel:
    """What parallelize_tensor did: layouts (of every name of a parameter), found (printable lines), head,
    forwards (name of a layer -> what is around it).
    """

    def __init__(
        self,
        layouts: dict[str, Layout],
        found: list[Found],
        head: Head | None = None,
        forwards: dict[str, SublayerForward] | None = None,
    ) -> None:
        self.layouts, self.found, self.head, self.forwards = layouts, found, head, forwards or {}

    def note_dealt(self, layouts: Mapping[str, Layout], rank: int) -> None:
        """Some parameters that are whole here were dealt over other ranks afterwards: experts. layouts: of
        what is here of them now. rank: this one's in tp, of which the first counts them.
        """
        for name, layout in layouts.items():
            partial = self.layouts[name].partial
            counted = layout.counted if partial or rank == 0 else ()
            self.layouts[name] = layout._replace(partial=partial, counted=counted)

    def __str__(self) -> str:
        return "\n".join(
            f"{line.fqn or '(the model)':40} {line.rule:10} {line.detail}" for line in self.found
        )


class _Taken(NamedTuple):
    parameter: torch.Tensor
    layout: Layout
    part: nn.Parameter


class Applier:
    """Cuts a model by what was found, and remembers what became of its parameters."""

    def __init__(
        self, model: nn.Module, group: Group, blocks: str | None, sequence: CutSequence | None
    ) -> None:
        self.model, self.group, self.blocks, self.sequence = model, group, blocks, sequence
        self.parts: dict[int, _Taken] = {}  # id of a parameter
        self.partial: set[str] = set()  # names of parameters that all ranks hold and use for their own heads
        self.wholly: set[str] = set()  # names of modules that are given the whole sequence
        self.head: Head | None = None  # that was cut
        self.forwards: dict[str, SublayerForward] = {}  # name of a column layer -> what is around it
        sides = getattr(sequence, "sides", {})
        self.after = after_trunk(model, blocks, sides) if sequence is not None else set()  # names of modules

    def in_sequence(self, fqn: str) -> bool:
        return self.sequence is not None and (fqn in self.after or within(fqn, self.blocks))

    def sequence_of(self, fqn: str) -> CutSequence | None:
        return self.sequence if self.in_sequence(fqn) else None

    def take(self, parameter: torch.Tensor, layout: Layout) -> nn.Parameter:
        """Cuts a parameter once, however many modules share it."""
        known = self.parts.get(id(parameter))
        if known is None:
            known = self.parts[id(parameter)] = _Taken(parameter, layout, cut(parameter, layout))
        if known.layout != layout:
            raise ValueError(
                f"tensor parallelism: tied parameters of shape {layout.full_shape} would be cut in two ways, "
                f"{known.layout} and {layout}"
            )
        return known.part

    def sublayer(self, sublayer: Sublayer) -> None:
        self.partial.update(sublayer.inside)
        cutter = Cutter(self.group, self.sequence_of(sublayer.owner), self.take)
        cut_sublayer(self.model, sublayer, cutter)
        forward = self.model.get_submodule(sublayer.owner).forward
        if isinstance(forward, SublayerForward):
            self.forwards[sublayer.columns[0]] = forward

    def single(self, fqn: str, rule: SingleRule) -> None:
        old, sequence = self.model.get_submodule(fqn), self.sequence_of(fqn)
        new: VocabParallelEmbedding | RowParallelLinear | ColumnParallelLinear
        if type(old) is not nn.Embedding and isinstance(old, nn.Embedding):
            cut_table(old, self.group, self.take)
            return
        if isinstance(old, nn.Embedding):
            new = VocabParallelEmbedding.from_module(old, self.group, take=self.take)
        elif rule == "row":
            if fqn in self.after:
                sequence = None  # given the whole sequence below, as a head that is not cut
            new = RowParallelLinear.from_module(base_of(old), self.group, sequence=sequence, take=self.take)
        else:
            new = ColumnParallelLinear.from_module(
                base_of(old), self.group, sequence=sequence, take=self.take
            )
            if rule == "vocab" or fqn in self.after:
                new.become_head()
            if rule == "vocab":
                self.head = self.head or Head(fqn, new)
        swap(self.model, old, new)
        if rule == "row" and fqn in self.after:
            self.whole(fqn)

    def follow(self, fqn: str, key: str) -> None:
        """Cuts a vector that is tied to a bias of the vocabulary, in a module that only holds it."""
        owner = self.model.get_submodule(fqn)
        parameter = owner.get_parameter(key)
        layout = even_slices(len(parameter), self.group).layout(parameter, 0)
        owner._parameters[key] = self.take(parameter, layout)

    def whole(self, fqn: str) -> None:
        """With a sequence, gives a module all tokens; without, replicated modules have them anyway."""
        if self.sequence is None or not self.in_sequence(fqn) or self.is_given_whole(fqn):
            return
        module = self.model.get_submodule(fqn)
        if fqn in self.after and not is_linear(module) and not isinstance(module, RowParallelLinear):
            return  # works token by token; the head behind it gathers
        module.forward = WholeSequence(module.forward, self.group, self.sequence, fqn not in self.after)
        self.wholly.add(fqn)

    def heads(self) -> None:
        """Gives the whole sequence to Linears after the trunk that are not cut."""
        for fqn in self.after:
            if is_linear(self.model.get_submodule(fqn)) and not self._leads_to_head(fqn):
                self.whole(fqn)

    def _leads_to_head(self, fqn: str) -> bool:
        """Whether a Linear works token by token for the head that is cut, and beside which it lies (BERT)."""
        around = self.head.fqn.rpartition(".")[0] if self.head is not None else ""
        return bool(around) and fqn.startswith(around + ".")

    def layouts(self) -> dict[str, Layout]:
        parts = {id(part): (layout, parameter) for parameter, layout, part in self.parts.values()}
        sliced = {id(parameter) for parameter, layout, part in self.parts.values() if part is not parameter}
        layouts: dict[str, Layout] = {}
        owners: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) in sliced:
                raise ValueError(
                    f"tensor parallelism: {name} is tied to a parameter that is cut, but is not cut itself; "
                    "replicate both by rules"
                )
            known = parts.get(id(parameter))
            layouts[name] = known[0] if known else whole(parameter, self.group.rank, self.is_partial(name))
            other = owners.setdefault(id(parameter), name)
            if layouts[other] != layouts[name]:
                raise ValueError(
                    f"sequence parallelism: {other} and {name} are tied, and only one of them works on "
                    "pieces of the sequence"
                )
        return layouts

    def is_partial(self, name: str) -> bool:
        owner = name.rpartition(".")[0]
        return name in self.partial or self.in_sequence(owner) and not self.is_given_whole(owner)

    def is_given_whole(self, fqn: str) -> bool:
        """Whether a module, or one that it lies in, is given the whole sequence."""
        return any(fqn == above or fqn.startswith(above + ".") for above in self.wholly)


def is_whole(model: nn.Module, sublayer: Sublayer) -> bool:
    return not any(buffer.is_meta for buffer in model.get_submodule(sublayer.owner).buffers())


class _Kind(NamedTuple):
    owner: type[nn.Module]
    rule: str
    columns: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # of parameters, by name


def kind_of(model: nn.Module, sublayer: Sublayer) -> _Kind:
    """Equal for sublayers that compute alike."""
    owner = model.get_submodule(sublayer.owner)
    shapes = tuple((name, tuple(p.shape)) for name, p in owner.named_parameters())
    return _Kind(type(owner), sublayer.rule, len(sublayer.columns), shapes)


def checked(model: nn.Module, cuts: Cuts, group: Group) -> list[Sublayer]:
    """The sublayers that compute the same in parts; the others join cuts.whole and say why."""
    for sublayer in cuts.sublayers:
        if sublayer.counts is not None:
            split_heads(sublayer.counts.q_heads, sublayer.counts.kv_heads, group.size, sublayer.owner)
    verdicts: dict[_Kind, Verdict] = {}  # of each kind of sublayer
    kept = []
    # Those that a pipeline stage has first: of others the buffers may be gone, without which nothing runs.
    for sublayer in sorted(cuts.sublayers, key=lambda sublayer: not is_whole(model, sublayer)):
        kind = kind_of(model, sublayer)
        if kind not in verdicts:
            verdicts[kind] = probe(model, sublayer, group.size)
    for sublayer in cuts.sublayers:
        layout, reason = verdicts[kind_of(model, sublayer)]
        if layout is not None:
            kept.append(sublayer._replace(layouts=(layout,)))
            continue
        place = sublayer.owner, sublayer.rule
        if place in cuts.asked:
            raise ValueError(f"tensor-parallel rule {place[1]!r} for {place[0]!r}: it {reason}")
        cuts.found[:] = [line for line in cuts.found if (line.fqn, line.rule) != place]
        cuts.found.append(Found(sublayer.owner, "replicate", f"{sublayer.rule}: {reason}"))
        if sublayer.rule == "attention":
            cuts.whole.append(sublayer.owner)
    return kept


def parallelize_tensor(
    model: nn.Module,
    group: Group | dist.ProcessGroup | None,
    *,
    rules: Mapping[str, str] | None = None,
    blocks: str | None = None,
    sequence: CutSequence | None = None,
    ties: Ties | None = None,
) -> TensorParallel:
    """Cuts a plain torch model over `group`, in place.

    model: with full weights, equal on all ranks. group: see comm.as_group.
    rules: {glob of module names: "column", "row", "vocab", "attention", "mlp", "experts", "tokens" or
    "replicate"},
    before anything that is found.
    blocks: name of the trunk (models/trunk.py). sequence: object whose `.sizes`, set before each forward,
    are the lengths per rank along dim 1 of the hidden state from block 0 on, and `.sides` what is known of
    {module: Side} (see whole_sequence.py); needs `blocks`. ties: {name of a parameter: first name of the same
    one}, for a model whose parameters no longer show it (on meta); None compares them. A group of one changes
    nothing.

    Raises ValueError for rules that do not fit, fewer query heads than ranks, and tied parameters that would
    be cut in two ways.
    """
    ranks = comm.as_group(group, "tp")
    if sequence is not None and blocks is None:
        raise ValueError("tensor parallelism with sequence= needs blocks=, the name of the trunk")
    cuts = find(model, rules=rules, blocks=blocks, ties=ties)
    if ranks.size == 1:
        return TensorParallel(
            {name: whole(p) for name, p in model.named_parameters(remove_duplicate=False)}, cuts.found
        )
    kept = checked(model, cuts, ranks)
    applier = Applier(model, ranks, blocks, sequence)
    for sublayer in kept:
        applier.sublayer(sublayer)
    for fqn, rule in cuts.single.items():
        applier.single(fqn, rule)
    for fqn, key in cuts.followers:
        applier.follow(fqn, key)
    if sequence is not None and blocks is not None:
        for fqn in sorted(cuts.whole, key=len):
            applier.whole(fqn)
        applier.heads()
        check_order(model, blocks, applier.after)
    return TensorParallel(applier.layouts(), cuts.found, applier.head, applier.forwards)
