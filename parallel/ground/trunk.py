"""The trunk of a model: the list of blocks through which one hidden state passes. Pipeline stages, sequence
splits, ZeRO-3 units and activation checkpoints all cut a model there.

    GPT:  tok_emb, pos_emb     blocks[0] ... blocks[L-1]     norm, head
          before               trunk                         after

It is the nn.ModuleList or nn.Sequential with the most parameters, the outermost of those that hold each
other; or what Plan(blocks=...) names, an nn.ModuleDict too. Its children may have any names. What is
registered before it is taken to run before it, what is registered after it to run after it; modules without
parameters run wherever they are called. Parameters that lie directly in a module that contains the trunk can
be used on either side.
"""

import enum
from typing import NamedTuple

import torch
from torch import nn

__all__ = ["Side", "Trunk", "find_trunk", "hidden_of", "hidden_out", "owners", "replace_hidden"]


class Side(enum.Enum):
    """Where a module outside the blocks runs."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"  # it contains the trunk, so its own parameters can be used on either side


class Trunk(NamedTuple):
    name: str  # of the container in the model; "" when the model itself is the list
    blocks: list[nn.Module]
    keys: tuple[str, ...]  # the names of the blocks in the container: "0", "1", or what its maker chose

    @classmethod
    def of(cls, name, container):
        return cls(name, list(container._modules.values()), tuple(container._modules))

    def now(self, model):
        """The same with the blocks that are there now: some may have been replaced."""
        return Trunk.of(self.name, model.get_submodule(self.name))

    def block_of(self, name):
        """Index of the block in which the parameter or module `name` lies; None outside the blocks."""
        if self.name and not name.startswith(self.name + "."):
            return None
        inside = name[len(self.name) + 1 :] if self.name else name
        key = inside.split(".")[0]
        return self.keys.index(key) if key in self.keys else None


def find_trunk(model, name=None):
    """The Trunk of a model, or None when it has no list of two or more blocks.

    name: of the container, when it is not to be searched for. Raises ValueError when it is not there, or when
    two lists are alike in size (an encoder and a decoder).
    """
    if name is not None:
        found = dict(model.named_modules()).get(name)
        if not isinstance(found, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            kind = "is not in the model" if found is None else f"is a {type(found).__name__}"
            raise ValueError(
                f"blocks={name!r}: {kind}; it must be a ModuleList, a Sequential or a ModuleDict"
            )
        return Trunk.of(name, found)
    lists = []  # (numel, name, module), outermost only
    for candidate, module in model.named_modules():
        inside = any(
            candidate == other or candidate.startswith(other + ".") or other == "" for _, other, _ in lists
        )
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and not inside:
            lists.append((sum(p.numel() for p in module.parameters()), candidate, module))
    if not lists:
        return None
    lists.sort(key=lambda item: -item[0])
    if len(lists) > 1 and lists[1][0] * 2 > lists[0][0] > 0:
        raise ValueError(
            f"both {lists[0][1]!r} and {lists[1][1]!r} may be the list of blocks; name it with "
            "Plan(blocks=...)"
        )
    return Trunk.of(lists[0][1], lists[0][2])


def owners(model, trunk, called=None):
    """(name, module, Side) of each module outside the blocks with parameters of its own. called: {name: Side}
    of modules whose side is known; of others the order of registration tells it.
    """
    called = called or {}
    inside = {id(module) for block in trunk.blocks for module in block.modules()} if trunk else set()
    found, passed = [], False
    for name, module in model.named_modules():
        if trunk and name == trunk.name:
            passed = True
        if id(module) in inside or not module._parameters:
            continue
        contains = trunk is not None and (
            name == "" or trunk.name == name or trunk.name.startswith(name + ".")
        )
        state = [*module._parameters.values(), *module._buffers.values()]  # a BatchNorm may have no weights
        if any(tensor is not None for tensor in state):
            side = Side.AROUND if contains or not trunk else Side.AFTER if passed else Side.BEFORE
            found.append((name, module, side if side is Side.AROUND else called.get(name, side)))
    return found


def hidden_of(args, kwargs=None):
    """The hidden state among the arguments or in the output of a block: the first tensor."""
    if isinstance(args, torch.Tensor):
        return args
    for value in [*args, *(kwargs or {}).values()]:
        if isinstance(value, torch.Tensor):
            return value
    raise ValueError("a block was called without a tensor, or returned none")


def hidden_out(out):
    """The same in what a block has returned, a tensor or several values."""
    return hidden_of(out if isinstance(out, torch.Tensor) else tuple(out))


def replace_hidden(args, kwargs, old, new):
    """args and kwargs with the tensor `old` replaced by `new`."""
    return [new if a is old else a for a in args], {k: new if v is old else v for k, v in kwargs.items()}
