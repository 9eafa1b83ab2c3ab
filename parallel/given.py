"""What a user gives to pycomm.parallel, as types."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

__all__ = ["Batch", "LossFunction", "Metric", "Tree"]

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
