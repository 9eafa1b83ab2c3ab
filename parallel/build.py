"""parallelize(): from a model of one process to this rank's part of it under a plan.

Order matters, and each step sees what the ones before it left:

    1  weights and buffers of rank 0 go to all ranks              so that every plan starts from the same values
    2  names, ties, optimizer groups are noted                    before parameters are replaced
    3  parameters of other pipeline stages leave                  pipeline/stage.py
    4  experts are dealt                                          expert/
    5  tensor parallel rules cut what is left                     tensor/
    6  bf16                                                       the values before the cast are kept for the master copies
    7  blocks are wrapped, inside to outside: attention over the whole sequence, recomputation, ZeRO-3, stages
    8  buckets, shards, the optimizer's new parameters            data/, zero/

The model is changed in place and remains the user's object; so does the optimizer.
"""

import functools

import torch
from torch.utils.checkpoint import checkpoint

from pycomm.parallel import comm
from pycomm.parallel.data.bucket import Bucket, ParamInfo, ReduceOptions, Reducer, cut_into_buckets
from pycomm.parallel.data.compression import make_compression
from pycomm.parallel.engine import Engine, Tie
from pycomm.parallel.entry import SequenceSplit
from pycomm.parallel.expert.moe import MoE
from pycomm.parallel.mesh import Mesh, device_of
from pycomm.parallel.pipeline import WeightStore, make_schedule
from pycomm.parallel.pipeline.stage import StageModel, cut_blocks
from pycomm.parallel.plan import Plan
from pycomm.parallel.streams import OWN, RandomStreams
from pycomm.parallel.tensor import parallelize_tensor
from pycomm.parallel.trunk import find_trunk, owners
from pycomm.parallel.zero.shards import Shards, check_fresh, is_elementwise, replace_parameters
from pycomm.parallel.zero.units import Unit, Units

__all__ = ["engine_of", "parallelize"]

ZERO_2_BUCKETS = 8


def parallelize(model, opt=None, plan=None):
    """Turns a model, and its optimizer, into this rank's part of them. Collective over all ranks.

    Args:
        model: any module, whole, on this rank's device, built in the same way on every rank. Rank 0's values are taken.
        opt: a torch optimizer over its parameters that has not taken a step, or None.
        plan: Plan; None is a single process.

    Returns (model, opt): the same objects. The optimizer's parameter groups hold what this rank owns.
    Raises ValueError for what does not fit, before anything is changed where it can be known then.
    """
    plan = plan or Plan()
    if "_parallel" in model.__dict__:
        raise ValueError(f"this model is parallelized already, by Plan({model.__dict__['_parallel'].plan})")
    device = device_of(model)
    trunk = _check(model, opt, plan)
    mesh = Mesh(plan, device.type)
    engine = Engine(plan, mesh, model, opt)
    engine.device = device
    comm.broadcast_values([*model.parameters(), *model.buffers()], mesh.world)
    engine.streams = RandomStreams(mesh, _seed(mesh, device), device)
    build = _Build(engine, trunk)
    build.cut_stages()
    build.deal_experts()
    build.cut_tensors()
    originals = build.cast()
    build.describe_parameters()
    build.wrap_blocks()
    build.make_buckets(originals)
    model.__dict__["_parallel"] = engine
    return model, opt


def engine_of(model, opt=None):
    """The Engine of a parallelized model. Raises ValueError for another model, or another optimizer than it was parallelized with."""
    engine = model.__dict__.get("_parallel") if isinstance(model, torch.nn.Module) else None
    if engine is None:
        raise ValueError("this model has not been through parallelize()")
    if opt is not None and opt is not engine.opt:
        raise ValueError("this optimizer is not the one that the model was parallelized with")
    return engine


def _check(model, opt, plan):
    """What can be said before any rank is asked. Returns the trunk, or None."""
    need = {"pp": plan.pp > 1, "ring": plan.ring > 1, "ulysses": plan.ulysses > 1, "megatron_sp": plan.megatron_sp}
    wanted = [name for name, value in {**need, "checkpoint": plan.checkpoint}.items() if value]
    empty = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if empty:
        raise ValueError(f"{len(empty)} tensors of the model are on meta ({empty[0]!r}): give it memory and values first (to_empty)")
    trunk = find_trunk(model, plan.blocks) if wanted or plan.blocks or plan.zero == 3 or plan.tp > 1 else None
    if wanted and trunk is None:
        raise ValueError(f"Plan({plan}): {', '.join(wanted)} cut the model at its blocks, but {type(model).__name__} has no list of blocks")
    if opt is not None:
        known = {id(parameter) for parameter in model.parameters()}
        strange = sum(id(parameter) not in known for group in opt.param_groups for parameter in group["params"])
        if strange:
            raise ValueError(f"{strange} parameters of the optimizer are not the model's: make it from model.parameters() of this model")
        check_fresh(opt)
        if isinstance(opt, torch.optim.LBFGS):
            raise ValueError("LBFGS calls the model from its step, which a plan cannot run; choose another optimizer")
        if plan.tp > 1 and not is_elementwise(opt):
            raise ValueError(f"Plan(tp={plan.tp}): {type(opt).__name__} looks at whole parameters, which tensor parallelism cuts")
    if plan.pp > 1:
        cut_blocks(len(trunk.blocks), plan.virtual_stages, plan.stages)
    if plan.schedule == "pipedream" and len({id(p) for p in model.parameters()}) != len(
        list(model.named_parameters(remove_duplicate=False))
    ):
        raise ValueError('Plan(schedule="pipedream"): stages update at different times, so weights tied between modules cannot stay equal')
    return trunk


def _seed(mesh, device):
    """Rank 0's current seed."""
    seed = torch.tensor([torch.initial_seed() % (1 << 62)], device=device)
    comm.broadcast(seed, 0, mesh.world)
    return int(seed)


class _Build:
    def __init__(self, engine, trunk):
        self.engine, self.trunk = engine, trunk
        self.plan, self.mesh, self.model = engine.plan, engine.mesh, engine.model
        self.canonical, by_id = {}, {}  # every name -> the first name of the same parameter
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self.canonical[name] = by_id.setdefault(id(parameter), name)
        engine.names = [name for name, first in self.canonical.items() if name == first]
        engine.shapes = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        self.is_trained = {name: parameter.requires_grad for name, parameter in self.model.named_parameters()}
        self.option = {}
        for number, group in enumerate(engine.opt.param_groups if engine.opt else []):
            for parameter in group["params"]:
                self.option[by_id[id(parameter)]] = number
        self.moe_names = [name for name, module in self.model.named_modules() if isinstance(module, MoE)]
        self.layouts = {}
        self.modules_of_stage = {}

    # 3
    def cut_stages(self):
        plan, engine = self.plan, self.engine
        if plan.ring > 1 or plan.ulysses > 1 or (plan.megatron_sp and plan.tp > 1):
            engine.split = SequenceSplit(self.mesh, plan)
        self.sides = {name: side for name, _, side in owners(self.model, self.trunk)} if self.trunk else {}
        if plan.pp > 1:
            bounds = cut_blocks(len(self.trunk.blocks), plan.virtual_stages, plan.stages)
            placement = make_schedule(plan.schedule, plan.pp, 1, plan.chunks_per_rank).placement
            engine.mine = [stage for stage in range(plan.virtual_stages) if placement[stage] == self.mesh.coordinate("pp")]
            self._check_around(placement)
        else:
            bounds = [(0, len(self.trunk.blocks))] if self.trunk else [(0, 0)]
        self.bounds = bounds
        if plan.pp > 1 or engine.split is not None:
            engine.stages = StageModel(self.model, self.trunk, bounds, engine.mine, engine.split)

    # 4
    def deal_experts(self):
        over = self.mesh.data_tp if self.plan.megatron_sp else self.mesh.data
        for name in self.moe_names:
            moe = self.model.get_submodule(name)
            moe.shard(self.mesh.group("ep"), over)
            self.engine.moes.append(moe)
        if self.plan.ep > 1 and not self.moe_names:
            raise ValueError(f"Plan(ep={self.plan.ep}): the model has no parallel.MoE layer whose experts could be dealt")

    def _check_around(self, placement):
        """Raises ValueError, on every rank, for a parameter that two stages of one rank would share."""
        if placement[0] != placement[len(placement) - 1]:
            return
        for name, module, side in owners(self.model, self.trunk):
            trained = [key for key, parameter in module._parameters.items() if parameter is not None and parameter.requires_grad]
            if side == "around" and trained:
                raise ValueError(
                    f"Plan({self.plan}): the first and the last stage are on one rank, and {trained[0]!r} lies in {name or 'the model'!r}, "
                    "which contains the blocks, so both may use it. Put it into a module of its own, or choose another schedule"
                )

    # 5
    def cut_tensors(self):
        rules = {name: "tokens" for name in self.moe_names}
        rules.update(self.plan.rules or {})
        sequence = self.engine.split if self.engine.split is not None and self.engine.split.megatron else None
        blocks = self.trunk.name if self.trunk else None
        self.engine.tensor = parallelize_tensor(self.model, self.mesh.group("tp"), rules=rules, blocks=blocks, sequence=sequence)
        self.layouts = self.engine.tensor.layouts
        if self.trunk:
            self.trunk = self.trunk._replace(blocks=list(self.model.get_submodule(self.trunk.name)))

    # 6
    def cast(self):
        """parameter -> its values at full precision."""
        originals = {parameter: parameter.detach() for parameter in self.model.parameters()}
        if self.plan.precision == "bf16":
            self.engine.compute_dtype = torch.bfloat16
            for_shapes = self.engine.stages.pristine.values() if self.engine.stages is not None else ()
            for parameter in [*originals, *(parameter for module in for_shapes for parameter in module.parameters())]:
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
        return originals

    def stage_of(self, name):
        """Virtual stage of a parameter of this rank; of those around the trunk (0, last), of which the ones here are taken."""
        if self.plan.pp == 1:
            return [0]
        inside = name[len(self.trunk.name) + 1 :] if self.trunk.name else name
        if (not self.trunk.name or name.startswith(self.trunk.name + ".")) and inside.split(".")[0].isdigit():
            index = int(inside.split(".")[0])
            return [stage for stage, (first, end) in enumerate(self.bounds) if first <= index < end]
        side = self.sides[name.rpartition(".")[0]]
        last = len(self.bounds) - 1
        return [0] if side == "before" else [last] if side == "after" else [0, last]

    def describe_parameters(self):
        engine, mesh = self.engine, self.mesh
        places = {}  # canonical name -> stages that use it
        for name, first in self.canonical.items():
            places.setdefault(first, []).extend(self.stage_of(name))
        for name, stages in places.items():
            if len(set(stages)) > 2 and self.is_trained[name]:
                raise ValueError(
                    f"{name!r} is used by pipeline stages {sorted(set(stages))}; a weight can be tied between two. Choose pp or stages so "
                    "that its users lie in two, or untie it"
                )
        self.info_stage, number_of = {}, {name: number for number, name in enumerate(engine.names)}
        for name, parameter in self.model.named_parameters():
            if parameter.is_meta or getattr(parameter, "absent", False):
                continue
            first = self.canonical[name]
            layout = self.layouts[name]
            expert = any(name.startswith(f"{moe}.experts.") for moe in self.moe_names)
            spread = layout.partial and layout.dim is None
            group = (mesh.expert_tp if spread else mesh.expert) if expert else (mesh.data_tp if spread else mesh.data)
            here = [stage for stage in self.stage_of(name) if stage in engine.mine]
            stages = sorted(set(places[first]))
            info = ParamInfo(first, parameter, layout, group, option=self.option.get(first))
            info.number = number_of[first]
            info.overlap = mesh.group("tp") if layout.overlap else None
            info.tied = len(stages) > 1
            info.counted = here[0] == stages[0]
            self.info_stage[info] = here[0]
            engine.infos.append(info)
        self.places = places

    # 7
    def wrap_blocks(self):
        plan, engine = self.plan, self.engine
        if self.trunk and plan.checkpoint:
            for block in self.trunk.blocks:
                block.forward = functools.partial(self._checkpointed, block.forward)
        if plan.pp > 1 and make_schedule(plan.schedule, plan.pp, 1, plan.chunks_per_rank).split:
            reducer_of = {info.param: stage for info, stage in self.info_stage.items()}
            engine.store = WeightStore(
                accumulate=lambda param, grad: engine.reducers[reducer_of[param]].accumulate(param, grad),
                on_grad=lambda param: engine.reducers[reducer_of[param]].ready(param),
            )

    def _checkpointed(self, forward, *args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=self.engine.checkpoint_contexts, **kwargs)

    # 8
    def make_buckets(self, originals):
        plan, engine = self.plan, self.engine
        options = ReduceOptions(
            zero=plan.zero,
            loose=True,
            whole=engine.opt is not None and not is_elementwise(engine.opt),
            naive=plan.grad_sync == "naive",
            compress=make_compression(plan.compression) if plan.compression else None,
        )
        for stage in engine.mine:
            infos = [info for info, place in self.info_stage.items() if place == stage][::-1]
            trained = [info for info in infos if info.param.requires_grad]
            limit = plan.bucket_mb * 1e6
            if plan.zero == 3:
                lists = [part for unit in self._units_of(trained) for part in cut_into_buckets(unit, float("inf"))]
            else:
                # Under zero=2 a bucket under way is memory that the shards save.
                lists = cut_into_buckets(trained, limit, least=ZERO_2_BUCKETS if plan.zero == 2 else 1)
            buckets = [Bucket(part, options) for part in lists]
            engine.reducers[stage] = Reducer(buckets, eager=engine.store is None)
            frozen = []
            if plan.zero == 3:
                still = [info for info in infos if not info.param.requires_grad]
                frozen = [Bucket(part, options) for unit in self._units_of(still) for part in cut_into_buckets(unit, float("inf"))]
            for bucket in [*buckets, *frozen]:
                precise = torch.float32 if plan.precision and bucket.dtype == torch.bfloat16 else None
                host = plan.offload is not None and bucket.device.type != "cpu"
                shard = Shards(bucket, originals, precise=precise, host=host, host_values=plan.offload == "parameters")
                shard.stage = stage
                engine.shards.append(shard)
        if plan.zero == 3:
            self._make_units()
        engine.streams.watch(self.model, engine.split is not None and engine.split.megatron)
        if engine.stages is not None:
            engine.stages.install(lambda: engine.streams.switch(OWN))
        if engine.opt is not None:
            replace_parameters(engine.opt, engine.shards)
        self._make_ties()

    def _unit_name(self, info):
        """The block, or the module outside the blocks, that a parameter belongs to."""
        if self.trunk:
            inside = info.name[len(self.trunk.name) + 1 :] if self.trunk.name else info.name
            if (not self.trunk.name or info.name.startswith(self.trunk.name + ".")) and inside.split(".")[0].isdigit():
                return self.trunk.name, int(inside.split(".")[0])
        return info.name.rpartition(".")[0], None

    def _units_of(self, infos):
        units = {}
        for info in infos:
            units.setdefault(self._unit_name(info), []).append(info)
        return list(units.values())

    def _make_units(self):
        engine = self.engine
        engine.units = Units()
        found = {}
        for shard in engine.shards:
            info = shard.bucket.infos[0]
            found.setdefault((self._unit_name(info), self.info_stage[info]), []).append(shard)
        for ((name, index), _), shards in found.items():
            if index is not None:
                engine.units.add(Unit(f"{name}.{index}", shards), [self.trunk.blocks[index]])
                continue
            held = {info.param for shard in shards for info in shard.bucket.infos}
            modules = [module for _, module in self.model.named_modules() if any(p in held for p in module._parameters.values())]
            around = self.trunk is not None and any(
                any(block is m for m in module.modules()) for module in modules for block in self.trunk.blocks
            )
            unit = Unit(name, shards, sticky=len(modules) > 1)
            if around or not modules or any(module is self.model for module in modules):
                engine.units.add(unit, always=True)
            else:
                engine.units.add(unit, modules)

    def _make_ties(self):
        engine = self.engine
        where = {}
        for stage, reducer in engine.reducers.items():
            for bucket in reducer.buckets:
                if bucket.infos[0].tied:
                    where[bucket.infos[0].name, stage] = bucket
        for (name, stage), bucket in sorted(where.items()):
            stages = sorted(set(self.places[name]))
            other = stages[1] if stage == stages[0] else stages[0]
            here = where.get((name, other))
            peer = None if here is not None else engine.rank_of_stage(other)
            engine.ties.append(Tie(bucket, stage == stages[0], peer, here))
