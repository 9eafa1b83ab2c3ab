"""Checks of the arguments of pycomm.fused, and what follows from them: the Problem and the shape of the
result.

All that is looked at are shapes, dtypes, devices and lists of lengths, so the outcome is remembered: a model
passes the same ones in each step.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypedDict

import torch

from pycomm.fused.problem import ACTIVATIONS, Problem
from pycomm.groups import even_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pycomm.fused.problem import Activation, Op
    from pycomm.fused.ranks import Ranks

__all__ = ["DTYPES", "Cut", "Plan", "plan"]

DTYPES = {
    "cpu": (torch.float32, torch.float16, torch.bfloat16, torch.float64),
    "cuda": (torch.float32, torch.float16, torch.bfloat16),
}


class Cut(TypedDict, total=False):
    """What an operation that cuts rows, or a shared dimension, is told of that. None: the default."""

    dim: int
    sizes: Sequence[int] | None
    shards: Sequence[int] | None


# Makes the error of a text, and of its kind.
_Wrong: TypeAlias = "Callable[..., Exception]"


class Facts(NamedTuple):
    """Of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Plan(NamedTuple):
    """problem; rows: of a as a matrix; shape: of the result."""

    problem: Problem
    rows: int
    shape: tuple[int, ...]


def plan(
    op: Op,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    ranks: Ranks,
    *,
    dim: int | None = None,
    sizes: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
) -> Plan:
    """Raises ValueError or TypeError, with the rank, for what does not fit; dim None: op cuts no rows."""
    tensors = {"a": a, "b": b} if bias is None else {"a": a, "b": b, "bias": bias}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{ranks} {op}: {name} must be a torch tensor, not {type(x).__name__}")
    facts = tuple([(name, Facts(x.shape, x.dtype, x.device)) for name, x in tensors.items()])
    sizes = None if sizes is None else tuple(map(int, sizes))
    shards = None if shards is None else tuple(map(int, shards))
    return _plan(op, facts, activation, (ranks.rank, ranks.size), (dim, sizes, shards))


@functools.lru_cache(4096)
def _plan(
    op: Op,
    tensors: tuple[tuple[str, Facts], ...],
    activation: Activation | None,
    place: tuple[int, int],
    cut: tuple[int | None, tuple[int, ...] | None, tuple[int, ...] | None],
) -> Plan:
    """place: rank and size of the group. cut: dim, sizes, shards."""
    (rank, world_size), (dim, sizes, shards) = place, cut

    def wrong(text: str, kind: type[Exception] = ValueError) -> Exception:
        return kind(f"[rank {rank}/{world_size}] {op}: {text}")

    facts = dict(tensors)
    a, b, bias = facts["a"], facts["b"], facts.get("bias")
    _check_kinds(wrong, facts)
    _check_shapes(wrong, a, b, bias, activation)
    lead, k = a.shape[:-1], a.shape[-1]
    panels = 2 if activation == "swiglu" else 1
    outer, inner, rows = 1, 1, lead.numel()
    result = list(lead)
    if dim is not None:
        at = _check_dim(wrong, a, dim)
        sizes = _check_sizes(wrong, op == "all_gather_matmul", lead[at], at, sizes, place)
        outer, inner = lead[:at].numel(), lead[at + 1 :].numel()
        rows = outer * sum(sizes) * inner
        result[at] = sum(sizes) if op == "all_gather_matmul" else sizes[rank]
    n = b.shape[1] // panels
    shards = _check_shards(wrong, b.shape[1] if op == "all_gather_matmul" else k, shards, rank, world_size)
    problem = Problem(
        op,
        rows,
        n,
        k,
        a.dtype,
        world_size,
        rank,
        activation,
        bias is not None,
        outer,
        inner,
        sizes or (),
        shards,
    )
    if world_size == 1:  # nothing is cut or added
        problem = problem._replace(op="matmul", outer=1, inner=1, sizes=(), shards=())
    return Plan(problem, lead.numel(), (*result, n))


def _check_kinds(wrong: _Wrong, facts: dict[str, Facts]) -> None:
    a = facts["a"]
    for name, x in facts.items():
        if x.dtype != a.dtype:
            raise wrong(f"a is {_name(a.dtype)}, {name} is {_name(x.dtype)}. Convert one of them.", TypeError)
        if x.device != a.device:
            raise wrong(f"a is on {a.device}, {name} is on {x.device}. Move one of them.")
    if a.device.type not in DTYPES:
        raise wrong(f"tensors are on {a.device}; the CPU and CUDA devices are supported")
    if a.dtype not in DTYPES[a.device.type]:
        allowed = ", ".join(_name(dtype) for dtype in DTYPES[a.device.type])
        raise wrong(
            f"dtype {_name(a.dtype)} is not supported on {a.device.type}; use one of {allowed}", TypeError
        )


def _check_shapes(
    wrong: _Wrong, a: Facts, b: Facts, bias: Facts | None, activation: Activation | None
) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise wrong(f"unknown activation {activation!r}; expected None or one of {', '.join(ACTIVATIONS)}")
    if len(a.shape) < 2 or len(b.shape) != 2:
        raise wrong(
            f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}; expected (..., K) with a leading dimension, "
            "and (K, N)"
        )
    if a.shape[-1] != b.shape[0]:
        raise wrong(
            f"a {tuple(a.shape)} has K={a.shape[-1]}, b {tuple(b.shape)} has K={b.shape[0]}. A weight (N, K) "
            "is passed as weight.t()."
        )
    if activation == "swiglu" and b.shape[1] % 2:
        raise wrong(
            f"b {tuple(b.shape)} has an odd number of columns; swiglu takes those of the gate, then as many "
            "of the up projection"
        )
    if bias is not None and tuple(bias.shape) != (b.shape[1],):
        raise wrong(f"bias has shape {tuple(bias.shape)}, b {tuple(b.shape)}; expected ({b.shape[1]},)")


def _check_dim(wrong: _Wrong, a: Facts, dim: int) -> int:
    last = len(a.shape) - 1
    at = dim + len(a.shape) if dim < 0 else dim
    if not 0 <= at < last:
        what = "is the inner dimension" if at == last else "is out of range"
        raise wrong(
            f"dim={dim} {what} of a {tuple(a.shape)}; expected 0 to {last - 1}, or {-len(a.shape)} to -2"
        )
    return at


def _check_sizes(
    wrong: _Wrong,
    gathers: bool,
    length: int,
    at: int,
    sizes: tuple[int, ...] | None,
    place: tuple[int, int],
) -> tuple[int, ...]:
    rank, world_size = place
    if sizes is None:
        return (length,) * world_size if gathers else tuple(even_sizes(length, world_size))
    sizes = tuple(int(size) for size in sizes)
    if len(sizes) != world_size:
        raise wrong(f"sizes has {len(sizes)} entries for {world_size} ranks")
    if min(sizes) < 0:
        raise wrong(f"sizes={list(sizes)} must not be negative")
    if gathers and sizes[rank] != length:
        raise wrong(f"sizes[{rank}]={sizes[rank]}, but a has {length} along dim {at}")
    if not gathers and sum(sizes) != length:
        raise wrong(f"sizes={list(sizes)} sum to {sum(sizes)}, but a has {length} along dim {at}")
    return sizes


def _check_shards(
    wrong: _Wrong, length: int, shards: tuple[int, ...] | None, rank: int, world_size: int
) -> tuple[int, ...]:
    if shards is None:
        return ()
    shards = tuple(int(shard) for shard in shards)
    if len(shards) != world_size:
        raise wrong(f"shards has {len(shards)} entries for {world_size} ranks")
    if shards[rank] != length:
        raise wrong(f"shards[{rank}]={shards[rank]}, but b's part here is {length} long")
    return () if len(set(shards)) == 1 else shards


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
