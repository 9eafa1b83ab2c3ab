"""What does not fit together in a model, an optimizer and a plan: refused before any rank is asked and before
anything is changed.

    plan                            looked for
    all                             a model that is parallelized, compiled or on meta in a way that cannot be
                                    filled; an optimizer that has taken steps or has other parameters
    cut at blocks                   a model without a list of blocks
    cut by rows or the sequence     BatchNorm, embeddings that look at all rows
    pp                              backward hooks of blocks, modules that two stages share
    tp                              an optimizer that is not known to be element-wise
    zero, pp, ep                    an optimizer that takes a number over all parameters (optimizers.py)

What can go wrong: it sees what is registered, not what a forward does. The first passes show that (the other
files of this folder).
"""

from collections.abc import Collection, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pycomm.parallel.checks.optimizers import try_optimizer
from pycomm.parallel.ground.answers import State
from pycomm.parallel.ground.plan import Plan, ScheduleName
from pycomm.parallel.models.modes import is_compiled
from pycomm.parallel.models.norms import batch_norms
from pycomm.parallel.models.trunk import Trunk, find_trunk
from pycomm.parallel.pipeline.placement import cut_blocks
from pycomm.parallel.pipeline.updates import refuse_tied_weights
from pycomm.parallel.zero.kinds import kind_of
from pycomm.parallel.zero.optimizer import check_fresh, is_elementwise

__all__ = ["check"]


def check(model: nn.Module, opt: torch.optim.Optimizer | None, plan: Plan) -> Trunk | None:
    """Raises ValueError for what does not fit together. Returns the Trunk; None where none is needed."""
    for name, module in model.named_modules():
        parts = module.__dict__.get("_parallel")
        if parts is not None:
            which, so = (
                (f"{name!r} of this model", ": parallelize the whole alone") if name else ("this model", "")
            )
            raise ValueError(f"{which} is parallelized already, by Plan({parts.plan}){so}")
    _check_meta(model)
    _check_compiled(model, plan)
    trunk = _trunk_for(model, plan)
    _check_batch_norms(model, trunk, plan)
    _check_embeddings(model, plan)
    if opt is not None:
        _check_optimizer(model, opt, plan)
    if plan.pp > 1 and trunk is not None:
        _check_hooks(trunk, plan)
        _check_shared(model, trunk, cut_blocks(len(trunk.blocks), plan.virtual_stages, plan.stages))
    if plan.schedule == ScheduleName.PIPEDREAM:
        refuse_tied_weights(model)
    return trunk


def _check_meta(model: nn.Module) -> None:
    """Parameters and buffers on meta get their values in parallelize(), other tensors do not."""
    if torch.get_default_device().type == "meta":
        raise ValueError(
            'torch\'s default device is meta: build the model under torch.device("meta"), and parallelize '
            "it outside"
        )
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ValueError(
                    f"{f'{name}.{key}'.lstrip('.')!r} is a tensor on meta that is neither a parameter nor a "
                    "buffer, so nothing gives it a value: register_buffer it, or give it memory and values "
                    "first"
                )


def _trunk_for(model: nn.Module, plan: Plan) -> Trunk | None:
    need = {
        "pp": plan.pp > 1,
        "ring": plan.ring > 1,
        "ulysses": plan.ulysses > 1,
        "megatron_sp": plan.megatron_sp,
        "checkpoint": plan.checkpoint,
    }
    wanted = [name for name, value in need.items() if value]
    if not (wanted or plan.blocks or kind_of(plan).by_unit or plan.tp > 1):
        return None
    trunk = find_trunk(model, plan.blocks)
    if wanted and trunk is None:
        raise ValueError(
            f"Plan({plan}): the model is cut at its blocks ({', '.join(wanted)}), but {type(model).__name__} "
            "has no list of blocks"
        )
    cuts = [name for name in ("ring", "ulysses", "megatron_sp") if name in wanted]
    if trunk is not None and len(trunk.lists) > 1 and cuts:
        raise ValueError(
            f"Plan({plan}): {cuts[0]} cuts the sequence at one list of blocks, and blocks names two. Name "
            "one, or use a plan without ring, ulysses and megatron_sp"
        )
    return trunk


def _check_shared(model: nn.Module, trunk: Trunk, bounds: list[tuple[int, int]]) -> None:
    """Raises ValueError for a module with values that blocks of two stages share, or a block and the model
    around it: a weight can be tied, a module is on one stage.
    """
    users: dict[int, tuple[int | None, str]] = {}  # id of a module -> (stage, where it is)
    blocks = {id(block) for block in trunk.blocks}
    places = [
        (stage, f"block {index}", module)
        for stage, (first, end) in enumerate(bounds)
        for index in range(first, end)
        for module in trunk.blocks[index].modules()
    ]
    for stage, place, module in places + [(None, repr(name), m) for name, m in _around(model, blocks)]:
        values = [*module._parameters.values(), *module._buffers.values()]
        other, where = users.setdefault(id(module), (stage, place))
        if other != stage and any(value is not None for value in values):
            raise ValueError(
                f"one {type(module).__name__} is part of {where} of {trunk.name!r}, in pipeline stage "
                f"{other}, and of {place}{'' if stage is None else f', in stage {stage}'}. Make one for each "
                "and tie their weights (b.weight = a.weight), or use a plan with pp=1"
            )


def _around(module: nn.Module, blocks: Collection[int], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of all that is reached without going into a block."""
    for name, child in module.named_children():
        if id(child) not in blocks:
            yield prefix + name, child
            yield from _around(child, blocks, f"{prefix}{name}.")


def _check_compiled(model: nn.Module, plan: Plan) -> None:
    """What is compiled is traced together with what a plan puts around and into it."""
    compiled = {name: module for name, module in model.named_modules() if is_compiled(module)}
    into = [axis for axis in ("ring", "ulysses") if getattr(plan, axis) > 1]
    if compiled and into:
        raise ValueError(
            f"Plan({plan}): {next(iter(compiled)) or 'the model'!r} is compiled, and {', '.join(into)} puts "
            "attention over ranks into it, which a compiler does not follow. Use the plan without "
            "torch.compile, or dp, tp and zero with it"
        )
    within = [name for name, module in compiled.items() if not (name and hasattr(module, "_orig_mod"))]
    if within and (plan.pp > 1 or plan.megatron_sp):
        raise ValueError(
            f"Plan({plan}): {within[0] or 'the model'!r} is compiled with what the plan changes in it. "
            "Compile its blocks, each by itself: blocks[i] = torch.compile(blocks[i])"
        )


def _check_batch_norms(model: nn.Module, trunk: Trunk | None, plan: Plan) -> None:
    found = batch_norms(model)
    names = list(found)
    own = [name for name, module in found.items() if "forward" in module.__dict__ or not _is_plain(module)]
    if own and plan.dp * plan.ep > 1:
        raise ValueError(
            f"Plan({plan}): {own[0]!r} is a BatchNorm with a forward of its own "
            f"({type(found[own[0]]).__name__}), whose statistics cannot be made those of all data ranks. "
            "Call torch's BatchNorm and what is done beside it one after the other, or use dp=1 and ep=1"
        )
    cuts = [axis for axis in ("ring", "ulysses") if getattr(plan, axis) > 1]
    cuts += ["megatron_sp"] * plan.megatron_sp
    if names and cuts:
        raise ValueError(
            f"Plan({plan}): {names[0]!r} is a BatchNorm, whose statistics need all positions, and "
            f"{', '.join(cuts)} cuts the sequence. Use a plan without, or another norm"
        )
    again = [name for name in names if trunk and trunk.block_of(name) is not None]
    if again and plan.checkpoint:
        raise ValueError(
            f"Plan({plan}): {again[0]!r} is a BatchNorm inside a block, and its recomputation would count "
            "the rows twice in the running averages. Use a plan without checkpoint"
        )


def _check_embeddings(model: nn.Module, plan: Plan) -> None:
    """Options of torch's embeddings that look at all rows of a batch, or write weights in the forward."""
    rows = plan.dp * plan.ep > 1
    for name, module in model.named_modules():
        if not isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            continue
        if module.scale_grad_by_freq and rows:
            raise ValueError(
                f"Plan({plan}): {name!r} scales gradients by how often an index is in the batch "
                "(scale_grad_by_freq), of which each rank has some rows. Use dp=1 and ep=1"
            )
        if module.max_norm is not None and (rows or kind_of(plan).divided or plan.precision):
            raise ValueError(
                f"Plan({plan}): {name!r} writes its weights in the forward (max_norm), each rank those of "
                "its own rows. Use a plan without dp, ep, zero and precision"
            )


def _check_hooks(trunk: Trunk, plan: Plan) -> None:
    for name, block in zip(trunk.names, trunk.blocks, strict=True):
        if block._backward_hooks or block._backward_pre_hooks:
            raise ValueError(
                f"Plan({plan}): {name!r} has a backward hook, which is given no gradient of what comes from "
                "another pipeline stage. Register it on a module inside of the block, or use pp=1"
            )


def _is_plain(module: nn.Module) -> bool:
    """Whether torch's own forward runs."""
    return type(module).forward is _BatchNorm.forward


def _check_optimizer(model: nn.Module, opt: torch.optim.Optimizer, plan: Plan) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    strange = sum(id(parameter) not in known for group in opt.param_groups for parameter in group["params"])
    if strange:
        raise ValueError(
            f"{strange} parameters of the optimizer are not the model's: make it from model.parameters() "
            "of this model"
        )
    check_fresh(opt)
    if isinstance(opt, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS calls the model from its step, which a plan cannot run; choose another optimizer"
        )
    if plan.tp > 1 and not is_elementwise(opt):
        raise ValueError(
            f"Plan(tp={plan.tp}): {type(opt).__name__} looks at whole parameters, which tensor "
            "parallelism cuts"
        )
    answer = try_optimizer(opt, plan)
    if answer is not None and answer.state is State.BROKEN:
        raise ValueError(answer.why)
