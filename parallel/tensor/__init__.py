"""Tensor parallelism: layers that are cut over a group, and the rules that cut a plain model."""

from pycomm.parallel.tensor.apply import Head, TensorParallel, parallelize_tensor
from pycomm.parallel.tensor.cross_entropy import cross_entropy
from pycomm.parallel.tensor.cut_logits import VocabShard
from pycomm.parallel.tensor.heads import RankHeads, split_heads
from pycomm.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

__all__ = [
    "ColumnParallelLinear",
    "Head",
    "RankHeads",
    "RowParallelLinear",
    "TensorParallel",
    "VocabParallelEmbedding",
    "VocabShard",
    "cross_entropy",
    "parallelize_tensor",
    "split_heads",
]
