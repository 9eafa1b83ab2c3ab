"""The backward of plain modules in two parts: the gradient of the input now (B), the gradients of the weights
later (W).

    forward, under DeferWeights(store, i)   y = x @ w.T + b      as always; saves x and w
    backward (B)                            dx = dy @ w          the store keeps (w, x, dy), (b, dy) for
                                                                 microbatch i
    store.flush(i) (W)                      w.grad += dy.T @ x   b.grad += dy.sum(0)

A torch function mode sees each call whose weight is a leaf nn.Parameter that requires grad, of F.linear,
torch.addmm(b, x, w) (Conv1D of HF transformers), torch.matmul, torch.mm and `@` with the weight on the right,
and F.embedding, and runs it through an autograd.Function that returns no gradient for the weight. So no
module is rewritten, and a model needs to know nothing of it. All else (norms, convolutions, w used through a
view such as w.t()) goes through autograd and gets its weight gradient during B: right, but not postponed.

[Note: same bits] flush adds up the contributions of one parameter within the microbatch, in the order in
which backward met them, and adds that sum to .grad. Autograd does the same with a parameter that is used
several times. Where the mode handles every use of a parameter, its gradient has the bits of a plain backward;
where it does not handle one use of a tied weight, the terms are summed in another order.

Memory: x and dy of each call live from B to W, that is (in + out) * rows elements per weight in every
microbatch whose W is outstanding; the rest of the graph is freed by B. W needs no weight: its data may be
freed by then (ZeRO-3), or be of another version (PipeDream). The weight is saved by save_for_backward, as
autograd would, so that saved-tensor hooks, version checks and a `.data` that was exchanged behave as they do
without the mode.

Gradient hooks of a parameter do not see what is postponed; `on_grad` of the store is called instead. A second
derivative is refused. Calls with `out=`, alpha or beta, weights that are subclasses (DTensor), a bias
that is no leaf, and embeddings that are sparse, renormalised or scaled by frequency are left to autograd.

Source: the split is that of Qi et al. 2024 (zero bubble pipelines).
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx

from pycomm.parallel.given import Tree
from pycomm.parallel.ground.differentiable import once

__all__ = ["DeferWeights", "WeightStore", "accumulate_grad"]

Compute: TypeAlias = Callable[[], torch.Tensor]  # a contribution to a gradient
Accumulate: TypeAlias = Callable[[torch.nn.Parameter, torch.Tensor], None]


def accumulate_grad(param: torch.nn.Parameter, grad: torch.Tensor) -> None:
    """Adds into param.grad in place (it may be a view of a flat buffer), or makes it."""
    if param.grad is None:
        param.grad = grad
    else:
        param.grad.add_(grad)


class WeightStore:
    """The postponed weight gradients of the stages of one rank.

    A `microbatch` is a key; where several stages share a store it must name the stage too: (stage,
    microbatch). accumulate(param, grad): called once per parameter and flush with the sum of its
    contributions, of the shape that the parameter had in forward and of its dtype then; the default is
    accumulate_grad. on_grad(param): called right after it.
    """

    def __init__(
        self,
        accumulate: Accumulate = accumulate_grad,
        on_grad: Callable[[torch.nn.Parameter], None] | None = None,
    ) -> None:
        self.accumulate, self.on_grad = accumulate, on_grad
        self.pending: dict[Hashable, deque[tuple[torch.nn.Parameter, Compute]]] = {}  # by microbatch
        self.mode: DeferWeights | None = None  # the innermost that is active

    def add(self, microbatch: Hashable, param: torch.nn.Parameter, compute: Compute) -> None:
        self.pending.setdefault(microbatch, deque()).append((param, compute))

    @torch.no_grad()
    def flush(self, microbatch: Hashable) -> None:
        """Computes and accumulates what backward left of this microbatch, in the order in which backward met
        it; frees each x and dy.
        """
        entries = self.pending.pop(microbatch, deque())
        left: dict[int, int] = {}
        for param, _ in entries:
            left[id(param)] = left.get(id(param), 0) + 1
        sums: dict[int, torch.Tensor] = {}
        while entries:
            param, compute = entries.popleft()
            grad = compute()
            del compute
            grad = sums.pop(id(param)) + grad if id(param) in sums else grad
            left[id(param)] -= 1
            if left[id(param)]:
                sums[id(param)] = grad
                continue
            self.accumulate(param, grad)
            if self.on_grad is not None:
                self.on_grad(param)

    def forget(self) -> None:
        """After a step that raised: drops what it left."""
        self.pending.clear()

    def checkpoint_contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[DeferWeights | None]]:
        """For torch.utils.checkpoint(..., use_reentrant=False, context_fn=store.checkpoint_contexts).

        The recomputation, which happens during B, must save the same tensors as the forward did: it runs
        under the same mode.
        """
        again = contextlib.nullcontext() if self.mode is None else DeferWeights(self, self.mode.microbatch)
        return contextlib.nullcontext(), again


if TYPE_CHECKING:  # what a forward keeps for its backward

    class _OfProduct(FunctionCtx):
        saved_tensors: tuple[torch.Tensor, torch.Tensor]
        needs_input_grad: tuple[bool, ...]
        params: tuple[torch.nn.Parameter, torch.nn.Parameter | None]
        rest: tuple[bool, WeightStore, Hashable]

    class _OfEmbedding(FunctionCtx):
        saved_tensors: tuple[torch.Tensor]
        param: torch.nn.Parameter
        rest: tuple[int, int, WeightStore, Hashable]


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """tensor.to(dtype), which is not called where nothing is to be done: these run for every product."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _linear_grad(x: torch.Tensor, dy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _as(dy.t() @ _as(x, dy.dtype), dtype)


def _product_grad(x: torch.Tensor, dy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _as(_as(x, dy.dtype).t() @ dy, dtype)


def _bias_grad(dy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _as(dy.sum(0), dtype)


def _embedding_grad(
    indices: torch.Tensor, dy: torch.Tensor, num_rows: int, padding_idx: int, dtype: torch.dtype
) -> torch.Tensor:
    return torch.ops.aten.embedding_dense_backward(dy, indices, num_rows, padding_idx, False).to(dtype)


_once = once("a backward in two parts (zb-h1, zbv)", "use a plan with pp=1")


class _Product(torch.autograd.Function):
    """x @ weight, or x @ weight.T where `transposed`, plus bias, by the function that the model called."""

    @staticmethod
    def forward(
        ctx: _OfProduct,
        x: torch.Tensor,
        weight: torch.nn.Parameter,
        bias: torch.nn.Parameter | None,
        transposed: bool,
        store: WeightStore,
        microbatch: Hashable,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.params = weight, bias if bias is not None and bias.requires_grad else None
        ctx.rest = transposed, store, microbatch
        if transposed:
            return F.linear(x, weight, bias)
        return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    @_once
    def backward(
        ctx: _OfProduct, dy: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        param, bias = ctx.params
        transposed, store, microbatch = ctx.rest
        flat = dy.reshape(-1, dy.shape[-1])
        dx = None
        if ctx.needs_input_grad[0]:
            weight = _as(weight, dy.dtype)
            dx = _as((flat @ (weight if transposed else weight.t())).view(x.shape), x.dtype)
        compute = _linear_grad if transposed else _product_grad
        store.add(
            microbatch, param, functools.partial(compute, x.reshape(-1, x.shape[-1]), flat, param.dtype)
        )
        if bias is not None:
            store.add(microbatch, bias, functools.partial(_bias_grad, flat, bias.dtype))
        return dx, None, None, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _OfEmbedding,
        indices: torch.Tensor,
        weight: torch.nn.Parameter,
        padding_idx: int,
        store: WeightStore,
        microbatch: Hashable,
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.param, ctx.rest = weight, (weight.shape[0], padding_idx, store, microbatch)
        return F.embedding(indices, weight, None if padding_idx < 0 else padding_idx)

    @staticmethod
    @_once
    def backward(ctx: _OfEmbedding, dy: torch.Tensor) -> tuple[None, None, None, None, None]:
        (indices,) = ctx.saved_tensors
        num_rows, padding_idx, store, microbatch = ctx.rest
        store.add(
            microbatch,
            ctx.param,
            functools.partial(_embedding_grad, indices, dy, num_rows, padding_idx, ctx.param.dtype),
        )
        return None, None, None, None, None


def _is_weight(tensor: torch.Tensor, dims: int) -> TypeGuard[torch.nn.Parameter]:
    return (
        type(tensor) is torch.nn.Parameter
        and tensor.requires_grad
        and tensor.is_leaf
        and tensor.dim() == dims
        and not tensor._backward_hooks  # they see what autograd accumulates
    )


# What a call computes, from its arguments: (x, weight, bias, transposed).
_Read: TypeAlias = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None", bool]


# The parameters have torch's names, so that keywords fit; calls with others (out=, beta=) do not fit and are
# left alone.
def _of_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> _Read:
    return input, weight, bias, True


def _of_addmm(input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> _Read:
    return mat1, mat2, input, False


def _of_matmul(input: torch.Tensor, other: torch.Tensor) -> _Read:
    return input, other, None, False


def _of_mm(input: torch.Tensor, mat2: torch.Tensor) -> _Read:
    return input, mat2, None, False


_PRODUCTS: dict[Callable[..., torch.Tensor], Callable[..., _Read]] = {
    F.linear: _of_linear,
    torch.addmm: _of_addmm,
    torch.matmul: _of_matmul,
    torch.Tensor.matmul: _of_matmul,
    torch.Tensor.__matmul__: _of_matmul,
    torch.mm: _of_mm,
    torch.Tensor.mm: _of_mm,
}


# signature of F.embedding
def _of_embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, int] | None:
    """(indices, weight, padding_idx or -1), or None for a variant that is left to autograd."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        return None
    if padding_idx is None:
        return input, weight, -1
    return input, weight, padding_idx % weight.shape[0]


class DeferWeights(torch.overrides.TorchFunctionMode):
    """While active, calls with weights go on record for `microbatch` in `store`; see the head of this file.
    For the forward only.
    """

    def __init__(self, store: WeightStore, microbatch: Hashable) -> None:
        super().__init__()
        self.store, self.microbatch = store, microbatch
        self.outer: list[DeferWeights | None] = []

    def __enter__(self) -> DeferWeights:
        self.outer.append(self.store.mode)
        self.store.mode = self
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self.store.mode = self.outer.pop()
        return super().__exit__(*error)

    def __torch_function__(
        self,
        func: Callable[..., Tree],
        types: Sequence[type],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree:
        kwargs = kwargs or {}
        read = _PRODUCTS.get(func)
        if (read is not None or func is F.embedding) and torch.is_grad_enabled():
            call = self._embedding(args, kwargs) if read is None else self._product(read, args, kwargs)
            if call is not None:
                return call()
        return func(*args, **kwargs)

    def _product(
        self, read: Callable[..., _Read], args: Sequence[Tree], kwargs: Mapping[str, Tree]
    ) -> Callable[[], torch.Tensor] | None:
        try:
            x, weight, bias, transposed = read(*args, **kwargs)
        except TypeError:
            return None
        if not _is_weight(weight, 2) or not isinstance(x, torch.Tensor) or x.dim() < 2 or x.is_sparse:
            return None
        if (
            bias is not None
            and bias.requires_grad
            and not _is_weight(bias, 1)
            or bias is not None
            and bias.dim() != 1
        ):
            return None
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(
                torch.get_autocast_dtype(x.device.type)
            )  # here, and not within, so that the smaller copy is the one that is saved
        return functools.partial(_Product.apply, x, weight, bias, transposed, self.store, self.microbatch)

    def _embedding(
        self, args: Sequence[Tree], kwargs: Mapping[str, Tree]
    ) -> Callable[[], torch.Tensor] | None:
        try:
            call = _of_embedding(*args, **kwargs)
        except TypeError:
            return None
        if call is None or not _is_weight(call[1], 2):
            return None
        return functools.partial(_Embedding.apply, *call, self.store, self.microbatch)
