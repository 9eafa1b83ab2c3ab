"""The steps that take parts of the model away, each by the apply.py of its strategies: stages and pieces of
the sequence, then tensors and stacked experts, then the cast to bf16.
"""

from typing import NamedTuple

import torch
from torch import nn

from pycomm.parallel.expert.apply import deal_stacked_experts
from pycomm.parallel.ground.mesh import Mesh
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.models.call_order import called_sides
from pycomm.parallel.models.trunk import Side, Trunk, owners
from pycomm.parallel.parts import Original
from pycomm.parallel.pipeline.absent_modules import AbsentModules
from pycomm.parallel.pipeline.apply import assign_stages
from pycomm.parallel.pipeline.placement import Stages
from pycomm.parallel.sequence.apply import split_sequence
from pycomm.parallel.sequence.sequence_split import SequenceSplit
from pycomm.parallel.tensor import TensorParallel, parallelize_tensor
from pycomm.parallel.zero.shards import Originals

__all__ = ["Cut", "cast", "cut_tensors", "make_stages"]


class Cut(NamedTuple):
    """How the model is cut into stages and along the sequence."""

    trunk: Trunk | None
    sides: dict[str, Side]  # name of a module outside the blocks -> its side; empty without a trunk
    stages: Stages
    split: SequenceSplit | None  # None: whole sequences
    absent: AbsentModules | None  # None: neither stages nor a split sequence

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The virtual stages that use the parameter `name`; both ends for one around the trunk."""
        if self.trunk is None or self.stages.last == 0:
            return (0,)
        block = self.trunk.block_of(name)
        if block is not None:
            return tuple(s for s, (first, end) in enumerate(self.stages.bounds) if first <= block < end)
        return self.stages.of(self.sides[name.rpartition(".")[0]])


def make_stages(model: nn.Module, trunk: Trunk | None, mesh: Mesh, plan: Plan) -> Cut:
    """A Cut. Parameters of other stages leave the model: their modules are on meta."""
    needed = plan.pp > 1 or plan.cuts_sequence
    found = owners(model, trunk, called_sides(model, trunk) if needed else None) if trunk else []
    sides = {name: side for name, _, side in found}
    split = split_sequence(trunk, sides, mesh, plan) if trunk is not None else None
    stages = assign_stages(trunk, found, plan, mesh.coordinate("pp"))
    absent = AbsentModules(model, trunk, stages, found) if needed and trunk is not None else None
    return Cut(trunk, sides, stages, split, absent)


def cut_tensors(
    model: nn.Module, original: Original, cut: Cut, mesh: Mesh, plan: Plan
) -> tuple[TensorParallel, Cut]:
    """(TensorParallel, the Cut with the blocks as they are now: some may have been replaced). tp leaves whole
    what ep deals: MoE layers, which have been dealt, and stacked experts, which are dealt here.
    """
    _empty_replaced(model, original)
    dealt = (*original.moe_names, *original.stacked_names)
    tensor = parallelize_tensor(
        model,
        mesh.group("tp"),
        rules={**dict.fromkeys(dealt, "tokens"), **(plan.rules or {})},
        blocks=cut.trunk.lists[0] if cut.trunk and len(cut.trunk.lists) == 1 else None,
        sequence=cut.split if cut.split is not None and cut.split.megatron else None,
        ties=original.first_name,
    )
    cut = cut._replace(trunk=cut.trunk.now(model) if cut.trunk else None)
    stacked = deal_stacked_experts(model, original.stacked_names, mesh.group("ep"))
    tensor.note_dealt(stacked, mesh.coordinate("tp"))
    _empty_replaced(model, original)
    return tensor, cut


def _empty_replaced(model: nn.Module, original: Original) -> None:
    """Modules that the cuts have taken out of the model, for which checkpoint/gathered.py keeps a place, let
    go of their parameters.
    """
    kept = set(model.modules())
    for module in original.children:
        if module not in kept:
            module._parameters = dict.fromkeys(module._parameters)


def cast(model: nn.Module, absent: AbsentModules | None, plan: Plan) -> tuple[Originals, torch.dtype | None]:
    """(the values at full precision, of parameters that have some; compute dtype, None: the model's own)."""
    full_values = {p: p.detach() for p in model.parameters() if not p.is_meta}
    if plan.precision is None:
        return full_values, None
    for_shapes = absent.templates.parameters() if absent is not None else ()
    for parameter in [*model.parameters(), *for_shapes]:
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    return full_values, torch.bfloat16
