"""Hooks that the user has registered on parameters, for their gradients. In one process a hook is given the
gradient of the whole batch; here what it is given may be

    a summand    of ranks (dp, ep, ring, ulysses, some of tp, pp for tied weights), of microbatches and of
                 calls with update=False: the hook must be linear, f(a + b) = f(a) + f(b), f(c a) = c f(a).
                 Masks and factors are. Weights that pp ties are not even scaled: another stage has the rest
                 of the gradient, and maybe not the hook
    a piece      of a parameter that tp has cut: it must treat each element by itself, and take a piece

Each hook is tried once, when a step meets it first: a copy (copied.py) is given a few random gradients, and
the hook itself none. What fails is refused by all ranks at the end of that step, before the update; on a
rank that has no such hook the sentence names none. A hook that has no copy is not tried.

Not looked at: hooks on other tensors and on modules. Of a tensor between modules a rank has its own rows,
with the gradients that one process has for them, so what treats rows alike is right there.

A loop of the user's own has one backward for each call of the hook, as one process has: there the ranks alone
make summands. It is asked after each backward, and all ranks refuse opt.step().

Cost: a look at a table of each parameter. Hooks after accumulation (register_post_accumulate_grad_hook) are
refused: gradients are accumulated in buckets here, not in `.grad`. The user's own loop refuses them in the
forward, because one that takes the optimizer's step in the backward never comes to opt.step().
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pycomm.parallel.checks.copied import copied_function
from pycomm.parallel.ground.answers import State
from pycomm.parallel.models import drawn

if TYPE_CHECKING:
    from pycomm.parallel.data.bucket import ParamInfo
    from pycomm.parallel.parts import Parallelized

__all__ = ["late_hook", "problem_of_hooks"]

NAME = "gradient hooks"
_ADVICE = "Compare some steps with one process, or give the hook no more than what a copy may have"
_FACTORS = (-1.0, 1e-4, 1e4)
_NOT_LINEAR = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative

_Hook = Callable[[torch.Tensor], torch.Tensor | None]


class _Found(NamedTuple):
    """Of a hook: what it does that it must not, or None."""

    of_summands: str | None
    of_pieces: str | None
    of_tied: str | None = None


_found: weakref.WeakKeyDictionary[Parallelized, dict[int, _Found | None]] = weakref.WeakKeyDictionary()


def problem_of_hooks(parts: Parallelized, is_in_parts: bool) -> str | None:
    """What is wrong with a hook of this rank, as a sentence. is_in_parts: the batch of an update is run in
    several microbatches or calls.
    """
    for info in parts.infos:
        param = info.param
        after = param._post_accumulate_grad_hooks  # of which one is the plan's
        if not (param._backward_hooks or (after and len(after) > 1)):
            continue
        layout, over_ranks = info.layout, _is_sum(info)
        if not (over_ranks or is_in_parts or layout.dim is not None):
            continue
        if any(True for _ in _users(after)):
            return _of_late(info)
        for number, hook in _users(param._backward_hooks):
            found = _tried(parts, info, number, hook)
            why = found and (over_ranks or is_in_parts) and found.of_summands
            why = why or (found and layout.dim is not None and found.of_pieces)
            why = why or (found and info.tied and found.of_tied)
            if why:
                return _sentence(parts, info, hook, why)
    return None


def late_hook(parts: Parallelized) -> str | None:
    """The same of a hook after accumulation where ranks have summands, which would act on one of them."""
    for info in parts.infos:
        after = info.param._post_accumulate_grad_hooks
        if after and any(True for _ in _users(after)) and _is_sum(info):
            return _of_late(info)
    return None


def _is_sum(info: ParamInfo) -> bool:
    """Whether the gradient is one over ranks."""
    layout = info.layout
    return info.group.size * info.replicas.size > 1 or layout.partial or layout.overlap or info.tied


def _of_late(info: ParamInfo) -> str:
    return (
        f"{info.name!r} has a hook after accumulation (register_post_accumulate_grad_hook), and its "
        "gradient is accumulated in a bucket, not in .grad. Use register_hook, or do it after the step"
    )


def _users(hooks: Mapping[int, Any] | None) -> Iterator[tuple[int, Any]]:
    """Those that are not the plan's own."""
    for number, hook in (hooks or {}).items():
        if not getattr(hook, "__module__", "").startswith("pycomm."):
            yield number, hook


def _sentence(parts: Parallelized, info: ParamInfo, hook: _Hook, why: str) -> str:
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return (
        f"the gradient hook {name} of {info.name!r} {why}. Under Plan({parts.plan}) it is given a part of "
        "the gradient, as of a rank, a microbatch or a piece, and what it returns would not be that of the "
        "whole. Hooks that scale, or mask by elements, are right. Clip with step(clip=...); change values "
        "after the step; or use a plan, and microbatches=1, under which the gradient is whole"
    )


def _tried(parts: Parallelized, info: ParamInfo, number: int, hook: _Hook) -> _Found | None:
    known = _found.setdefault(parts, {})
    if number not in known:
        try:
            copied = copied_function(hook)
        except Exception as error:
            why = f"a hook of {info.name!r} has no copy ({type(error).__name__}: {str(error)[:200]})"
            parts.checks.note(NAME, State.NOT_TRIED, why, parts.mesh.world.rank, _ADVICE)
            known[number] = None
        else:
            cuda = [info.param.device] if info.param.device.type == "cuda" else []
            with drawn.kept(), torch.random.fork_rng(cuda), torch.no_grad():
                known[number] = _judged(copied, info)
    return known[number]


def _judged(hook: _Hook, info: ParamInfo) -> _Found:
    error: Exception | None = None
    own = info.param.dtype
    for dtype in dict.fromkeys((torch.promote_types(own, torch.float32), own)):
        try:
            return _compared(hook, info, dtype)
        except Exception as raised:  # of the hook, which does not take this dtype, or such a piece
            error = error or raised
    why = f"raises {type(error).__name__} for a gradient {tuple(info.shape)}: {str(error)[:200]}"
    return _Found(why, why)


def _compared(hook: _Hook, info: ParamInfo, dtype: torch.dtype) -> _Found:
    generator = torch.Generator().manual_seed(0)

    def drawn_gradient() -> torch.Tensor:
        """Of sizes from 1e-6 to 1e3."""
        size = torch.rand(info.shape, generator=generator, dtype=torch.float64) * 9 - 6
        values = torch.randn(info.shape, generator=generator, dtype=torch.float64) * 10**size
        return values.to(info.param.device, dtype)

    def result(gradient: torch.Tensor) -> torch.Tensor:
        given = gradient.clone()
        returned = hook(given)
        found = given if returned is None else returned
        return _real(found if found.layout == torch.strided else found.to_dense())

    one, other = drawn_gradient(), drawn_gradient()
    most = _NOT_LINEAR.get(dtype, 5e-2)
    of_one, of_other = result(one), result(other)
    linear = None
    if _differ(result(one + other), of_one + of_other, of_one.abs() + of_other.abs(), most):
        linear = "gives for a sum of gradients something else than the sum of what it gives for each"
    for factor in _FACTORS:
        if linear is None and _differ(result(one * factor), of_one * factor, (of_one * factor).abs(), most):
            linear = f"gives for {factor:g} times a gradient something else than {factor:g} times the same"
    chosen = torch.rand(info.shape, generator=generator).to(one.device) < 0.5
    mixed = torch.where(chosen if of_one.dim() == one.dim() else chosen[..., None], of_one, of_other)
    pieces = None
    if _differ(result(torch.where(chosen, one, other)), mixed, mixed.abs(), most):
        pieces = "gives for an element something that other elements change"
    tied = "changes a gradient of which another pipeline stage has the rest, where the hook may be missing"
    return _Found(linear, pieces, None if torch.equal(of_one, _real(one)) else tied)


def _real(values: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(values) if values.is_complex() else values).double()


def _differ(one: torch.Tensor, other: torch.Tensor, size: torch.Tensor, most: float) -> bool:
    if one.shape != other.shape:
        return True
    return bool(((one - other).abs() > most * size + 1e-300).any()) or bool(one.isnan().any())
