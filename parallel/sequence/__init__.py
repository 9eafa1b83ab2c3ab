"""Sequence parallelism: Ulysses, ring attention and their hybrid, and which positions each rank holds.

apply.py             the sequence of a model is cut under a plan
ulysses.py           ulysses_attention: all heads of some positions become some heads of all positions
ring.py              ring_attention: keys and values travel around the ring
block.py             attention of some queries to one block of keys, to be merged
split.py             which positions each rank holds
attention.py         a model's own calls of scaled_dot_product_attention, over the whole sequence
eager.py             the eager attention of transformers on a split sequence
mask.py              attention masks on a split sequence
sequence_split.py    where a model's sequence is cut: at its first block
"""

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
