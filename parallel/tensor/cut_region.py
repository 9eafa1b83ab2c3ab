"""Cuts one region that regions.py found: replaces its Linears by column and row layers and narrows what the owner sees.

    x ──entry──> q_proj, k_proj, v_proj   (rows of this rank's heads)  ──> the module's own forward ──> o_proj (its columns) ──exit──> +
    bias
        once                                                                                             leave

The entry sits at the column layers, not at the module: what the module does with x beside them (a norm before, a residual around) is then
as in one process. Fused projections [q | k | v] give each rank its heads' rows of all three parts. `take` cuts a parameter and remembers
it, so that tied ones stay one.
"""

from torch import nn

from pycomm.parallel.layout import Layout, whole
from pycomm.parallel.tensor.attention import MultiheadForward
from pycomm.parallel.tensor.heads import split_heads
from pycomm.parallel.tensor.layers import ColumnParallelLinear, Entry, Exit, RowParallelLinear, Shards, even_shards, linear_sizes
from pycomm.parallel.tensor.narrow import HeadCounts, RegionForward, narrow_attributes

__all__ = ["cut_region", "swap"]


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


def head_shards(counts, heads, rank, fused):
    """(shards of each column layer, shards of the row layer) of an attention. heads: RankHeads of all ranks."""
    dim, q_width, kv_width = counts.head_dim, counts.q_heads * counts.head_dim, counts.kv_heads * counts.head_dim
    mine, q_lengths, kv_lengths = heads[rank], [head.q_count * dim for head in heads], [head.kv_count * dim for head in heads]
    q = rows(mine.q, dim)
    row = Shards((q,), (q,), tuple(q_lengths))
    if fused:
        kv = rows(mine.kv, dim, q_width), rows(mine.kv, dim, q_width + kv_width)
        lengths = tuple(q + 2 * kv for q, kv in zip(q_lengths, kv_lengths, strict=True))
        columns = [Shards((q, *kv), (q, *kv) if mine.counts_kv else (q,), lengths, mine.shares_kv)]
    else:
        kv = rows(mine.kv, dim)
        columns = [row] + [Shards((kv,), (kv,) if mine.counts_kv else (), tuple(kv_lengths), mine.shares_kv)] * 2
    return columns, row


def cut_region(model, region, group, sequence, take):
    """Cuts `region` of `model` for this rank of `group`. Returns the exit of the region, which its row layer (or attention) calls."""
    if region.rule == "multihead":
        return cut_multihead(model.get_submodule(region.owner), region, group, sequence, take)
    owner = model.get_submodule(region.owner)
    entry = Entry(group, sequence)
    leave = Exit(group, sequence, entry)
    row = model.get_submodule(region.row)
    width = None
    if region.rule == "attention":
        counts = region.counts
        heads = split_heads(counts.q_heads, counts.kv_heads, group.size, region.owner)
        mine = heads[group.rank]
        column_shards, row_shards = head_shards(counts, heads, group.rank, len(region.columns) == 1)
        narrow_attributes(owner, HeadCounts(counts.q_heads, counts.kv_heads, counts.head_dim, mine))
        for name in region.per_head:
            name, parameter = name.rpartition(".")[2], owner.get_parameter(name.rpartition(".")[2])
            owner._parameters[name] = take(parameter, Layout(tuple(parameter.shape), 0, (mine.q,), (mine.q,)))
        width = linear_sizes(model.get_submodule(region.columns[0]))[0], mine.q_count * counts.head_dim
    else:
        row_shards = even_shards(linear_sizes(row)[0], group)
        column_shards = [row_shards] * len(region.columns)
        if type(owner) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
            no_fast_path(owner)
    for name, shards in zip(region.columns, column_shards, strict=True):
        old = model.get_submodule(name)
        new = ColumnParallelLinear.from_module(old, group, gather_output=False, sequence=sequence, shards=shards, take=take)
        new.entry, new.shared_entry = entry, len(region.columns) > 1
        swap(model, old, new)
    new = RowParallelLinear.from_module(row, group, input_is_parallel=True, sequence=sequence, shards=row_shards, take=take)
    new.exit = leave
    swap(model, row, new)
    if type(owner) is not nn.Sequential and not isinstance(owner.forward, RegionForward):
        owner.forward = RegionForward(owner.forward, region.owner, entry, width)
    return leave


def no_fast_path(layer):
    """Keeps torch's Transformer layers, and nn.TransformerEncoder, from the fused inference kernel, which reads whole weights."""
    layer.activation_relu_or_gelu = 0


def cut_multihead(module, region, group, sequence, take):
    if sequence is not None and not module.batch_first:
        raise ValueError(
            f"{region.owner}: splitting the sequence needs (batch, T, h); make it with batch_first=True, or without megatron_sp"
        )
    counts, entry = region.counts, Entry(group, sequence)
    leave = Exit(group, sequence, entry)
    heads = split_heads(counts.q_heads, counts.kv_heads, group.size, region.owner)
    (qkv,), q = head_shards(counts, heads, group.rank, True)

    def part(name, shards, dim):
        parameter = module._parameters.get(name)
        if parameter is not None:
            module._parameters[name] = take(parameter, shards.layout(parameter, dim))

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
    module.forward = MultiheadForward(module, entry, leave, heads)
    return leave
