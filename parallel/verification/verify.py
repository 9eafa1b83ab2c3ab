"""verify(): the order of things.

    copies         two models like the user's, in fp64, without dropout             alone.py
    parallelize    one of them; what the plan refuses is refused as it is
    alone          the other computes the step of one process, on every rank, and what each module returned is
                   kept on the CPU
    step           par.step of the first; what each module returns is compared      watch.py, pieces.py
    gradients      whole ones, and the parameters after a step of SGD with lr=1
    exchange       what all ranks have found                                        report.py
                   and so on from `alone`, for the steps that were asked for, until one differs

The user's model and random numbers are as before afterwards. The plan has groups of its own, which are closed
in the end; torch's default group serves to tell all ranks how each of them fared, also where one of them
failed in the middle of the step and the others were waiting for it.

Cost: the memory of the two copies and of all outputs of one process; for each step the work of three.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import random
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from pycomm.parallel.building import Given, parallelize_on
from pycomm.parallel.checkpoint import full_gradients, full_state_dict
from pycomm.parallel.checkpoint.agree import exchange, together, together_over
from pycomm.parallel.checks import assumptions_of
from pycomm.parallel.checks.before import check
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.batch import check_microbatches, inputs_and_targets, split_batch
from pycomm.parallel.ground.mesh import Mesh, device_of
from pycomm.parallel.ground.plan import Plan, ScheduleName
from pycomm.parallel.models.trunk import Trunk
from pycomm.parallel.parts import parts_of
from pycomm.parallel.run.model_loss import for_loss
from pycomm.parallel.run.prepare import Options
from pycomm.parallel.run.step import run_step
from pycomm.parallel.verification import alone
from pycomm.parallel.verification.report import (
    Difference,
    Found,
    Off,
    Verification,
    What,
    first_module,
    first_parameter,
    off,
)
from pycomm.parallel.verification.watch import Watch, WatchedPasses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pycomm.parallel.given import Batch, LossFunction, Tree
    from pycomm.parallel.ground.batch import Microbatch
    from pycomm.parallel.parts import Parallelized

__all__ = ["verify"]

# In fp64 rounding gives 1e-13, but 1e-7 where a norm computes in fp32 by itself.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
COARSE = 5e-2  # 16 bits
LR, LR_OF_STEPS = 1.0, 0.1  # of one step; of several, which would leave the range where rounding stays small


def verify(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    batch: Batch,
    plan: Plan | str,
    loss_fn: LossFunction | None = None,
    *,
    steps: int = 1,
    microbatches: int = 1,
    count: Callable[[Tree], torch.Tensor | float] | None = None,
    sharded: bool = False,
    tolerance: float | None = None,
    fp64: bool = True,
    show: bool = True,
) -> Verification:
    """Compares steps under a plan with the same steps by one process, on the same ranks. Collective over all
    ranks; rank 0 prints what was found.

    Args:
        model: as it would be given to parallelize(), or a function without arguments that makes it, for
        models that cannot be copied. It stays as it is.
        batch, loss_fn, microbatches, count, sharded: as for step(). One process runs the whole batch at once,
        but by microbatches where there is a BatchNorm or a parallel.MoE.
        steps: how many, each with this batch; the first that differs is the last.
        plan: Plan or its text. Its precision, compression and pipedream, which differ on purpose, are left
        aside.
        tolerance: what is equal, as a part of the largest value of a tensor. None: 1e-6 in fp64, 1e-3 in
        fp32, 0.05 below.
        fp64: compute in fp64, so that no difference is rounding; False keeps the model's dtypes.
        show: False prints nothing.

    Compared are the outputs of all modules of which a rank has rows, positions or columns, the loss, the
    gradient of every parameter, and its value after the step of SGD. Rates of dropout are zero in both.

    Returns a Verification, the same on all ranks, true where all is equal: equal, module (the first in the
    forward whose output differs), parameter (the first in the backward whose gradient does), difference (the
    first of all), step, loss, ...; str() of it is the report. Raises what parallelize() and step() raise for
    this plan, with their words, and ValueError for a model that cannot be copied or run by one process.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"verify(steps={steps!r}): how many steps, 1 or more")
    check_microbatches(microbatches)
    plan, notes = _exact(Plan.of(plan))
    if plan.world_size > 1 and not dist.is_initialized():
        dist.init_process_group("pycomm")
    world = comm.as_group()
    device = device_of(model) if isinstance(model, torch.nn.Module) else torch.empty(0).device
    asked = _Asked(batch, loss_fn, microbatches, count, sharded, steps, tolerance, fp64, notes)
    with _undisturbed(), torch.enable_grad():
        prepared = together_over(world, device, lambda: _prepare(model, plan, asked))
        found = together_over(world, device, functools.partial(_on_own_groups, plan, prepared, asked))
    del prepared
    gc.collect()  # a model under a plan refers to itself, so its memory is not given back before
    if show and world.rank == 0:
        print(found, flush=True)
    return found


class _Prepared(NamedTuple):
    """Of the user's model, on this rank alone."""

    single: torch.nn.Module  # for one process
    model: torch.nn.Module  # for the plan
    opt: torch.optim.Optimizer
    trunk: Trunk | None


def _prepare(model: torch.nn.Module | Callable[[], torch.nn.Module], plan: Plan, asked: _Asked) -> _Prepared:
    single, model = alone.copies_of(model)
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        raise ValueError("verify compares with a whole model: give it one that has values, none on meta")
    for one in (single, model):
        if asked.fp64:
            one.double()
    alone.without_dropout(model)
    opt = torch.optim.SGD(model.parameters(), lr=asked.lr)
    return _Prepared(single, model, opt, check(model, opt, plan))


def _on_own_groups(plan: Plan, prepared: _Prepared, asked: _Asked) -> Verification:
    """The Verification. Collective over all ranks. The plan has groups of its own, which are closed at the
    end, so that ranks which wait for one that failed wait no longer.
    """
    mesh = Mesh(plan, device_of(prepared.model), own=True)
    try:
        parallelize_on(mesh, Given(prepared.model, prepared.opt, plan), prepared.trunk)
        return _compare(parts_of(prepared.model), prepared.single, asked)
    finally:
        mesh.close()


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What the caller of verify() asks for."""

    batch: Batch
    loss_fn: LossFunction | None
    microbatches: int
    count: Callable[[Tree], torch.Tensor | float] | None
    sharded: bool
    steps: int
    tolerance: float | None
    fp64: bool
    notes: list[str]

    @property
    def lr(self) -> float:
        return LR if self.steps == 1 else LR_OF_STEPS


def _exact(plan: Plan) -> tuple[Plan, list[str]]:
    """(the plan without what differs from one process on purpose, [what was left aside])."""
    schedule = Plan().schedule if plan.schedule == ScheduleName.PIPEDREAM else plan.schedule
    exact = dataclasses.replace(plan, precision=None, compression=None, schedule=schedule)
    fields = "precision", "compression", "schedule"
    aside = [name for name in fields if getattr(plan, name) != getattr(exact, name)]
    return exact, [f"{name} is left aside: it differs from one process on purpose" for name in aside]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Random numbers are as before afterwards."""
    state, devices = random.getstate(), range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)


def _compare(parts: Parallelized, single: torch.nn.Module, asked: _Asked) -> Verification:
    """parts: of one copy; single: the other."""
    if dropped := alone.without_dropout(single):
        asked.notes.append(f"dropout is zero here, in {len(dropped)} modules: with it no two runs are equal")
    comm.broadcast_values([*single.parameters(), *single.buffers()], parts.mesh.world)
    batch, loss_fn = for_loss(single, asked.batch, asked.loss_fn, parts.plan)
    inputs, targets = inputs_and_targets(batch)
    batch = inputs, targets
    options = Options(loss_fn, asked.microbatches, count=asked.count, sharded=asked.sharded)
    if asked.fp64:
        batch = alone.double(batch)
    told = exchange(parts, (parts.mesh.rows[1], _on(batch, "cpu"))) if options.sharded else None
    by_microbatch = options.microbatches > 1 and alone.depends_on_rows(single, loss_fn)
    if by_microbatch:
        asked.notes.append(
            "one process runs the same microbatches, for its BatchNorm or the balance of experts"
        )

    def run() -> alone.Reference:
        chunks, rows = alone.chunks_of(_pieces(parts, batch, told, options.microbatches), by_microbatch)
        chunks = [_on_device(chunk, parts.device) for chunk in chunks]
        with _explained(asked.fp64):
            reference = alone.run_alone(single, chunks, options.loss_fn, options.count)
        watch.begin(reference, [row[parts.mesh.rows[1]] for row in rows])
        return reference

    parts.checks.asks = False  # a fault is to be shown, not refused
    watch = Watch(parts)
    found: Verification | None = None
    for step in range(1, asked.steps + 1):
        if found is not None:
            _take_step(single, asked.lr)
        reference = together(parts, run)
        loss = float(run_step(parts, batch, options, functools.partial(WatchedPasses, watch)).loss)
        together(parts, watch.raise_error)
        largest = 0.0 if found is None else found.largest
        found = _found(parts, reference, watch.found, loss, asked)
        found = dataclasses.replace(found, step=step, largest=max(largest, found.largest))
        if not found.equal:
            break
    assert found is not None  # one step at least
    return found


@torch.no_grad()
def _take_step(single: torch.nn.Module, lr: float) -> None:
    """SGD, of one process."""
    for parameter in single.parameters():
        if parameter.grad is not None:
            parameter.sub_(lr * parameter.grad)


def _pieces(
    parts: Parallelized,
    batch: tuple[Tree, Tree],
    told: Sequence[tuple[int, tuple[Tree, Tree]]] | None,
    microbatches: int,
) -> list[list[Microbatch]]:
    """Microbatches of all data ranks: pieces[data rank][microbatch]. told: (data rank, its rows) of each
    rank; None: all have the whole batch.
    """
    count = parts.mesh.rows[0]
    if told is None:
        return [split_batch(batch, microbatches, count, part) for part in range(count)]
    batches = dict(told)
    pieces = [split_batch(batches[part], microbatches, 1, 0, takes_none=True) for part in range(count)]
    used = [any(map(alone.rows_of, group)) for group in zip(*pieces, strict=True)]
    return [[piece for piece, use in zip(own, used, strict=True) if use] for own in pieces]


def _on(values: Tree, device: torch.device | str) -> Tree:
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, values)


def _on_device(chunk: Microbatch, device: torch.device | str) -> Microbatch:
    return dataclasses.replace(chunk, inputs=_on(chunk.inputs, device), targets=_on(chunk.targets, device))


@contextlib.contextmanager
def _explained(fp64: bool) -> Iterator[None]:
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        where, how = (" in fp64", ". verify(fp64=False) keeps the model's dtypes") if fp64 else ("", "")
        raise ValueError(
            f"one process cannot run this model{where} ({type(error).__name__}: {error}){how}"
        ) from error


def _found(
    parts: Parallelized, reference: alone.Reference, seen: Mapping[str, Off], loss: float, asked: _Asked
) -> Verification:
    """The Verification. Collective over all ranks."""
    told = exchange(parts, seen)
    tolerance = _tolerance(reference) if asked.tolerance is None else asked.tolerance
    module, modules, largest = first_module(told, reference.order, tolerance)
    offs, order = _parameters(parts, reference, asked.lr), _order_of_parameters(parts, reference)
    parameter, parameters, other = Found(None, (), 0.0)
    for what, some in offs.items():
        if parameter is None:
            parameter, parameters, other = first_parameter(some, order, tolerance, what)
    apart, wrong = off(torch.tensor(loss), torch.tensor(reference.loss)), None
    if apart.differs(tolerance, 0.0):
        wrong = Difference("loss", "loss", apart.absolute, apart.relative)
    notes = list(asked.notes)
    if reference.draws:
        notes.append("the model draws random numbers, which differ between the ranks")
    if wrong and not module:
        notes.append("only the losses differ: loss_fn must be the mean over the targets that count")
    first = module or wrong or parameter
    return Verification(
        equal=first is None,
        loss=loss,
        loss_alone=reference.loss,
        module=module,
        parameter=parameter,
        difference=first,
        modules=modules,
        parameters=parameters,
        compared=(len(set().union(*told)), len(offs["gradient"])),
        largest=max(largest, other, 0.0 if wrong else apart.relative),
        notes=tuple(notes),
        granted=tuple(each.name for each in assumptions_of(parts.plan) if each.is_experiment),
        plan=f"Plan({parts.plan})",
        steps=asked.steps,
    )


def _tolerance(reference: alone.Reference) -> float:
    dtypes = {value.dtype for value in reference.values.values()}
    return max((TOLERANCES.get(dtype, COARSE) for dtype in dtypes), default=COARSE)


def _parameters(parts: Parallelized, reference: alone.Reference, lr: float) -> dict[What, dict[str, Off]]:
    """{what: {name: Off}} of the gradients and of the values after the step, equal on all ranks."""
    gradients, values = full_gradients(parts.model), full_state_dict(parts.model)
    right = reference.gradients
    offs: dict[What, dict[str, Off]] = {
        "gradient": {name: off(gradients[name], right[name]) for name in right},
        "value after the step": {
            name: off(values[name], value.double() - lr * right[name].double())
            for name, value in reference.values.items()
        },
    }
    return exchange(parts, offs)[0]


def _order_of_parameters(parts: Parallelized, reference: alone.Reference) -> list[str]:
    """First names of the parameters as the forward comes to them: by the module that holds them, or the next
    around it that was called.
    """
    place = {name: number for number, name in enumerate(reference.order)}
    first: dict[str, int] = {}
    for alias, name in parts.original.first_name.items():
        owner = alias.rpartition(".")[0]
        while owner and owner not in place:
            owner = owner.rpartition(".")[0]
        first[name] = min(first.get(name, len(place)), place.get(owner, len(place)))
    return sorted(first, key=lambda name: first[name])
