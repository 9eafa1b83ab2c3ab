"""What a process has drawn of random numbers: from torch's generators of the CPU and of a device, from
Python's, and from NumPy's where that is loaded. (Which ones a model draws on many ranks: streams.py.)
"""

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import TypeAlias

import torch

__all__ = ["Drawn", "drawn", "kept", "pass_over", "same"]

Drawn: TypeAlias = list[torch.Tensor | tuple[object, ...]]  # the state of each generator


def drawn(device: torch.device) -> Drawn:
    """The state of all; for same()."""
    state: Drawn = [torch.get_rng_state()]
    if device.type == "cuda":
        state.append(torch.cuda.get_rng_state(device))
    state.append(random.getstate())
    if "numpy" in sys.modules:
        _, keys, *rest = sys.modules["numpy"].random.get_state()
        state.append((keys.tobytes(), *rest))
    return state


def same(one: Drawn, other: Drawn) -> bool:
    """Whether nothing was drawn between two states."""
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def pass_over(number: int, device: torch.device) -> None:
    """Draws some, so that what comes later has other ones."""
    if number:
        torch.rand(number)
        torch.rand(number, device=device)
        for _ in range(number):
            random.random()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.random(number)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn inside, Python's and NumPy's generators are as before; torch's: streams.kept()."""
    numpy = sys.modules.get("numpy")
    before, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        if numpy:
            numpy.random.set_state(of_numpy)
