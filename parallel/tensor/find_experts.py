"""Recognises experts that are two parameters for all of them (experts.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pycomm.parallel.tensor.experts import DOWN, UP, check_experts, has_experts
from pycomm.parallel.tensor.modules import join
from pycomm.parallel.tensor.sublayers import Sublayer

if TYPE_CHECKING:
    from torch import nn

__all__ = ["find_experts"]


def find_experts(modules: Mapping[str, nn.Module], fqn: str) -> list[Sublayer]:
    """Of the module `fqn`. modules: of the model, by name. Raises Unfit."""
    if not has_experts(modules[fqn]):
        return []
    check_experts(modules[fqn])
    return [Sublayer("experts", fqn, (join(fqn, UP),), join(fqn, DOWN))]
