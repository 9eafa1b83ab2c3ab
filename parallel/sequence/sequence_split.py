"""Where the sequence is cut: at the entry of the first block.

Everything before the trunk (embeddings, positions, rotary tables) runs on the whole sequence on every rank,
so a model needs no knowledge of being cut. At block 0 the hidden state (batch, T, h) is cut along dim 1:

    over ring and ulysses    index_select of this rank's positions; gradients of what came before are parts,
                             which are summed with those of the data ranks
    over tp (megatron_sp)    scatter_to: the same hidden state came in on every rank of tp, and so does the
                             gradient

and every other tensor that a block is given and that has T positions (rotary tables, position ids) is cut
over ring and ulysses alike, but for attention masks (mask.py); over tp all of it stays whole, as attention
sees the gathered sequence there. What
follows the trunk works on the piece; targets are cut like the hidden state over ring and ulysses.

Cost: one index_select per tensor and pass. What can go wrong: blocks that work out positions from the length
of what they get (they see the local length), and results that mix positions after the trunk; targets without
a dimension of length T are refused for that reason.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from pycomm.parallel.ground import comm, differentiable
from pycomm.parallel.ground.mesh import Mesh
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.models.trunk import Side, replace_hidden
from pycomm.parallel.sequence import split
from pycomm.parallel.sequence.attention import SequenceAttention
from pycomm.parallel.sequence.mask import looks_like_mask

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree

__all__ = ["SequenceSplit"]

MOST_WHOLE = 1024  # positions of a forward in which nothing is cut


class Entered(NamedTuple):
    """What a block is given: its arguments, and the hidden state among them."""

    args: Sequence[Tree]
    kwargs: Mapping[str, Tree]
    hidden: torch.Tensor


class LocalShapes(TorchFunctionMode):
    """Helps models with what they still have of the whole length after their blocks.

    A view or reshape of (rows, local length, ...) to (rows or -1, whole length, ...) is made one to the local
    length (GPT-2 of transformers notes the shape of its input). And the cross_entropy of logits of this
    rank's positions with targets that are an input of the model takes this rank's targets (nanoGPT): see
    SequenceSplit.own_targets().
    """

    def __init__(self, split: SequenceSplit) -> None:
        super().__init__()
        self.split = split

    def __torch_function__(
        self,
        func: Callable[..., Tree],
        types: Collection[type[torch.Tensor]],
        args: tuple[Tree, ...] = (),
        kwargs: dict[str, Tree] | None = None,
    ) -> Tree:
        if func in (torch.Tensor.view, torch.Tensor.reshape) and not kwargs and args[0].dim() > 2:
            shape = list(args[1]) if len(args) == 2 and isinstance(args[1], (tuple, list)) else list(args[1:])
            length, piece = self.split.length, self.split.piece
            of_piece = len(shape) > 2 and shape[1] == length and args[0].shape[1] == piece
            of_piece &= len(shape) > 2 and shape[0] in (-1, args[0].shape[0])
            if of_piece and length != piece and math.prod(shape) != args[0].numel():
                args = args[0], [shape[0], piece, *shape[2:]]
        if func is F.cross_entropy:
            return func(**self._of_own_targets(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def _of_own_targets(self, *args: Tree, **kwargs: Tree) -> dict[str, Tree]:
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
        kwargs.update(zip(names, args, strict=False))
        kwargs["target"] = self.split.own_targets(kwargs["input"], kwargs["target"])
        return kwargs


class SequenceSplit:
    """The cut of one plan. megatron: whether tp cuts the sequence too.

    `sizes`: lengths of the pieces of all ranks of tp, for the tensor parallel layers; `is_whole`: whether
    nothing is cut at the moment, see whole(). `sides`: {name: Side} of modules outside the blocks. `modes()`:
    a context in which attention sees the whole sequence.
    """

    def __init__(self, mesh: Mesh, plan: Plan, sides: Mapping[str, Side]) -> None:
        self.sides = sides
        self.ring, self.ulysses, self.tp = mesh.group("ring"), mesh.group("ulysses"), mesh.group("tp")
        self.zigzag = plan.zigzag and self.ring.size > 1
        self.megatron = plan.megatron_sp and self.tp.size > 1
        self.degree = self.ring.size * self.ulysses.size  # pieces, tp not counted
        self.attention = SequenceAttention(self.ring, self.ulysses, self.zigzag) if self.degree > 1 else None
        self.is_whole, self.noise = False, 0.0  # see whole()
        self.length = 0  # of the whole sequence of the forward that runs
        self.sizes = [0] * self.tp.size
        self.inputs: list[torch.Tensor] = []  # tensors (batch, T) that the model was given in this forward
        # id of a tensor that blocks were given in this forward -> (it, this rank's part)
        self._cuts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, length: int) -> None:
        """A forward over `length` positions starts."""
        if self.is_whole and length > MOST_WHOLE:
            raise ValueError(f"{length} positions are too many to be run whole on each rank")
        self.length = length
        if length < self.degree:
            raise ValueError(
                f"sequence parallelism over {self.degree} ranks: a sequence of {length} leaves some without "
                "a position"
            )
        local = (
            split.local_length(length, self.ring, self.ulysses, self.zigzag) if self.degree > 1 else length
        )
        self.sizes = comm.even_sizes(local, self.tp.size)
        if self.attention:
            self.attention.length = length
        self._cuts = {}

    @contextlib.contextmanager
    def whole(self, noise: float = 0.0) -> Iterator[None]:
        """Inside, nothing is cut: forwards compute what one process computes, on every rank of ring and
        ulysses, and what plain tensor parallelism computes.

        noise: relative size of a change of the hidden state in front of block 0, as rounding makes one; alike
        on all ranks. Raises ValueError in a forward over more than MOST_WHOLE positions.
        """
        before = self.degree, self.megatron, self.attention
        self.degree, self.megatron, self.attention = 1, False, None
        self.is_whole, self.noise = True, noise
        try:
            yield
        finally:
            self.degree, self.megatron, self.attention = before
            self.is_whole, self.noise = False, 0.0

    def _changed(self, hidden: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        change = torch.randn(tuple(hidden.shape), generator=generator).mul_(self.noise).add_(1)
        return hidden * change.to(hidden)

    def note_inputs(self, inputs: Tree) -> None:
        """What the model is called with."""
        leaves = tree_leaves(inputs)
        self.inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() == 2]

    def own_targets(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """This rank's part of targets that the model compares with logits of this rank's positions. Only what
        is an input as it was given, (batch, T) or flat, is known to be in the order of the positions. Raises
        ValueError for other targets of the whole length.
        """
        flat, local = target.dim() == 1, sum(self.sizes)  # a head gives the positions of all ranks of tp
        if self.degree == 1 or not target.dim() or logits.shape[0 if flat else -1] == target.shape[-1]:
            return target
        for given in self.inputs:
            same_memory = given.data_ptr() == target.data_ptr() and given.dtype == target.dtype
            in_order = given.is_contiguous() and target.is_contiguous() and given.numel() == target.numel()
            rows, length = given.shape
            if same_memory and in_order and length == self.length:
                if flat and logits.shape[0] == rows * local:
                    return self.cut(given).flatten()
                if target.shape == given.shape and logits.shape[-1] == local:
                    return self.cut(given)
        raise ValueError(
            f"sequence parallelism over {self.degree} ranks: the model compares logits "
            f"{tuple(logits.shape)}, of this rank's positions, with targets {tuple(target.shape)}, which are "
            "not an input of it as it was given. Compute the loss in loss_fn: (output, targets) -> mean"
        )

    def modes(self) -> list[TorchFunctionMode]:
        """Contexts for a forward."""
        if self.is_whole:
            return []
        own: list[TorchFunctionMode] = [LocalShapes(self)]
        return own + ([self.attention] if self.attention else [])

    @property
    def piece(self) -> int:
        """Length of the hidden state inside the trunk on this rank."""
        if self.is_whole:
            return self.length
        return self.sizes[self.tp.rank] if self.megatron else sum(self.sizes)

    def local_length(self, length: int) -> int:
        """The same, of an input of `length` positions."""
        self.begin(length)
        return self.piece

    def cut(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's positions (ring and ulysses) along `dim`."""
        if self.degree == 1:
            return tensor
        held = split.positions(self.length, self.ring, self.ulysses, self.zigzag, device=tensor.device)
        return tensor.index_select(dim, held)

    def enter(
        self,
        first: bool,
        cut_hidden: bool,
        args: Sequence[Tree],
        kwargs: Mapping[str, Tree],
        hidden: torch.Tensor,
    ) -> Entered:
        """What a block is given, with its tensors cut.

        first: the first block of this pass. cut_hidden: the hidden state is whole (block 0 of the model).
        """
        if first and cut_hidden:
            self.begin(hidden.shape[1])
            piece = self._changed(hidden) if self.noise else self.cut(hidden)
            if self.megatron:
                piece = differentiable.scatter_to(piece, 1, self.sizes, self.tp)
        else:
            piece = hidden
        if self.degree == 1:
            args, kwargs = replace_hidden(args, kwargs, hidden, piece)
            return Entered(args, kwargs, piece)
        args, kwargs = tree_map(
            lambda value: piece if value is hidden else self._cut_other(value), (tuple(args), dict(kwargs))
        )
        return Entered(args, kwargs, piece)

    def leave(self, out: Tree) -> Tree:
        """megatron_sp, where the model ends with its blocks: the result with the positions of all ranks of
        tp.
        """
        return tree_map(
            lambda x: (
                differentiable.gather_from(x, 1, self.sizes, self.tp) if isinstance(x, torch.Tensor) else x
            ),
            out,
        )

    def _cut_other(self, value: Tree) -> Tree:
        if not isinstance(value, torch.Tensor) or self.length not in value.shape:
            return value
        if looks_like_mask(value, self.length):
            return value
        if id(value) not in self._cuts:
            where = [dim for dim, size in enumerate(value.shape) if size == self.length]
            dim = 1 if 1 in where else 0 if 0 in where else None
            if dim is None or len(where) > 1 and dim != 1 or value.dim() > 3:
                raise ValueError(
                    f"sequence parallelism over {self.degree} ranks: a block is given a tensor "
                    f"{tuple(value.shape)} with T={self.length} in it: neither (batch, T, ...), which is "
                    "cut, nor a mask (batch, heads, T, T), which stays whole"
                )
            self._cuts[id(value)] = value, self.cut(value, dim)  # the tensor is kept: its id stays its own
        return self._cuts[id(value)][1]

    def cut_targets(self, targets: Tree) -> Tree:
        """Targets for this rank's positions. Raises ValueError for some that do not have a value per
        position.
        """
        if self.degree == 1:
            return targets

        def cut(value: Tree) -> Tree:
            if not isinstance(value, torch.Tensor):
                return value
            if value.dim() < 2 or value.shape[1] != self.length:
                raise ValueError(
                    f"sequence parallelism over {self.degree} ranks needs targets (batch, T={self.length}, "
                    f"...), one per position; got {tuple(value.shape)}"
                )
            return self.cut(value)

        return tree_map(cut, targets)
