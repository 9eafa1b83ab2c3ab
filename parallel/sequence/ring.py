"""Ring attention: every rank keeps its queries while the blocks of keys and values travel around the ring;
the softmax is merged on the way.

    step       rank 0    rank 1    rank 2    rank 3
    0 (own)    kv 0      kv 1      kv 2      kv 3      each block goes to the next rank while attention to it
    1          kv 3      kv 0      kv 1      kv 2      is computed: isend and irecv are posted before the
    2          kv 2      kv 3      kv 0      kv 1      compute and waited for after it
    3          kv 1      kv 2      kv 3      kv 0

Causal, zigzag (split.py): rank r holds chunks r and 2R-1-r. Which chunks of the queries (rows) see which of
the keys, R = 2:

    own block, rank 0     block of an earlier rank (1 <- 0)     block of a later rank (0 <- 1)
           k0  k3                k0  k3                                k1  k2
      q0    \\   .            q1   #   .     all queries,          q0    .   .     late half of the queries,
      q3    #   \\            q2   #   .     early half of keys    q3    #   #     all keys

# is a full square, \\ a triangle, . nothing. Positions increase along the local piece, so the own block is
one plain causal call, and every other is one full rectangle of two chunk squares: no mask is made, and all
ranks do equal work in each step. tiles() finds these from the positions alone, for all lengths, uneven chunks
and contiguous pieces (there the first rank idles in all steps but one).

Backward goes around again: blocks are recomputed from lse (block.py), dq stays, and the gradients of a block
follow it one step behind, each rank adding its own, until they come home; the owner adds its own part last.
The order of every sum is fixed: the bits are the same in each run.

A sink is one more score of each head, of a key without value (gpt-oss): it is merged after the last block,
lse' = log(exp lse + exp sink), and needs nothing of other ranks.

Cost per rank, n elements in k and v of a piece, R ranks: forward R-1 sends of n; backward R-1 sends of n and
R-1 of n gradients in the accumulation type (fp32 for 16-bit inputs). With GQA n counts key heads only.
Memory: own piece, two blocks on the way, no full sequence.

Deadlock. A large send waits for its recv (docs/decisions/0028), and NCCL runs what two ranks post to each
other in order: so even ranks post the send first and odd ranks the recv. Empty messages are not sent, and
both sides know the lengths.

What can go wrong: pieces cut by another rule than split.py's give wrong masks; lengths are checked, contents
cannot be.
Source: Liu et al., Ring Attention, 2023; zigzag: see split.py; Brandon et al., Striped Attention, 2023, is
the alternative: it balances as well but every block then needs a triangular mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from pycomm.parallel.ground import comm, differentiable
from pycomm.parallel.sequence import block, split
from pycomm.parallel.sequence.mask import Mask, block_of, checked, of_heads
from pycomm.parallel.sequence.ulysses import through_heads, ulysses_attention

if TYPE_CHECKING:
    import torch.distributed as dist

    from pycomm.parallel.ground.comm import Group

__all__ = ["ring_attention", "ring_ulysses_attention"]


class Tile(NamedTuple):
    """Local query rows start..stop see the local keys 0..keys of a block; causal: row start+i only
    keys 0..i.
    """

    start: int
    stop: int
    keys: int
    causal: bool


def tiles(q_spans: split.Spans, k_spans: split.Spans, causal: bool) -> list[Tile]:
    """What must be computed of a block, none of it empty. Spans of two ranks are equal or disjoint."""
    rows, keys = (sum(stop - start for start, stop in spans) for spans in (q_spans, k_spans))
    if not rows or not keys:
        return []
    if not causal or q_spans == k_spans:
        return [Tile(0, rows, keys, causal)]
    out: list[Tile] = []
    offset = 0
    for start, stop in q_spans:
        seen = sum(last - first for first, last in k_spans if last <= start)
        if seen and out and out[-1].stop == offset and out[-1].keys == seen:
            out[-1] = out[-1]._replace(stop=offset + stop - start)
        elif seen:
            out.append(Tile(offset, offset + stop - start, seen, False))
        offset += stop - start
    return out


class _RingSpec(NamedTuple):
    """spans: of every ring rank. mask: of the whole sequence."""

    group: comm.Group
    spans: tuple[split.Spans, ...]
    causal: bool
    made: block.Scores
    mask: Mask | None = None

    def source(self, step: int) -> int:
        """Whose block is here in this step."""
        return (self.group.rank - step) % self.group.size

    def tiles(self, source: int) -> list[tuple[Tile, torch.Tensor | None]]:
        """Each with the mask of its rows and keys."""
        mine, theirs = self.spans[self.group.rank], self.spans[source]
        found = tiles(mine, theirs, self.causal)
        if self.mask is None or not found:
            return [(tile, None) for tile in found]
        mask = block_of(self.mask, mine, theirs)  # without causal there is one tile, of all
        return [] if mask is None else [(found[0], mask)]

    def length(self, source: int) -> int:
        return sum(stop - start for start, stop in self.spans[source])


def _width(k: torch.Tensor, v: torch.Tensor) -> int:
    """Elements of k and v at one position."""
    return k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])


def _pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """k and v as one flat tensor: one message."""
    flat = k.new_empty(k.numel() + v.numel())
    flat[: k.numel()].view(k.shape).copy_(k)
    flat[k.numel() :].view(v.shape).copy_(v)
    return flat


def _unpack(
    flat: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v of a block of `length`, as views; k, v: tensors of the same shapes but for the length."""
    k_shape, v_shape = (torch.Size((*x.shape[:2], length, x.shape[3])) for x in (k, v))
    return flat[: k_shape.numel()].view(k_shape), flat[k_shape.numel() :].view(v_shape)


def _pass_on(flat: torch.Tensor, count: int, group: Group) -> tuple[list[comm.Work], torch.Tensor]:
    """Starts to send `flat` to the next rank and to receive `count` elements from the one before. Returns the
    works, and what will have come.
    """
    incoming = flat.new_empty(count)
    works = []
    for sends in (True, False) if group.rank % 2 == 0 else (False, True):
        if sends and flat.numel():
            works.append(comm.isend(flat, (group.rank + 1) % group.size, group))
        elif not sends and count:
            works.append(comm.irecv(incoming, (group.rank - 1) % group.size, group))
    return works, incoming


def _wait(works: Iterable[comm.Work]) -> None:
    for work in works:
        work.wait()


def _blocks(k: torch.Tensor, v: torch.Tensor, spec: _RingSpec) -> Iterator[tuple[int, torch.Tensor]]:
    """(source, flat block) of every step; the next block travels between one yield and the next."""
    flat = _pack(k, v)
    for step in range(spec.group.size):
        works: Sequence[comm.Work] = ()
        incoming = flat  # in the last step nothing comes
        if step + 1 < spec.group.size:
            works, incoming = _pass_on(flat, _width(k, v) * spec.length(spec.source(step + 1)), spec.group)
        yield spec.source(step), flat
        _wait(works)
        flat = incoming


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: _RingSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in the accumulation type."""
    wide = block.wide_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)  # until a block is seen
    queries = q.to(wide)
    for source, flat in _blocks(k, v, spec):
        k_block, v_block = _unpack(flat, k, v, spec.length(source))
        for tile, mask in spec.tiles(source) if q.numel() else ():
            rows, keys = slice(tile.start, tile.stop), slice(tile.keys)
            part = block.forward(
                queries[:, :, rows],
                k_block[:, :, keys].to(wide),
                v_block[:, :, keys].to(wide),
                tile.causal,
                spec.made,
                mask if mask is None or mask.dtype == torch.bool else mask.to(wide),
            )
            if source == spec.group.rank:  # the first, and it covers all rows
                out, lse = part
            else:
                block.merge(out[:, :, rows], lse[:, :, rows], *part)
    return out, lse


def _backward(rows: block.Rows, k: torch.Tensor, v: torch.Tensor, spec: _RingSpec) -> block.Gradients:
    """In the accumulation type. rows: all of this rank."""
    wide, group = rows.q.dtype, spec.group
    dq = torch.zeros_like(rows.q)
    own: torch.Tensor | None = None
    works: Sequence[comm.Work] = ()
    incoming: torch.Tensor | None = None
    for step, (source, flat) in enumerate(_blocks(k, v, spec)):
        k_block, v_block = _unpack(flat, k, v, spec.length(source))
        grads = torch.zeros_like(flat, dtype=wide)
        dk_block, dv_block = _unpack(grads, k, v, spec.length(source))
        for tile, mask in spec.tiles(source) if rows.q.numel() else ():
            here, keys = slice(tile.start, tile.stop), slice(tile.keys)
            kv = k_block[:, :, keys].to(wide), v_block[:, :, keys].to(wide)
            seen = mask if mask is None or mask.dtype == torch.bool else mask.to(wide)
            part = block.backward(rows.part(here), *kv, tile.causal, spec.made, seen)
            totals = dq[:, :, here], dk_block[:, :, keys], dv_block[:, :, keys]
            for total, piece in zip(totals, part, strict=True):
                total += piece
        if step == 0:
            own = grads
            continue
        _wait(works)  # of the step before: its send reads `outgoing`
        if incoming is not None:
            grads += incoming
        outgoing = grads
        works, incoming = _pass_on(outgoing, _width(k, v) * spec.length(spec.source(step + 1)), group)
    _wait(works)
    assert own is not None  # from the first step on
    if incoming is not None:
        own += incoming
    return block.Gradients(dq, *_unpack(own, k, v, k.shape[2]))


def _add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """In place. sinks: (heads,)."""
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
        out.mul_((lse - total).exp_().unsqueeze(-1))
        lse.copy_(total)


def _grad_of_sinks(rows: block.Rows, sinks: torch.Tensor) -> torch.Tensor:
    """The gradient of the share that sinks take of all rows, (heads,)."""
    share = (sinks.to(rows.lse.dtype).unsqueeze(-1) - rows.lse).exp_()
    return -((rows.dout * rows.out).sum(-1) * share).sum((0, 2))


T = torch.Tensor


class _Context(Protocol):
    spec: _RingSpec
    saved_tensors: tuple[T, T, T, T | None, T, T, T]

    def save_for_backward(self, *tensors: T | None) -> None: ...


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        spec: _RingSpec,
    ) -> torch.Tensor:
        with torch.autocast(q.device.type, enabled=False):  # the products here are in the accumulation type
            out, lse = _forward(q, k, v, spec)
            _add_sinks(out, lse, sinks)
        # the last one makes this differ from what torch's own attention saves, so that a checkpoint
        # recomputed with that one is an error
        ctx.save_for_backward(q, k, v, sinks, out, lse, q.new_empty(0))
        ctx.spec = spec
        return out.to(q.dtype)

    @staticmethod
    @differentiable.once("ring attention", "use a plan without ring, as tp")
    def backward(ctx: _Context, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse, _ = ctx.saved_tensors
        wide = block.wide_dtype(q.dtype)
        with torch.autocast(q.device.type, enabled=False):
            rows = block.Rows(q.to(wide), out, lse, dout.to(wide).contiguous())
            grads = _backward(rows, k, v, ctx.spec)
            of_sinks = None if sinks is None else _grad_of_sinks(rows, sinks).to(sinks.dtype)
        return *(grad.to(q.dtype) for grad in grads), of_sinks, None


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group | dist.ProcessGroup | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    zigzag: bool | None = None,
    length: int | None = None,
    attn_mask: torch.Tensor | Mask | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over the sequence whose pieces the ranks of `group` hold, as split.positions(length, group,
    one rank, zigzag) says.

    q: (B, Hq, T_local, D), k: (B, Hkv, T_local, D), v: (B, Hkv, T_local, Dv), of one floating dtype, Hq a
    multiple of Hkv; B, heads and D equal on all ranks. Returns (B, Hq, T_local, Dv). Collective on the group;
    so is its backward.
    group: None: the default group. scale: of the scores, 1/sqrt(D) by default.
    zigzag: how the pieces are cut; by default as is_causal, since only a causal mask needs the balance.
    length: of the whole sequence; without it one all_gather of 8 bytes asks for the pieces, and the host
    waits. attn_mask: of the whole sequence, the same on all ranks, (T, T) or (1 or B, 1 or Hq, T or 1, T):
    bool or numbers to add (mask.py); not with is_causal.
    softcap: c, which makes c tanh(s/c) of a score before the mask. sinks: (Hq,), a score of each head to
    which no value belongs. Both are Gemma Team 2024 and Agarwal et al. 2025 (gpt-oss).
    ValueError: shapes or dtypes that do not fit, pieces of other lengths than split.py gives. Source: Liu et
    al. 2023.
    """
    ring = comm.as_group(group, "ring")
    zigzag = is_causal if zigzag is None else zigzag
    split.check_pieces(q, k, v, ring)
    if length is None:
        sizes = split.exchange_lengths(q.shape[2], ring, q.device)
        length = sum(sizes)
        expected = [row[0] for row in split.lengths(length, ring, comm.ALONE, zigzag)]
        if sizes != expected:
            who = f"[rank {ring.rank}/{ring.size} of {ring.name}] ring_attention"
            way = (
                "contiguous pieces"
                if not zigzag
                else "zigzag=False, or pieces as sequence.positions(..., zigzag=True) gives them"
            )
            raise ValueError(
                f"{who}: the ranks hold {sizes} positions, a sequence of {length} is cut into {expected}; "
                f"use {way}"
            )
    split.check_pieces(q, k, v, ring, split.local_length(length, ring, comm.ALONE, zigzag))
    spans = tuple(split.ring_spans(length, ring.size, rank, zigzag) for rank in range(ring.size))
    mask = checked(attn_mask, q, is_causal, length)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    spec = _RingSpec(ring, spans, is_causal, block.Scores(scale, softcap), mask)
    return _Ring.apply(q, k, v, sinks, spec)


def ring_ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ring: Group | dist.ProcessGroup | None = None,
    ulysses: Group | dist.ProcessGroup | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    zigzag: bool | None = None,
    length: int | None = None,
    attn_mask: torch.Tensor | Mask | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over a sequence cut over ring x ulysses (split.positions): all-to-all inside `ulysses`,
    blocks around `ring`.

    Arguments, result and errors as in ring_attention; a group of None is this rank alone. In a ring of one,
    zigzag is without effect. The ulysses group should be the one with the faster links: its volume does not
    hide behind compute.
    Source: Fang and Zhao, USP, 2024.
    """
    outer = comm.ALONE if ring is None else comm.as_group(ring, "ring")
    inner = comm.ALONE if ulysses is None else comm.as_group(ulysses, "ulysses")
    zigzag = is_causal if zigzag is None else zigzag
    if length is None:
        inside = sum(split.exchange_lengths(q.shape[-2], inner, q.device))
        length = sum(split.exchange_lengths(inside, outer, q.device))
    sizes = split.ulysses_sizes(length, outer, inner, zigzag)
    if outer.size == 1 and softcap is None and sinks is None:
        return ulysses_attention(
            q, k, v, inner, is_causal=is_causal, scale=scale, sizes=sizes, attn_mask=attn_mask
        )
    split.check_pieces(q, k, v, inner, sizes[inner.rank])
    mask = checked(attn_mask, q, is_causal, length)

    def around(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: split.Span, enable_gqa: bool
    ) -> torch.Tensor:
        return ring_attention(
            q,
            k,
            v,
            outer,
            is_causal=is_causal,
            scale=scale,
            zigzag=zigzag,
            length=length,
            attn_mask=None if mask is None else of_heads(mask, heads),
            softcap=softcap,
            sinks=None if sinks is None else sinks[heads[0] : heads[1]],
        )

    return through_heads(q, k, v, inner, around, sizes)
