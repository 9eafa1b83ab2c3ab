"""Tensor parallelism: layers that are cut over a group, and the rules that cut a plain model.

layers.py            column and row Linears and embeddings, usable alone
cross_entropy.py     the mean loss, from whole logits or from logits that are cut
apply.py             a plain model is cut in place: find, probe, cut
find.py              what can be cut in a module graph
find_attention.py    attention, by the names and widths of its Linears
find_mlp.py          an MLP: Linear, an element-wise function, Linear
find_experts.py      experts that are stacked in two parameters
sublayers.py         the sublayers that find.py has found
modules.py           questions about modules: linear, how wide, element-wise
probe.py             whether the parts of a sublayer compute what the whole does
cut_sublayer.py      Linears of a sublayer become column and row layers
narrow.py            an attention's own forward on fewer heads
heads.py             which heads each rank holds
multihead.py         nn.MultiheadAttention on this rank's heads
adapters.py          LoRA layers, cut as the layers that they wrap
experts.py           stacked experts, each cut along its features
tables.py            embeddings with a forward of their own, cut by rows
edges.py             what happens to the input and output of a sublayer
slices.py            which indices of a cut dimension a rank holds
cut_logits.py        logits of which a rank has some columns
products.py          F.linear with its collective, overlapped where that pays
reads.py             cut parameters that are read outside of their layer
stream_edges.py      where the stream of random numbers changes
whole_sequence.py    modules that need all tokens under megatron_sp
"""

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
