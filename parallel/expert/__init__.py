"""Expert parallelism: a mixture of experts whose tokens travel to the ranks that hold their experts."""

from pycomm.parallel.expert.moe import MoE

__all__ = ["MoE"]
