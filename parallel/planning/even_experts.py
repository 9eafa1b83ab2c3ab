"""Mixtures of experts without values: which experts a token takes depends on numbers that a traced model does
not have, so the tokens are dealt evenly.

    parallel.MoE            its own forward; only the numbers of rows of each expert, which it reads, are even
    experts in parameters   (expert/stacked.py, as transformers has them) x once for each choice, times the
                            weights of one expert, gated, times the other; weighted and summed

    n tokens, top_k of E experts: top_k n rows of work, top_k n / E for each expert; nothing else is assumed

What a step really does is more on the ranks whose experts are chosen often.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeAlias

import torch

from pycomm.parallel.expert import MoE
from pycomm.parallel.expert.stacked import DOWN, UP, is_stacked, misfit
from pycomm.parallel.ground.comm import even_sizes

__all__ = ["Mixture", "deal_evenly", "mixtures_of"]


Enter: TypeAlias = Callable[[str], AbstractContextManager[None]]


class Mixture(NamedTuple):
    """fqn: of the module; inside: prefix of what its experts are. stacked: they are in a few parameters."""

    fqn: str
    inside: str
    stacked: bool
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    parameters: int  # of one expert
    top_k: int | None  # of stacked ones what they are called with says it


def mixtures_of(model: torch.nn.Module) -> list[Mixture]:
    """Those of the model, in its order. Raises ValueError for a MoE whose experts lie on ranks."""
    found: list[Mixture] = []
    for fqn, module in model.named_modules():
        if isinstance(module, MoE):
            if module.is_sharded:
                raise ValueError(
                    f"{fqn!r} is a MoE whose experts are laid over {module.group.size} ranks already: give "
                    "the planner the model without group="
                )
            size = sum(p.numel() for p in module.experts.parameters()) // module.num_experts
            found.append(Mixture(fqn, f"{fqn}.experts", False, module.num_experts, size, module.top_k))
        elif is_stacked(module) and not any(fqn.startswith(f"{m.fqn}.") for m in found):
            if misfit(module, 1) is None:
                count = len(module._parameters[DOWN])
                size = sum(p.numel() for p in module.parameters()) // count
                found.append(Mixture(fqn, fqn, True, count, size, None))
    return found


def deal_evenly(shadow: torch.nn.Module, mixtures: Sequence[Mixture], enter: Enter) -> dict[str, EvenExperts]:
    """Changes the mixtures of a copy of the model. enter(name): a context in which products are those of the
    module `name`. Returns the forwards of stacked ones by their fqn.
    """
    dealt: dict[str, EvenExperts] = {}
    for mixture in mixtures:
        module = shadow.get_submodule(mixture.fqn)
        if mixture.stacked:
            module.forward = dealt[mixture.fqn] = EvenExperts(module, mixture.fqn, enter)
        elif isinstance(module, MoE):
            module.read_counts = _even_counts
    return dealt


def _even_counts(counts: torch.Tensor, assignments: int) -> list[int]:
    """Of a rank alone: what its tokens choose, and what arrives, which are the same."""
    return 2 * even_sizes(assignments, len(counts) // 2)


class EvenExperts:
    """The forward of stacked experts, on rows of which each has as many. It knows top_k once it ran."""

    def __init__(self, module: torch.nn.Module, fqn: str, enter: Enter) -> None:
        self.module, self.fqn, self.enter, self.top_k = module, fqn, enter, 1

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        given = inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs).args[1:]
        shapes = [tuple(value.shape) for value in given if isinstance(value, torch.Tensor)]
        if len(given) != 3 or [len(shape) for shape in shapes] != [2, 2, 2] or shapes[1] != shapes[2]:
            raise ValueError(
                f"{self.fqn!r} is given tensors of shapes {shapes}, and the planner deals rows evenly to "
                "experts that take (tokens, h) and, twice, (tokens, top_k)"
            )
        x, chosen, weights = given
        own = self.module._parameters
        up = next(name for name in UP if own.get(name) is not None)
        self.top_k = chosen.shape[-1]
        rows = x.repeat_interleave(self.top_k, 0)
        rows = self._act(self._linear(rows, up), up)
        rows = self._linear(rows, DOWN) * weights.reshape(-1, 1)
        return rows.view(-1, self.top_k, x.shape[-1]).sum(1).to(x.dtype)

    def _linear(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.module.get_parameter(name)[0]
        bias = self.module._parameters.get(f"{name}_bias")
        weight = weight if getattr(self.module, "is_transposed", False) else weight.t()
        with self.enter(f"{self.fqn}.{name}"):
            rows = rows @ weight.to(rows.dtype)
        return rows if bias is None else rows + bias[0]

    def _act(self, rows: torch.Tensor, up: str) -> torch.Tensor:
        act = getattr(self.module, "act_fn", torch.nn.functional.silu)
        if up != UP[0]:
            return act(rows)
        own_gate = getattr(self.module, "_apply_gate", None)
        if own_gate is not None:
            return own_gate(rows)
        gate, straight = rows.chunk(2, -1)
        return act(gate) * straight
