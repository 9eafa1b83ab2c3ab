"""What a plan has made of a model on this rank, for people: which blocks and layers are here, what is cut and
what stays whole, why, and how many bytes that is. Reads only; no communication.
"""

import math
import re
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from pycomm.parallel.building.over_hosts import over_hosts
from pycomm.parallel.checks import assumptions_of
from pycomm.parallel.ground.plan import Axis, Plan
from pycomm.parallel.parts import Parallelized, parts_of
from pycomm.parallel.zero.kinds import kind_of

__all__ = ["AxisPlace", "Description", "LayerLine", "describe"]

Sizes: TypeAlias = dict[str, int]  # of "model", "here" and "updated"
OverHosts: TypeAlias = tuple[str | None, list[str]]


class AxisPlace(NamedTuple):
    """This rank on an axis of the plan."""

    place: int
    ranks: int
    text: str  # what is divided along the axis


class LayerLine(NamedTuple):
    """Modules alike but for numbers: * stands for these."""

    module: str
    rule: str
    detail: str
    number: int


class Description:
    """What describe() returns; str() is the text.

    rank: this one, and how many there are. numel, nbytes: of the whole model's parameters and of this rank's,
    {"model", "here", "updated"}; updated: what this rank's optimizer has. hosts: where the ranks are, None on
    one host; crossing: sentences about the axes that cross hosts, and what that costs. checks: {what the plan
    takes for granted: what was found of it}, see docs/limits.md.
    """

    def __init__(
        self,
        rank: tuple[int, int],
        plan: Plan,
        axes: dict[Axis, AxisPlace],
        layers: list[LayerLine],
        sizes: tuple[Sizes, Sizes],
        more: tuple[OverHosts, dict[str, str]],
    ) -> None:
        self.rank, self.plan, self.axes, self.layers = rank, plan, axes, layers
        self.numel, self.nbytes = sizes
        (self.hosts, self.crossing), self.checks = more

    def __str__(self) -> str:
        lines = [f"Plan({self.plan}), rank {self.rank[0]} of {self.rank[1]}"]
        lines += [f"  {axis:8} {place} of {size}: {text}" for axis, (place, size, text) in self.axes.items()]
        if self.hosts:
            lines.append(f"  hosts    {self.hosts}")
            lines += [f"    {sentence}" for sentence in self.crossing]
        if self.layers:
            width = min(44, max(len(name) for name, *_ in self.layers))
            lines.append("  layers, of all stages")
            lines += [
                f"    {name:{width}} {f'{number} x' if number > 1 else '':>5} {rule:10} {detail}"
                for name, rule, detail, number in self.layers
            ]
        lines.append(
            f"  parameters: {_text(self.nbytes['model'])} in the whole model, {_text(self.nbytes['here'])} "
            f"here, {_text(self.nbytes['updated'])} that this rank's optimizer updates"
        )
        if self.checks:
            lines.append("  taken for granted")
            lines += [f"    {name:16} {said}" for name, said in self.checks.items()]
        return "\n".join(lines)


def describe(model: nn.Module) -> Description:
    """What parallelize() has made of `model` on this rank: a Description, to be printed.

    Raises ValueError for a model that has not been through parallelize().
    """
    parts = parts_of(model)
    world = parts.mesh.world
    axes: dict[Axis, AxisPlace] = {}
    for axis, text in _axes(parts).items():
        group = parts.mesh.group(axis)
        if group.size > 1:
            axes[axis] = AxisPlace(group.rank, group.size, text)
    layers = _layers(parts) if parts.plan.tp > 1 else []
    more = over_hosts(parts), _checks(parts)
    with parts.writes.inside("describe"):
        sizes = _sizes(parts)
    return Description((world.rank, world.size), parts.plan, axes, layers, sizes, more)


def _checks(parts: Parallelized) -> dict[str, str]:
    found = {each.name: f"refused where it is not so: {each.when}" for each in assumptions_of(parts.plan)}
    for each in assumptions_of(parts.plan):
        if each.is_experiment:
            found[each.name] = "not tried yet"
    return found | {name: str(answer) for name, answer in parts.checks.of.items()}


def _axes(parts: Parallelized) -> dict[Axis, str]:
    plan = parts.plan
    divided = kind_of(plan).divided
    if divided and plan.zero_group == "host":
        divided += f" among the {parts.mesh.shards_of(parts.mesh.data)[0].size} of a host"
    positions = "positions of the sequence, from the first block on"
    return {
        "pp": _stages(parts),
        "dp": "rows of the batch" + (f"; zero divides {divided}" if divided else ""),
        "ep": f"experts of {len(parts.moes) + len(parts.original.stacked_names)} layers",
        "ring": positions,
        "ulysses": positions + "; heads in attention",
        "tp": "heads and features of the layers below"
        + ("; positions between them" if plan.megatron_sp else ""),
    }


def _stages(parts: Parallelized) -> str:
    stages = parts.stages
    named = "" if parts.stage_model is None else f" of {parts.stage_model.trunk.name!r}"
    texts = []
    for stage in stages.mine:
        first, end = stages.bounds[stage]
        ends = " and what comes before" * (stage == 0) + " and what comes after" * (stage == stages.last)
        texts.append(f"stage {stage}, blocks {first} to {end - 1}{named}{ends}")
    return f"{'; '.join(texts)}; {parts.plan.schedule}"


def _layers(parts: Parallelized) -> list[LayerLine]:
    """One line for modules that differ in numbers only."""
    found: dict[tuple[str, str, str], int] = {}
    for line in parts.tensor.found:
        kind = re.sub(r"\d+", "*", line.fqn) or "(the model)", line.rule, line.detail
        found[kind] = found.get(kind, 0) + 1
    return [LayerLine(*kind, count) for kind, count in found.items()]


def _sizes(parts: Parallelized) -> tuple[Sizes, Sizes]:
    """(elements, bytes)"""
    width = {info.name: info.param.element_size() for info in parts.infos}
    common = max(width.values(), default=4)
    shapes = parts.original.shapes
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    values: dict[int, torch.Tensor] = {_storage(info.param): info.param for info in parts.infos}
    for shard in parts.all_shards:
        if shard.values_here is not None:
            values[_storage(shard.values_here)] = shard.values_here
    updated = [owned.param for shard in parts.all_shards for owned in shard.updated]
    numel = {
        "model": sum(counts.values()),
        "here": sum(t.untyped_storage().nbytes() // t.element_size() for t in values.values()),
        "updated": sum(parameter.numel() for parameter in updated),
    }
    nbytes = {
        "model": sum(count * width.get(name, common) for name, count in counts.items()),
        "here": sum(tensor.untyped_storage().nbytes() for tensor in values.values()),
        "updated": sum(parameter.numel() * parameter.element_size() for parameter in updated),
    }
    return numel, nbytes


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _text(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
