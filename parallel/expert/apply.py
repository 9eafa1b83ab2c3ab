"""Experts are dealt over the ranks of ep, and which of a model's experts that can be done with.

    step                    what leaves this rank                                            when
    stacked_to_deal         nothing; refuses a model in which there is nothing to deal       before all cuts
    deal_moes               experts of parallel.MoE that other ranks have (moe.py)           before tp cuts
    deal_stacked_experts    of experts stacked in parameters, those of other ranks           after tp, which
                            (stacked.py)                                                     leaves them whole

What can go wrong: fewer experts than ranks, experts that share a parameter, or that do not compute row by
row. Stacked experts are then left whole, as long as there is something else to deal.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from pycomm.parallel.expert.moe import MoE
from pycomm.parallel.expert.stacked import deal_stacked, is_stacked, misfit
from pycomm.parallel.ground.comm import Group
from pycomm.parallel.ground.layout import Layout
from pycomm.parallel.ground.mesh import Mesh
from pycomm.parallel.ground.plan import Plan

__all__ = ["deal_moes", "deal_stacked_experts", "moe_names_of", "stacked_to_deal"]


def moe_names_of(model: nn.Module) -> tuple[str, ...]:
    """Names of the MoE layers."""
    return tuple(name for name, module in model.named_modules() if isinstance(module, MoE))


def stacked_to_deal(model: nn.Module, first_name: Mapping[str, str], ep: int) -> tuple[str, ...]:
    """Names of the stacked experts that ep ranks can share. first_name: every name of a parameter -> the
    first name of the same one. Raises ValueError where there is nothing to deal.
    """
    if ep == 1:
        return ()
    names, reasons, moe_names = [], [], moe_names_of(model)
    for name, module in model.named_modules():
        if is_stacked(module) and not any(name.startswith(f"{moe}.") for moe in moe_names):
            why = _shared(name, module, first_name) or misfit(module, ep)
            if why is None:
                names.append(name)
            else:
                reasons.append(f"; {name!r} is left whole: {why}")
    if not names and not moe_names:
        raise ValueError(
            f"Plan(ep={ep}): the model has no parallel.MoE layer whose experts could be dealt, and no "
            f"experts stacked in parameters as in transformers{reasons[0] if reasons else ''}"
        )
    return tuple(names)


def _shared(name: str, module: nn.Module, first_name: Mapping[str, str]) -> str | None:
    """Why tied experts are not dealt, or None."""
    firsts = list(first_name.values())
    for key in module._parameters:
        if firsts.count(first_name.get(f"{name}.{key}", "")) > 1:
            return f"{key!r} is tied to another parameter"
    return None


def deal_moes(model: nn.Module, names: Sequence[str], mesh: Mesh, plan: Plan) -> dict[str, MoE]:
    """The layers by name; experts of other ranks leave them."""
    found = {name: model.get_submodule(name) for name in names}
    moes = {name: module for name, module in found.items() if isinstance(module, MoE)}
    for moe in moes.values():
        moe.shard(mesh.group("ep"), mesh.data_tp if plan.megatron_sp else mesh.data)
    return moes


def deal_stacked_experts(model: nn.Module, names: Sequence[str], ep: Group) -> dict[str, Layout]:
    """What is here, by the name of a parameter; experts of other ranks leave the modules."""
    return {
        f"{name}.{key}": layout
        for name in names
        for key, layout in deal_stacked(model.get_submodule(name), name, ep).items()
    }
