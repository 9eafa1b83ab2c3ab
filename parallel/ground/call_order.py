"""On which side of the blocks a module is called, of models that can be run without being given a batch:
those of transformers have inputs for that (`dummy_inputs`). Some are registered in another order than they
are called in (OPT's last norm stands before its blocks).

A copy of the model without data runs once on the meta device. What it calls before the first block, or after
the last one, is known then, whatever becomes of the rest: much code looks at values, which meta has not, and
fails on the way. Nothing is known of a model of another kind, or of a module that was not reached: for these
the order of registration counts (trunk.owners), and the first forward says where that is wrong.
"""

import copy

import torch

from pycomm.parallel.ground.caches import Caches
from pycomm.parallel.ground.trunk import Side

__all__ = ["called_sides"]


def called_sides(model, trunk):
    """{name of a module outside of the blocks: Side} of those that were seen to be called on one side."""
    try:
        inputs = dict(model.dummy_inputs)
    except Exception:  # no such attribute, or one that this class has not filled in
        return {}
    known = {id(p): torch.nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    known |= {id(b): b.to("meta") for b in model.buffers()}
    shadow = copy.deepcopy(model, known)
    events = _record(shadow, trunk.name)
    try:
        with torch.no_grad(), torch.device("meta"):
            Caches().around(lambda: shadow(**{key: value.to("meta") for key, value in inputs.items()}))
        finished = True
    except Exception:  # what was called before stays true
        finished = False
    at = [index for index, name in enumerate(events) if name is None]
    if not at:
        return {name: Side.BEFORE for name in events}
    before = set(events[: at[0]])
    after = {name for name in events[at[-1] :] if name is not None} if finished else set()
    return dict.fromkeys(before - after, Side.BEFORE) | dict.fromkeys(after - before, Side.AFTER)


def _record(model, trunk):
    """The list to which calls are appended: names, or None for a block."""
    events = []
    blocks = list(model.get_submodule(trunk).children())
    inside = {id(module) for block in blocks for module in block.modules()}
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: events.append(None))
    for name, module in model.named_modules():
        if module._parameters and id(module) not in inside:
            module.register_forward_pre_hook(lambda *_, name=name: events.append(name))
    return events
