"""One training step of a model on the ranks of a plan.

    compare        where Plan(compare_every=) asks for it: values that several ranks hold  replicas.py
    prepare        rows of this rank, counts of targets                              prepare.py
    questions      the first time: may the batch be cut?  weights of the losses      questions.py, checks/
    passes         for each microbatch, in the order of the schedule                 passes.py, pipeline/
                       forward of a stage: blocks with tensor parallel layers, attention over the whole
                       sequence, gathered parameters
                       backward: gradients of complete buckets are summed meanwhile  data/
    update         gradients of all microbatches, norm, optimizer                    updates.py
                   or, PipeDream, after every microbatch                             pipeline/updates.py

Every loss is counted by one rank of those that hold the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pycomm import CommError, MismatchError, trace
from pycomm.parallel.checks.exchange import Cuts
from pycomm.parallel.checks.gradient_hooks import problem_of_hooks
from pycomm.parallel.ground.plan import Plan, ScheduleName
from pycomm.parallel.ground.same_batch import Call, SameBatch
from pycomm.parallel.parts import Parallelized
from pycomm.parallel.pipeline import make_schedule
from pycomm.parallel.pipeline.executor import run as run_schedule
from pycomm.parallel.pipeline.updates import PipeDreamUpdates
from pycomm.parallel.run.loss import sharded_logits
from pycomm.parallel.run.passes import StagePasses, agree, forget_passes, gathering_in
from pycomm.parallel.run.prepare import Options, prepare
from pycomm.parallel.run.questions import Questions
from pycomm.parallel.run.replicas import compare_replicas
from pycomm.parallel.run.updates import OneUpdate, Updates
from pycomm.parallel.zero.kinds import kind_of
from pycomm.parallel.zero.optimizer import step_optimizer

if TYPE_CHECKING:
    from pycomm.parallel.given import Batch
    from pycomm.parallel.ground.batch import Microbatch
    from pycomm.parallel.ground.losses import Result
    from pycomm.parallel.run.router_loss import Loss

    MakePasses = Callable[[Parallelized, Sequence[Microbatch], Loss, Updates], StagePasses]

__all__ = ["compares_now", "run_step"]


def run_step(
    parts: Parallelized, batch: Batch, options: Options, make_passes: MakePasses = StagePasses
) -> Result:
    """After a step that raised on all ranks the model is as before."""
    with trace.span("step"), parts.passes.step(), parts.writes.inside("step"):
        return _run(parts, batch, options, make_passes)


def _run(parts: Parallelized, batch: Batch, options: Options, make_passes: MakePasses) -> Result:
    parts.averages.refuse_applied("step")
    updates, problem = _updates_of(parts, options), None
    try:
        if compares_now(parts):
            compare_replicas(parts)
        cuts = Cuts(options.microbatches, options.sharded, not options.update or not parts.window.is_empty)
        questions = Questions(parts, cuts, options, None)
        counted = prepare(parts, batch, options, questions.rows, updates.separate)
        parts.trained.look(parts.window.is_empty)
        if parts.window.is_empty:
            for reducer in parts.reducers.values():
                reducer.zero_grad()
        questions.ask(*counted.batch, counted.first)
        microbatches, targets = counted.by(questions.counter_of("loss_fn"))
        problem = problem_of_hooks(parts, cuts.others or len(microbatches) > 1)
        with sharded_logits(parts.tensor.head, options.loss_fn):
            shown = None if options.sharded else batch
            watched = (parts.hyperparameters, parts.trained, parts.writes)
            call = Call(options.update, updates.scale, *watched, problem)
            same = SameBatch(shown, parts.mesh.world, parts.device, call)
            updates.begin(same, targets, len(microbatches))
            if updates.separate:  # begin() has checked that all ranks look alike
                parts.trained.take_in(False)
            for moe in parts.moes:
                moe.aux_scale = updates.weight / len(microbatches)
            passes = make_passes(parts, microbatches, options.loss_fn, updates)
            agree(parts, microbatches)
            with gathering_in(parts, microbatches, not cuts.others):
                _run_passes(parts, passes, len(microbatches))
        result = updates.end(passes.losses)
        parts.hyperparameters.note()
        parts.last_step.updates += options.update
        return result
    except BaseException as error:
        forget_passes(parts)
        of_hook = isinstance(error, (RuntimeError, AttributeError, TypeError))  # .grad may be None for it
        if problem is not None and of_hook and not isinstance(error, CommError):
            raise ValueError(f"[rank {parts.mesh.world.rank}] step: {problem}") from error
        is_unknown = isinstance(error, MismatchError) and not parts.last_words.of_others()
        cause = _unlike(parts.plan) if is_unknown else None
        if cause is not None:
            raise ValueError(f"{cause} {error}") from error
        raise


def compares_now(parts: Parallelized) -> bool:
    """Whether this is the first call of an N-th update of Plan(compare_every=N)."""
    every = parts.plan.compare_every
    return every is not None and (parts.last_step.updates + 1) % every == 0 and parts.window.is_empty


def _unlike(plan: Plan) -> str | None:
    """What ranks that do not call the same collectives have done, or None where it is not known."""
    if plan.megatron_sp or kind_of(plan).by_unit:
        why = "works on its positions" if plan.megatron_sp else "gathers parameters"
        return (
            f"Plan({plan}): the ranks did not call the same modules in the same order, as they must where "
            f"each {why}: experts in a ModuleList of which a rank calls some only, a block left out by "
            "chance, or requires_grad_() on some ranks only. Name the module around them in rules as "
            "'replicate' (megatron_sp), call all of them, freeze alike, or use another plan."
        )
    return None


def _updates_of(parts: Parallelized, options: Options) -> Updates:
    if parts.plan.schedule != ScheduleName.PIPEDREAM:
        return OneUpdate(parts, options)

    opt = parts.opt
    assert opt is not None  # a step has one

    def take_step(stage: int) -> None:
        frozen = {info.name for info in parts.infos if not info.param.requires_grad}
        step_optimizer(opt, parts.shards[stage], None, frozen)

    return PipeDreamUpdates(parts.reducers, take_step, parts.mesh, parts.device, options)


def _run_passes(parts: Parallelized, passes: StagePasses, microbatches: int) -> None:
    plan, pp = parts.plan, parts.mesh.group("pp")
    if plan.pp > 1:
        schedule = make_schedule(plan.schedule, plan.pp, microbatches, plan.chunks_per_rank)
        run_schedule(schedule, pp.rank, pp, passes)
        return
    for number in range(microbatches):
        passes.forward(0, number, None)
        passes.backward(0, number, None)
        passes.weight(0, number)
        passes.update(0, number)
