"""What is asked of the planner, checked before anything is searched or simulated. Each refusal names the
argument, its value and what would do.

What a torch model or its optimizer refuse beside (BatchNorm, hooks, kinds of optimizers) is known to
par.parallelize only, see checks/before.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from pycomm.parallel.ground.plan import AXES, Plan, fields_of

if TYPE_CHECKING:
    from pycomm.parallel.planning.job import Job
    from pycomm.parallel.planning.model import Model
    from pycomm.parallel.planning.space import Request

__all__ = ["Fixed", "check_job", "check_request", "fixed_fields", "whole"]

Fixed: TypeAlias = Mapping[str, Any]  # field of Plan -> its value, which a plan must have

NO_RULES = (
    "the planner does not predict rules of a Plan: plan without, and give them to the plan that is chosen"
)
MOST = 10**9  # ranks, and rows: sizes far above them are typing errors


def whole(name: str, value: object, most: int | None = None) -> int:
    """`value`, where it is a whole number from 1 to `most`. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value > (most or value):
        upto = f"from 1 to {most:,}" if most else "1 or more"
        raise ValueError(f"{name}={value!r}: must be a whole number, {upto}")
    return value


def fixed_fields(given: Fixed | str | None) -> Fixed:
    """str: the text of a Plan."""
    if isinstance(given, str):
        plan = Plan.parse(given)
        return {name: getattr(plan, name) for name in fields_of(given)}
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f'fixed={given!r}: must be a dict of fields of a Plan, {{"tp": 8}}, or a text, "tp=8,zero=1"'
        )
    return dict(given or {})


def check_request(request: Request) -> None:
    """Raises ValueError for a Request that has no meaning; one that has no plan is the search's to refuse."""
    whole("ranks", request.world, MOST)
    whole("batch", request.rows, MOST)
    whole("microbatch", request.microbatch)
    check_memory(request.memory)
    if not isinstance(request.fixed, Mapping):
        raise ValueError(f"fixed={request.fixed!r}: must be a dict of fields of a Plan")
    known = {field.name for field in dataclasses.fields(Plan)}
    strange = sorted(set(map(str, request.fixed)) - known)
    if strange:
        raise ValueError(f"fixed: a Plan has no {strange[0]!r}; it has {', '.join(sorted(known))}")
    if request.fixed.get("rules"):
        raise ValueError(NO_RULES)
    for axis in AXES:
        if axis in request.fixed:
            whole(axis, request.fixed[axis], MOST)
    if request.memory is None and request.machine.usable <= 0:
        gib = request.machine.reserved / 2**30
        raise ValueError(f"{request.machine.name}: {gib:.1f} GiB are reserved, which leaves nothing")


def check_memory(memory: object) -> None:
    """Bytes, or None for the machine's."""
    if memory is None:
        return
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 < memory < math.inf:
        raise ValueError(f"memory={memory!r}: must be a number above 0")


def unfit(model: Model, axes: Mapping[str, int]) -> str | None:
    """Why a model cannot be dealt over these axes ({axis: ranks}), or None."""
    tp, pp, ep = (axes.get(axis, 1) for axis in ("tp", "pp", "ep"))
    parts = axes.get("ring", 1) * axes.get("ulysses", 1)
    if pp > model.layers:
        return f"pp={pp} stages for {model.layers} blocks; pp can be {model.layers} at most"
    if tp > model.heads:
        return f"tp={tp} for {model.heads} heads; tp can be {model.heads} at most"
    if parts > model.sequence:
        return f"ring x ulysses={parts} for {model.sequence} positions, of which each rank needs one"
    if ep > 1 and model.experts is None:
        return f"ep={ep}, and the planner knows of no experts in this model"
    if model.experts is not None and 1 < ep > model.experts.count:
        return f"ep={ep} for {model.experts.count} experts; ep can be {model.experts.count} at most"
    return None


def check_job(job: Job) -> None:
    """Raises ValueError for a plan that par.step would refuse for these rows or this model."""
    whole("batch", job.rows, MOST)
    whole("microbatches", job.microbatches)
    if job.plan.rules:
        raise ValueError(NO_RULES)
    axes: dict[str, int] = {axis: getattr(job.plan, axis) for axis in AXES}
    why = unfit(job.model, axes)
    if why:
        raise ValueError(f"Plan({job.plan}) and {job.model.name}: {why}")
    if job.rows < job.microbatches * job.data_ranks:
        raise ValueError(
            f"Plan({job.plan}): a batch of {job.rows} rows cannot be cut into {job.microbatches} "
            f"microbatches for {job.data_ranks} data ranks (dp x ep)"
        )
