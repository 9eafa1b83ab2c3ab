"""SequenceAttention: a model's own calls of F.scaled_dot_product_attention, computed over the whole sequence
while each rank runs its piece.

    model(x piece)
      F.scaled_dot_product_attention(q, k, v)              with q, k, v of this rank's positions
        SequenceAttention.__torch_function__
          ring_ulysses_attention(q, k, v, ring, ulysses)

A TorchFunctionMode sees every call of torch's Python API in the block `with mode:`; it changes attention and
passes on the rest, so that the model's code stays as it is. Cost: that of ring.py and ulysses.py, and about a
microsecond of host time per torch call.

[Note: calls inside calls] While a mode handles a call, torch has switched that mode off, so attention inside
F.multi_head_attention_forward (all of nn.MultiheadAttention) or inside backward() (recomputed checkpoints)
would not be seen. These functions are run as copies that do not ask whether a mode is active, with the mode
switched on again.

[Note: recomputation] torch.utils.checkpoint runs the forward again in backward, where the mode must be active
with the same `length`, or else the rank would attend to its own piece alone, silently. Two ways, which may be
used together:
    - checkpoint(block, x, use_reentrant=False, context_fn=mode.context_fn), which also keeps the length of
      its own forward: what a pipeline with several microbatches under way needs;
    - loss.backward() inside `with mode:` (torch hands modes on to the threads of autograd); the only way with
      use_reentrant=True.
Forgetting both fails with use_reentrant=False, as what is saved is different then; with use_reentrant=True
nothing can tell.

What can go wrong: attention that a model computes without F.scaled_dot_product_attention (its own softmax,
flex_attention) is not seen and stays local, but for the eager one of transformers (eager.py), which comes to
attend() by itself. `calls` counts what was seen, so that the caller can tell. Masks
are those of the whole sequence (mask.py). Source: the mode is torch.overrides; the attention Fang and Zhao,
USP, 2024.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NoReturn, TypedDict, cast

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from pycomm.parallel.sequence.mask import checked
from pycomm.parallel.sequence.ring import ring_ulysses_attention

if TYPE_CHECKING:
    from typing_extensions import Required

    from pycomm.parallel.given import Tree
    from pycomm.parallel.ground.comm import Group

__all__ = ["UNASKING", "SequenceAttention"]


class Options(TypedDict, total=False):
    """Of F.scaled_dot_product_attention (the first two) and of ring_ulysses_attention."""

    dropout_p: Required[float]
    enable_gqa: Required[bool]
    is_causal: Required[bool]
    scale: Required[float | None]
    softcap: float | None
    sinks: torch.Tensor | None


def _unasking(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """A copy of a Python function of torch to which no mode and no tensor subclass is ever active."""
    names = {name: lambda *tensors: False for name in ("has_torch_function", "has_torch_function_unary")}
    written = cast(types.FunctionType, function)
    copy = types.FunctionType(
        written.__code__, {**written.__globals__, **names}, written.__name__, written.__defaults__
    )
    copy.__kwdefaults__ = written.__kwdefaults__
    return copy


ATTENTION, MULTI_HEAD = F.scaled_dot_product_attention, F.multi_head_attention_forward
_ASKING = (MULTI_HEAD, torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
UNASKING: dict[Callable[..., Tree], Callable[..., Tree]] = {each: _unasking(each) for each in _ASKING}


class _PerThread(threading.local):
    """inside: one of our attentions is being computed."""

    inside = False


class _Again:
    """The mode active once more, with the length of another time. It can be entered again: retain_graph can
    make torch recompute twice.
    """

    def __init__(self, mode: SequenceAttention, length: int | None) -> None:
        self.mode, self.length = mode, length

    def __enter__(self) -> None:
        self.before, self.mode.length = self.mode.length, self.length
        self.mode.__enter__()

    def __exit__(self, *error: object) -> None:
        self.mode.__exit__(*error)
        self.mode.length = self.before


class SequenceAttention(TorchFunctionMode):
    """While active, F.scaled_dot_product_attention attends over the whole sequence that the ranks of ring x
    ulysses hold pieces of.

    ring, ulysses: of one rank where unused. zigzag: the ring's cut (split.py); without effect in a ring of
    one.
    length: the whole length of the sequence of the coming forward; set by the caller. calls: how many
    attentions were computed so far.

    Raises ValueError at an attention with dropout, a mask of another shape than the whole sequence's, keys of
    another length than the queries or pieces of another length than split.lengths() says. q, k, v may be
    (B, H, T, D) or (H, T, D).
    """

    def __init__(self, ring: Group, ulysses: Group, zigzag: bool) -> None:
        super().__init__()
        self.ring, self.ulysses, self.zigzag = ring, ulysses, zigzag
        self.length: int | None = None
        self.calls = 0
        self._thread = _PerThread()

    def __torch_function__(
        self,
        func: Callable[..., Tree],
        classes: Collection[type[torch.Tensor]],
        args: tuple[Tree, ...] = (),
        kwargs: dict[str, Tree] | None = None,
    ) -> Tree:
        kwargs = kwargs or {}
        if self._thread.inside:
            # Active twice (see [Note: recomputation]): the outer one has done the work.
            return func(*args, **kwargs)
        if func is ATTENTION:
            return self._attention(*args, **kwargs)
        if func is MULTI_HEAD and kwargs.get("need_weights", True):
            self._refuse("MultiheadAttention computes weights; call it with need_weights=False")
        if func in UNASKING:
            with self:
                return UNASKING[func](*args, **kwargs)
        return func(*args, **kwargs)

    def context_fn(
        self,
    ) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """For torch.utils.checkpoint's argument of this name: (context of the forward, context of the
        recomputation).
        """
        return contextlib.nullcontext(), _Again(self, self.length)

    def _refuse(self, what: str) -> NoReturn:
        ring, ulysses = (
            f"rank {group.rank}/{group.size} of {group.name}" for group in (self.ring, self.ulysses)
        )
        raise ValueError(f"[{ring}, {ulysses}] scaled_dot_product_attention on a split sequence: {what}")

    # signature of F.scaled_dot_product_attention
    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        options: Options = {
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "enable_gqa": enable_gqa,
            "scale": scale,
        }
        return self.attend(query, key, value, attn_mask, options)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        options: Options,
    ) -> torch.Tensor:
        """Attention of this rank's queries over the whole sequence."""
        dropout_p, is_causal = options["dropout_p"], options["is_causal"]
        if dropout_p:
            self._refuse(
                f"dropout of attention weights (dropout_p={dropout_p}) is not supported; set it to 0 (that "
                "of activations may stay)"
            )
        if self.length is None:
            self._refuse(
                "the length of the whole sequence is not known before the first block, so there can be no "
                "attention (an encoder in front of a decoder's blocks); in a forward of your own, set "
                "SequenceAttention.length before it"
            )
        if query.dim() != key.dim() or query.dim() not in (3, 4):
            self._refuse(
                f"query {tuple(query.shape)}, key {tuple(key.shape)}; both must be (batch, heads, T, D) or "
                "(heads, T, D)"
            )
        # A head alone is for all by broadcast.
        if query.shape[-3] != key.shape[-3] != 1 and not options["enable_gqa"]:
            self._refuse(f"{query.shape[-3]} query heads and {key.shape[-3]} key heads; pass enable_gqa=True")
        if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (x.to(dtype) for x in (query, key, value))
        batch = query.dim() == 4
        query, key, value = (x if batch else x.unsqueeze(0) for x in (query, key, value))
        if attn_mask is not None and not batch and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(0)
        try:
            mask = checked(attn_mask, query, is_causal, self.length)
        except ValueError as error:
            self._refuse(str(error))
        self.calls += 1
        self._thread.inside = True
        try:
            out = ring_ulysses_attention(
                query,
                key,
                value,
                self.ring,
                self.ulysses,
                is_causal=is_causal,
                scale=options["scale"],
                zigzag=self.zigzag,
                length=self.length,
                attn_mask=mask,
                softcap=options.get("softcap"),
                sinks=options.get("sinks"),
            )
        finally:
            self._thread.inside = False
        return out if batch else out.squeeze(0)
