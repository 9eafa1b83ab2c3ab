"""Experts that are stacked in a few parameters, as in the mixtures of transformers, dealt over ranks.

    one process, 5 experts    gate_up_proj (5, 2f, h)    down_proj (5, h, f)     [biases (5, ...)]
    rank 0 of 2               experts 0 1 2              experts 0 1 2
    rank 1                    experts 3 4                experts 3 4

    x (tokens, h); chosen, weights (tokens, top_k): what the router of this rank has found
      dispatch     each row to the ranks of its experts; picture and cost: dispatch.py
      inner        the module's own forward on what came: one choice for each row, of weight 1
      combine      the rows back to their tokens; here each is weighted, and they are summed

The router is the model's own and on every rank, as are the weights that it gives: their gradient is made
where the tokens are. So any kernel of the module's (eager, grouped_mm, batched_mm) runs unchanged.

What a module must keep to, tried with few random features before anything is dealt: each row is treated
alone, and what an expert gives is multiplied by its weight.

[Note: equal graphs] in moe.py holds here too. A rank to which no row came does not call the module, whose
kernels may not take none: its parameters get zeros.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from pycomm.parallel.expert import dispatch
from pycomm.parallel.given import Tree
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.layout import Layout

__all__ = ["StackedForward", "deal_stacked", "is_stacked", "misfit"]

UP, DOWN = ("gate_up_proj", "up_proj"), "down_proj"
EXPERTS = "num_experts"
TOLERANCE = 1e-4  # of the largest output of a trial in float32
Shapes: TypeAlias = dict[str, tuple[int, ...]]  # of parameters, by name


def is_stacked(module: nn.Module) -> bool:
    """Whether it has the names and shapes of stacked experts."""
    ndims = [getattr(module._parameters.get(name), "ndim", 0) for name in (*UP, DOWN)]
    return ndims in ([3, 0, 3], [0, 3, 3])


def _down(module: nn.Module) -> nn.Parameter:
    """Of a module that is_stacked()."""
    down = module._parameters[DOWN]
    assert down is not None
    return down


def misfit(module: nn.Module, ranks: int) -> str | None:
    """Why stacked experts cannot be dealt over this many ranks, or None."""
    experts = len(_down(module))
    own = {name: p for name, p in module._parameters.items() if p is not None}
    strange = [name for name, p in own.items() if len(p) != experts]
    if getattr(module, EXPERTS, None) != experts or strange:
        return f"not all of {', '.join(own)} have one part for each of its num_experts experts"
    if experts < ranks:
        return f"it has {experts} experts, fewer than the {ranks} ranks of ep"
    if any(True for part in module.children() for _ in part.parameters()):
        return "it has modules with parameters"
    hooked = [name for name, p in own.items() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        return f"{hooked[0]!r} has a gradient hook, which would be given a part of its gradient"
    if not _same_by_expert(module):
        return "it computes something else by its experts, or cannot be tried"
    return None


def _same_by_expert(module: nn.Module) -> bool:
    """Tried without the module's values, which another pipeline stage may have alone."""
    shapes = _small_shapes(module)
    if shapes is None:
        return False
    experts, generator = len(_down(module)), torch.Generator().manual_seed(1)
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    hidden = _down(module).shape[1 if not _is_transposed(module) else 2]
    x = torch.randn((4, hidden), generator=generator) / hidden**0.5
    chosen = torch.randint(0, experts, (4, 2), generator=generator)
    weights = torch.rand((4, 2), generator=generator)

    def run(first: int, end: int, *given: torch.Tensor) -> torch.Tensor:
        twin: Any = copy.copy(module)
        twin.__dict__.pop("forward", None)
        if hasattr(module, "config"):
            twin.config = _Eager(module.config)
        twin.num_experts = end - first
        twin._parameters = {name: nn.Parameter(value[first:end]) for name, value in values.items()}
        with torch.no_grad():
            return twin.forward(*given)

    try:
        whole, parts = run(0, experts, x, chosen, weights), torch.zeros_like(x)
        for first, end in ((0, experts // 2), (experts // 2, experts)):
            rows, choices = torch.where((chosen >= first) & (chosen < end))
            if len(rows):
                own = chosen[rows, choices][:, None] - first
                out = run(first, end, x[rows], own, torch.ones(len(rows), 1))
                parts.index_add_(0, rows, out * weights[rows, choices][:, None])
    except Exception:  # in whatever way it says that it needs something else
        return False
    return whole.shape == parts.shape and bool((whole - parts).abs().max() <= TOLERANCE * whole.abs().max())


def _is_transposed(module: nn.Module) -> bool:
    return bool(getattr(module, "is_transposed", False))


def _small_shapes(module: nn.Module) -> Shapes | None:
    """Of the parameters with 3 features instead of all; None: not as transformers has them."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    experts, hidden, features = own[DOWN].shape
    if _is_transposed(module):
        hidden, features = features, hidden
    found: Shapes = {}
    for name, parameter in own.items():
        kind = name.removesuffix("_bias")
        if kind not in (*UP, DOWN):
            return None
        wide = {"gate_up_proj": 2, "up_proj": 1}.get(kind)
        out, into = (hidden, features) if wide is None else (wide * features, hidden)
        small: tuple[int, ...] = (hidden, 3) if wide is None else (3 * wide, hidden)
        full: tuple[int, ...] = (out, into)
        if _is_transposed(module):
            small, full = small[::-1], full[::-1]
        if name.endswith("_bias"):
            small, full = (3 * wide if wide else hidden,), (out,)
        if tuple(parameter.shape) != (experts, *full):
            return None
        found[name] = (experts, *small)
    return found


class _Eager:
    """A configuration that asks for the plain kernel."""

    _experts_implementation = "eager"

    def __init__(self, config: object) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def deal_stacked(module: nn.Module, fqn: str, group: comm.Group) -> dict[str, Layout]:
    """Leaves this rank's experts in the module, and makes its forward collective on the group. fqn: its name,
    for errors. Returns the layouts of its parameters, by name.
    """
    held = comm.even_sizes(len(_down(module)), group.size)
    first = sum(held[: group.rank])
    part, layouts = ((first, first + held[group.rank]),), {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            layouts[name] = layout = Layout(tuple(parameter.shape), 0, part, part)
            module._parameters[name] = nn.Parameter(
                layout.take(parameter.detach()), requires_grad=parameter.requires_grad
            )
    setattr(module, EXPERTS, held[group.rank])
    module.forward = StackedForward(module, fqn, held, group)
    return layouts


class StackedForward:
    """Takes the place of the forward of experts that were dealt."""

    def __init__(self, module: nn.Module, fqn: str, held: Sequence[int], group: comm.Group) -> None:
        self.module, self.inner, self.fqn, self.held, self.group = module, module.forward, fqn, held, group
        self.signature = inspect.signature(module.forward)

    def __call__(self, *args: Tree, **kwargs: Tree) -> torch.Tensor:
        x, chosen, weights = self._given(args, kwargs)
        if x.is_meta:  # only the shape is asked for
            return torch.empty_like(x)
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()
        routes, _ = dispatch.make_routes(chosen.long(), self.held, self.group)
        rows = dispatch.dispatch(x, routes, self.group)
        return dispatch.combine(self._run(rows, routes.per_expert), weights, routes, self.group)

    def _given(
        self, args: Sequence[Tree], kwargs: Mapping[str, Tree]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (tokens, h), chosen and weights (tokens, top_k)."""
        given = tuple(self.signature.bind(*args, **kwargs).arguments.values())
        shapes = [tuple(value.shape) for value in given if isinstance(value, torch.Tensor)]
        if len(given) == len(shapes) == 3 and shapes[1] == shapes[2] and shapes[1][:1] == shapes[0][:1]:
            if len(shapes[0]) == len(shapes[1]) == 2:
                return cast("tuple[torch.Tensor, torch.Tensor, torch.Tensor]", given)
        raise ValueError(
            f"[rank {self.group.rank}/{self.group.size}] {self.fqn} is given tensors of shapes {shapes}, and "
            "experts under ep take (tokens, h) and, twice, (tokens, top_k): use a plan with ep=1"
        )

    def _run(self, rows: torch.Tensor, per_expert: Sequence[int]) -> torch.Tensor:
        if not len(rows):
            nothing = [p.flatten()[:0].sum() for p in self.module._parameters.values() if p is not None]
            return rows + sum(nothing, rows.new_zeros(())).to(rows.dtype)
        own = torch.arange(len(per_expert), device=rows.device)
        counts = torch.tensor(per_expert, device=rows.device)
        chosen = own.repeat_interleave(counts, output_size=len(rows))[:, None]
        return self.inner(rows, chosen, torch.ones_like(rows[:, :1]))
