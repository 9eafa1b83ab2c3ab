"""Recognises experts that are two parameters for all of them (experts.py)."""

from pycomm.parallel.tensor.experts import DOWN, UP, check_experts, has_experts
from pycomm.parallel.tensor.modules import join
from pycomm.parallel.tensor.sublayers import Sublayer

__all__ = ["find_experts"]


def find_experts(modules, fqn):
    """[Sublayer] of the module `fqn`, or []. modules: name -> module of the model. Raises Unfit."""
    if not has_experts(modules[fqn]):
        return []
    check_experts(modules[fqn])
    return [Sublayer("experts", fqn, (join(fqn, UP),), join(fqn, DOWN))]
