"""Linear and embedding layers whose weights are cut over a group, usable alone.

    ColumnParallelLinear    rows of W (out_features)      y_r = x W_r^T + b_r         input edge: copy_to;
                                                                                      gather_from if asked
    RowParallelLinear       columns of W (in_features)    y = sum_r x_r W_r^T + b     scatter_to if asked;
                                                                                      output edge: reduce_from
    VocabParallelEmbedding  rows                          y = sum_r E_r[id], 0 for    reduce_from
                                                          ids of others

A column layer followed by a row layer needs one all_reduce forward and one backward (B = bytes of the
activation, 2(n-1)/n B sent each). With `sequence` (an object whose .sizes are the lengths per rank along dim
1) the input of the column layer and the output of the row layer are pieces of the sequence, and the pair is
all_gather at the input and reduce_scatter at the output: the same bytes, 1/n of the activation memory. The
two edges are in edges.py.

Sizes need not divide: comm.even_sizes, and a rank may hold nothing, which still takes part in every
collective of forward and backward. The bias of a row layer is added after the reduction, once. A weight is an
exact slice of the full one, so that layouts describe all of them. A constructor draws the full weight as
torch.nn does and keeps its part: with equal seeds, the weights of one process.

Sources: Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., Reducing Activation Recomputation, 2022
(sequence).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, TypeVar, cast

import torch
from torch import nn
from torch.nn import functional as F

from pycomm.parallel.ground import comm, differentiable
from pycomm.parallel.ground.layout import Layout, whole
from pycomm.parallel.tensor.cut_logits import CutLogits, VocabShard
from pycomm.parallel.tensor.edges import (
    CutSequence,
    InputEdge,
    OutputEdge,
    SublayerInput,
    SublayerOutput,
    check_piece,
    now_cut,
)
from pycomm.parallel.tensor.modules import is_transposed, linear_sizes
from pycomm.parallel.tensor.slices import Slices, Take, cut, even_slices

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Unpack

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"]


L = TypeVar("L", bound="ParallelLayer")


class Factory(TypedDict, total=False):
    """How a layer is made."""

    device: torch.device | str | int | None
    dtype: torch.dtype | None


class ParallelLayer(nn.Module):
    """A layer that is made from one with full weights, by _setup()."""

    group: comm.Group
    weight: nn.Parameter
    _layouts: dict[str, Layout]

    @classmethod
    def _empty(cls: type[L]) -> L:
        """For from_module(): the weights are not drawn."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        return layer

    def layouts(self) -> dict[str, Layout]:
        """Local parameter name -> Layout."""
        return dict(self._layouts)


class ParallelLinear(ParallelLayer):
    """What column and row layers share: the local weight and the product with it."""

    bias: nn.Parameter | None
    sequence: CutSequence | None

    def _adopt(self, linear: nn.Linear, cut_dim: Literal[0, 1], slices: Slices | None, take: Take) -> None:
        """Takes the parts of `linear`; cut_dim: 0 when out_features are cut, 1 when in_features are. slices:
        None where these are even.
        """
        self.transposed = is_transposed(linear)
        self.full_size = linear_sizes(linear)[1 - cut_dim]  # of the dimension that is cut
        self.sizes = comm.even_sizes(self.full_size, self.group.size)  # per rank, without `slices`
        slices = slices or even_slices(self.full_size, self.group)
        self.lengths = slices.lengths  # what every rank holds of it
        self.local_size = self.lengths[self.group.rank]
        layout = slices.layout(linear.weight, 1 - cut_dim if self.transposed else cut_dim)
        self._layouts = {"weight": layout}
        self.weight = take(linear.weight, layout)
        if linear.bias is None:
            self.register_parameter("bias", None)
        else:
            # That of a row layer is whole; with a sequence it is added to this rank's piece alone.
            partial = self.sequence is not None
            layout = (
                slices.layout(linear.bias, 0)
                if cut_dim == 0
                else whole(linear.bias, self.group.rank, partial)
            )
            self._layouts["bias"] = layout
            self.bias = take(linear.bias, layout)
        self.train(linear.training)

    def matrix(self) -> torch.Tensor:
        """The weight as F.linear takes it, (out, in)."""
        return self.weight.t() if self.transposed else self.weight

    def extra_repr(self) -> str:
        sizes = (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )
        return f"{sizes}, tp={self.group.rank}/{self.group.size}"


C = TypeVar("C", bound="ColumnParallelLinear")
R = TypeVar("R", bound="RowParallelLinear")
V = TypeVar("V", bound="VocabParallelEmbedding")


class ColumnParallelLinear(ParallelLinear):
    """y = x W^T + b with the rows of W (out_features) cut over `group`.

    x: (..., in_features), the same on all ranks, or with `sequence` this rank's piece (batch, T_r,
    in_features).
    Returns (..., out_features) with gather_output (with `sequence`: of this rank's piece), else this rank's
    columns (of the whole sequence). in_features and out_features are those that forward takes and gives here.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: comm.Group | dist.ProcessGroup | None = None,
        gather_output: bool = True,
        sequence: CutSequence | None = None,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        linear = nn.Linear(in_features, out_features, bias, **factory)
        self._setup(linear, group, gather_output=gather_output, sequence=sequence)

    @classmethod
    def from_module(
        cls: type[C],
        linear: nn.Linear,
        group: comm.Group | dist.ProcessGroup | None = None,
        *,
        gather_output: bool = True,
        sequence: CutSequence | None = None,
        slices: Slices | None = None,
        take: Take = cut,
    ) -> C:
        """From a layer with full weights (or transformers' Conv1D). slices: this rank's of the features that
        are cut, where they are not even.
        """
        layer = cls._empty()
        layer._setup(linear, group, gather_output=gather_output, sequence=sequence, slices=slices, take=take)
        return layer

    def _setup(
        self,
        linear: nn.Linear,
        group: comm.Group | dist.ProcessGroup | None,
        *,
        gather_output: bool = True,
        sequence: CutSequence | None = None,
        slices: Slices | None = None,
        take: Take = cut,
    ) -> None:
        if slices is not None and gather_output:
            raise ValueError("gather_output joins even slices only; pass gather_output=False with slices")
        self.group = comm.as_group(group, "tp")
        self.in_features, _ = linear_sizes(linear)
        self.gather_output, self.sequence = gather_output, sequence
        self._adopt(linear, 0, slices, take)
        self.input_edge: InputEdge = SublayerInput(self.group, sequence)
        self.shares_input = False  # with other layers: it then enters once for all of them
        self.is_head = False  # its output are logits: marked when left cut, and of the whole sequence

    def take_input_from(self, edge: InputEdge, shared: bool) -> None:
        """edge: that of the sublayer; shared: other layers are given the same input."""
        self.input_edge, self.shares_input = edge, shared

    def become_head(self) -> None:
        self.is_head = True

    def leave_cut(self, is_cut: bool) -> None:
        """Whether forward gives this rank's columns only."""
        self.gather_output = not is_cut

    @property
    def out_features(self) -> int:
        return self.full_size if self.gather_output else self.local_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shares_input:
            out = F.linear(self.input_edge(x), self.matrix(), self.bias)
        else:
            edge = cast("SublayerInput", self.input_edge)
            out = edge.linear(x, self.matrix(), self.bias, self.lengths)
        if self.gather_output:
            out = differentiable.gather_from(out, -1, self.sizes, self.group)
            sequence = now_cut(self.sequence)
            if sequence is not None and not self.is_head:
                out = differentiable.scatter_to(out, 1, sequence.sizes, self.group)
        elif self.is_head and self.group.size > 1:
            start, stop = self._layouts["weight"].ranges[0]
            out = CutLogits.of(out, VocabShard(self.group, start, stop, self.full_size), self.sizes)
        return out


class RowParallelLinear(ParallelLinear):
    """y = x W^T + b with the columns of W (in_features) cut over `group`; b is added after the sum over
    ranks.

    x: (..., in_features), the same on all ranks, of which each uses its part; with input_is_parallel this
    rank's part alone (with `sequence`: of the whole sequence). Returns (..., out_features) on every rank,
    with `sequence` this rank's piece (batch, T_r, out_features).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: comm.Group | dist.ProcessGroup | None = None,
        input_is_parallel: bool = False,
        sequence: CutSequence | None = None,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        linear = nn.Linear(in_features, out_features, bias, **factory)
        self._setup(linear, group, input_is_parallel=input_is_parallel, sequence=sequence)

    @classmethod
    def from_module(
        cls: type[R],
        linear: nn.Linear,
        group: comm.Group | dist.ProcessGroup | None = None,
        *,
        input_is_parallel: bool = False,
        sequence: CutSequence | None = None,
        slices: Slices | None = None,
        take: Take = cut,
    ) -> R:
        """As that of ColumnParallelLinear."""
        layer = cls._empty()
        layer._setup(
            linear, group, input_is_parallel=input_is_parallel, sequence=sequence, slices=slices, take=take
        )
        return layer

    def _setup(
        self,
        linear: nn.Linear,
        group: comm.Group | dist.ProcessGroup | None,
        *,
        input_is_parallel: bool = False,
        sequence: CutSequence | None = None,
        slices: Slices | None = None,
        take: Take = cut,
    ) -> None:
        if slices is not None and not input_is_parallel:
            raise ValueError(
                "an input that is not parallel is cut evenly; pass input_is_parallel=True with slices"
            )
        self.group = comm.as_group(group, "tp")
        _, self.out_features = linear_sizes(linear)
        self.input_is_parallel, self.sequence = input_is_parallel, sequence
        self._adopt(linear, 1, slices, take)
        self.output_edge: OutputEdge = SublayerOutput(self.group, sequence)

    def give_output_to(self, edge: OutputEdge) -> None:
        """edge: that of the sublayer."""
        self.output_edge = edge

    @property
    def in_features(self) -> int:
        return self.local_size if self.input_is_parallel else self.full_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.input_is_parallel:
            sequence = now_cut(self.sequence)
            if sequence is not None:
                check_piece(x, sequence, self.group, "row-parallel layer")
                x = differentiable.gather_from(x, 1, sequence.sizes, self.group)
            x = differentiable.scatter_to(x, -1, self.sizes, self.group)
        return self.output_edge(x, self.matrix(), self.bias, self.lengths)


class VocabParallelEmbedding(ParallelLayer):
    """nn.Embedding with its rows cut over `group`. ids: integers, the same on all ranks. Returns (*ids.shape,
    embedding_dim).

    Raises ValueError for an embedding with options that look at all rows (max_norm, ...).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: comm.Group | dist.ProcessGroup | None = None,
        padding_idx: int | None = None,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self._setup(nn.Embedding(num_embeddings, embedding_dim, padding_idx, **factory), group)

    @classmethod
    def from_module(
        cls: type[V],
        embedding: nn.Embedding,
        group: comm.Group | dist.ProcessGroup | None = None,
        *,
        take: Take = cut,
    ) -> V:
        """From a layer with full weights."""
        layer = cls._empty()
        layer._setup(embedding, group, take=take)
        return layer

    def _setup(
        self, embedding: nn.Embedding, group: comm.Group | dist.ProcessGroup | None, *, take: Take = cut
    ) -> None:
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ValueError(
                "an embedding with max_norm, scale_grad_by_freq or sparse cannot be cut by rows; replicate it"
            )
        self.group = comm.as_group(group, "tp")
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        slices = even_slices(self.num_embeddings, self.group)
        (self.start, self.stop), layout = slices.ranges[0], slices.layout(embedding.weight, 0)
        self._layouts = {"weight": layout}
        self.weight = take(embedding.weight, layout)
        self.train(embedding.training)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.device.type == "cpu" and ids.numel() and (ids.min() < 0 or ids.max() >= self.num_embeddings):
            raise IndexError(
                f"embedding: ids from {int(ids.min())} to {int(ids.max())}, but there are "
                f"{self.num_embeddings} rows"
            )
        if self.start == self.stop:
            # Through the empty weight, so that the result asks for a gradient as it does on the other ranks.
            out = self.weight.sum() + self.weight.new_zeros((*ids.shape, self.embedding_dim))
        else:
            here = (ids >= self.start) & (ids < self.stop)
            padding = None
            if self.padding_idx is not None and self.start <= self.padding_idx < self.stop:
                padding = self.padding_idx - self.start
            out = F.embedding(torch.where(here, ids - self.start, 0), self.weight, padding)
            out = out.masked_fill(~here.unsqueeze(-1), 0)
        return differentiable.reduce_from(out, self.group)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rows {self.start}:{self.stop}"
