"""The trunk of a model: the list of blocks through which one hidden state passes. Pipeline stages, sequence
splits, ZeRO-3 units and activation checkpoints all cut a model there.

    GPT:  tok_emb, pos_emb     blocks[0] ... blocks[L-1]     norm, head
          before               trunk                         after

An encoder-decoder has two lists, which make one trunk when Plan(blocks=(...)) names both, in the order in
which they run:

    source embedding   encoder blocks 0 ... n-1   encoder norm, target embedding   decoder blocks n ...   head
    before             first list                 between                         second list            after

It is the nn.ModuleList or nn.Sequential with the most parameters, the outermost of those that hold each
other; or what Plan(blocks=...) names, an nn.ModuleDict too. Its children may have any names; of lists in it
the children are blocks. What is registered before it is taken to run before it, what is registered after it
to run after it; modules without parameters run wherever they are called. Parameters that lie directly in a
module that contains the trunk can be used on either side.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from pycomm.parallel.given import Tree

__all__ = ["Owner", "Side", "Trunk", "find_trunk", "hidden_of", "hidden_out", "owners", "replace_hidden"]


class Side(enum.Enum):
    """Where a module outside the blocks runs."""

    BEFORE = "before"
    BETWEEN = "between"  # the two lists of a trunk
    AFTER = "after"
    AROUND = "around"  # it contains the trunk, so its own parameters can be used on either side


class Owner(NamedTuple):
    """A module outside the blocks with parameters of its own."""

    name: str
    module: nn.Module
    side: Side


class Trunk(NamedTuple):
    lists: tuple[str, ...]  # names of the containers in the model; ("",) when the model itself is the list
    blocks: list[nn.Module]
    names: tuple[str, ...]  # of the blocks in the model
    border: int  # index of the first block of the second list; 0 where there is one list

    @classmethod
    def of(cls, model: nn.Module, lists: Sequence[str]) -> "Trunk":
        blocks: list[nn.Module] = []
        names: list[str] = []
        border = 0
        for name in lists:
            border = len(blocks)
            for key, block in _blocks_in(model.get_submodule(name)):
                blocks.append(block)
                names.append(f"{name}.{key}" if name else key)
        return cls(tuple(lists), blocks, tuple(names), border)

    @property
    def name(self) -> str:
        """As Plan.parse takes it."""
        return "+".join(self.lists)

    def now(self, model: nn.Module) -> "Trunk":
        """The same with the blocks that are there now: some may have been replaced."""
        return Trunk.of(model, self.lists)

    def block_of(self, name: str) -> int | None:
        """Index of the block in which the parameter or module `name` lies; None outside the blocks."""
        for container in self.lists:
            prefix = f"{container}." if container else ""
            if name.startswith(prefix):
                ends = [*(place for place, letter in enumerate(name) if letter == "."), len(name)]
                block = next((name[:end] for end in ends if name[:end] in self.names), None)
                if block is not None:
                    return self.names.index(block)
        return None

    def contained_in(self, name: str) -> bool:
        """Whether the module `name` is one of the lists, or contains one."""
        return any(name in ("", each) or each.startswith(name + ".") for each in self.lists)


def _blocks_in(container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, block) of its children; of lists of lists, which have no forward, those of the inner ones."""
    for key, child in container._modules.items():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from ((f"{key}.{name}", block) for name, block in _blocks_in(child))
        elif child is not None:
            yield key, child


def find_trunk(model: nn.Module, name: str | Sequence[str] | None = None) -> Trunk | None:
    """The Trunk of a model, or None when it has no list of two or more blocks.

    name: of the container, when it is not to be searched for, or a pair of names. Raises ValueError when it
    is not there, or when two lists are alike in size (an encoder and a decoder).
    """
    if name is not None:
        names, modules = (name,) if isinstance(name, str) else tuple(name), dict(model.named_modules())
        for each in names:
            _check_list(name, each, modules.get(each))
        if len(names) > 2 or any(one != other and one.startswith(other) for one in names for other in names):
            raise ValueError(f"blocks={name!r}: one list or two, none of them inside of the other")
        return Trunk.of(model, names)
    lists: list[tuple[int, str]] = []  # (number of values, name), outermost only
    for candidate, module in model.named_modules():
        inside = any(
            candidate == other or candidate.startswith(other + ".") or other == "" for _, other in lists
        )
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and not inside:
            lists.append((sum(p.numel() for p in module.parameters()), candidate))
    if not lists:
        return None
    lists.sort(key=lambda item: -item[0])
    if len(lists) > 1 and lists[1][0] * 2 > lists[0][0] > 0:
        one, other = lists[0][1], lists[1][1]
        raise ValueError(
            f"both {one!r} and {other!r} may be the list of blocks: name one with Plan(blocks={one!r}), or, "
            "of an encoder and a decoder, both in the order in which they run: Plan(blocks=(..., ...)). Two "
            "towers with an input each (CLIP) cannot be cut into pipeline stages: use a plan with pp=1, such "
            f"as tp=2,blocks={one}"
        )
    return Trunk.of(model, (lists[0][1],))


def _check_list(asked: str | Sequence[str], name: str, found: nn.Module | None) -> None:
    if not isinstance(found, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        kind = "is not in the model" if found is None else f"is a {type(found).__name__}"
        one = f"blocks={asked!r}: " + ("" if name == asked else f"{name!r} ")
        raise ValueError(f"{one}{kind}; it must be a ModuleList, a Sequential or a ModuleDict")


def owners(model: nn.Module, trunk: Trunk | None, called: Mapping[str, Side] | None = None) -> list[Owner]:
    """Each module outside the blocks with parameters of its own. called: the sides that are known, by name;
    of other modules the order of registration tells it.
    """
    called = called or {}
    blocks = trunk.blocks if trunk else []
    inside = {id(module) for block in blocks for module in block.modules()}
    found: list[Owner] = []
    passed: set[str] = set()
    for name, module in model.named_modules():
        if trunk and name in trunk.lists:
            passed.add(name)
        if id(module) in inside or not module._parameters:
            continue
        state = [*module._parameters.values(), *module._buffers.values()]  # a BatchNorm may have no weights
        if any(tensor is not None for tensor in state):
            if not trunk or trunk.contained_in(name):
                found.append(Owner(name, module, Side.AROUND))
            else:
                side = Side.BETWEEN if passed else Side.BEFORE
                side = Side.AFTER if len(passed) == len(trunk.lists) else side
                found.append(Owner(name, module, called.get(name, side)))
    return found


def hidden_of(args: torch.Tensor | Iterable[Tree], kwargs: Mapping[str, Tree] | None = None) -> torch.Tensor:
    """The hidden state among the arguments or in the output of a block: the first tensor."""
    if isinstance(args, torch.Tensor):
        return args
    for value in [*args, *(kwargs or {}).values()]:
        if isinstance(value, torch.Tensor):
            return value
    raise ValueError("a block was called without a tensor, or returned none")


def hidden_out(out: Tree) -> torch.Tensor:
    """The same in what a block has returned, a tensor or several values."""
    if isinstance(out, torch.Tensor):
        return out
    if not isinstance(out, Iterable):
        raise ValueError(
            f"a block returned a {type(out).__name__}: a tensor, or a tuple that begins with one"
        )
    return hidden_of(tuple(out.values() if isinstance(out, Mapping) else out))


def replace_hidden(
    args: Sequence[Tree], kwargs: Mapping[str, Tree], old: torch.Tensor, new: torch.Tensor
) -> tuple[list[Tree], dict[str, Tree]]:
    """args and kwargs with the tensor `old` replaced by `new`."""
    return [new if a is old else a for a in args], {k: new if v is old else v for k, v in kwargs.items()}
