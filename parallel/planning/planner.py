"""The planner for programs: auto, explain and simulate, of a torch model, a config, a name or a Model.

plan = par.auto(model, opt, batch=batch, world=8)             a Plan, with .microbatches and .prediction
model, opt = par.parallelize(model, opt, plan)
par.step(model, opt, batch, microbatches=plan.microbatches)

print(par.explain("tp=8,pp=8", "gpt3-175b", batch=512, microbatches=64, machine="h100"))
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from pycomm.parallel.building.describe import note_original
from pycomm.parallel.checks.before import check
from pycomm.parallel.ground.batch import inputs_and_targets, split_batch
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.planning.asked import check_job, check_memory, fixed_fields
from pycomm.parallel.planning.job import PYCOMM, Job, Software, recompute_of
from pycomm.parallel.planning.machine import Machine, load_machine
from pycomm.parallel.planning.model import Model
from pycomm.parallel.planning.named import from_config, named
from pycomm.parallel.planning.quantities import MeanBytes
from pycomm.parallel.planning.report import Explanation, explain_job
from pycomm.parallel.planning.search import Prediction, Request, predict, search
from pycomm.parallel.planning.traced import trace_model
from pycomm.parallel.run.model_loss import model_loss_of, with_targets

if TYPE_CHECKING:
    from typing import TypeAlias

    from transformers import PretrainedConfig

    from pycomm.parallel.given import Batch
    from pycomm.parallel.planning.asked import Fixed

    Described: TypeAlias = torch.nn.Module | Model | str | PretrainedConfig | dict[str, object]
    AnyMachine: TypeAlias = Machine | str | Path | None
    AnyOptimizer: TypeAlias = torch.optim.Optimizer | type[torch.optim.Optimizer] | None

__all__ = ["ChosenPlan", "auto", "explain", "simulate"]

DEVICES = {"A100": "a100-selene", "H100": "h100-dgx", "H200": "h200-dgx", "B200": "b200-dgx"}


class ChosenPlan(Plan):
    """A Plan that auto() has chosen; equal to the Plan with the same fields. microbatches: for par.step.
    prediction: a Prediction; others: the next best, as Predictions. A changed copy (dataclasses.replace)
    has none.
    """

    microbatches: int = 1
    prediction: Prediction | None = None
    others: tuple[Prediction, ...] = ()

    @classmethod
    def best_of(cls, found: list[Prediction]) -> ChosenPlan:
        """found: the best first."""
        best, *others = found
        self = cls(**{name: getattr(best.plan, name) for name in cls.__dataclass_fields__})
        told = {"microbatches": best.job.microbatches, "prediction": best, "others": tuple(others)}
        for name, value in told.items():
            object.__setattr__(self, name, value)
        return self

    def __eq__(self, other: object) -> bool:
        fields = self.__dataclass_fields__
        return isinstance(other, Plan) and all(getattr(self, f) == getattr(other, f) for f in fields)

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, field) for field in self.__dataclass_fields__))


def auto(
    model: Described,
    opt: AnyOptimizer = None,
    *,
    batch: Batch | int,
    world: int | None = None,
    memory: float | None = None,
    machine: AnyMachine = None,
    fixed: Fixed | str | None = None,
    microbatch: int = 16,
) -> ChosenPlan:
    """The best Plan for these ranks, a ChosenPlan. No communication; equal on all ranks for equal arguments.

    Args:
        model: a torch module (on meta will do; it is traced and not changed), a config of transformers, a
        name or a planning.model.Model. opt: its optimizer, or a class of optimizers; None: Adam. batch: as
        par.step takes it, whole; or the number of its rows for a model that is not traced. world: number of
        ranks; None: those of the default group. memory: bytes of a rank that may be used; None: the
        machine's. machine: a name, a .toml file or a Machine; None: that of this process's device. fixed:
        {field of Plan: value} that the plan must have, or its text. microbatch: most rows of one microbatch.

    Raises planning.NoPlan, a ValueError, which says what is in the way.
    """
    if world is None:
        world = dist.get_world_size() if dist.is_initialized() else 1
    fixed = fixed_fields(fixed)
    blocks = fixed.get("blocks")
    if blocks is not None and not isinstance(blocks, str):
        fixed = {"megatron_sp": False, **fixed}  # which cuts at one list of blocks only
    described, rows = _described(model, batch, blocks)
    half = described.item == 2
    if fixed.get("precision") and not half:
        raise ValueError(
            f"fixed: precision={fixed['precision']!r} of a model in 32 bits, whose activations are traced as "
            "they are: give the planner the model in bfloat16 (a copy on meta will do)"
        )
    request = Request(
        described,
        _machine(machine),
        world,
        rows,
        memory,
        fixed,
        microbatch,
        _software(opt, described.item, half),
        "bf16" if half else None,
        _refusals(model, opt),
    )
    return ChosenPlan.best_of(search(request))


def _refusals(model: Described, opt: AnyOptimizer) -> Callable[[Plan], None]:
    """A function that raises what par.parallelize would raise for a Plan of this model and optimizer. It
    looks at the model once for plans that differ in sizes only.
    """
    if not isinstance(model, torch.nn.Module):
        return lambda plan: None
    known: dict[tuple[object, ...], ValueError | None] = {}
    instance = opt if isinstance(opt, torch.optim.Optimizer) else None

    def refuse(plan: Plan) -> None:
        data = plan.dp * plan.ep > 1
        axes = tuple(getattr(plan, axis) > 1 for axis in ("tp", "ring", "ulysses"))
        stages = (plan.virtual_stages, plan.stages, plan.schedule == "pipedream")
        options = plan.megatron_sp, plan.checkpoint, plan.zero, plan.precision, plan.blocks
        key: tuple[object, ...] = (data, axes, stages, plan.ep, *options)
        if key not in known:
            try:
                check(model, instance, plan)
                if plan.ep > 1:
                    note_original(model, instance, plan)  # whether there are experts that it can deal
                known[key] = None
            except ValueError as error:
                known[key] = error
        refusal = known[key]
        if refusal is not None:
            raise refusal

    return refuse


def simulate(
    plan: Plan | str,
    model: Described,
    *,
    batch: Batch | int,
    microbatches: int = 1,
    machine: AnyMachine = None,
    opt: AnyOptimizer = None,
) -> Prediction:
    """One step: .time, .memory, .mfu, .plan. plan: str is its text. The other arguments are those of
    auto().
    """
    return predict(_job(Plan.of(plan), model, batch, microbatches, (machine, opt)))


def explain(
    plan: Plan | str,
    model: Described,
    *,
    batch: Batch | int,
    microbatches: int = 1,
    machine: AnyMachine = None,
    opt: AnyOptimizer = None,
    memory: float | None = None,
) -> Explanation:
    """What a plan is predicted to do, and the one change that would help most, to be printed.
    plan: str is its text. The other arguments are those of auto().
    """
    check_memory(memory)
    limit = None if memory is None else MeanBytes(memory)
    return explain_job(_job(Plan.of(plan), model, batch, microbatches, (machine, opt)), limit)


def _job(
    plan: Plan,
    model: Described,
    batch: Batch | int,
    microbatches: int,
    rest: tuple[AnyMachine, AnyOptimizer],
) -> Job:
    machine, opt = rest
    described, rows = _described(model, batch, plan.blocks)
    half = described.item == 2
    software = _software(opt, described.item, half)
    job = Job(described, _machine(machine), plan, rows, microbatches, recompute_of(plan), software)
    check_job(job)
    _refusals(model, opt)(plan)
    return job


def _described(
    model: Described, batch: Batch | int, blocks: str | tuple[str, str] | None
) -> tuple[Model, int]:
    """(Model, rows)"""
    if isinstance(batch, int):
        rows = batch
    else:
        split_batch(batch, 1, 1, 0)  # raises what par.step would raise for it
        inputs, _ = inputs_and_targets(batch)
        rows = next((leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)), 0)
        if not rows:
            raise ValueError("the inputs of the batch have no tensor with rows")
    if isinstance(model, Model):
        return model, rows
    if isinstance(model, str):
        return named(model), rows
    if isinstance(model, torch.nn.Module):
        if isinstance(batch, int):
            raise ValueError(
                "a torch model is traced with a batch: give auto() and explain() the batch itself"
            )
        return trace_model(model, _with_own_targets(model, batch), blocks), rows
    return from_config(model), rows


def _with_own_targets(model: torch.nn.Module, batch: Batch) -> Batch:
    """The batch as par.step makes it for a model with a loss of its own: an encoder-decoder gets its
    decoder's inputs. What step refuses without a loss_fn may have one.
    """
    try:
        _, own = model_loss_of(model, None, Plan())
        return with_targets(model, batch) if own else batch
    except ValueError:
        return batch


def _machine(machine: AnyMachine) -> Machine:
    if isinstance(machine, Machine):
        return machine
    if machine is not None and not isinstance(machine, (str, Path)):
        raise ValueError(f"machine={machine!r}: must be a name, the path of a .toml file or a Machine")
    if machine is None:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        machine = next((file for word, file in DEVICES.items() if word in name), None)
        if machine is None and name:
            raise ValueError(
                f"the planner does not know {name!r}: give machine=, as `python -m pycomm.plan calibrate` "
                "writes it"
            )
    return load_machine(machine or "cpu-2core")


def _software(opt: AnyOptimizer, item: int, half: bool) -> Software:
    """PYCOMM with the state of this optimizer. Its moments have the dtype of the values that it is given:
    fp32 masters for a model in 16 bits.
    """
    kind = opt if isinstance(opt, type) else type(opt)
    if opt is not None and not (issubclass(kind, torch.optim.Optimizer) or hasattr(opt, "param_groups")):
        raise ValueError(f"opt={opt!r}: must be an optimizer or a class of optimizers")
    if issubclass(kind, torch.optim.LBFGS):
        raise ValueError("LBFGS calls the model from its step, which a plan cannot run")
    value = 4 if half else item
    if opt is None or "adam" in kind.__name__.lower():
        moments = 2
    elif issubclass(kind, torch.optim.SGD):
        groups = getattr(opt, "param_groups", [])
        moments = int(any(group["momentum"] for group in groups))
    else:
        moments = 1
    state = moments * value + (4 if half else 0)
    update = (2 + 2 * moments + 1) * value + item
    return PYCOMM._replace(gradient=item, summed=item, state=state, update=update + (20 if half else 0))
