"""Where the gradients and values of the described parameters lie: buckets, their shards, and ZeRO-3's units.

infos of a stage    a b c | d e | f g     in the order in which backward is to reach them
buckets             of at most bucket_mb; with ZeRO-3 one for each unit (a block, or a module outside)
shards              one for each bucket: values, master copies, what the optimizer has
"""

import collections

import torch

from pycomm.parallel.data.reducer import Reducer
from pycomm.parallel.data.replicated import way_to_sum
from pycomm.parallel.pipeline.apply import splits_backward
from pycomm.parallel.zero.kinds import kind_of
from pycomm.parallel.zero.optimizer import is_elementwise
from pycomm.parallel.zero.shards import MasterOptions
from pycomm.parallel.zero.units import Unit, Units

__all__ = ["make_reducers", "make_shards", "make_units"]


def make_reducers(infos_of, trunk, opt, plan):
    """{stage: Reducer} with buckets of the trained parameters. infos_of: see describe.Described."""
    # In a split backward, parts of two microbatches may alternate: nothing is summed before both are done.
    eager = not splits_backward(plan)
    reducers = {}
    for stage, infos in infos_of.items():
        trained = [info for info in infos if info.param.requires_grad]
        reducers[stage] = Reducer(_buckets_of(trained, trunk, opt, plan), eager=eager)
    return reducers


def make_shards(infos_of, reducers, full_values, trunk, opt, plan):
    """{stage: the Shards of its buckets}. full_values: parameter -> values at full precision."""
    kind, found = kind_of(plan), {}
    for stage, infos in infos_of.items():
        buckets = list(reducers[stage].buckets)
        if kind.by_unit:  # frozen parameters are freed too
            frozen = [info for info in infos if not info.param.requires_grad]
            buckets += _buckets_of(frozen, trunk, opt, plan)
        found[stage] = tuple(
            kind.shards(bucket, full_values, _master_options(bucket, plan)) for bucket in buckets
        )
    return found


def _buckets_of(infos, trunk, opt, plan):
    kind = kind_of(plan)
    whole = opt is not None and not is_elementwise(opt)
    make_sum = way_to_sum(plan.compression, plan.grad_sync == "naive")
    units = _by_unit(infos, trunk).values() if kind.by_unit else [infos]
    parts = [part for unit in units for part in kind.cut(unit, plan.bucket_mb * 1e6)]
    return [kind.make_bucket(part, whole, make_sum) for part in parts]


def _master_options(bucket, plan):
    return MasterOptions(
        dtype=torch.float32 if plan.precision and bucket.dtype == torch.bfloat16 else None,
        on_host=plan.offload is not None and bucket.device.type != "cpu",
        values_on_host=plan.offload == "parameters",
    )


def make_units(model, trunk, shards):
    """Units of ZeRO-3, which wrap the forwards of the modules that use them. shards: {stage: its Shards}."""
    units, found = Units(), {}
    for stage, parts in shards.items():
        for shard in parts:
            found.setdefault((_unit_of(shard.bucket.infos[0].name, trunk), stage), []).append(shard)
    users = {key: _users(model, parts) for key, parts in found.items() if key[0][1] is None}
    of_several = collections.Counter(module for modules in users.values() for module in modules)
    for key, parts in found.items():
        (name, index), _ = key
        if index is not None:
            units.add(Unit(trunk.names[index], parts), [trunk.blocks[index]])
            continue
        modules = users[key]
        # A module that needs two units, as one with one tied parameter of two, has both in backward.
        sticky = len(modules) > 1 or any(of_several[module] > 1 for module in modules)
        unit = Unit(name, parts, sticky=sticky)
        if not modules or any(module is model or _contains_blocks(module, trunk) for module in modules):
            units.add(unit, always=True)
        else:
            units.add(unit, modules)
    return units


def _users(model, parts):
    """The modules that have one of these parameters as their own."""
    held = {info.param for shard in parts for info in shard.bucket.infos}
    return [m for m in model.modules() if any(p in held for p in m._parameters.values())]


def _contains_blocks(module, trunk):
    inside = set(module.modules())
    return trunk is not None and any(block in inside for block in trunk.blocks)


def _unit_of(name, trunk):
    """(name of the trunk, index of the block) of a parameter, or (the module outside the blocks, None)."""
    index = trunk.block_of(name) if trunk else None
    return (name.rpartition(".")[0], None) if index is None else (trunk.name, index)


def _by_unit(infos, trunk):
    """{unit: its infos}, in the order of the infos."""
    units = {}
    for info in infos:
        units.setdefault(_unit_of(info.name, trunk), []).append(info)
    return units
