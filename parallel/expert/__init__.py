"""Expert parallelism: a mixture of experts whose tokens travel to the ranks that hold their experts.

apply.py       experts of a model are dealt over the ranks of ep
moe.py         MoE, a plain module in one process
dispatch.py    tokens to the ranks of their experts, and back
stacked.py     experts of transformers, stacked in a few parameters, dealt over ranks
"""

from pycomm.parallel.expert.moe import MoE

__all__ = ["MoE"]
