"""Ulysses attention: an all-to-all turns "all heads, my positions" into "my heads, all positions", attention
runs as on one rank, and a second all-to-all turns the result back.

    4 heads, 2 ranks             rank 0          rank 1                        rank 0          rank 1
                            positions 0..3   positions 4..7               positions 0..7   positions 0..7
    q, k, v   head 0             a                b                            a b
              head 1             c                d       -- to_heads -->      c d
              head 2             e                f      <- to_sequence --                      e f
              head 3             g                h                                             g h

Order. forward: to_heads(q, k, v), attention, to_sequence(out); backward: to_heads(grad of out), attention's
backward, to_sequence(grads of q, k, v). q, k and v travel in one call: it carries the bytes of three and
costs one latency, and the copies that bring a rank's rows together are needed either way.

Cost. N tokens in all, h = heads * head size, P ranks: each of q, k, v, out is N*h/P elements on a rank, of
which (P-1)/P go to others: in total 4 N h/P (P-1)/P forward and the same backward, in 2 calls each. The
volume shrinks with P, where the all-gather of Megatron's sequence parallelism does not.

Heads that do not divide. Query heads are cut by comm.even_sizes; with fewer heads than ranks some ranks
compute none and only take part in the exchanges. A rank gets the key heads that its query heads use: when
several ranks use one key head it is sent to each of them (this adds bytes), and to_sequence sums its
gradients, in order of rank, 16-bit types in fp32.

    6 query heads, 2 key heads, 4 ranks
    rank 0: q 0 1, k 0     rank 1: q 2 3, k 0 1     rank 2: q 4, k 1     rank 3: q 5, k 1

What can go wrong: ranks that disagree about the lengths of the pieces; so they are exchanged unless the
caller knows them (`sizes`).
Source: Jacobs et al., DeepSpeed Ulysses, 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from pycomm.parallel.ground import comm, differentiable
from pycomm.parallel.sequence import split
from pycomm.parallel.sequence.mask import Mask, checked, of_heads

if TYPE_CHECKING:
    import torch.distributed as dist

    from pycomm.parallel.ground.comm import Group

__all__ = ["ulysses_attention"]


class _Cut(NamedTuple):
    """sizes: positions of each rank; heads: for each tensor that travels, the (start, stop) of the heads of
    each rank.
    """

    group: comm.Group
    sizes: list[int]
    heads: tuple[split.Spans, ...]


class _Kernel(Protocol):
    """Attention of this rank's heads over whole sequences."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: split.Span, enable_gqa: bool
    ) -> torch.Tensor:
        """heads: (start, stop) of the queries'."""


_Shape = tuple[int, ...]


def _head_ranges(q_heads: int, k_heads: int, parts: int) -> tuple[split.Spans, split.Spans]:
    """Of each rank's query heads, and of the key heads that these use."""
    shared = q_heads // k_heads
    q_ranges, k_ranges, start = [], [], 0
    for count in comm.even_sizes(q_heads, parts):
        q_ranges.append((start, start + count))
        k_ranges.append((start // shared, (start + count - 1) // shared + 1) if count else (0, 0))
        start += count
    return tuple(q_ranges), tuple(k_ranges)


def _views(flat: torch.Tensor, shapes: Sequence[_Shape]) -> list[torch.Tensor]:
    """The flat tensor as consecutive tensors of the given shapes."""
    counts = [torch.Size(shape).numel() for shape in shapes]
    return [piece.view(shape) for piece, shape in zip(flat.split(counts), shapes, strict=True)]


def _head_shapes(tensors: Sequence[torch.Tensor], cut: _Cut) -> tuple[list[list[_Shape]], list[list[_Shape]]]:
    """Shapes of what rank r's heads have at this rank's positions, for all r, and of what this rank's heads
    have at theirs.
    """

    def shapes(ranges: Sequence[split.Span], size: int) -> list[_Shape]:
        return [
            (t.shape[0], stop - start, size, t.shape[3])
            for t, (start, stop) in zip(tensors, ranges, strict=True)
        ]

    away = [shapes(ranges, cut.sizes[cut.group.rank]) for ranges in zip(*cut.heads, strict=True)]
    here = [shapes([ranges[cut.group.rank] for ranges in cut.heads], size) for size in cut.sizes]
    return away, here


def _counts(shapes: Iterable[Iterable[_Shape]]) -> list[int]:
    return [sum(torch.Size(shape).numel() for shape in of_rank) for of_rank in shapes]


def _flat(shapes: Iterable[Iterable[_Shape]]) -> list[_Shape]:
    return [shape for of_rank in shapes for shape in of_rank]


def _to_heads(tensors: Sequence[torch.Tensor], cut: _Cut) -> list[torch.Tensor]:
    """(B, all heads, my positions, D_i) -> (B, my heads, all positions, D_i), for all tensors in one call."""
    away, here = _head_shapes(tensors, cut)
    rows = tensors[0].new_empty(sum(_counts(away)))
    sent = iter(_views(rows, _flat(away)))
    for by_rank in zip(*cut.heads, strict=True):
        for tensor, (start, stop) in zip(tensors, by_rank, strict=True):
            next(sent).copy_(tensor[:, start:stop])
    parts = _views(comm.all_to_all(rows, _counts(away), _counts(here), cut.group), _flat(here))
    number = len(tensors)
    return [torch.cat(parts[i::number], dim=2) for i in range(number)]


def _to_sequence(tensors: Sequence[torch.Tensor], cut: _Cut) -> list[torch.Tensor]:
    """The converse; heads that several ranks hold are summed in order of rank."""
    away, here = _head_shapes(tensors, cut)
    rows = tensors[0].new_empty(sum(_counts(here)))
    sent = iter(_views(rows, _flat(here)))
    edges = [sum(cut.sizes[:rank]) for rank in range(cut.group.size)]
    for start, size in zip(edges, cut.sizes, strict=True):
        for tensor in tensors:
            next(sent).copy_(tensor[:, :, start : start + size])
    parts = _views(comm.all_to_all(rows, _counts(here), _counts(away), cut.group), _flat(away))
    number = len(tensors)
    return [_join_heads(parts[i::number], ranges) for i, ranges in enumerate(cut.heads)]


def _join_heads(parts: list[torch.Tensor], ranges: split.Spans) -> torch.Tensor:
    heads = max(stop for _, stop in ranges)
    if sum(stop - start for start, stop in ranges) == heads:  # every head is somewhere, so none is twice
        return torch.cat(parts, dim=1)
    like = parts[0]
    wide = torch.float32 if like.element_size() == 2 else like.dtype
    out = like.new_zeros((like.shape[0], heads, *like.shape[2:]), dtype=wide)
    for part, (start, stop) in zip(parts, ranges, strict=True):
        out[:, start:stop] += part
    return out.to(like.dtype)


class _Context(Protocol):
    cut: _Cut
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, cut: _Cut, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.cut = cut
        return tuple(_to_heads(tensors, cut))

    @staticmethod
    @differentiable.once("ulysses attention", "use a plan without ulysses, as tp")
    def backward(ctx: _Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_to_sequence(grads, ctx.cut)


class _ToSequence(torch.autograd.Function):
    """[Note: checkpoints in step] torch.utils.checkpoint recomputes when the first saved tensor is asked for
    and stops when the last is back. Ranks without heads save nothing in attention, so that they would do
    either at another place than the others, and one rank's forward exchange would meet another's backward. An
    empty tensor saved here and asked for before the exchange keeps all ranks in step.
    """

    @staticmethod
    def forward(ctx: _Context, cut: _Cut, tensor: torch.Tensor) -> torch.Tensor:
        ctx.cut = cut
        ctx.save_for_backward(tensor.new_empty(0))
        return _to_sequence([tensor], cut)[0]

    @staticmethod
    @differentiable.once("ulysses attention", "use a plan without ulysses, as tp")
    def backward(ctx: _Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018
        return None, _to_heads([grad], ctx.cut)[0]


def _repeat(tensor: torch.Tensor, repeats: Iterable[int]) -> torch.Tensor:
    """Head i of dim 1, repeats[i] times. By cat, whose gradient is summed in a fixed order on every
    device.
    """
    return torch.cat(
        [tensor[:, i : i + 1].expand(-1, count, -1, -1) for i, count in enumerate(repeats)], dim=1
    )


def nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The result for no heads or no positions, joined to the graph: this rank must take part in backward's
    exchanges too.
    """
    return q.new_zeros((*q.shape[:3], v.shape[3])) + (q.sum() + k.sum() + v.sum())


def through_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, kernel: _Kernel, sizes: list[int]
) -> torch.Tensor:
    """The kernel on this rank's heads and the positions of all ranks of the group, in order of rank; sizes:
    of each.
    """
    q_ranges, k_ranges = _head_ranges(q.shape[1], k.shape[1], group.size)
    shared = q.shape[1] // k.shape[1]
    used = [head // shared for head in range(*q_ranges[group.rank])]
    uses = [used.count(head) for head in range(*k_ranges[group.rank])]
    even = len(set(uses)) <= 1
    if group.size > 1:
        q, k, v = _ToHeads.apply(_Cut(group, sizes, (q_ranges, k_ranges, k_ranges)), q, k, v)
    if not uses:
        out = nothing(q, k, v)
    elif even:
        out = kernel(q, k, v, heads=q_ranges[group.rank], enable_gqa=uses[0] > 1)
    else:
        k, v = _repeat(k, uses), _repeat(v, uses)
        out = kernel(q, k, v, heads=q_ranges[group.rank], enable_gqa=False)
    return out if group.size == 1 else _ToSequence.apply(_Cut(group, sizes, (q_ranges,)), out)


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group | dist.ProcessGroup | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    attention: Callable[..., torch.Tensor] | None = None,
    sizes: list[int] | None = None,
    attn_mask: torch.Tensor | Mask | None = None,
) -> torch.Tensor:
    """Attention over the sequence whose contiguous pieces the ranks of `group` hold, in order of rank.

    q: (B, Hq, T_local, D), k: (B, Hkv, T_local, D), v: (B, Hkv, T_local, Dv), of one floating dtype, Hq a
    multiple of Hkv; B, heads and D equal on all ranks, T_local free. Returns (B, Hq, T_local, Dv). Collective
    on the group; so is its backward.
    group: None: the default group. scale: of the scores, 1/sqrt(D) by default.
    attention: function (q, k, v, is_causal=, scale=, enable_gqa=) for whole sequences, by default
    F.scaled_dot_product_attention.
    sizes: T_local of every rank; without it one all_gather of 8 bytes asks for them, and the host waits.
    attn_mask: of the whole sequence, the same on all ranks, (T, T) or (1 or B, 1 or Hq, T or 1, T): bool or
    numbers to add (mask.py); not with is_causal. `attention` then takes it as attn_mask=.
    ValueError: shapes or dtypes that do not fit. Source: Jacobs et al. 2023; the head cut is described above.
    """
    ranks = comm.as_group(group, "ulysses")
    attend: Callable[..., torch.Tensor] = F.scaled_dot_product_attention if attention is None else attention
    split.check_pieces(q, k, v, ranks, None if sizes is None else sizes[ranks.rank])
    sizes = split.exchange_lengths(q.shape[2], ranks, q.device) if sizes is None else sizes
    mask = checked(attn_mask, q, is_causal, sum(sizes))

    def whole(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: split.Span, enable_gqa: bool
    ) -> torch.Tensor:
        if not q.shape[2]:
            return nothing(q, k, v)
        options: dict[str, object] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        if mask is not None:
            options["attn_mask"] = of_heads(mask, heads).values
        return attend(q, k, v, **options)

    return through_heads(q, k, v, ranks, whole, sizes)
