"""Sequence parallelism: Ulysses, ring attention and their hybrid, and which positions each rank holds."""

from pycomm.parallel.sequence.attention import SequenceAttention
from pycomm.parallel.sequence.ring import ring_attention, ring_ulysses_attention
from pycomm.parallel.sequence.split import (
    cut,
    lengths,
    local_length,
    positions,
    ring_spans,
    spans,
    ulysses_sizes,
)
from pycomm.parallel.sequence.ulysses import ulysses_attention

__all__ = [
    "SequenceAttention",
    "cut",
    "lengths",
    "local_length",
    "positions",
    "ring_attention",
    "ring_spans",
    "ring_ulysses_attention",
    "spans",
    "ulysses_attention",
    "ulysses_sizes",
]
