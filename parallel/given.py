"""What a user gives to pycomm.parallel, as types."""

from collections.abc import Callable, MutableMapping
from typing import Any, Protocol, TypeAlias

import torch

__all__ = ["Batch", "LossFunction", "Metric", "Optimizer", "Tree"]

# Nested lists, tuples, dicts and classes that torch's pytree knows, with any leaves; not a type that Python
# can write down.
Tree: TypeAlias = Any
# A tree whose tensors have the rows of a batch as their first dimension: (inputs, targets), or the arguments
# of a model by name.
Batch: TypeAlias = Any
# (what the model returned, targets) -> the loss, a tensor of one element
LossFunction: TypeAlias = Callable[..., torch.Tensor]
# (what the model returned, targets) -> a mean over the targets
Metric: TypeAlias = Callable[..., torch.Tensor | float]


class Optimizer(Protocol):
    """What pycomm asks of an optimizer: torch.optim.Optimizer, or a wrapper of one that has as much."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]: ...

    def step(self) -> object: ...
