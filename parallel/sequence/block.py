"""Attention of some queries to one block of keys, with what is needed to merge blocks exactly: the rows'
log-sum-exp.

With S = scale * q k^T, over the keys of block b and over all keys:

    lse_b = log sum_b exp S        out_b = sum_b exp(S - lse_b) v
    lse   = log sum_b exp lse_b    out   = sum_b exp(lse_b - lse) out_b               forward: merge()
    P_b   = exp(S - lse)           dv = P^T dout                                      backward;
                                   dS = P * (dout v^T - delta)       delta = rowsum(dout * out)
                                   dq = scale dS k  dk = scale dS^T q

A soft cap c makes S = c tanh(scale * q k^T / c) of it, and dq, dk get the factor 1 - (S/c)^2.

The backward of a block needs out and lse of the whole row and no other block, so that blocks are recomputed
one at a time. No exponent is ever positive but by rounding, whatever the size of the scores.

Everything here is in the accumulation type: fp64 for fp64, else fp32; 16-bit inputs are widened block by
block and rounded once at the end, since rounding each block's result (what fused kernels of one device do)
makes an error that grows with the number of blocks.

Two kernels, chosen by what the tensors are: on CPU torch's flash kernel, which returns lse and does not write
S to memory (1.8 times as fast as the other at 512 x 512, head size 64, one core), where the head sizes of q
and v are equal and nothing caps the scores; else plain matrix products, which hold S. The plain one takes
STRIP query rows at a time, so that its memory grows with the keys and not with their square.

What can go wrong: flash on CPU divides by zero on an empty tensor (a signal, not an error), so callers leave
empty blocks out.
Source: Dao et al., FlashAttention, 2022 (the gradient through lse); Milakov and Gimelshein 2018 (online
softmax).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

__all__ = ["Rows", "Scores", "backward", "forward", "merge", "wide_dtype"]

STRIP = 1024  # query rows at a time in the plain kernel; not tuned on a device
_NAME = "_scaled_dot_product_flash_attention_for_cpu"


class _Flash(NamedTuple):
    """torch's kernel on CPU."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _flash() -> _Flash | None:
    """None where this torch has none."""
    forward, backward = (getattr(torch.ops.aten, name, None) for name in (_NAME, f"{_NAME}_backward"))
    return None if forward is None or backward is None else _Flash(forward, backward)


FLASH = _flash()


class Rows(NamedTuple):
    """What backward needs of some query rows, in the accumulation type."""

    q: torch.Tensor  # (B, Hq, Tq, D)
    out: torch.Tensor  # (B, Hq, Tq, Dv), over all keys
    lse: torch.Tensor  # (B, Hq, Tq), over all keys
    dout: torch.Tensor  # gradient of out

    def part(self, rows: slice) -> Rows:
        return Rows(*(x[:, :, rows] for x in self))


class Scores(NamedTuple):
    """How scores are made of products: scale, then a soft cap, None for none."""

    scale: float
    cap: float | None = None

    def of(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(q, k.mT).mul_(self.scale)
        return scores if self.cap is None else scores.div_(self.cap).tanh_().mul_(self.cap)


class Gradients(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class _Strip(NamedTuple):
    """Query rows [start, stop) of the plain kernel."""

    start: int
    stop: int
    keys: int  # that these rows can see
    seen: torch.Tensor | None  # mask of them


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _flash_for(q: torch.Tensor, v: torch.Tensor, made: Scores) -> _Flash | None:
    """None: the plain kernel."""
    fits = q.device.type == "cpu" and made.cap is None and q.shape[3] == v.shape[3]
    return FLASH if fits else None


def _strips(q: torch.Tensor, k: torch.Tensor, causal: bool, mask: torch.Tensor | None) -> Iterator[_Strip]:
    rows = q.shape[2]
    for start in range(0, rows, STRIP):
        stop = min(start + STRIP, rows)
        keys = stop if causal else k.shape[2]
        seen = mask
        if causal:
            seen = torch.ones(stop - start, keys, dtype=torch.bool, device=q.device).tril_(start)
        elif mask is not None and mask.shape[2] > 1:
            seen = mask[:, :, start:stop]
        yield _Strip(start, stop, keys, seen)


def _masked(scores: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """In place."""
    if seen is None:
        return scores
    return scores.masked_fill_(~seen, -torch.inf) if seen.dtype == torch.bool else scores.add_(seen)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """0 in the place of the -inf of a row that sees nothing: what is subtracted from its scores of -inf."""
    return lse.masked_fill(lse == -torch.inf, 0)


def _plain_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, made: Scores, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3])
    for start, stop, keys, seen in _strips(q, k, causal, mask):
        scores = _masked(made.of(q[:, :, start:stop], k[:, :, :keys]), seen)
        row_lse = scores.logsumexp(-1)
        weights = scores.sub_(_finite(row_lse).unsqueeze(-1)).exp_()
        out[:, :, start:stop] = torch.matmul(weights, v[:, :, :keys])
        lse[:, :, start:stop] = row_lse
    return out, lse


def _plain_backward(
    rows: Rows, k: torch.Tensor, v: torch.Tensor, causal: bool, made: Scores, mask: torch.Tensor | None
) -> Gradients:
    dq, dk, dv = torch.empty_like(rows.q), torch.zeros_like(k), torch.zeros_like(v)
    for start, stop, keys, seen in _strips(rows.q, k, causal, mask):
        q, out, lse, dout = rows.part(slice(start, stop))
        scores = made.of(q, k[:, :, :keys])
        slope = made.scale if made.cap is None else (scores / made.cap).square_().neg_().add_(1) * made.scale
        probabilities = _masked(scores, seen).sub_(_finite(lse).unsqueeze(-1)).exp_()
        dv[:, :, :keys] += torch.matmul(probabilities.mT, dout)
        delta = (dout * out).sum(-1, keepdim=True)
        dscores = torch.matmul(dout, v[:, :, :keys].mT).sub_(delta).mul_(probabilities).mul_(slope)
        dq[:, :, start:stop] = torch.matmul(dscores, k[:, :, :keys])
        dk[:, :, :keys] += torch.matmul(dscores.mT, q)
    return Gradients(dq, dk, dv)


def _fold(tensor: torch.Tensor, k_heads: int) -> torch.Tensor:
    """(B, Hq, T, ...) -> (B, Hkv, Hq/Hkv * T, ...): the queries of one key head as rows of one matrix, so
    that k is not repeated.
    """
    return tensor.reshape(tensor.shape[0], k_heads, -1, *tensor.shape[3:])


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    made: Scores,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one block. q: (B, Hq, Tq, D), k: (B, Hkv, Tk, D), v: (B, Hkv, Tk, Dv), not empty, in the
    accumulation type.

    causal: query i sees keys 0..i (then Tq = Tk), else all. mask, not with causal: (1 or B, 1 or Hq, 1 or Tq,
    Tk), truth values or numbers in the accumulation type to add.
    out: (B, Hq, Tq, Dv), lse: (B, Hq, Tq); 0 and -inf for rows that see nothing.
    """
    shape, k_heads = q.shape[:3], k.shape[1]
    shared = shape[1] // k_heads
    if shared > 1 and (causal or mask is not None):
        # Folded rows would have no triangular mask.
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    elif shared > 1:
        q = _fold(q, k_heads)
    flash = _flash_for(q, v, made) if mask is None else None
    if flash is not None:
        out, lse = flash.forward(q, k, v, 0.0, causal, scale=made.scale)
    else:
        out, lse = _plain_forward(q, k, v, causal, made, mask)
    return out.reshape(*shape, -1), lse.reshape(shape)


def backward(
    rows: Rows, k: torch.Tensor, v: torch.Tensor, causal: bool, made: Scores, mask: torch.Tensor | None = None
) -> Gradients:
    """What comes from one block; arguments as in forward()."""
    q_shape, k_shape, v_shape = rows.q.shape, k.shape, v.shape
    shared = q_shape[1] // k_shape[1]
    repeats = shared > 1 and (causal or mask is not None)
    if repeats:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    elif shared > 1:
        rows = Rows(*(_fold(x, k_shape[1]) for x in rows))
    flash = _flash_for(rows.q, v, made) if mask is None else None
    if flash is not None:
        q, out, lse, dout = rows
        dq, dk, dv = flash.backward(dout, q, k, v, out, lse, 0.0, causal, scale=made.scale)
    else:
        dq, dk, dv = _plain_backward(rows, k, v, causal, made, mask)
    if repeats:
        dk, dv = (x.unflatten(1, (k_shape[1], shared)).sum(2) for x in (dk, dv))
    return Gradients(dq.reshape(q_shape), dk.reshape(k_shape), dv.reshape(v_shape))


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """out, lse of some keys and of some others -> of both, in place in out and lse."""
    both = torch.logaddexp(lse, part_lse)
    top = _finite(both)  # -inf where neither sees anything
    out.mul_((lse - top).exp_().unsqueeze(-1)).add_(part * (part_lse - top).exp_().unsqueeze(-1))
    lse.copy_(both)
