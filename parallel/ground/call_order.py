"""On which side of the blocks a module is called, of models that can be run without being given a batch:
those of transformers have inputs for that (`dummy_inputs`). Some are registered in another order than they
are called in (OPT's last norm stands before its blocks).

A copy of the model without data runs on the meta device: with the inputs; with those that are no masks; and
with a yes to whatever is asked of values, which meta has not (is all of this mask true?). The run that comes
furthest counts. What it calls before the first block, or after the last one, is known then, whatever becomes
of the rest. Nothing is known of a model of another kind, or of a module that was not reached: for these the
order of registration counts (trunk.owners). The first forward says where the sides that were found are wrong.
"""

import contextlib
import copy

import torch
from torch.overrides import TorchFunctionMode

from pycomm.parallel.ground.caches import Caches
from pycomm.parallel.ground.trunk import Side

__all__ = ["called_sides"]

_QUESTIONS = {torch.Tensor.__bool__: True, torch.Tensor.item: 1, torch.Tensor.__int__: 1, torch.equal: True}


def called_sides(model, trunk):
    """{name of a module outside of the blocks: Side} of those that were seen to be called on one side."""
    try:
        inputs = dict(model.dummy_inputs)
    except Exception:  # no such attribute, or one that this class has not filled in
        return {}
    plain = {key: value for key, value in inputs.items() if "mask" not in key}
    runs = ((inputs, False), (plain, False), (plain, True))
    events, finished = max((_calls(model, trunk, *run) for run in runs), key=lambda found: len(found[0]))
    at = [index for index, name in enumerate(events) if name is None]
    if not at:
        return {name: Side.BEFORE for name in events}
    before = set(events[: at[0]])
    after = {name for name in events[at[-1] :] if name is not None} if finished else set()
    return dict.fromkeys(before - after, Side.BEFORE) | dict.fromkeys(after - before, Side.AFTER)


class _Yes(TorchFunctionMode):
    """Whatever code asks of values on meta is so."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _QUESTIONS and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return _QUESTIONS[func]
        return func(*args, **(kwargs or {}))


def _calls(model, trunk, inputs, answered):
    """(what was called, see _record; whether it ended) in a run of a copy with these inputs. answered:
    whether code that looks at values goes on.
    """
    known = {id(p): torch.nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    known |= {id(b): b.to("meta") for b in model.buffers()}
    shadow = copy.deepcopy(model, known)
    events = _record(shadow, trunk.name)
    try:
        with torch.no_grad(), torch.device("meta"), _Yes() if answered else contextlib.nullcontext():
            Caches().around(lambda: shadow(**{key: value.to("meta") for key, value in inputs.items()}))
    except Exception:  # what was called before stays true
        return events, False
    return events, True


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
