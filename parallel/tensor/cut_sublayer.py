"""Cuts one sublayer that find.py found: replaces its Linears by column and row layers and narrows what the
owner sees.

    x ──input edge──> q_proj, k_proj, v_proj ──> the module's own forward ──> o_proj ──output edge──> + bias
          once        rows of this rank's heads                               its columns

The input edge sits at the column layers, not at the module: what the module does with x beside them (a norm
before, a residual around) is then as in one process. Of fused projections each rank gets the rows of its
heads, wherever they lie (Sublayer.layouts). `take` cuts a parameter and remembers it, so that tied ones stay
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import nn

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.layout import Layout, whole
from pycomm.parallel.tensor.adapters import cut_column_adapter, cut_row_adapter
from pycomm.parallel.tensor.edges import CutSequence, SublayerInput, SublayerOutput
from pycomm.parallel.tensor.experts import cut_experts
from pycomm.parallel.tensor.heads import RankHeads, Span, split_heads
from pycomm.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from pycomm.parallel.tensor.modules import base_of, is_adapter, linear_sizes
from pycomm.parallel.tensor.multihead import MultiheadForward
from pycomm.parallel.tensor.narrow import HeadCounts, Narrowed, SublayerForward, narrow_attributes
from pycomm.parallel.tensor.slices import Slices, Take, even_slices, part_slices

if TYPE_CHECKING:
    from pycomm.parallel.tensor.sublayers import Rows, Sublayer

__all__ = ["Cutter", "cut_sublayer", "swap"]


class Cutter(NamedTuple):
    """Who cuts, and how. sequence: see layers.py."""

    group: comm.Group
    sequence: CutSequence | None
    take: Take


class HeadSlices(NamedTuple):
    columns: list[Slices]  # of each column layer
    row: Slices  # of the row layer


class _Enters(NamedTuple):
    source: SublayerInput
    shared: bool  # whether other layers are given the same input


def swap(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts module `new` in place of `old`, wherever it is registered, with the hooks of `old`."""
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(new, hooks).update(getattr(old, hooks))
    for module in list(model.modules()):
        for name, value in module._modules.items():
            if value is old:
                module._modules[name] = new


def rows(heads: Span, head_dim: int, offset: int = 0) -> Span:
    return offset + heads[0] * head_dim, offset + heads[1] * head_dim


def head_slices(counts: HeadCounts, heads: Sequence[RankHeads], rank: int, fused: Rows | None) -> HeadSlices:
    """Of an attention. heads: of all ranks. fused: the layout of the only column layer; None where there are
    three.
    """
    dim, mine = counts.head_dim, heads[rank]
    q_width, kv_width = counts.q_heads * dim, counts.kv_heads * dim
    q_lengths = [head.q_count * dim for head in heads]
    kv_lengths = [head.kv_count * dim for head in heads]
    q = rows(mine.q, dim)
    row = Slices((q,), (q,), tuple(q_lengths))
    if fused == "heads":
        return HeadSlices([mixed_slices(counts, heads, rank)], row)
    if fused:
        kv = rows(mine.kv, dim, q_width), rows(mine.kv, dim, q_width + kv_width)
        lengths = tuple(q + 2 * kv for q, kv in zip(q_lengths, kv_lengths, strict=True))
        counted = (q, *kv) if mine.counts_kv else (q,)
        return HeadSlices([Slices((q, *kv), counted, lengths, mine.shares_kv)], row)
    own = rows(mine.kv, dim)
    of_kv = Slices((own,), (own,) if mine.counts_kv else (), tuple(kv_lengths), mine.shares_kv)
    return HeadSlices([row, of_kv, of_kv], row)


def mixed_slices(counts: HeadCounts, heads: Sequence[RankHeads], rank: int) -> Slices:
    """Slices of a projection whose rows are those of a kv head and its query heads, head by head."""
    dim, mine, per_kv = counts.head_dim, heads[rank], counts.q_heads // counts.kv_heads
    ranges, counted = [], []
    for kv in range(*mine.kv):
        start = kv * (per_kv + 2) * dim
        first, last = (min(max(head - kv * per_kv, 0), per_kv) for head in mine.q)
        q = rows((first, last), dim, start)
        both = rows((per_kv, per_kv + 2), dim, start)
        ranges += [q, both]
        counted += [q, both] if mine.counts_kv else [q]
    lengths = tuple((head.q_count + 2 * head.kv_count) * dim for head in heads)
    return Slices(_joined(ranges), _joined(counted), lengths, mine.shares_kv)


def _joined(ranges: Iterable[Span]) -> tuple[Span, ...]:
    """Ranges that follow each other as one."""
    found: list[Span] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def cut_sublayer(model: nn.Module, sublayer: Sublayer, cutter: Cutter) -> SublayerOutput | None:
    """Cuts `sublayer` of `model` for this rank of the cutter's group. Returns its output edge; None where it
    has none.
    """
    owner = model.get_submodule(sublayer.owner)
    if sublayer.rule == "experts":
        cut_experts(owner, sublayer.owner, cutter)
        return None
    source = SublayerInput(cutter.group, cutter.sequence, by_token=sublayer.rule == "mlp")
    output = SublayerOutput(cutter.group, cutter.sequence, source)
    if sublayer.rule == "multihead":
        _cut_multihead(cast(nn.MultiheadAttention, owner), sublayer, cutter, source, output)
        return output
    width = None
    if sublayer.rule == "attention":
        (column_slices, row_slices), width = _narrow_attention(model, owner, sublayer, cutter)
    else:
        features, _ = linear_sizes(model.get_submodule(sublayer.row))
        row_slices = even_slices(features, cutter.group)
        outs = [linear_sizes(model.get_submodule(name))[1] for name in sublayer.columns]
        column_slices = [part_slices(row_slices, features, out) for out in outs]
        if type(owner) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
            # Keeps torch's layer, and nn.TransformerEncoder, from the fused inference kernel, which reads
            # whole weights.
            vars(owner)["activation_relu_or_gelu"] = 0
    for name, slices in zip(sublayer.columns, column_slices, strict=True):
        _cut_column(model, name, slices, cutter, _Enters(source, len(sublayer.columns) > 1))
    _cut_row(model, sublayer.row, row_slices, cutter, output)
    if type(owner) is not nn.Sequential and not isinstance(owner.forward, SublayerForward):
        owner.forward = SublayerForward(owner, sublayer.owner, source, width)
    return output


def _cut_column(model: nn.Module, name: str, slices: Slices, cutter: Cutter, enters: _Enters) -> None:
    old = model.get_submodule(name)
    if is_adapter(old):
        cut_column_adapter(old, slices, enters.source, cutter)
        return
    column = ColumnParallelLinear.from_module(
        base_of(old),
        cutter.group,
        gather_output=False,
        sequence=cutter.sequence,
        slices=slices,
        take=cutter.take,
    )
    column.take_input_from(*enters)
    swap(model, old, column)


def _cut_row(model: nn.Module, name: str, slices: Slices, cutter: Cutter, output: SublayerOutput) -> None:
    old = model.get_submodule(name)
    if is_adapter(old):
        cut_row_adapter(old, slices, output, cutter)
        return
    row = RowParallelLinear.from_module(
        base_of(old),
        cutter.group,
        input_is_parallel=True,
        sequence=cutter.sequence,
        slices=slices,
        take=cutter.take,
    )
    row.give_output_to(output)
    swap(model, old, row)


def _narrow_attention(
    model: nn.Module, owner: nn.Module, sublayer: Sublayer, cutter: Cutter
) -> tuple[HeadSlices, Narrowed]:
    """Makes an attention module see its local heads."""
    counts, rank = _counts_of(sublayer), cutter.group.rank
    heads = split_heads(counts.q_heads, counts.kv_heads, cutter.group.size, sublayer.owner)
    mine = heads[rank]
    before = narrow_attributes(owner, counts._replace(mine=mine))
    for fqn in sublayer.per_head:
        name = fqn.rpartition(".")[2]
        parameter = owner.get_parameter(name)
        layout = Layout(tuple(parameter.shape), 0, (mine.q,), (mine.q,))
        owner._parameters[name] = cutter.take(parameter, layout)
    hidden, _ = linear_sizes(model.get_submodule(sublayer.columns[0]))
    narrow = Narrowed(hidden, mine.q_count * counts.head_dim, counts.q_heads, mine.q, before)
    fused = sublayer.layout if len(sublayer.columns) == 1 else None
    return head_slices(counts, heads, rank, fused), narrow


def _counts_of(sublayer: Sublayer) -> HeadCounts:
    """Of an attention."""
    assert sublayer.counts is not None
    return sublayer.counts


def _cut_multihead(
    module: nn.MultiheadAttention,
    sublayer: Sublayer,
    cutter: Cutter,
    source: SublayerInput,
    output: SublayerOutput,
) -> None:
    group, sequence, take = cutter
    if sequence is not None and not module.batch_first:
        raise ValueError(
            f"{sublayer.owner}: splitting the sequence needs (batch, T, h); make it with batch_first=True, "
            "or without megatron_sp"
        )
    counts = _counts_of(sublayer)
    heads = split_heads(counts.q_heads, counts.kv_heads, group.size, sublayer.owner)
    (qkv,), q = head_slices(counts, heads, group.rank, "blocks")

    def part(name: str, slices: Slices, dim: int) -> None:
        parameter = module._parameters.get(name)
        if parameter is not None:
            module._parameters[name] = take(parameter, slices.layout(parameter, dim))

    for name in ("in_proj_weight", "in_proj_bias"):
        part(name, qkv, 0)
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        part(name, q, 0)
    for name in ("bias_k", "bias_v"):
        part(name, q, 2)
    out = module.out_proj
    out._parameters["weight"] = take(out.weight, q.layout(out.weight, 1))
    if out.bias is not None:
        take(out.bias, whole(out.bias, group.rank, partial=sequence is not None))
    vars(module)["forward"] = MultiheadForward(module, source, output, heads)
