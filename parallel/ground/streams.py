"""Random numbers of a model on many ranks (dropout): which ranks draw the same ones.

    stream    ranks of one tp group   drawn from
    shared    the same numbers        where they hold the same activations: outside of cut sublayers
    own       different numbers       inside a cut sublayer (other heads); under megatron_sp from block 0 on
                                      (other tokens)

Ranks that differ in another axis have different streams of both kinds. The user's stream, from which every
rank draws the same batches, is left as it was.

[Note: two streams] Drawing everything from one stream that is equal on tp is not enough where shares are
uneven: 2 heads draw more numbers than 1, and from then on the ranks' hidden states would differ without
anyone noticing. So a rank changes streams at the edges of a sublayer: after its column layers and before its
row layer (tensor/stream_edges.py).

Recomputation of activations starts with the state that the generator had at the block, which torch keeps; the
state of the other stream and which one was in use is kept by recomputation(). Cost: a copy of the state (5 KB
on CPU) per change, only while training with tp > 1.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeAlias

import torch

from pycomm.parallel.ground.plan import AXES

if TYPE_CHECKING:
    from pycomm.parallel.ground.mesh import Mesh

__all__ = ["RandomStreams", "Stream", "StreamState"]


class Stream(enum.Enum):
    SHARED = "shared"
    OWN = "own"


# of the CPU's generator, and of the device's, where the device is not the CPU
StreamState: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


class RandomStreams:
    """The two streams of this rank. seed: a whole number, equal on all ranks."""

    def __init__(self, mesh: Mesh, seed: int, device: torch.device) -> None:
        self.device = device
        self.cut = mesh.group("tp").size > 1  # else both streams may be the same
        place = 0  # of this rank among those that differ in another axis than tp
        for axis in AXES[:-1]:
            place = place * getattr(mesh.plan, axis) + mesh.coordinate(axis)
        first = seed + place * (mesh.plan.tp + 1)
        self.states = {
            Stream.SHARED: self._seeded(first),
            Stream.OWN: self._seeded(first + 1 + mesh.coordinate("tp")),
        }
        self.current: Stream | None = None  # in use; None outside of a forward

    def _seeded(self, seed: int) -> StreamState:
        on_cpu = torch.Generator().manual_seed(seed).get_state()
        if self.device.type != "cuda":
            return on_cpu, None
        return on_cpu, torch.Generator(self.device).manual_seed(seed).get_state()

    def _get(self) -> StreamState:
        on_device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return torch.get_rng_state(), on_device

    def _set(self, state: StreamState) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.device)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever is drawn inside, the generators are as before afterwards."""
        before = self._get()
        try:
            yield
        finally:
            self._set(before)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Around a forward: draws from the shared stream until switch()."""
        with self.kept():
            self._set(self.states[Stream.SHARED])
            self.current = Stream.SHARED
            try:
                yield
            finally:
                if self.current is not None:
                    self.states[self.current] = self._get()
                self.current = None

    def switch(self, stream: Stream) -> None:
        """From here on numbers come from `stream`. Outside of a forward nothing changes."""
        if self.current is not None and self.current != stream:
            self.states[self.current] = self._get()
            self._set(self.states[stream])
            self.current = stream

    def recomputation(self) -> AbstractContextManager[None]:
        """A context that is made in a forward and entered around its recomputation in backward."""
        return _Again(self, self.current, dict(self.states))


class _Again:
    """The streams as they were at another time. It can be entered again: a gradient in a loss makes torch
    recompute twice.
    """

    def __init__(
        self, streams: RandomStreams, current: Stream | None, states: dict[Stream, StreamState]
    ) -> None:
        self.streams, self.then = streams, (current, states)

    def __enter__(self) -> None:
        self.before = self.streams.current, self.streams.states
        self.streams.current, self.streams.states = self.then[0], dict(self.then[1])

    def __exit__(self, *error: object) -> None:
        self.streams.current, self.streams.states = self.before
