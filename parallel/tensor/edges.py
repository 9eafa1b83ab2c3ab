"""The two edges of a sublayer that is cut: what is done to its input before the column layers, and to the
products of its row layer.

    input                            output
    copy_to     gradient is summed   sum over ranks, then the bias         the same hidden state on all ranks
    gather_sum                       reduce_scatter, then the bias         pieces of the sequence

Product and collective are one call of products.py, except where several column layers share an input (q, k
and v; gate and up): there one gather serves all of them, and one sum of their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from pycomm.parallel.ground import comm, differentiable
from pycomm.parallel.tensor.narrow import plain
from pycomm.parallel.tensor.products import copy_linear, gather_linear, linear_reduce, linear_reduce_scatter
from pycomm.parallel.tensor.slices import Pieces

if TYPE_CHECKING:
    from pycomm.parallel.ground.comm import Group

__all__ = ["SublayerInput", "SublayerOutput", "check_piece", "flat_pieces", "now_cut"]


class CutSequence(Protocol):
    """A sequence of which every rank has a piece. Set before each forward."""

    @property
    def sizes(self) -> list[int]:
        """Of the pieces of all ranks, along dim 1 of the hidden state."""


class InputEdge(Protocol):
    """What a column layer asks of its input edge."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What enters, for layers that are given the same tensor."""

    def leave_group(self) -> None:
        """From now on this rank is alone: for a trial of one rank's part (probe.py)."""


class OutputEdge(Protocol):
    """What a row layer asks of its output edge."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: Sequence[int]
    ) -> torch.Tensor:
        """F.linear, summed over the ranks. lengths: of the cut dimension of the weight on all ranks."""


class SumEdge(OutputEdge, Protocol):
    """What a sublayer asks of it."""

    def sum(self, part: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The same of a product that this rank has worked out already."""


def now_cut(sequence: CutSequence | None) -> CutSequence | None:
    """`sequence`, or None while it is whole (SequenceSplit.whole): then this is plain tensor parallelism."""
    return None if getattr(sequence, "is_whole", False) else sequence


def check_piece(x: torch.Tensor, sequence: CutSequence, group: Group, what: str) -> None:
    """Raises ValueError unless dim 1 of x is this rank's piece of the sequence."""
    if x.dim() < 3 or x.shape[1] != sequence.sizes[group.rank]:
        raise ValueError(
            f"[rank {group.rank}/{group.size}] {what}: input of shape {tuple(x.shape)}, but dim 1 of (batch, "
            f"T, h) should be this rank's piece of the sequence, {sequence.sizes[group.rank]} of "
            f"{sum(sequence.sizes)}. The model reshapes or pools it; use it without megatron_sp"
        )


def flat_pieces(x: torch.Tensor, sequence: CutSequence, group: Group, what: str) -> Pieces:
    """Pieces of (tokens, h), where a model makes one dimension of the rows and positions of what is this
    rank's piece.
    """
    here = sequence.sizes[group.rank]
    if x.dim() != 2 or here == 0 or x.shape[0] % here:
        raise ValueError(
            f"[rank {group.rank}/{group.size}] {what}: input of shape {tuple(x.shape)}, but dim 0 of "
            f"(tokens, h) should be rows times this rank's piece of the sequence, {here} of "
            f"{sum(sequence.sizes)}. Use the model without megatron_sp, or longer sequences"
        )
    return Pieces(0, [x.shape[0] // here * size for size in sequence.sizes])


class SublayerInput:
    """What the column layers do to their input, once for layers that are given the same tensor.

    sequence: see layers.py. by_token: each row of the input is treated alone, so that rows and positions may
    be one dimension (an MLP).
    """

    def __init__(self, group: Group, sequence: CutSequence | None = None, by_token: bool = False) -> None:
        self.group, self._sequence, self.by_token = group, sequence, by_token
        self.source: torch.Tensor | None = None  # see clear()
        self.version: int | None = None
        self.result: torch.Tensor | None = None

    @property
    def sequence(self) -> CutSequence | None:
        """None where the input is whole."""
        return now_cut(self._sequence)

    def clear(self) -> None:
        """Forgets the last input, which would keep its graph alive."""
        self.source = None  # the last input
        self.version = None  # its version counter then: changed in place, it is another input
        self.result = None  # what it became

    def leave_group(self) -> None:
        """From now on this rank is alone: for a trial of one rank's part (probe.py)."""
        self.group = comm.ALONE

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = plain(x)
        version = None if x.is_inference() else x._version
        if self.source is not x or self.version != version or self.result is None:
            self.source, self.version, self.result = x, version, self._enter(x)
        return self.result

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        sequence = self.sequence
        if sequence is None:
            return differentiable.copy_to(x, self.group)
        return differentiable.gather_sum(x, *self._pieces(x, sequence), self.group)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: Sequence[int]
    ) -> torch.Tensor:
        """F.linear of what enters, for the only layer that is given x. lengths: of the cut dimension of the
        weight on all ranks.
        """
        x = plain(x)
        sequence = self.sequence
        if sequence is None:
            return copy_linear(x, weight, bias, self.group, lengths)
        return gather_linear(x, weight, bias, self.group, self._pieces(x, sequence), lengths)

    def _pieces(self, x: torch.Tensor, sequence: CutSequence) -> Pieces:
        what = "input of a tensor-parallel sublayer"
        if self.by_token and x.dim() == 2:
            return flat_pieces(x, sequence, self.group, what)
        check_piece(x, sequence, self.group, what)
        return Pieces(1, sequence.sizes)


class SublayerOutput:
    """Sums the products of the ranks, and adds the bias. source: the SublayerInput, which is cleared here."""

    def __init__(
        self, group: Group, sequence: CutSequence | None = None, source: SublayerInput | None = None
    ) -> None:
        self.group, self._sequence, self.source = group, sequence, source

    @property
    def sequence(self) -> CutSequence | None:
        """None where the output is whole."""
        return now_cut(self._sequence)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: Sequence[int]
    ) -> torch.Tensor:
        if self.source is not None:
            self.source.clear()
        x = plain(x)
        sequence = self.sequence
        if sequence is None:
            return linear_reduce(x, weight, bias, self.group, lengths)
        return linear_reduce_scatter(x, weight, bias, self.group, self._pieces(x, sequence), lengths)

    def sum(self, part: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The same of a product that this rank has worked out already."""
        if self.source is not None:
            self.source.clear()
        sequence = self.sequence
        if sequence is None:
            out = differentiable.reduce_from(part, self.group)
        else:
            out = differentiable.reduce_scatter(part, *self._pieces(part, sequence), self.group)
        return out if bias is None else out + bias

    def _pieces(self, x: torch.Tensor, sequence: CutSequence) -> Pieces:
        length = sum(sequence.sizes)
        if x.dim() == 2 and self.source is not None and self.source.by_token and x.shape[0] % length == 0:
            return Pieces(0, [x.shape[0] // length * size for size in sequence.sizes])
        if x.dim() < 3 or x.shape[1] != length:
            raise ValueError(
                f"[rank {self.group.rank}/{self.group.size}] output of a tensor-parallel sublayer: shape "
                f"{tuple(x.shape)}, but dim 1 should be the whole sequence, {length}"
            )
        return Pieces(1, sequence.sizes)
