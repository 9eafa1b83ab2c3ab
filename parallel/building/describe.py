"""What there is to know of parameters: of all in the user's model, and of those here after the cuts."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from pycomm.parallel.building.cut import Cut
from pycomm.parallel.data.bucket import ParamInfo
from pycomm.parallel.expert.apply import moe_names_of, stacked_to_deal
from pycomm.parallel.ground.comm import Group
from pycomm.parallel.ground.layout import Layout
from pycomm.parallel.ground.mesh import Mesh
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.parts import Original
from pycomm.parallel.pipeline.absent import is_absent
from pycomm.parallel.zero.optimizer import is_elementwise

__all__ = ["Described", "describe_parameters", "note_original"]


def note_original(model: nn.Module, opt: torch.optim.Optimizer | None, plan: Plan) -> Original:
    """Original, of a model that nothing was taken from. Raises ValueError where ep has nothing to deal, for
    an optimizer that would have to see all experts of a parameter, and for modules of torch.jit.
    """
    _refuse_scripts(model)
    first_name: dict[str, str] = {}
    by_id: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name[name] = by_id.setdefault(id(parameter), name)
    option: dict[str, int] = {}
    for number, group in enumerate(opt.param_groups if opt else []):
        for parameter in group["params"]:
            option[by_id[id(parameter)]] = number
    parameters = dict(model.named_parameters())
    stacked_names = stacked_to_deal(model, first_name, plan.ep)
    if stacked_names and opt is not None and not is_elementwise(opt):
        raise ValueError(
            f"Plan(ep={plan.ep}): {type(opt).__name__} looks at whole parameters, and in "
            f"{stacked_names[0]!r} the experts of all ranks are one"
        )
    return Original(
        names=tuple(parameters),
        first_name=first_name,
        shapes={name: tuple(parameter.shape) for name, parameter in parameters.items()},
        trained=frozenset(name for name, parameter in parameters.items() if parameter.requires_grad),
        option=option,
        moe_names=moe_names_of(model),
        stacked_names=stacked_names,
        children={module: dict(module._modules) for module in model.modules()},
    )


def _refuse_scripts(model: nn.Module) -> None:
    """What torch.jit has compiled takes no parameter, attribute or forward from Python."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name or 'the model'!r} is a module of torch.jit ({type(module).__name__}), whose "
                "parameters and forward a plan cannot replace. Use the module as it was before "
                "torch.jit.script or torch.jit.trace"
            )


class Described(NamedTuple):
    """The parameters after the cuts."""

    infos: tuple[ParamInfo, ...]  # of this rank, in order of the model
    infos_of: dict[int, list[ParamInfo]]  # stage of this rank -> its infos, as backward is to reach them
    stages_of: dict[str, tuple[int, ...]]  # first name of every parameter -> all stages that use it


def describe_parameters(
    model: nn.Module, original: Original, cut: Cut, layouts: Mapping[str, Layout], mesh: Mesh
) -> Described:
    """layouts: by name, of what tensor parallelism has left here."""
    stages_of = _stages_of(original, cut)
    number_of = {name: number for number, name in enumerate(original.names)}
    infos: list[ParamInfo] = []
    infos_of: dict[int, list[ParamInfo]] = {stage: [] for stage in cut.stages.mine}
    for name, parameter in model.named_parameters():
        if is_absent(parameter):
            continue
        first, layout = original.first_name[name], layouts[name]
        is_expert = name.rpartition(".")[0] in original.stacked_names
        is_expert |= any(name.startswith(f"{moe}.experts.") for moe in original.moe_names)
        here = next(stage for stage in cut.stages_of(name) if stage in cut.stages.mine)
        group, replicas = mesh.shards_of(_group_of(mesh, is_expert, layout))
        info = ParamInfo(
            name=first,
            param=parameter,
            layout=layout,
            group=group,
            replicas=replicas,
            holders=_holders_of(mesh, is_expert, layout),
            overlap=mesh.group("tp") if layout.overlap else None,
            option=original.option.get(first),
            number=number_of[first],
            tied=len(stages_of[first]) > 1,
            counted=here == stages_of[first][0],
        )
        infos.append(info)
        infos_of[here].insert(0, info)
    return Described(tuple(infos), infos_of, stages_of)


def _stages_of(original: Original, cut: Cut) -> dict[str, tuple[int, ...]]:
    used: dict[str, set[int]] = {}
    for name, first in original.first_name.items():
        used.setdefault(first, set()).update(cut.stages_of(name))
    return {name: tuple(sorted(stages)) for name, stages in used.items()}


def _holders_of(mesh: Mesh, is_expert: bool, layout: Layout) -> Group:
    """The ranks that compute with just the same values."""
    if layout.dim is None:
        return mesh.expert_tp if is_expert else mesh.data_tp
    return mesh.expert if is_expert else mesh.data


def _group_of(mesh: Mesh, is_expert: bool, layout: Layout) -> Group:
    """The ranks over which a gradient is summed: those with a part of it."""
    if is_expert:
        return mesh.expert_tp if layout.partial else mesh.expert
    return mesh.data_tp if layout.partial and layout.dim is None else mesh.data
