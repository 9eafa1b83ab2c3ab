"""What later stages take for granted of the blocks that a stage runs, compared with what these do.

    a guess            a module that cannot run without data returns what is like its input      templates.py
    numbers            those of a run without data; a state of the block's own may change them
    nothing written    to globals, classes, shared objects: a later stage has those of its own process, where
                       this was not written                                          models/shared_state.py

A table that a block keeps for its next call is made by each stage for itself, in its first pass over inputs
of a shape; what a later pass changes is refused. Cost: the tokens of some places, twice in a pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from pycomm.parallel.given import Tree
from pycomm.parallel.models.trunk import Trunk, replace_hidden
from pycomm.parallel.pipeline.templates import NOT_HANDED_ON, Templates, check_like, numbers_of

if TYPE_CHECKING:
    from pycomm.parallel.pipeline.pieces import Cut

__all__ = ["Assumptions"]


class Assumptions:
    """For the passes of stages that are not the last."""

    def __init__(self, trunk: Trunk, templates: Templates, split: Cut | None) -> None:
        self.trunk, self.templates, self.split = trunk, templates, split
        self.shared = templates.shared
        self.looked_at: set[tuple[int, str]] = (
            set()
        )  # (index, name) of modules whose results are compared with a guess
        self.template: Tree = None  # what later stages take the running block to return
        self.tokens: list[object] = []  # at the first block of this pass
        self.seen: set[tuple[int, torch.Size]] = (
            set()
        )  # (stage, shape of the hidden state) of passes that have been

    def before(
        self,
        index: int,
        is_first: bool,
        hidden: torch.Tensor,
        args: Sequence[Tree],
        kwargs: Mapping[str, Tree],
    ) -> None:
        """In front of a block. is_first: of its stage. hidden: a piece where the sequence is cut."""
        if is_first:
            self.tokens = self.shared.tokens()
        if self.split is not None and index > 0:  # later stages have a whole stand-in
            length = self.split.length
            whole = hidden.new_empty((hidden.shape[0], length, *hidden.shape[2:]), device="meta")
            args, kwargs = replace_hidden(args, kwargs, hidden, whole)
        self.template = self.templates.of(index, f"block {index}", args, kwargs)
        for name in self.templates.guessed[index]:
            if name and (index, name) not in self.looked_at:
                module = self.trunk.blocks[index].get_submodule(name)
                what = f"{name!r} of block {index} of {self.trunk.name!r}"
                module.forward = functools.partial(_looked_at, what, module.forward)
            self.looked_at.add((index, name))

    def after(self, index: int, args: Sequence[Tree], kwargs: Mapping[str, Tree], out: Tree) -> None:
        """Behind it. Raises ValueError where it is not what later stages take it for."""
        if (index, "") in self.looked_at:
            check_like(f"block {index} of {self.trunk.name!r}", args, kwargs, out)
        if isinstance(out, torch.Tensor):
            return
        found, taken = numbers_of(out), numbers_of(self.template)
        if found != taken:
            raise ValueError(
                f"block {index} of {self.trunk.name!r} returns a number ({found}, not {taken}), "
                f"{NOT_HANDED_ON}"
            )

    def end(self, stage: int, shape: torch.Size) -> None:
        """Behind the last block of a stage that was given a hidden state of this shape."""
        changed = self.shared.changed(self.tokens) if (stage, shape) in self.seen else None
        self.seen.add((stage, shape))
        if changed is not None:
            raise ValueError(f"the blocks of stage {stage} write to {changed}, {NOT_HANDED_ON}")

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What passes inside note is forgotten afterwards."""
        before = set(self.seen), set(self.looked_at)
        try:
            yield
        finally:
            self.seen, self.looked_at = before


def _looked_at(what: str, forward: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> Tree:
    out = forward(*args, **kwargs)
    check_like(what, args, kwargs, out)
    return out
