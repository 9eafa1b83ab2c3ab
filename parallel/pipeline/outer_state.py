"""What a model's own forward writes outside of its blocks: counts, running averages, values that it keeps.

A rank runs the whole forward more often than one process does: for the shape of what it will receive, and
once for each of its stages. So a run for a shape leaves nothing behind, and what two stages of one rank would
both write is refused.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from pycomm.parallel.models.shared_state import SharedState

__all__ = ["OuterState"]


class Buffer(NamedTuple):
    """A buffer as it is."""

    module: nn.Module
    key: str
    value: torch.Tensor


Version: TypeAlias = (
    float | tuple[int, int]
)  # a number, or the id of a tensor and how often it was written to


class OuterState:
    """model: its tree. blocks: those of the trunk, whose own state is not looked at."""

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        inside = {id(module) for block in blocks for module in block.modules()}
        self.modules = [module for module in model.modules() if id(module) not in inside]
        self.shared = SharedState(self.modules)
        # (module, key of a buffer or number), or words -> the stage that writes to it
        self.writers: dict[tuple[nn.Module, str] | str, int] = {}

    def buffers(self) -> list[Buffer]:
        return [
            Buffer(module, key, value)
            for module in self.modules
            for key, value in module._buffers.items()
            if value is not None
        ]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What is run for a shape counts nothing, averages nothing and keeps nothing."""
        kept = [(m, dict(m.__dict__), dict(m._buffers), dict(m._modules)) for m in self.modules]
        for module, key, value in self.buffers():
            module._buffers[key] = value.clone()
        try:
            with self.shared.kept():
                yield
        finally:
            for module, attributes, buffers, modules in kept:
                module.__dict__.clear()
                module.__dict__.update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)
                module._modules.clear()
                module._modules.update(modules)

    @contextlib.contextmanager
    def written_once(self, stage: int, mine: Collection[int]) -> Iterator[None]:
        """Around the forward of one stage of `mine`. Raises ValueError where another stage of this rank
        writes the same, which would be written several times for one microbatch.
        """
        if len(mine) == 1:
            yield
            return
        before, tokens = self._versions(), self.shared.tokens()
        yield
        after, changed = self._versions(), self.shared.changed(tokens)
        written = [place for place in {**before, **after} if after.get(place) != before.get(place)]
        words = {(module, key): f"{key!r} of a {type(module).__name__}" for module, key in written}
        places: list[tuple[tuple[nn.Module, str] | str, str]] = [*words.items()]
        if changed:
            places.append((changed, changed))
        for place, what in places:
            if self.writers.setdefault(place, stage) != stage:
                raise ValueError(
                    f"the model's forward writes to {what} outside of the blocks, in stages "
                    f"{self.writers[place]} and {stage} of one rank, so twice for each microbatch. Choose a "
                    "schedule with one stage on a rank (1f1b, gpipe, zb-h1), or move that into a block"
                )

    def _versions(self) -> dict[tuple[nn.Module, str], Version]:
        """{(module, key): what changes when it is written}, of buffers and numbers."""
        found: dict[tuple[nn.Module, str], Version] = {
            (module, key): (id(value), value._version) for module, key, value in self.buffers()
        }
        for module in self.modules:
            for key, value in module.__dict__.items():
                if isinstance(value, (int, float)):
                    found[module, key] = value
        return found
