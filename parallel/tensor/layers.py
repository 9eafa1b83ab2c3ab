"""Linear and embedding layers whose weights are cut over a group, usable alone.

    ColumnParallelLinear    out_features are cut     y_r = x W_r^T + b_r           entry copy_to, exit nothing or gather_from
    RowParallelLinear       in_features are cut      y = sum_r x_r W_r^T + b       entry nothing or scatter_to, exit reduce_from
    VocabParallelEmbedding  rows are cut             y = sum_r E_r[id], 0 for ids of others      exit reduce_from

A column layer followed by a row layer needs one all_reduce forward and one backward (B = bytes of the activation, 2(n-1)/n B sent each).
With `sequence` (an object whose .sizes are the lengths per rank along dim 1) the input of the column layer and the output of the row layer
are pieces of the sequence, and the pair is all_gather at the entry and reduce_scatter at the exit: the same bytes, 1/n of the activation
memory. Product and collective are one call of products.py, except where several column layers share an entry (q, k and v; gate and up):
there one gather serves all of them, and one sum of their gradients.

Sizes need not divide: comm.even_sizes, and a rank may hold nothing, which still takes part in every collective of forward and backward. The
bias of a row layer is added after the reduction, once. A weight is an exact slice of the full one, so that layouts describe all of them.
A constructor draws the full weight as torch.nn does and keeps its part: with equal seeds, the weights of one process.

Sources: Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., Reducing Activation Recomputation, 2022 (sequence).
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from pycomm.parallel import comm, differentiable, products
from pycomm.parallel.layout import Layout, whole
from pycomm.parallel.tensor.heads import spans
from pycomm.parallel.tensor.narrow import plain

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "Shards", "VocabParallelEmbedding", "VocabShard", "even_shards"]


class Shards(NamedTuple):
    """The indices of the cut dimension that a rank holds; fields as in Layout. lengths: how many every rank holds."""

    ranges: tuple[tuple[int, int], ...]
    counted: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    overlap: bool = False

    def layout(self, tensor, dim):
        return Layout(tuple(tensor.shape), dim, self.ranges, self.counted, overlap=self.overlap)


class VocabShard(NamedTuple):
    """Mark on logits of which this rank has the columns [start, stop) of full_size: attribute `vocab_shard` of the tensor."""

    group: comm.Group
    start: int
    stop: int
    full_size: int


def even_shards(length, group):
    lengths = comm.even_sizes(length, group.size)
    span = spans(lengths)[group.rank]
    return Shards((span,), (span,), tuple(lengths))


def cut(parameter, layout):
    """The local part of a parameter, as a parameter of its own; the parameter itself when it is not cut."""
    return parameter if layout.dim is None else nn.Parameter(layout.take(parameter.detach()), requires_grad=parameter.requires_grad)


def is_transposed(linear):
    """Whether the weight is (in, out), as in the Conv1D of transformers."""
    return type(linear).__name__ == "Conv1D" and hasattr(linear, "nf")


def linear_sizes(linear):
    """(in_features, out_features)"""
    out_dim = 1 if is_transposed(linear) else 0
    return linear.weight.shape[1 - out_dim], linear.weight.shape[out_dim]


def check_piece(x, sequence, group, what):
    """Raises ValueError unless dim 1 of x is this rank's piece of the sequence."""
    if x.dim() < 3 or x.shape[1] != sequence.sizes[group.rank]:
        raise ValueError(
            f"[rank {group.rank}/{group.size}] {what}: input of shape {tuple(x.shape)}, but dim 1 of (batch, T, h) should be this rank's "
            f"piece of the sequence, {sequence.sizes[group.rank]} of {sum(sequence.sizes)}. The model reshapes or pools it; use "
            "it without megatron_sp"
        )


class Entry:
    """What the column layers of a region do to their input, done once for layers that are given the same tensor."""

    def __init__(self, group, sequence=None):
        self.group, self.sequence = group, sequence
        self.clear()

    def clear(self):
        self.source = self.result = self.version = None

    def __call__(self, x):
        x = plain(x)
        version = None if x.is_inference() else x._version  # changed in place since: another input
        if self.source is not x or self.version != version:
            self.source, self.version, self.result = x, version, self.enter(x)
        return self.result

    def enter(self, x):
        if self.sequence is None:
            return differentiable.copy_to(x, self.group)
        self.check(x)
        return differentiable.gather_sum(x, 1, self.sequence.sizes, self.group)

    def linear(self, x, weight, bias, shards):
        """F.linear of what enters, for the only layer that is given x. shards: see products.py."""
        x = plain(x)
        if self.sequence is None:
            return products.copy_linear(x, weight, bias, self.group, shards)
        self.check(x)
        return products.gather_linear(x, weight, bias, self.group, 1, self.sequence.sizes, shards)

    def check(self, x):
        check_piece(x, self.sequence, self.group, "entry of a tensor-parallel region")


class Exit:
    """Sums the products of the ranks, and adds the bias. entry: the region's; it would keep its input, and what autograd saved for it, to
    the next call."""

    def __init__(self, group, sequence=None, entry=None):
        self.group, self.sequence, self.entry = group, sequence, entry

    def __call__(self, x, weight, bias, shards):
        if self.entry is not None:
            self.entry.clear()
        x = plain(x)
        if self.sequence is None:
            return products.linear_reduce(x, weight, bias, self.group, shards)
        if x.dim() < 3 or x.shape[1] != sum(self.sequence.sizes):
            raise ValueError(
                f"[rank {self.group.rank}/{self.group.size}] exit of a tensor-parallel region: shape {tuple(x.shape)}, but dim 1 should be "
                f"the whole sequence, {sum(self.sequence.sizes)}"
            )
        return products.linear_reduce_scatter(x, weight, bias, self.group, 1, self.sequence.sizes, shards)


class ParallelLinear(nn.Module):
    """What column and row layers share: the local weight and the product with it."""

    def adopt(self, linear, group, cut_dim, shards, take):
        """Takes the parts of `linear`; cut_dim: 0 when out_features are cut, 1 when in_features are. Returns the full length."""
        self.group, self.transposed = comm.as_group(group, "tp"), is_transposed(linear)
        length = linear_sizes(linear)[1 - cut_dim]
        shards = shards or even_shards(length, self.group)
        layout = shards.layout(linear.weight, 1 - cut_dim if self.transposed else cut_dim)
        self._layouts, self.shards = {"weight": layout}, shards.lengths
        self.weight = take(linear.weight, layout)
        if linear.bias is None:
            self.register_parameter("bias", None)
        else:
            partial = cut_dim == 1 and self.sequence is not None  # a row layer's is added to a piece of the sequence
            layout = shards.layout(linear.bias, 0) if cut_dim == 0 else whole(linear.bias, self.group.rank, partial)
            self._layouts["bias"] = layout
            self.bias = take(linear.bias, layout)
        self.train(linear.training)
        return length

    def layouts(self):
        """Local parameter name -> Layout."""
        return dict(self._layouts)

    def matrix(self):
        """The weight as F.linear takes it, (out, in)."""
        return self.weight.t() if self.transposed else self.weight

    def extra_repr(self):
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, tp={self.group.rank}/{self.group.size}"


class ColumnParallelLinear(ParallelLinear):
    """y = x W^T + b with the rows of W (out_features) cut over `group`.

    x: (..., in_features), the same on all ranks, or with `sequence` this rank's piece (batch, T_r, in_features).
    Returns (..., out_features) with gather_output (with `sequence`: of this rank's piece), else this rank's columns (of the whole
    sequence). in_features and out_features are those that forward takes and gives here. factory: device, dtype.
    """

    def __init__(self, in_features, out_features, bias=True, *, group=None, gather_output=True, sequence=None, **factory):
        super().__init__()
        self._setup(nn.Linear(in_features, out_features, bias, **factory), group, gather_output, sequence)

    @classmethod
    def from_module(cls, linear, group=None, *, gather_output=True, sequence=None, shards=None, take=cut):
        """From an nn.Linear (or transformers' Conv1D) with full weights; shards: this rank's output features, if not even."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._setup(linear, group, gather_output, sequence, shards, take)
        return layer

    def _setup(self, linear, group, gather_output, sequence, shards=None, take=cut):
        self.in_features, _ = linear_sizes(linear)
        self.gather_output, self.sequence = gather_output, sequence
        self.full_size = self.adopt(linear, group, 0, shards, take)
        self.local_size = self.weight.shape[1 if self.transposed else 0]
        if shards is not None and gather_output:
            raise ValueError("gather_output joins even shards only; pass gather_output=False with shards")
        self.sizes = comm.even_sizes(self.full_size, self.group.size)
        self.entry = Entry(self.group, sequence)
        self.is_head = False  # logits: marked when they are left cut, and of the whole sequence
        self.shared_entry = False  # with other layers that are given the same input, which then enters once

    @property
    def out_features(self):
        return self.full_size if self.gather_output else self.local_size

    def forward(self, x):
        if self.shared_entry:
            out = F.linear(self.entry(x), self.matrix(), self.bias)
        else:
            out = self.entry.linear(x, self.matrix(), self.bias, self.shards)
        if self.gather_output:
            out = differentiable.gather_from(out, -1, self.sizes, self.group)
            if self.sequence is not None and not self.is_head:
                out = differentiable.scatter_to(out, 1, self.sequence.sizes, self.group)
        elif self.is_head and self.group.size > 1:
            start, stop = self._layouts["weight"].ranges[0]
            out.vocab_shard = VocabShard(self.group, start, stop, self.full_size)
        return out


class RowParallelLinear(ParallelLinear):
    """y = x W^T + b with the columns of W (in_features) cut over `group`; b is added after the sum over ranks.

    x: (..., in_features), the same on all ranks, of which each uses its part; with input_is_parallel this rank's part alone (with
    `sequence`: of the whole sequence). Returns (..., out_features) on every rank, with `sequence` this rank's piece (batch, T_r,
    out_features).
    """

    def __init__(self, in_features, out_features, bias=True, *, group=None, input_is_parallel=False, sequence=None, **factory):
        super().__init__()
        self._setup(nn.Linear(in_features, out_features, bias, **factory), group, input_is_parallel, sequence)

    @classmethod
    def from_module(cls, linear, group=None, *, input_is_parallel=False, sequence=None, shards=None, take=cut):
        """From an nn.Linear (or transformers' Conv1D) with full weights; shards: this rank's input features, if not even."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._setup(linear, group, input_is_parallel, sequence, shards, take)
        return layer

    def _setup(self, linear, group, input_is_parallel, sequence, shards=None, take=cut):
        _, self.out_features = linear_sizes(linear)
        self.input_is_parallel, self.sequence = input_is_parallel, sequence
        self.full_size = self.adopt(linear, group, 1, shards, take)
        if shards is not None and not input_is_parallel:
            raise ValueError("an input that is not parallel is cut evenly; pass input_is_parallel=True with shards")
        self.local_size = self.weight.shape[0 if self.transposed else 1]
        self.sizes = comm.even_sizes(self.full_size, self.group.size)
        self.exit = Exit(self.group, sequence)

    @property
    def in_features(self):
        return self.local_size if self.input_is_parallel else self.full_size

    def forward(self, x):
        if not self.input_is_parallel:
            if self.sequence is not None:
                check_piece(x, self.sequence, self.group, "row-parallel layer")
                x = differentiable.gather_from(x, 1, self.sequence.sizes, self.group)
            x = differentiable.scatter_to(x, -1, self.sizes, self.group)
        return self.exit(x, self.matrix(), self.bias, self.shards)


class VocabParallelEmbedding(nn.Module):
    """nn.Embedding with its rows cut over `group`. ids: integers, the same on all ranks. Returns (*ids.shape, embedding_dim)."""

    def __init__(self, num_embeddings, embedding_dim, *, group=None, padding_idx=None, **factory):
        super().__init__()
        self._setup(nn.Embedding(num_embeddings, embedding_dim, padding_idx, **factory), group)

    @classmethod
    def from_module(cls, embedding, group=None, *, take=cut):
        """From an nn.Embedding with full weights. Raises ValueError for options that look at all rows (max_norm, ...)."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._setup(embedding, group, take)
        return layer

    def _setup(self, embedding, group, take=cut):
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ValueError("an embedding with max_norm, scale_grad_by_freq or sparse cannot be cut by rows; replicate it")
        self.group = comm.as_group(group, "tp")
        self.num_embeddings, self.embedding_dim, self.padding_idx = embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx
        shards = even_shards(self.num_embeddings, self.group)
        (self.start, self.stop), layout = shards.ranges[0], shards.layout(embedding.weight, 0)
        self._layouts = {"weight": layout}
        self.weight = take(embedding.weight, layout)
        self.train(embedding.training)

    def layouts(self):
        """Local parameter name -> Layout."""
        return dict(self._layouts)

    def forward(self, ids):
        if ids.device.type == "cpu" and ids.numel() and (ids.min() < 0 or ids.max() >= self.num_embeddings):
            raise IndexError(f"embedding: ids from {int(ids.min())} to {int(ids.max())}, but there are {self.num_embeddings} rows")
        if self.start == self.stop:
            # Through the empty weight, so that the result asks for a gradient as it does on the other ranks.
            out = self.weight.sum() + self.weight.new_zeros((*ids.shape, self.embedding_dim))
        else:
            here = (ids >= self.start) & (ids < self.stop)
            padding = None if self.padding_idx is None or not self.start <= self.padding_idx < self.stop else self.padding_idx - self.start
            out = F.embedding(torch.where(here, ids - self.start, 0), self.weight, padding)
            out = out.masked_fill(~here.unsqueeze(-1), 0)
        return differentiable.reduce_from(out, self.group)

    def extra_repr(self):
        return f"{self.num_embeddings}, {self.embedding_dim}, rows {self.start}:{self.stop}"
