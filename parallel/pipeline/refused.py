"""torch.autograd.grad in a model or a loss whose graph is spread over stages.

    stage 0   x -> blocks 0, 1 -> h |             stage 1   | h -> blocks 2, 3 -> energy -> grad(energy, x)?

The graph of `energy` ends at h. Of x torch says that it was not used; with allow_unused=True it gives None,
and where the last stage uses x once more, or a weight that is tied, it gives a part of the gradient without a
word. So it is refused on the last stage, which alone comes to what follows the blocks: in every loss, and in
the model's own forward by a mode of torch functions in the first training pass (it costs 1 us for each call
of the forward) and by torch's own error later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree

__all__ = ["NoGradients", "explained"]

_UNUSED = "appears to not have been used in the graph"


class NoGradients(TorchFunctionMode):
    """Around a forward of the last stage, or a loss."""

    def __torch_function__(
        self,
        func: Callable[..., Tree],
        types: Collection[type[torch.Tensor]],
        args: tuple[Tree, ...] = (),
        kwargs: dict[str, Tree] | None = None,
    ) -> Tree:
        if func is torch.autograd.grad:
            raise _refusal()
        return func(*args, **(kwargs or {}))


def explained(error: RuntimeError) -> ValueError | None:
    """What torch says of a graph that ends at the edge of a stage, or None for another error."""
    return _refusal() if _UNUSED in str(error) else None


def _refusal() -> ValueError:
    return ValueError(
        "the model or the loss calls torch.autograd.grad (forces, a gradient penalty, an inner step), and "
        "under pp this rank has the graph of its stages only: use a plan with pp=1"
    )
