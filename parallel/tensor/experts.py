"""Experts that are two parameters, as in the mixtures of transformers: each expert is cut along its features.

    gate_up_proj (E, 2f, h)    rows of gate and rows of up      x, weights of the routes: enter once
    down_proj    (E, h, f)     columns                          sum over the ranks: the result

Every rank has a part of every expert and runs all tokens, so the routes are those of one process, and no rank
waits for an expert that is chosen most. With `sequence` a rank's own tokens are gathered, with their routes,
and the sum is scattered; rows are tokens of all positions, in any order.

What the class says of its weights (has_gate, is_concatenated, is_transposed, has_bias) decides whether it is
one of these, and a trial with few random features that it computes the same in parts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from pycomm.parallel.ground import differentiable
from pycomm.parallel.ground.layout import Layout
from pycomm.parallel.models.config_view import ConfigView
from pycomm.parallel.tensor.edges import flat_pieces, now_cut
from pycomm.parallel.tensor.slices import even_slices, part_slices
from pycomm.parallel.tensor.sublayers import Unfit

if TYPE_CHECKING:
    from pycomm.parallel.tensor.cut_sublayer import Cutter

__all__ = ["DOWN", "UP", "check_experts", "cut_experts", "has_experts", "misfit"]

UP, DOWN = "gate_up_proj", "down_proj"
SAID = {
    "has_gate": True,
    "is_concatenated": True,
    "is_transposed": False,
    "has_bias": False,
    "has_post_expert_norm": False,
}
TOLERANCE = 1e-4  # of the largest output of a trial in float32


def has_experts(module: nn.Module) -> bool:
    shapes = [getattr(module._parameters.get(name), "ndim", 0) for name in (UP, DOWN)]
    return shapes == [3, 3]


def check_experts(module: nn.Module) -> None:
    """Raises Unfit for experts that cannot be cut."""
    up, down = (module.get_parameter(name).shape for name in (UP, DOWN))
    if {name: getattr(module, name, None) for name in SAID} != SAID or len(module._parameters) != 2:
        raise Unfit("its weights lie otherwise, or there are more of them")
    if up != (down[0], 2 * down[2], down[1]):
        raise Unfit(f"shapes {tuple(up)} and {tuple(down)} are not those of gates and of one down projection")
    if any(True for part in module.children() for _ in part.parameters()):
        raise Unfit("it has modules with parameters")
    if not _same_in_parts(module):
        raise Unfit("computes something else in parts, or cannot be tried")


def _same_in_parts(module: nn.Module) -> bool:
    """Tried without the module's values, which another pipeline stage may have alone."""
    experts, hidden, _ = module.get_parameter(DOWN).shape
    generator = torch.Generator().manual_seed(1)
    halves = [torch.randn((experts, 3, hidden), generator=generator) for _ in range(2)]
    down = torch.randn((experts, hidden, 3), generator=generator)
    x = torch.randn((4, hidden), generator=generator) / hidden**0.5
    chosen = torch.randint(0, experts, (4, 2), generator=generator)
    weights = torch.rand((4, 2), generator=generator)

    def run(first: int, last: int) -> torch.Tensor:
        twin = copy.copy(module)
        twin.__dict__.pop("forward", None)
        if hasattr(module, "config"):  # which says what kernel is used
            vars(twin)["config"] = ConfigView(module.config, {"_experts_implementation": "eager"})
        up = torch.cat([half[:, first:last] for half in halves], 1)
        twin._parameters = {UP: nn.Parameter(up), DOWN: nn.Parameter(down[:, :, first:last].contiguous())}
        with torch.no_grad():
            return twin.forward(x, chosen, weights)

    try:
        whole, parts = run(0, 3), run(0, 1) + run(1, 3)
    except Exception:  # in whatever way it says that it needs something else
        return False
    return whole.shape == parts.shape and bool((whole - parts).abs().max() <= TOLERANCE * whole.abs().max())


def misfit(module: nn.Module, parts: int) -> str | None:
    """Why the kernel of these experts does not take their parts, or None. All but the plain one (eager) ask
    for rows of whole multiples of 16 bytes.
    """
    down = module.get_parameter(DOWN)
    features, kernel = (
        down.shape[2],
        getattr(getattr(module, "config", None), "_experts_implementation", None),
    )
    lengths = {features // parts, -(-features // parts)}
    if kernel in (None, "eager") or all(length * down.itemsize % 16 == 0 for length in lengths):
        return None
    return (
        f"has {features} features over {parts} ranks, and {kernel} needs parts of whole multiples of "
        f"{16 // down.itemsize}"
    )


def cut_experts(module: nn.Module, fqn: str, cutter: Cutter) -> None:
    """Cuts the experts in place. fqn: their name, for errors."""
    group = cutter.group
    up, down = module.get_parameter(UP), module.get_parameter(DOWN)
    features = down.shape[2]
    slices = even_slices(features, group)
    both = part_slices(slices, features, 2 * features)
    for name, parameter, dim, part in ((UP, up, 1, both), (DOWN, down, 2, slices)):
        layout = Layout(tuple(parameter.shape), dim, part.ranges, part.counted)
        module._parameters[name] = cutter.take(parameter, layout)
    for name in ("intermediate_dim", "intermediate_size"):
        if module.__dict__.get(name) == features:
            setattr(module, name, slices.lengths[group.rank])
    module.forward = ExpertsForward(module.forward, fqn, cutter)


class ExpertsForward:
    """Takes the place of the forward of experts that are cut."""

    def __init__(self, inner: Callable[..., torch.Tensor], fqn: str, cutter: Cutter) -> None:
        self.inner, self.fqn, self.group, self.sequence = inner, fqn, cutter.group, cutter.sequence

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x (tokens, h), chosen and weights (tokens, top_k)."""
        if x.is_meta:  # only the shape is asked for
            return torch.empty_like(x)
        sequence = now_cut(self.sequence)
        if sequence is None:
            x, weights = (differentiable.copy_to(value, self.group) for value in (x, weights))
            return differentiable.reduce_from(self._run(x, chosen, weights), self.group)
        pieces = flat_pieces(x, sequence, self.group, "experts of a tensor-parallel model")
        chosen = differentiable.gather_from(chosen, *pieces, self.group)
        x, weights = (differentiable.gather_sum(value, *pieces, self.group) for value in (x, weights))
        return differentiable.reduce_scatter(self._run(x, chosen, weights), *pieces, self.group)

    def _run(self, *args: torch.Tensor) -> torch.Tensor:
        try:
            return self.inner(*args)
        except (RuntimeError, ValueError, AssertionError) as error:  # a kernel that asks for other widths
            raise ValueError(
                f"[rank {self.group.rank}/{self.group.size}] {self.fqn} does not run on its part of the "
                f"features: {error}. If it runs without tp, pass rules={{{self.fqn!r}: 'replicate'}}"
            ) from error
