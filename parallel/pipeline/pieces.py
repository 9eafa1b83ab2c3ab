"""The blocks of a stage where the sequence is cut: what they are given, and what leaves them.

    whole sequence   | piece of this rank                        | whole, or a piece
    embeddings, ...  | block 0   ...   last block                | head, loss
                     enter: cut what the first block of the      leave: gathered under megatron_sp, where the
                     model is given                              model ends with its blocks

How tensors are cut is the business of the SequenceSplit that this is given (sequence/sequence_split.py).

What can go wrong: a block that changes a list or dict that it is given (it is given a copy, with pieces in
it); a block that looks at other positions, which often ends in sizes that do not fit; a stage that is handed
more than the hidden state. All of these raise a ValueError that says so.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from pycomm.parallel.given import Tree
from pycomm.parallel.ground.leaves import leaves
from pycomm.parallel.models.trunk import hidden_of
from pycomm.parallel.pipeline.handover import Wanted, absent_places

__all__ = ["Cut", "Entered", "Pieces"]


class Entered(NamedTuple):
    """What a block runs with."""

    args: Sequence[Tree]
    kwargs: Mapping[str, Tree]
    hidden: torch.Tensor  # the piece of the hidden state


class Cut(Protocol):
    """What a pipeline asks of a SequenceSplit, see there."""

    length: int
    megatron: bool
    is_whole: bool

    def begin(self, length: int) -> None: ...

    def local_length(self, length: int) -> int: ...

    # hidden state in, piece of it out
    def enter(
        self,
        first: bool,
        cut_hidden: bool,
        args: Sequence[Tree],
        kwargs: Mapping[str, Tree],
        hidden: torch.Tensor,
    ) -> tuple[Sequence[Tree], Mapping[str, Tree], torch.Tensor]: ...

    def leave(self, out: Tree) -> Tree: ...


class Pieces:
    """name: of the trunk. has_head: whether modules are called after the blocks.
    on_pieces: called when a forward goes on with this rank's piece of the sequence over tp.
    """

    def __init__(self, split: Cut, name: str, has_head: bool, on_pieces: Callable[[], None]) -> None:
        self.split, self.name, self.has_head, self.on_pieces = split, name, has_head, on_pieces

    def shape_of_input(
        self, given: tuple[Sequence[Tree], Mapping[str, Tree]], found: Sequence[Wanted], first: int
    ) -> list[Wanted]:
        """Of the hidden state alone, of which this rank has a piece. given: args and kwargs of block `first`.
        found: what of it other stages compute.
        """
        absent = [leaf for _, leaf in absent_places(*given)]
        if len(absent) != 1 or absent[0] is not hidden_of(*given):
            raise ValueError(
                f"block {first} of {self.name!r} is given {len(absent)} tensors that earlier pipeline "
                "stages compute, and the plan cuts the sequence, which can be done where the hidden state is "
                "the only one. Use pp=1, or a plan without ring, ulysses and megatron_sp"
            )
        place, shape, dtype = found[0]
        return [Wanted(place, (shape[0], self.split.local_length(shape[1]), *shape[2:]), dtype)]

    def begin(self, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> None:
        """In front of the first block of a later stage, whose stand-in of the hidden state is whole."""
        self.split.begin(hidden_of(args, kwargs).shape[1])

    def enter(
        self,
        index: int,
        is_first: bool,
        args: Sequence[Tree],
        kwargs: Mapping[str, Tree],
        hidden: torch.Tensor,
    ) -> Entered:
        """A block's arguments with pieces in them. is_first: of its stage."""
        args, kwargs, hidden = self.split.enter(is_first, index == 0, args, kwargs, hidden)
        if is_first and self.split.megatron:
            self.on_pieces()
        return Entered(args, kwargs, hidden)

    def run(self, what: str, forward: Callable[..., Tree], /, *args: Tree, **kwargs: Tree) -> Tree:
        """The result of a block. Raises ValueError where it changes a list or dict that it is given."""
        before = [id(leaf) for leaf in leaves((args, kwargs))]
        out = forward(*args, **kwargs)
        if before != [id(leaf) for leaf in leaves((args, kwargs))]:
            raise ValueError(
                f"{what} changes a list or dict that it is given, where the sequence is cut: the model's own "
                "would not have it. Return it, or use a plan without ring, ulysses and megatron_sp"
            )
        return out

    def leave(self, out: Tree) -> Tree:
        """Behind the last block of the model."""
        return self.split.leave(out) if self.split.megatron and not self.has_head else out

    def explained(self, error: RuntimeError, at: int | None, in_block: bool) -> Exception:
        """What a model raised in block `at`, or behind it, in words where sizes do not fit."""
        fits = type(error) is not RuntimeError or "size" not in str(error).lower()
        if self.split.is_whole or at is None or fits:
            return error
        block = f"block {at} of {self.name!r}"
        if in_block:
            return ValueError(
                f"{block} does not run on pieces of the sequence ({error}). Something in it looks at other "
                "positions or at their number (a convolution, attention under a name that is not known: name "
                "it in Plan(rules=...)). Use a plan without ring, ulysses and megatron_sp"
            )
        return ValueError(
            f"the model does not run behind {block}, where it has a piece of the sequence ({error}). What it "
            "has kept from before the blocks is that of the whole: give it to the blocks, or use a plan "
            "without ring, ulysses and megatron_sp"
        )
