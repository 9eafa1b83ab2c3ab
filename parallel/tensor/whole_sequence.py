"""Sequence parallelism over tp, for modules that need all tokens: they are given the whole sequence.

[Note: sequence] With `sequence`, the hidden state in the trunk and after it is this rank's piece along dim 1;
whoever calls cuts it at block 0. Between the sublayers that are cut each rank works on its own tokens, so a
parameter there (a norm) gets a part of its gradient, to be summed over tp: Layout.partial. Attention that is
not cut, and what a rule says to replicate, is given the whole sequence and gives back its piece; a head that
is not cut is given the whole sequence. What is "after the trunk" is read from the order of registration, or
known from the calls (models/call_order.py), and checked in the first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from pycomm.parallel.ground import differentiable
from pycomm.parallel.models.trunk import Side
from pycomm.parallel.tensor.edges import CutSequence, check_piece, now_cut
from pycomm.parallel.tensor.modules import within

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from pycomm.parallel.given import Tree
    from pycomm.parallel.ground.comm import Group

__all__ = ["WholeSequence", "after_trunk", "check_order"]


_Hook = Callable[[nn.Module, tuple["Tree", ...]], None]


class WholeSequence:
    """Takes the place of a forward that needs all tokens: gathers its input, and gives back this rank's piece
    if `give_piece`.
    """

    def __init__(
        self, inner: Callable[..., Tree], group: Group, sequence: CutSequence, give_piece: bool
    ) -> None:
        self.inner, self.group, self.sequence, self.give_piece = inner, group, sequence, give_piece

    def _gather(self, x: Tree, known: dict[int, torch.Tensor]) -> Tree:
        if (
            not isinstance(x, torch.Tensor)
            or x.dim() != 3
            or not x.is_floating_point()
            or x.shape[1] != self.sequence.sizes[self.group.rank]
        ):
            return x
        if id(x) not in known:
            known[id(x)] = differentiable.gather_from(x, 1, self.sequence.sizes, self.group)
        return known[id(x)]

    def _piece(self, out: Tree) -> Tree:
        if isinstance(out, tuple):
            return (self._piece(out[0]), *out[1:])
        return differentiable.scatter_to(out, 1, self.sequence.sizes, self.group)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        if now_cut(self.sequence) is None:
            return self.inner(*args, **kwargs)
        known: dict[int, torch.Tensor] = {}  # the same tensor stays the same: attention(x, x, x)
        if not self.give_piece and args:
            check_piece(args[0], self.sequence, self.group, "the head")
        given = [self._gather(x, known) for x in args]
        named = {name: self._gather(x, known) for name, x in kwargs.items()}
        out = self.inner(*given, **named)
        return self._piece(out) if self.give_piece else out


def after_trunk(model: nn.Module, blocks: str | None, sides: Mapping[str, Side]) -> set[str]:
    """Names of the modules that run after the trunk: as `sides` ({name: Side}) has it; of others those that
    are registered after it. Embeddings always come before it.
    """
    names = [fqn for fqn, _ in model.named_modules()]
    last = max(index for index, fqn in enumerate(names) if within(fqn, blocks))
    found = {fqn for fqn in names[last + 1 :] if sides.get(fqn, Side.AFTER) is Side.AFTER}
    found |= {fqn for fqn, side in sides.items() if side is Side.AFTER}
    return {fqn for fqn in found if not isinstance(model.get_submodule(fqn), nn.Embedding)}


def check_order(model: nn.Module, blocks: str, after: Collection[str]) -> None:
    """Watches the first forward, which raises ValueError when a module outside of the trunk runs on the other
    side of it than its place in the model says. after: from after_trunk().
    """
    _OrderCheck(model, blocks, after)


class _OrderCheck:
    def __init__(self, model: nn.Module, blocks: str, after: Collection[str]) -> None:
        self.started = False  # a block has run
        self.early: list[str] = []  # modules registered after the trunk that ran before it
        self.forwards = 0
        self.handles: list[RemovableHandle] = []
        self.watch(model, self.root)
        for block in model.get_submodule(blocks).children():
            self.watch(block, self.block)
        for fqn, module in model.named_modules():
            outside = not within(fqn, blocks) and not blocks.startswith(fqn + ".") and fqn
            if outside and next(module.parameters(recurse=False), None) is not None:
                self.watch(module, self.late(fqn) if fqn in after else self.before(fqn))

    def watch(self, module: nn.Module, hook: _Hook) -> None:
        self.handles.append(module.register_forward_pre_hook(hook))

    def root(self, module: nn.Module, args: tuple[Tree, ...]) -> None:
        self.forwards += 1
        if self.forwards > 1:
            for handle in self.handles:
                handle.remove()

    def block(self, module: nn.Module, args: tuple[Tree, ...]) -> None:
        self.started = True
        if self.early:
            self.fail(self.early[0], "after", "before")

    def before(self, fqn: str) -> _Hook:
        def hook(module: nn.Module, args: tuple[Tree, ...]) -> None:
            if self.started and self.forwards == 1:
                self.fail(fqn, "before", "after")

        return hook

    def late(self, fqn: str) -> _Hook:
        def hook(module: nn.Module, args: tuple[Tree, ...]) -> None:
            if not self.started:
                self.early.append(fqn)

        return hook

    @staticmethod
    def fail(fqn: str, place: str, use: str) -> NoReturn:
        raise ValueError(
            f"sequence parallelism: {fqn} is registered {place} the blocks but runs {use} them, so its "
            "gradient would be summed wrongly. Register modules in the order of their use, or use the model "
            "without megatron_sp"
        )
