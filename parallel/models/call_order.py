"""On which side of the blocks a module is called, of models that can be run without being given a batch:
those of transformers have inputs for that (`dummy_inputs`). Some are registered in another order than they
are called in (OPT's last norm stands before its blocks).

A copy of the model without data runs on the meta device: with the inputs; with those that are no masks; and
with a yes to whatever is asked of values, which meta has not (is all of this mask true?). The run that comes
furthest counts. What it calls before the first block, between two lists or after the last block is known
then, whatever becomes of the rest. Nothing is known of a model of another kind, or of a module that was not
reached: for these the order of registration counts (trunk.owners). The first forward says where the sides
that were found are wrong.
"""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pycomm.parallel.given import Tree
from pycomm.parallel.models.caches import Caches
from pycomm.parallel.models.shared_state import SharedState
from pycomm.parallel.models.trunk import Side, Trunk

__all__ = ["called_sides"]

Event: TypeAlias = str | int  # the name of a module, or the number of the list that a block is in

_QUESTIONS = {torch.Tensor.__bool__: True, torch.Tensor.item: 1, torch.Tensor.__int__: 1, torch.equal: True}


def called_sides(model: nn.Module, trunk: Trunk) -> dict[str, Side]:
    """The sides of modules outside of the blocks, by name: of those that were seen to be called on one."""
    try:
        inputs = dict(cast("Mapping[str, torch.Tensor]", model.dummy_inputs))
    except Exception:  # no such attribute, or one that this class has not filled in
        return {}
    plain = {key: value for key, value in inputs.items() if "mask" not in key}
    runs = [(inputs, False), (plain, False), (plain, True)][len(plain) == len(inputs) :]
    caches = Caches()  # a walk through all modules, so once
    events, finished = max((_calls(model, trunk, caches, *run) for run in runs), key=lambda run: len(run[0]))
    at = [[place for place, event in enumerate(events) if event == each] for each in range(len(trunk.lists))]
    if not at[0]:
        return {event: Side.BEFORE for event in events if isinstance(event, str)}
    seen = {Side.BEFORE: events[: at[0][0]]}
    if len(at) == 2 and at[1]:
        seen[Side.BETWEEN] = events[at[0][-1] : at[1][0]]
    if finished and at[-1]:
        seen[Side.AFTER] = events[at[-1][-1] :]
    found: dict[str, set[Side]] = {}
    for side, calls in seen.items():
        for name in {event for event in calls if isinstance(event, str)}:
            found.setdefault(name, set()).add(side)
    return {name: sides.pop() for name, sides in found.items() if len(sides) == 1}


class _Yes(TorchFunctionMode):
    """Whatever code asks of values on meta is so."""

    def __torch_function__(
        self,
        func: Callable[..., Tree],
        types: Sequence[type],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree:
        if func in _QUESTIONS and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return _QUESTIONS[func]
        return func(*args, **(kwargs or {}))


def _calls(
    model: nn.Module, trunk: Trunk, caches: Caches, inputs: Mapping[str, torch.Tensor], answered: bool
) -> tuple[list[Event], bool]:
    """(what was called; whether it ended) in a run of a copy with these inputs. answered: whether code that
    looks at values goes on.
    """
    known: dict[int, torch.Tensor] = {
        id(p): torch.nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()
    }
    known |= {id(b): b.to("meta") for b in model.buffers()}
    shadow = copy.deepcopy(model, known)
    events = _record(shadow, trunk)
    try:
        with (
            torch.no_grad(),
            torch.device("meta"),
            SharedState(model.modules()).kept(on_meta=True),
            _Yes() if answered else contextlib.nullcontext(),
        ):
            caches.around(lambda: shadow(**{key: value.to("meta") for key, value in inputs.items()}))
    except Exception:  # what was called before stays true
        return events, False
    return events, True


def _record(model: nn.Module, trunk: Trunk) -> list[Event]:
    """The list to which calls are appended."""
    events: list[Event] = []
    trunk = trunk.now(model)
    inside = {id(module) for block in trunk.blocks for module in block.modules()}
    for index, block in enumerate(trunk.blocks):
        number = int(len(trunk.lists) == 2 and index >= trunk.border)
        block.register_forward_pre_hook(lambda *_, number=number: events.append(number))
    for name, module in model.named_modules():
        if module._parameters and id(module) not in inside:
            module.register_forward_pre_hook(lambda *_, name=name: events.append(name))
    return events
