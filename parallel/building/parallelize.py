"""parallelize(): from a model of one process to this rank's part of it under a plan.

Each step takes what it needs from those before it and returns what it makes. At the end all of it goes into
one frozen value (parts.py). The model and the optimizer are changed in place and remain the user's objects.
What a strategy does lies in the apply.py of its folder; what needs two of them lies in building/.

    step                     makes                          the model afterwards
    check                    trunk                          untouched: what is refused here changes nothing
                                                            (checks/before.py)
    Mesh                     mesh                           untouched
    refuse_unlike            -                              untouched: ranks that were given different things
                                                            are refused (alike.py)
    note_original            original                       untouched: names, ties and optimizer groups are
                                                            noted before parameters are replaced
    Filling                  where values on meta come      untouched
                             from (filling.py)
    broadcast                -                              values of rank 0 on all ranks, so that every plan
                                                            starts from the same
    make_stages              stages, split, absent          parameters of other pipeline stages are on meta
                                                            (sequence/apply.py, pipeline/apply.py)
    buffers                  -                              buffers that were on meta have values
    deal_moes                moes                           experts of other ranks have left (expert/apply.py)
    cut_tensors              tensor                         layers are cut (tensor/apply.py); of stacked
                                                            experts this rank's are left
    cast                     full-precision values          computes in bf16 where the plan says so
    hollow                   -                              parameters that were on meta have a device
    describe_parameters      infos by stage                 final: no parameter is replaced after this
    make_buckets             reducers, shards               gradients have hooks, values lie in buffers;
                                                            ZeRO-3 has freed them (zero/apply.py)
    defer_weights            deferred                       untouched
    synchronize              -                              BatchNorm is over the rows of all data ranks
    _guard_reads             reads                          cut parameters are read in their layers only
    give_memory              -                              parameters in no bucket have memory
    wrap                     units                          forwards are wrapped, inside to outside:
                                                            recomputation, ZeRO-3, random streams,
    wrap_stages              stage_model                    and stages
    replace_parameters       -                              the optimizer has what this rank owns
    notice                   ties, trained, writes,         requires_grad_(), writes to parameters and
                             hyperparameters                changed hyperparameters are noticed from now on
    fill                     -                              what was on meta has its values
    _take_over               -                              save_pretrained, generate are of all ranks; calls
                                                            of the model, backward and opt.step() may be the
                                                            user's own (run/own_loop.py)
"""

import functools
import logging
import typing
from typing import TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn

from pycomm.parallel.building.alike import Folder, Given, refuse_unlike
from pycomm.parallel.building.cut import cast, cut_tensors, make_stages
from pycomm.parallel.building.describe import describe_parameters, note_original
from pycomm.parallel.building.filling import Common, Filling, give_memory
from pycomm.parallel.building.notice import Built, notice
from pycomm.parallel.building.over_hosts import warnings_of
from pycomm.parallel.building.report import describe
from pycomm.parallel.building.wrap import wrap, wrap_stages
from pycomm.parallel.checkpoint.dicts import guard_state_dicts
from pycomm.parallel.checkpoint.optimizer_dicts import guard_optimizer_dicts
from pycomm.parallel.checkpoint.pretrained import save_pretrained_whole
from pycomm.parallel.checks.before import check
from pycomm.parallel.checks.optimizers import note_optimizer
from pycomm.parallel.data.batch_norm import synchronize
from pycomm.parallel.expert.apply import deal_moes
from pycomm.parallel.expert.moe import MoE
from pycomm.parallel.given import Optimizer
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.last_words import LastWords
from pycomm.parallel.ground.mesh import Mesh, device_of
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.ground.streams import RandomStreams
from pycomm.parallel.models.trunk import Trunk
from pycomm.parallel.parts import Original, Parallelized, attach, parts_of
from pycomm.parallel.pipeline.apply import defer_weights, splits_backward
from pycomm.parallel.run.generate import generate_together
from pycomm.parallel.run.own_loop import OwnLoop
from pycomm.parallel.tensor import TensorParallel
from pycomm.parallel.tensor.reads import Reads
from pycomm.parallel.zero.apply import make_buckets
from pycomm.parallel.zero.optimizer import guard, replace_parameters

__all__ = ["parallelize", "parallelize_again", "parallelize_on"]

LOG = logging.getLogger("pycomm.parallel")


ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@overload
def parallelize(
    model: ModelT, opt: None = None, plan: Plan | str | None = None, *, weights: Folder | None = None
) -> tuple[ModelT, None]: ...
@overload
def parallelize(
    model: ModelT, opt: OptimizerT, plan: Plan | str | None = None, *, weights: Folder | None = None
) -> tuple[ModelT, OptimizerT]: ...
def parallelize(
    model: nn.Module,
    opt: Optimizer | None = None,
    plan: Plan | str | None = None,
    *,
    weights: Folder | None = None,
) -> tuple[nn.Module, Optimizer | None]:
    """Turns a model, and its optimizer, into this rank's part of them. Collective over all ranks.

    Args:
        model: any module, on this rank's device, built alike on all ranks. Rank 0's values are taken. What is
        on meta gets its values here, and only what this rank holds gets memory, on torch's default device
        where nothing of the model has another: see building/filling.py.
        opt: over the parameters of the model; it has not taken a step.
        plan: "dp=2,zero=1"; None is a single process.
        weights: a folder with safetensors as the hub has them, which all ranks see: values of the model
        (checkpoint/hub.py). None: what is on meta is initialised, module by module (building/initial.py).

    What was cut, and what stays whole and why: describe(model), and the log "pycomm.parallel" (INFO). That an
    axis which talks in every block crosses hosts is a warning there.

    Returns (model, opt): the same objects. The optimizer's parameter groups hold what this rank owns.
    Raises ValueError for what does not fit, before anything is changed where it can be known then: models,
    optimizers or plans that differ between ranks (building/alike.py); keys of weights that are missing, that
    the model has not, or of other shapes; not that a module on meta has no initialisation.
    """
    _begin(Given(model, typing.cast("torch.optim.Optimizer | None", opt), Plan.of(plan), weights))
    return model, opt


def parallelize_again(
    model: nn.Module, opt: torch.optim.Optimizer, plan: Plan, weights: Folder | None
) -> None:
    """parallelize(), in a training under way. Hyperparameters are not compared: schedulers have moved on, and
    ranks may be a step apart.
    """
    _begin(Given(model, opt, plan, weights, begins=False))


def _begin(given: Given) -> None:
    trunk = None
    try:
        trunk = check(given.model, given.opt, given.plan)
    except ValueError as error:
        if not _are_others_there(given.plan):
            raise
        given = given._replace(refused=error)  # the other ranks are told
    mesh = Mesh(given.plan, device_of(given.model))
    try:
        parallelize_on(mesh, given, trunk)
    except BaseException:
        mesh.close()
        raise


def _are_others_there(plan: Plan) -> bool:
    """Whether there are ranks that would wait for this one in the plan's first collective."""
    if dist.is_initialized():
        return dist.get_world_size() == plan.world_size > 1
    return plan.world_size > 1 and dist.is_torchelastic_launched()


def parallelize_on(mesh: Mesh, given: Given, trunk: Trunk | None) -> None:
    """What comes after the mesh, see the head of the file. trunk: as check() found it."""
    (model, opt, plan, weights, *_), device = given, device_of(given.model)
    refuse_unlike(given, mesh.world, device)
    original, seed = note_original(model, opt, plan), _seed(mesh, device)
    filling = Filling(model, original, weights, Common(mesh.world, device, seed))
    _broadcast(model, mesh)
    streams = RandomStreams(mesh, seed, device)

    cut = make_stages(model, trunk, mesh, plan)
    filling.buffers(model, cut)
    moes = deal_moes(model, original.moe_names, mesh, plan)
    tensor, cut = cut_tensors(model, original, cut, mesh, plan)
    full_values, compute_dtype = cast(model, cut.absent, plan)

    filling.hollow(model, cut)
    described = describe_parameters(model, original, cut, tensor.layouts, mesh)
    eager = not splits_backward(plan)
    reducers, shards = make_buckets(described.infos_of, full_values, cut.trunk, opt, plan, eager)
    deferred = defer_weights(reducers, plan)
    synchronize(model, mesh)
    reads = _guard_reads(model, tensor, moes, original, plan)
    give_memory(described.infos)
    units = wrap(model, plan, cut, streams, deferred, shards)
    stage_model = wrap_stages(model, cut, streams, tensor.forwards)
    owner = None if opt is None else replace_parameters(opt, sum(shards.values(), ()))
    noticed = notice(given, original, cut, Built(mesh, device, described, reducers, shards, owner, units))
    attach(
        model,
        Parallelized(
            plan=plan,
            mesh=mesh,
            model=model,
            opt=opt,
            device=device,
            original=original,
            streams=streams,
            stages=cut.stages,
            stage_model=stage_model,
            split=cut.split,
            tensor=tensor,
            reads=reads,
            moes=tuple(moes.values()),
            compute_dtype=compute_dtype,
            infos=described.infos,
            reducers=reducers,
            shards=shards,
            deferred=deferred,
            units=units,
            ties=noticed.ties,
            trained=noticed.trained,
            last_words=LastWords(mesh, device),
            hyperparameters=noticed.hyperparameters,
            writes=noticed.writes,
        ),
    )
    note_optimizer(parts_of(model))
    filling.fill(parts_of(model))
    _take_over(model, opt)
    _tell(model)


def _tell(model: nn.Module) -> None:
    """The log: what the plan has made of the model, and a warning where it will be slow."""
    mesh = parts_of(model).mesh
    for sentence in warnings_of(mesh) if mesh.world.rank == 0 else ():
        LOG.warning("Plan(%s): %s", mesh.plan, sentence)
    if LOG.isEnabledFor(logging.INFO):
        LOG.info("%s", describe(model))


def _take_over(model: nn.Module, opt: torch.optim.Optimizer | None) -> None:
    """Methods of the user's objects that are collective from now on, or mean something else."""
    own = OwnLoop(parts_of(model))
    parts_of(model).writes.follow(parts_of(model).units)
    save_pretrained_whole(model)
    generate_together(model)
    cuts = guard_state_dicts(parts_of(model))
    if opt is not None:
        parts = parts_of(model)
        guard_optimizer_dicts(opt, cuts)
        guard(opt, own, functools.partial(parts.trained.regroup, parts.original.option))


def _guard_reads(
    model: nn.Module, tensor: TensorParallel, moes: dict[str, MoE], original: Original, plan: Plan
) -> Reads | None:
    """Of parameters that are not whole here, or whose gradients are summed with those of other ranks."""
    if plan.tp * plan.ep * plan.pp == 1:
        return None
    return Reads(model, tensor.layouts, moes if plan.ep > 1 else {}, original.stacked_names)


def _broadcast(model: nn.Module, mesh: Mesh) -> None:
    """Gives all ranks the values of rank 0; what is on meta has none."""
    tensors = [*model.parameters(), *model.buffers()]
    comm.broadcast_values([tensor for tensor in tensors if not tensor.is_meta], mesh.world)


def _seed(mesh: Mesh, device: torch.device) -> int:
    """Rank 0's current seed."""
    seed = torch.tensor([torch.initial_seed() % (1 << 62)], device=device)
    comm.broadcast(seed, 0, mesh.world)
    return int(seed)
