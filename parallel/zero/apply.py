"""Where the gradients and values of a rank's parameters lie, under every value of Plan(zero=), 0 too.

    infos of a stage      a b c | d e | f g    in the order in which backward is to reach them
    buckets               of at most bucket_mb; with ZeRO-3 one for each unit (a block, or a module outside)
    shards                one for each bucket: values, master copies, what the optimizer has

    step                  makes                the model afterwards
    make_buckets          reducers, shards     gradients have hooks, values lie in buffers; ZeRO-3 frees them
    make_units            Units                ZeRO-3 only: forwards gather and free parameters (units.py)
    replace_parameters    -                    as before; the optimizer has the shards (optimizer.py)

What can go wrong: an optimizer that looks at whole parameters. Its buckets are cut between parameters.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import nn

from pycomm.parallel.data.bucket import Bucket, ParamInfo
from pycomm.parallel.data.reducer import Reducer
from pycomm.parallel.data.replicated import way_to_sum
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.models.trunk import Trunk
from pycomm.parallel.zero.kinds import kind_of
from pycomm.parallel.zero.optimizer import is_elementwise
from pycomm.parallel.zero.shards import MasterOptions, Originals, Shards
from pycomm.parallel.zero.streamed import StreamedShards
from pycomm.parallel.zero.units import Unit, Units

__all__ = ["buckets_of", "make_buckets", "make_units", "master_options", "one_bucket"]

Infos: TypeAlias = Mapping[int, Sequence[ParamInfo]]  # stage of this rank -> those of its parameters
Optimizer: TypeAlias = torch.optim.Optimizer | None


class Where(NamedTuple):
    """What a parameter is gathered with: a block of a trunk, or a module outside of the blocks."""

    name: str  # of the trunk, or the module
    block: int | None  # its index; None outside of the blocks


def make_buckets(
    infos_of: Infos, full_values: Originals, trunk: Trunk | None, opt: Optimizer, plan: Plan, eager: bool
) -> tuple[dict[int, Reducer], dict[int, tuple[Shards, ...]]]:
    """By stage: the Reducer with the buckets of its trained parameters, and the Shards of all its buckets.

    full_values: at full precision. eager: whether a bucket may be summed as soon as
    it is complete; not where parts of the backward of two microbatches alternate.
    """
    reducers = {}
    for stage, infos in infos_of.items():
        trained = [info for info in infos if info.param.requires_grad]
        reducers[stage] = Reducer(buckets_of(trained, trunk, opt, plan), eager=eager)
    kind = kind_of(plan)
    found: dict[int, tuple[Shards, ...]] = {}
    for stage, infos in infos_of.items():
        buckets = list(reducers[stage].buckets)
        if kind.by_unit:  # frozen parameters are freed too
            frozen = [info for info in infos if not info.param.requires_grad]
            buckets += buckets_of(frozen, trunk, opt, plan)
        found[stage] = tuple(
            kind.shards(bucket, full_values, master_options(bucket, plan)) for bucket in buckets
        )
    return reducers, found


def buckets_of(infos: Sequence[ParamInfo], trunk: Trunk | None, opt: Optimizer, plan: Plan) -> list[Bucket]:
    """New buckets of these parameters, which are in none. Collective over the ranks of each."""
    kind = kind_of(plan)
    units = _by_unit(infos, trunk).values() if kind.by_unit else [infos]
    parts = [part for unit in units for part in kind.cut(unit, plan.bucket_mb * 1e6)]
    return [one_bucket(part, opt, plan) for part in parts]


def one_bucket(infos: Sequence[ParamInfo], opt: Optimizer, plan: Plan) -> Bucket:
    """infos: of equal key()."""
    whole = opt is not None and not is_elementwise(opt)
    return kind_of(plan).make_bucket(infos, whole, way_to_sum(plan.compression, plan.grad_sync == "naive"))


def master_options(bucket: Bucket, plan: Plan) -> MasterOptions:
    return MasterOptions(
        dtype=torch.float32 if plan.precision and bucket.dtype == torch.bfloat16 else None,
        on_host=plan.offload is not None and bucket.device.type != "cpu",
        values_on_host=plan.offload == "parameters",
    )


def make_units(model: nn.Module, trunk: Trunk | None, shards: Mapping[int, Sequence[Shards]]) -> Units:
    """Units of ZeRO-3, which wrap the forwards of the modules that use them. shards: by stage."""
    units = Units()
    found: dict[tuple[Where, int], list[StreamedShards]] = {}
    for stage, parts in shards.items():
        for shard in parts:
            where = _unit_of(shard.bucket.infos[0].name, trunk)
            found.setdefault((where, stage), []).append(cast(StreamedShards, shard))
    users = {key: _users(model, streamed) for key, streamed in found.items() if key[0].block is None}
    of_several = collections.Counter(module for modules in users.values() for module in modules)
    for key, streamed in found.items():
        name, index = key[0]
        if trunk is not None and index is not None:
            units.add(Unit(trunk.names[index], streamed), [trunk.blocks[index]])
            continue
        modules = users[key]
        # A module that needs two units, as one with one tied parameter of two, has both in backward.
        sticky = len(modules) > 1 or any(of_several[module] > 1 for module in modules)
        unit = Unit(name, streamed, sticky=sticky)
        if not modules or any(module is model or _contains_blocks(module, trunk) for module in modules):
            units.add(unit, always=True)
        else:
            units.add(unit, modules)
    return units


def _users(model: nn.Module, parts: Sequence[Shards]) -> list[nn.Module]:
    """The modules that have one of these parameters as their own."""
    held = {info.param for shard in parts for info in shard.bucket.infos}
    return [m for m in model.modules() if any(p in held for p in m._parameters.values())]


def _contains_blocks(module: nn.Module, trunk: Trunk | None) -> bool:
    inside = set(module.modules())
    return trunk is not None and any(block in inside for block in trunk.blocks)


def _unit_of(name: str, trunk: Trunk | None) -> Where:
    """name: of a parameter."""
    index = None if trunk is None else trunk.block_of(name)
    if trunk is None or index is None:
        return Where(name.rpartition(".")[0], None)
    return Where(trunk.name, index)


def _by_unit(infos: Sequence[ParamInfo], trunk: Trunk | None) -> dict[Where, list[ParamInfo]]:
    """The infos of each unit, in their order."""
    units: dict[Where, list[ParamInfo]] = {}
    for info in infos:
        units.setdefault(_unit_of(info.name, trunk), []).append(info)
    return units
