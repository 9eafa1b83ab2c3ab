"""Which positions of a sequence each rank of ring x ulysses holds: arithmetic that every rank can do for
every other, without communication.

The ring is outer. Under a causal mask a later query sees more keys, so contiguous pieces would give the last
ring rank nearly all the work. Zigzag cuts the sequence into 2R chunks and gives rank r the chunks r and
2R-1-r: an early and a late one, in this order.

    length 23, ring 2 (zigzag), ulysses 2          chunks of 6, 6, 6, 5 positions

    chunk              0                 1                 2                3
    positions          0 1 2 3 4 5       6 7 8 9 10 11     12 .. 17         18 19 20 21 22
    ring rank          0                 1                 1                0
    held by ring 0     0 1 2 3 4 5 18 19 20 21 22      ulysses 0: 0 1 2 3 4 5    ulysses 1: 18 19 20 21 22
    held by ring 1     6 7 .. 17                       ulysses 0: 6 .. 11        ulysses 1: 12 .. 17

A ring rank's positions, in order, are then cut contiguously over ulysses: when the Ulysses all-to-all joins
the pieces again, they come out in increasing order, and a causal mask inside one ring rank is the plain one.
All cuts are comm.even_sizes: no length has to divide, and when there are fewer positions than ranks some
ranks hold none.

Positions are kept as spans, pairs (start, stop) in increasing order; a rank has at most two. Cost: no bytes.
What can go wrong: a tensor whose piece was cut by another rule, which check_pieces() turns into an error.
Source: zigzag is Zhu, ring-flash-attention, 2024 (its issue
2), also in Llama 3 (Dubey et al. 2024, 3.3.2); ring over Ulysses is Fang and Zhao, USP, 2024.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from pycomm.parallel.ground import comm

if TYPE_CHECKING:
    from pycomm.parallel.ground.comm import Group

__all__ = [
    "cut",
    "exchange_lengths",
    "lengths",
    "local_length",
    "positions",
    "ring_spans",
    "spans",
    "ulysses_sizes",
]


Span = tuple[int, int]  # positions [start, stop)
Spans = tuple[Span, ...]  # in increasing order


def _cut_spans(spans_: Spans, start: int, stop: int) -> Spans:
    """The spans of the local indices start..stop of a piece that is made of spans_."""
    out, offset = [], 0
    for first, last in spans_:
        low, high = max(first, first + start - offset), min(last, first + stop - offset)
        if low < high:
            out.append((low, high))
        offset += last - first
    return tuple(out)


def _total(spans_: Spans) -> int:
    return sum(stop - start for start, stop in spans_)


def ring_spans(length: int, size: int, rank: int, zigzag: bool) -> Spans:
    """Of rank `rank` of a ring of `size`: none empty, adjacent ones joined."""
    chunks = comm.even_sizes(length, 2 * size if zigzag else size)
    edges = [0, *itertools.accumulate(chunks)]
    held = [rank, 2 * size - 1 - rank] if zigzag else [rank]
    out: list[Span] = []
    for chunk in held:
        start, stop = edges[chunk], edges[chunk + 1]
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(span for span in out if span[0] < span[1])


def ulysses_sizes(
    length: int, ring: Group, ulysses: Group, zigzag: bool, ring_rank: int | None = None
) -> list[int]:
    """How many positions each ulysses rank holds in ring rank `ring_rank` (this rank's own by default)."""
    ring_rank = ring.rank if ring_rank is None else ring_rank
    return comm.even_sizes(_total(ring_spans(length, ring.size, ring_rank, zigzag)), ulysses.size)


def spans(
    length: int,
    ring: Group,
    ulysses: Group,
    zigzag: bool,
    ring_rank: int | None = None,
    ulysses_rank: int | None = None,
) -> Spans:
    """That a rank holds, by default this one."""
    ring_rank = ring.rank if ring_rank is None else ring_rank
    ulysses_rank = ulysses.rank if ulysses_rank is None else ulysses_rank
    sizes = ulysses_sizes(length, ring, ulysses, zigzag, ring_rank)
    start = sum(sizes[:ulysses_rank])
    return _cut_spans(ring_spans(length, ring.size, ring_rank, zigzag), start, start + sizes[ulysses_rank])


def positions(
    length: int,
    ring: Group,
    ulysses: Group,
    zigzag: bool,
    ring_rank: int | None = None,
    ulysses_rank: int | None = None,
    *,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Positions in the full sequence that a rank (by default this one) holds, in local order: int64, (local
    length,).
    """
    held = spans(length, ring, ulysses, zigzag, ring_rank, ulysses_rank)
    return torch.cat([torch.arange(*span, device=device) for span in held or ((0, 0),)])


def local_length(
    length: int,
    ring: Group,
    ulysses: Group,
    zigzag: bool,
    ring_rank: int | None = None,
    ulysses_rank: int | None = None,
) -> int:
    """How many positions a rank (by default this one) holds."""
    ulysses_rank = ulysses.rank if ulysses_rank is None else ulysses_rank
    return ulysses_sizes(length, ring, ulysses, zigzag, ring_rank)[ulysses_rank]


def lengths(length: int, ring: Group, ulysses: Group, zigzag: bool) -> list[list[int]]:
    """How many positions every rank holds: lengths(...)[ring rank][ulysses rank]."""
    return [ulysses_sizes(length, ring, ulysses, zigzag, ring_rank) for ring_rank in range(ring.size)]


def cut(tensor: torch.Tensor, dim: int, held: Spans) -> torch.Tensor:
    """The part of a full tensor at the spans `held` along `dim`: a view where there is one span, else a copy.
    Differentiable.
    """
    pieces = [tensor.narrow(dim, start, stop - start) for start, stop in held or ((0, 0),)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def exchange_lengths(local: int, group: Group, device: torch.device) -> list[int]:
    """The number `local` of every rank of the group. Collective: one all_gather of 8 bytes, and the host
    waits for it.
    """
    if group.size == 1:
        return [local]
    out = torch.empty(group.size, dtype=torch.int64, device=device)
    comm.all_gather(out, torch.full((1,), local, dtype=torch.int64, device=device), group)
    return out.tolist()


def check_pieces(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, local: int | None = None
) -> None:
    """ValueError unless q, k, v are what a sequence-parallel attention takes; local: length that this rank
    must hold, None for any.

    q: (B, Hq, T, D), k: (B, Hkv, T, D), v: (B, Hkv, T, Dv) of one dtype, Hq a multiple of Hkv.
    """
    who = f"[rank {group.rank}/{group.size} of {group.name}] sequence-parallel attention"
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"{who}: {shapes}; all must be (batch, heads, local length, head size)")
    if q.shape[2] != k.shape[2] or k.shape[2] != v.shape[2]:
        raise ValueError(
            f"{who}: {shapes}; query and key lengths differ; cross-attention and key caches cannot be split"
        )
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{who}: {shapes}; batch, key heads and head size must agree")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{who}: {q.shape[1]} query heads and {k.shape[1]} key heads; the first must be a multiple of "
            "the second"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{who}: q is {q.dtype}, k {k.dtype}, v {v.dtype}; they must have one dtype")
    if local is not None and q.shape[2] != local:
        raise ValueError(
            f"{who}: this rank has {q.shape[2]} positions, sequence.lengths() says {local}; cut with "
            "sequence.cut()"
        )
