"""Attention masks on a split sequence. A mask is made before the blocks, from the whole sequence, on every
rank; it is not cut like other tensors of a block, since a rank's queries meet all keys:

    mask (1 or batch, 1 or heads, T or 1, T)        whole on every rank; it must reach attention whole

    ulysses     all positions, some heads           the rank's heads of it
    ring        its own queries, one block of       rows at the positions of the rank's queries, columns at
                keys at a time                      those of the block; a block that nobody sees is left out

A truth value says whether a query may attend to a key; a number is added to the score. A query that may
attend to nothing gets zeros and gives no gradient, as in torch. Where numbers say that (all of a row close to
the lowest number of the dtype, which torch takes as "all alike"), blocks cannot be merged exactly: refused.
A mask that needs a gradient (a learned bias) is refused too: its gradient would be in pieces.

Cost: no communication; T^2 elements on every rank, which the model makes itself. A call looks at them once:
what one function of this folder has checked, the next takes as it is (Mask).
"""

from typing import NamedTuple

import torch

from pycomm.parallel.sequence import split

__all__ = ["Mask", "block_of", "checked", "looks_like_mask", "of_heads"]


class Mask(NamedTuple):
    """A mask that has been checked. values: in four dimensions."""

    values: torch.Tensor


def looks_like_mask(value: torch.Tensor, length: int) -> bool:
    """Whether a tensor that a block is given has a value for each pair of positions, or for each key, in four
    dimensions.
    """
    return value.dim() == 4 and value.shape[3] == length and value.shape[2] in (1, length)


def checked(mask: torch.Tensor | Mask | None, q: torch.Tensor, is_causal: bool, length: int) -> Mask | None:
    """q: (batch, all query heads, ...). Raises ValueError for a mask that attention over `length` positions
    cannot take.
    """
    if mask is None or isinstance(mask, Mask):
        return mask
    shape, (batch, q_heads) = tuple(mask.shape), q.shape[:2]
    if is_causal:
        raise ValueError("attention takes is_causal=True or attn_mask, not both")
    fits = mask.dim() in (2, 3, 4) and shape[-1] == length and shape[-2] in (1, length)
    aside = (1,) * (4 - len(shape)) + shape
    if not fits or aside[0] not in (1, batch) or aside[1] not in (1, q_heads):
        raise ValueError(
            f"attn_mask of shape {shape} is not that of the whole sequence, (1 or {batch}, 1 or {q_heads}, "
            f"1 or {length}, {length}): the model has cut it, or made it from a piece; use is_causal=True or "
            "no mask"
        )
    if mask.requires_grad:
        raise ValueError(f"attn_mask of shape {shape} needs a gradient, which would be in pieces")
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            raise ValueError(f"attn_mask is {mask.dtype}; it must be bool or floating point")
        top, lowest = mask.amax(-1), torch.finfo(mask.dtype).min / 2
        if bool(((top < lowest) & (top > -torch.inf)).any()):
            raise ValueError(
                "attn_mask has a query that may attend to no key, said by numbers; say it by -inf or by "
                "truth values, or give no such query"
            )
    return Mask(mask.reshape(aside))


def of_heads(mask: Mask, heads: split.Span) -> Mask:
    """The rank's query heads (start, stop) of it."""
    values = mask.values
    return Mask(values[:, heads[0] : heads[1]]) if values.shape[1] > 1 else mask


def block_of(mask: Mask, q_spans: split.Spans, k_spans: split.Spans) -> torch.Tensor | None:
    """Its part for the queries at some positions and the keys at others. None where nobody sees anything,
    which only truth values on a CPU tell.
    """
    values = mask.values
    rows = values if values.shape[2] == 1 else split.cut(values, 2, q_spans)
    part = split.cut(rows, 3, k_spans)
    if part.dtype == torch.bool and part.device.type == "cpu" and not bool(part.any()):
        return None
    return part
