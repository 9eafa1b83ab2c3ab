"""Cuts one sublayer that find.py found: replaces its Linears by column and row layers and narrows what the
owner sees.

    x ──input edge──> q_proj, k_proj, v_proj ──> the module's own forward ──> o_proj ──output edge──> + bias
          once        rows of this rank's heads                               its columns

The input edge sits at the column layers, not at the module: what the module does with x beside them (a norm
before, a residual around) is then as in one process. Fused projections [q | k | v] give each rank its heads'
rows of all three parts. `take` cuts a parameter and remembers it, so that tied ones stay one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from pycomm.parallel.ground import comm
from pycomm.parallel.ground.layout import Layout, whole
from pycomm.parallel.tensor.edges import SublayerInput, SublayerOutput
from pycomm.parallel.tensor.heads import split_heads
from pycomm.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from pycomm.parallel.tensor.modules import linear_sizes
from pycomm.parallel.tensor.multihead import MultiheadForward
from pycomm.parallel.tensor.narrow import SublayerForward, narrow_attributes
from pycomm.parallel.tensor.slices import Slices, even_slices

__all__ = ["Cutter", "cut_sublayer", "swap"]


class Cutter(NamedTuple):
    """Who cuts, and how. sequence: see layers.py, or None; take: function (parameter, layout) -> its part."""

    group: comm.Group
    sequence: Any
    take: Callable


def swap(model, old, new):
    """Puts module `new` in place of `old`, wherever it is registered, with the hooks of `old`."""
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(new, hooks).update(getattr(old, hooks))
    for module in list(model.modules()):
        for name, value in module._modules.items():
            if value is old:
                module._modules[name] = new


def rows(heads, head_dim, offset=0):
    return offset + heads[0] * head_dim, offset + heads[1] * head_dim


def head_slices(counts, heads, rank, fused):
    """(Slices of each column layer, Slices of the row layer) of an attention. heads: RankHeads of
    all ranks.
    """
    dim, mine = counts.head_dim, heads[rank]
    q_width, kv_width = counts.q_heads * dim, counts.kv_heads * dim
    q_lengths = [head.q_count * dim for head in heads]
    kv_lengths = [head.kv_count * dim for head in heads]
    q = rows(mine.q, dim)
    row = Slices((q,), (q,), tuple(q_lengths))
    if fused:
        kv = rows(mine.kv, dim, q_width), rows(mine.kv, dim, q_width + kv_width)
        lengths = tuple(q + 2 * kv for q, kv in zip(q_lengths, kv_lengths, strict=True))
        return [Slices((q, *kv), (q, *kv) if mine.counts_kv else (q,), lengths, mine.shares_kv)], row
    kv = rows(mine.kv, dim)
    of_kv = Slices((kv,), (kv,) if mine.counts_kv else (), tuple(kv_lengths), mine.shares_kv)
    return [row, of_kv, of_kv], row


def cut_sublayer(model, sublayer, cutter):
    """Cuts `sublayer` of `model` for this rank of the cutter's group. Returns its SublayerOutput."""
    owner = model.get_submodule(sublayer.owner)
    source = SublayerInput(cutter.group, cutter.sequence)
    output = SublayerOutput(cutter.group, cutter.sequence, source)
    if sublayer.rule == "multihead":
        _cut_multihead(owner, sublayer, cutter, source, output)
        return output
    width = None
    if sublayer.rule == "attention":
        column_slices, row_slices, width = _narrow_attention(model, owner, sublayer, cutter)
    else:
        row_slices = even_slices(linear_sizes(model.get_submodule(sublayer.row))[0], cutter.group)
        column_slices = [row_slices] * len(sublayer.columns)
        if type(owner) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
            # Keeps torch's layer, and nn.TransformerEncoder, from the fused inference kernel, which reads
            # whole weights.
            owner.activation_relu_or_gelu = 0
    shared = {"sequence": cutter.sequence, "take": cutter.take}
    for name, slices in zip(sublayer.columns, column_slices, strict=True):
        old = model.get_submodule(name)
        column = ColumnParallelLinear.from_module(
            old, cutter.group, gather_output=False, slices=slices, **shared
        )
        column.take_input_from(source, shared=len(sublayer.columns) > 1)
        swap(model, old, column)
    old = model.get_submodule(sublayer.row)
    row = RowParallelLinear.from_module(
        old, cutter.group, input_is_parallel=True, slices=row_slices, **shared
    )
    row.give_output_to(output)
    swap(model, old, row)
    if type(owner) is not nn.Sequential and not isinstance(owner.forward, SublayerForward):
        owner.forward = SublayerForward(owner.forward, sublayer.owner, source, width)
    return output


def _narrow_attention(model, owner, sublayer, cutter):
    """Makes an attention module see its local heads. Returns (Slices of the column layers, Slices of the row
    layer, (full, local) width of the last dimension).
    """
    counts, rank = sublayer.counts, cutter.group.rank
    heads = split_heads(counts.q_heads, counts.kv_heads, cutter.group.size, sublayer.owner)
    mine = heads[rank]
    narrow_attributes(owner, counts._replace(mine=mine))
    for fqn in sublayer.per_head:
        name = fqn.rpartition(".")[2]
        parameter = owner.get_parameter(name)
        layout = Layout(tuple(parameter.shape), 0, (mine.q,), (mine.q,))
        owner._parameters[name] = cutter.take(parameter, layout)
    width = linear_sizes(model.get_submodule(sublayer.columns[0]))[0], mine.q_count * counts.head_dim
    return *head_slices(counts, heads, rank, len(sublayer.columns) == 1), width


def _cut_multihead(module, sublayer, cutter, source, output):
    group, sequence, take = cutter
    if sequence is not None and not module.batch_first:
        raise ValueError(
            f"{sublayer.owner}: splitting the sequence needs (batch, T, h); make it with batch_first=True, "
            "or without megatron_sp"
        )
    counts = sublayer.counts
    heads = split_heads(counts.q_heads, counts.kv_heads, group.size, sublayer.owner)
    (qkv,), q = head_slices(counts, heads, group.rank, True)

    def part(name, slices, dim):
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
    module.forward = MultiheadForward(module, source, output, heads)
