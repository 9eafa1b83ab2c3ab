"""The steps that deal experts over the ranks of ep.

parallel.MoE             before tensors are cut; experts of other ranks leave the module
stacked, transformers    after that; tp leaves them whole
"""

from pycomm.parallel.expert import MoE
from pycomm.parallel.expert.stacked import deal_stacked, is_stacked, misfit
from pycomm.parallel.zero.optimizer import is_elementwise

__all__ = ["deal_all_stacked", "deal_moes", "moe_names_of", "stacked_to_deal"]


def moe_names_of(model):
    """Names of the MoE layers."""
    return tuple(name for name, module in model.named_modules() if isinstance(module, MoE))


def deal_moes(model, moe_names, mesh, plan):
    """The MoE layers; experts of other ranks leave them."""
    moes = tuple(model.get_submodule(name) for name in moe_names)
    for moe in moes:
        moe.shard(mesh.group("ep"), mesh.data_tp if plan.megatron_sp else mesh.data)
    return moes


def stacked_to_deal(model, opt, first_name, plan):
    """Names of the stacked experts that ep deals. Raises ValueError where ep has nothing to deal, and for an
    optimizer that would have to see all experts of a parameter.
    """
    if plan.ep == 1:
        return ()
    names, reasons, moe_names = [], [], moe_names_of(model)
    for name, module in model.named_modules():
        if is_stacked(module) and not any(name.startswith(f"{moe}.") for moe in moe_names):
            why = _shared(name, module, first_name) or misfit(module, plan.ep)
            if why is None:
                names.append(name)
            else:
                reasons.append(f"; {name!r} is left whole: {why}")
    if not names and not moe_names:
        raise ValueError(
            f"Plan(ep={plan.ep}): the model has no parallel.MoE layer whose experts could be dealt, and no "
            f"experts stacked in parameters as in transformers{reasons[0] if reasons else ''}"
        )
    if names and opt is not None and not is_elementwise(opt):
        raise ValueError(
            f"Plan(ep={plan.ep}): {type(opt).__name__} looks at whole parameters, and in {names[0]!r} the "
            "experts of all ranks are one"
        )
    return tuple(names)


def _shared(name, module, first_name):
    """Why tied experts are not dealt, or None."""
    firsts = list(first_name.values())
    for key in module._parameters:
        if firsts.count(first_name.get(f"{name}.{key}")) > 1:
            return f"{key!r} is tied to another parameter"
    return None


def deal_all_stacked(model, names, mesh, tensor):
    """Deals them, and notes in `tensor` (TensorParallel) what of their parameters is here. Returns
    {name: module}.
    """
    dealt, group, tp = {}, mesh.group("ep"), mesh.group("tp")
    for name in names:
        module = dealt[name] = model.get_submodule(name)
        for key, layout in deal_stacked(module, name, group).items():
            full = f"{name}.{key}"
            partial = tensor.layouts[full].partial
            counted = layout.counted if partial or tp.rank == 0 else ()
            tensor.layouts[full] = layout._replace(partial=partial, counted=counted)
    return dealt
