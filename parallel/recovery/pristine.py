"""The user's model and optimizer as they were before parallelize(), which changes both in place, so that they
can go through it again under another plan. They remain the user's objects: loops, schedulers and hooks that
hold them go on; modules inside of the model are others afterwards.

Kept are the structure and the small things: modules, names, ties, hooks, buffers, parameters on meta. Values
come from a snapshot. While a model is built again a rank has memory for all of its parameters, as it had when
it was built first (not those that were on meta then).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from pycomm.parallel.parts import parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

__all__ = ["Pristine"]

# Of the optimizer: methods that parallelize() changes, and where it registers hooks.
TAKEN_OVER = ("zero_grad", "add_param_group", "state_dict", "load_state_dict")
HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
)

_NO_AVERAGES = (
    "this model belongs to parallel.resilient, whose snapshots do not contain averages: the part of a rank "
    "that dies would be lost. Use parallel.parallelize with parallel.save and parallel.load, or average the "
    "values of parallel.full_state_dict(model) on every rank, and give that average to run.keep"
)


class Pristine:
    """model, opt: before parallelize(). Raises ValueError for a model that cannot be copied."""

    def __init__(self, model: nn.Module, opt: torch.optim.Optimizer) -> None:
        self.model, self.opt = model, opt
        self.devices = {name: param.device for name, param in model.named_parameters()}
        names = {id(param): name for name, param in model.named_parameters()}
        self.groups = [[names[id(p)] for p in group["params"]] for group in opt.param_groups]
        self.methods = {name: opt.__dict__[name] for name in TAKEN_OVER if name in opt.__dict__}
        self.hooks = _hooks_of(opt)
        self.added: set[int] | None = None  # hooks of parallelize()
        self.trained: dict[str, bool] = {}  # which parameters were, before reset()
        memo: dict[int, object] = {id(model): model, **{id(p): _like(p, "meta") for p in model.parameters()}}
        try:
            self.state = copy.deepcopy(model.__dict__, memo)
        except Exception as error:
            raise ValueError(
                f"resilient: {type(model).__name__} cannot be copied, which is needed to build it again "
                f"under another plan: {error!r}"
            ) from error

    def note_hooks(self) -> None:
        """After parallelize(): what it has added, which leaves with the next reset(). What was frozen or
        unfrozen before the last reset() is so again.
        """
        if "add_param_group" in self.opt.__dict__:
            self.opt.__dict__["add_param_group"] = _refuse_group
        if self.trained:
            parts_of(self.model).trained.set(self.trained)
        parts_of(self.model).averages.refusal = _NO_AVERAGES
        self.added = _hooks_of(self.opt) - self.hooks
        self.hooks = _hooks_of(self.opt) - self.added

    def reset(self) -> None:
        """Model and optimizer are as before parallelize(), but for values and hyperparameters."""
        former = self.model.__dict__.get("_parallel")
        self.trained = former.trained.now() if former is not None else {}
        modes = {name: module.training for name, module in self.model.named_modules()}
        memo: dict[int, object] = {id(self.model): self.model}
        shell = nn.Module()
        shell.__dict__ = self.state
        for name, param in nn.Module.named_parameters(shell):
            memo[id(param)] = _like(param, self.devices[name])
        self.model.__dict__ = copy.deepcopy(self.state, memo)
        for name, module in self.model.named_modules():
            module.training = modes.get(name, module.training)
        named = dict(self.model.named_parameters())
        self.opt.state.clear()
        for group, names in zip(self.opt.param_groups, self.groups, strict=True):
            group["params"] = [named[name] for name in names]
        for name in TAKEN_OVER:
            self.opt.__dict__.pop(name, None)
        self.opt.__dict__.update(self.methods)
        for kind in _kinds_of(self.opt):
            for hook in kind.keys() & (self.added or set()):
                del kind[hook]
        self.hooks = _hooks_of(self.opt)


def _refuse_group(param_group: dict[str, object]) -> NoReturn:
    raise ValueError(
        "add_param_group: after a loss the optimizer is made again with the groups that it had at first. "
        "Give par.resilient all groups, with what is to wait frozen, or in a group with lr=0"
    )


def _kinds_of(opt: torch.optim.Optimizer) -> list[MutableMapping[int, Callable[..., object]]]:
    return [getattr(opt, kind, {}) for kind in HOOKS]


def _hooks_of(opt: torch.optim.Optimizer) -> set[int]:
    """torch numbers the hooks of all kinds together."""
    return {hook for kind in _kinds_of(opt) for hook in kind}


def _like(param: torch.Tensor, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.zeros_like(param, device=device), requires_grad=param.requires_grad)
