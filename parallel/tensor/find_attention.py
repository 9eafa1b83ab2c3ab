"""Recognises an attention module by the names of its Linears, and works out its heads from their widths.

    separate   q_proj, k_proj, v_proj, o_proj      or other names of SEPARATE and OUTPUT
    fused      c_attn = [q | k | v], c_proj        or other names of FUSED
               query_key_value, dense              or other names of MIXED: [q | k | v], or head by head
    torch      nn.MultiheadAttention

The number of heads is read from the module's attributes or its configuration (narrow.head_counts); the widths
must fit it. Every other parameter and buffer must be known to be harmless on a rank with few heads.
"""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from pycomm.parallel.tensor.adapters import factors_of
from pycomm.parallel.tensor.modules import child, is_projection, join, linear_sizes, within
from pycomm.parallel.tensor.narrow import HeadCounts, head_counts
from pycomm.parallel.tensor.sublayers import Sublayer, Unfit

__all__ = ["find_attention"]

SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("w_q", "w_k", "w_v"),
    ("W_q", "W_k", "W_v"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
)
OUTPUT = (
    *("o_proj", "out_proj", "wo", "w_o", "W_o", "dense", "out", "to_out"),
    *("to_out.0", "out_lin", "c_proj", "proj", "o"),
)
FUSED = (
    ("c_attn", "c_proj"),
    ("qkv", "proj"),
    ("Wqkv", "out_proj"),
    ("in_proj", "out_proj"),
    ("qkv_proj", "o_proj"),
    ("to_qkv", "to_out"),
)
MIXED = (("query_key_value", "dense"),)
OF_QK = re.compile(r"(^|_|\.)(q|k|qk|query|key)(_|\.|$)|qnorm|knorm|qknorm")


def find_attention(modules: Mapping[str, nn.Module], fqn: str) -> list[Sublayer]:
    """Of the module `fqn`: [] where it is no attention. modules: of the model, by name. Raises Unfit."""
    module = modules[fqn]
    if isinstance(module, nn.MultiheadAttention):
        counts = HeadCounts(module.num_heads, module.num_heads, module.head_dim)
        return [Sublayer("multihead", fqn, (fqn,), join(fqn, "out_proj"), counts)]
    for names in SEPARATE:
        if all(is_projection(child(module, name)) for name in names):
            return [_sublayer(modules, fqn, names, _output(modules, fqn, OUTPUT))]
    for name, out in (*FUSED, *MIXED):
        row = _output(modules, fqn, (out, out + ".0")) if is_projection(child(module, name)) else None
        if row is not None:
            found = _sublayer(modules, fqn, (name,), row)
            is_known = (name, out) in FUSED
            return [
                found._replace(
                    layouts=("blocks", "heads") if is_known else ("heads", "blocks"), is_known=is_known
                )
            ]
    return []


def _output(modules: Mapping[str, nn.Module], fqn: str, names: Iterable[str]) -> str | None:
    """Name of the output Linear: a child, or for modules split in two (attention.self,
    attention.output.dense) one of the sibling; None where there is none.
    """
    for name in names:
        if is_projection(child(modules[fqn], name)):
            return join(fqn, name)
    sibling = join(fqn.rpartition(".")[0], "output.dense")
    return sibling if fqn and is_projection(modules.get(sibling)) else None


def _sublayer(modules: Mapping[str, nn.Module], fqn: str, names: Sequence[str], row: str | None) -> Sublayer:
    if row is None:
        raise Unfit(f"no output Linear found beside {', '.join(names)}")
    module = modules[fqn]
    if "position_bias" in inspect.signature(module.forward).parameters:
        raise Unfit("its forward is given a bias of each head (position_bias)")
    value_width, _ = linear_sizes(modules[row])
    outs = [linear_sizes(module.get_submodule(name))[1] for name in names]
    counts = _counts(module, outs, value_width, row)
    per_head, inside = _other_parameters(module, fqn, names, row, counts)
    _check_buffers(module, counts)
    columns = tuple(join(fqn, name) for name in names)
    inside += factors_of(modules, columns, row)
    return Sublayer("attention", fqn, columns, row, counts, per_head, inside)


def _counts(module: nn.Module, outs: Sequence[int], value_width: int, row: str) -> HeadCounts:
    """From the widths. outs: of q, k, v, or of the fused Linear; value_width: into the output."""
    q_heads, kv_heads = head_counts(module)
    if q_heads is None:
        raise Unfit("its number of heads is not among its attributes")
    is_separate = len(outs) == 3
    q_width = outs[0] if is_separate else value_width
    if q_width % q_heads or value_width != q_width:
        raise Unfit(
            f"widths {q_width} of queries and {value_width} into {row.rpartition('.')[2]} do not fit "
            f"{q_heads} heads"
        )
    head_dim = q_width // q_heads
    kv_width, rest = (outs[1], outs[1] - outs[2]) if is_separate else divmod(outs[0] - q_width, 2)
    if (
        rest
        or kv_width % head_dim
        or kv_width < head_dim
        or kv_heads not in (None, kv_width // head_dim)
        and is_separate
    ):
        raise Unfit(f"widths {outs} do not fit {q_heads} query heads of {head_dim} and {kv_heads} kv heads")
    return HeadCounts(q_heads, kv_width // head_dim, head_dim)


class _Others(NamedTuple):
    """Names of parameters."""

    per_head: tuple[str, ...]  # one number per head
    inside: tuple[str, ...]  # held whole and used per head


def _other_parameters(
    module: nn.Module, fqn: str, columns: Sequence[str], row: str, counts: HeadCounts
) -> _Others:
    """Of an attention, that are not those of its Linears."""
    per_head, inside = [], []
    hidden = linear_sizes(module.get_submodule(columns[0]))[0]
    for name, parameter in module.named_parameters():
        owner, shape = name.rpartition(".")[0], tuple(parameter.shape)
        if any(within(owner, column) for column in columns) or within(join(fqn, owner), row):
            continue
        of_qk = OF_QK.search(name)
        is_norm = "norm" in type(child(module, owner) if owner else module).__name__.lower()
        if not owner and shape == (counts.q_heads,):
            per_head.append(join(fqn, name))
        elif is_norm and shape == (counts.head_dim,) and (of_qk or counts.head_dim != hidden):
            inside.append(join(fqn, name))
        elif not (is_norm and shape == (hidden,) and not of_qk):
            raise Unfit(f"parameter {name} of shape {shape}: not known how ranks with few heads use it")
    return _Others(tuple(per_head), tuple(inside))


def _check_buffers(module: nn.Module, counts: HeadCounts) -> None:
    for name, buffer in module.named_buffers():
        shape = buffer.shape
        is_mask = buffer.dim() >= 2 and shape[-1] == shape[-2] and buffer.numel() == shape[-1] ** 2
        if counts.q_heads > 1 and counts.q_heads in shape and not is_mask and "inv_freq" not in name:
            raise Unfit(f"buffer {name} of shape {tuple(shape)} may hold one value per head")
