"""Which plan as many ranks take as are left.

plan             left     taken            ranks without a part
dp=4             3        dp=3             0
dp=2,tp=2        3        tp=2             1        the cut of the model stays, with fewer copies
dp=2,tp=2        1        one rank         0        not enough for the cut: it gets smaller, too
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any, TypeAlias

from pycomm.parallel.ground.plan import AXES, Plan, ScheduleName

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Plans", "check_kept", "checked_plan", "first_plan", "plan_for"]

REMEMBERING = ("int8", "powersgd", "topk")  # compressions that keep the error of the last sum


# Of all ranks, or a function from ranks to one for as many at most.
Plans: TypeAlias = "Plan | Callable[[int], Plan | str | None]"


def first_plan(wanted: Plans, ranks: int) -> Plan:
    """For all ranks. Raises ValueError for a Plan of more."""
    plan = wanted if isinstance(wanted, Plan) else checked_plan(wanted, ranks)
    if plan.world_size > ranks:
        raise ValueError(f"resilient: the plan is for {plan.world_size} ranks, but there are {ranks}")
    return plan


def checked_plan(wanted: Plans, ranks: int) -> Plan:
    """plan_for(), of which the state is in snapshots."""
    plan = plan_for(wanted, ranks)
    check_kept(plan)
    return plan


def plan_for(plan: Plans, ranks: int) -> Plan:
    """The Plan for `ranks` ranks at most."""
    if callable(plan):
        given = plan(ranks)
        chosen = None if given is None else Plan.of(given)
        if chosen is None or chosen.world_size > ranks:
            raise ValueError(f"resilient: the function for plans gave {given!r} for {ranks} ranks")
        return chosen
    if ranks >= plan.world_size:
        return plan
    cut = [axis for axis in AXES if axis != "dp"]
    choices = []
    for sizes in itertools.product(*(_divisors(getattr(plan, axis)) for axis in cut)):
        ways = math.prod(sizes)
        if ways <= ranks:
            choices.append((ways, sizes, min(plan.dp, ranks // ways)))
    _, sizes, dp = max(choices)  # the model in as many parts as before, then as many copies as there can be
    axes: dict[str, Any] = {**dict(zip(cut, sizes, strict=True)), "dp": dp}
    if axes["pp"] != plan.pp:
        axes["stages"] = None
        if axes["pp"] == 1 and plan.schedule != ScheduleName.PIPEDREAM:
            axes.update(schedule="1f1b", chunks=None)
    return dataclasses.replace(plan, **axes)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def check_kept(plan: Plan) -> None:
    """Raises ValueError for a plan of which a rank has what no snapshot keeps, so that the run would not go
    on as it was.
    """
    if plan.compression is not None and (callable(plan.compression) or plan.compression in REMEMBERING):
        raise ValueError(
            f"resilient: Plan({plan}) keeps the error of its compressed sums on each rank, which is in no "
            'snapshot. Use compression None, "fp16" or "bf16", or go back to a checkpoint of parallel.save'
        )
    if plan.schedule == ScheduleName.PIPEDREAM and plan.pp > 1:
        raise ValueError(
            f"resilient: Plan({plan}): what pipedream computes depends on the number of stages, so a smaller "
            "plan would not repeat it. Use another schedule, or go back to a checkpoint of parallel.save"
        )
