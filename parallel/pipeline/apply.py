"""A plan's pipeline: what of it is made when, by parallelize().

    step             makes                                  the model afterwards
    assign_stages    Stages: blocks and rank of each        untouched
    AbsentModules    what this rank does not have           its parameters are on meta (absent_modules.py)
    defer_weights    WeightStore of a split backward        as before
    StageModel       the walk through the blocks            forwards are wrapped (stage.py)
    make_ties        weights of several stages              as before (ties.py)

What can go wrong: fewer blocks than stages; a trained parameter around the blocks where one rank has both
ends. Both are refused by assign_stages, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.ground.split_backward import WeightStore
from pycomm.parallel.models.trunk import Side, Trunk
from pycomm.parallel.pipeline.placement import Stages, cut_blocks
from pycomm.parallel.pipeline.schedules import make_schedule

if TYPE_CHECKING:
    from pycomm.parallel.data.reducer import Reducer

__all__ = ["assign_stages", "defer_weights", "not_to_train", "splits_backward"]


def assign_stages(
    trunk: Trunk | None, owners: Sequence[tuple[str, nn.Module, Side]], plan: Plan, rank: int
) -> Stages:
    """owners: see models/trunk.py. rank: this one's in pp. Raises ValueError for what the plan cannot cut."""
    if plan.pp == 1:
        return Stages(((0, len(trunk.blocks) if trunk else 0),), (0,), (0,))
    assert trunk is not None  # checks/before.py has refused such a plan
    bounds = cut_blocks(len(trunk.blocks), plan.virtual_stages, plan.stages)
    placement = make_schedule(plan.schedule, plan.pp, 1, plan.chunks_per_rank).placement
    mine = [stage for stage in range(plan.virtual_stages) if placement[stage] == rank]
    between = next(s for s, (_, end) in enumerate(bounds) if end >= trunk.border)
    if placement[0] == placement[-1]:
        _check_around(owners, plan)
    return Stages(tuple(bounds), placement, tuple(mine), between)


def _check_around(owners: Sequence[tuple[str, nn.Module, Side]], plan: Plan) -> None:
    """Raises ValueError, on every rank, for a trained parameter that two stages of one rank would share."""
    for name, module, side in owners:
        for key, parameter in module._parameters.items() if side is Side.AROUND else ():
            if parameter is not None and parameter.requires_grad:
                raise ValueError(_around(key, name, plan))


def _around(key: str, owner: str, plan: Plan) -> str:
    return (
        f"Plan({plan}): the first and the last stage are on one rank, and {key!r} lies in "
        f"{owner or 'the model'!r}, which contains the blocks, so both may use it. Put it into a module of "
        "its own, or choose another schedule"
    )


def not_to_train(
    names: Iterable[str], sides: Mapping[str, Side], stages: Stages, plan: Plan
) -> dict[str, str]:
    """Of the names of parameters those that may be frozen only -> why. sides: by name of a module."""
    if stages.last == 0 or stages.placement[0] != stages.placement[-1]:
        return {}
    split = {name: name.rpartition(".") for name in names}
    return {
        name: _around(key, owner, plan)
        for name, (owner, _, key) in split.items()
        if sides.get(owner) is Side.AROUND
    }


def splits_backward(plan: Plan) -> bool:
    """Whether the schedule computes gradients of inputs and of weights apart."""
    return plan.pp > 1 and make_schedule(plan.schedule, plan.pp, 1, plan.chunks_per_rank).split


def defer_weights(reducers: Mapping[int, Reducer], plan: Plan) -> WeightStore | None:
    """The WeightStore of a split backward, whose gradients go to the reducers (stage -> Reducer)."""
    if not splits_backward(plan):
        return None

    def reducer_of(param: nn.Parameter) -> Reducer:
        return next(reducer for reducer in reducers.values() if reducer.has(param))

    return WeightStore(
        accumulate=lambda param, grad: reducer_of(param).accumulate(param, grad),
        on_grad=lambda param: reducer_of(param).ready(param),
    )
