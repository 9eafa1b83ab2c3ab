"""Sequence parallelism of a plan: ring, ulysses and megatron_sp.

    step             what changes in the model
    SequenceSplit    nothing; it knows which positions are on this rank (sequence_split.py)
    serve_eager      eager attention of transformers in the blocks runs over all ranks (eager.py)

Tensor parallel layers gather and scatter positions over tp themselves (megatron_sp): they are given the
SequenceSplit. Stages of a pipeline cut what their blocks are given with it.

What can go wrong: everything that sequence_split.py lists, in a forward; nothing here.
"""

from collections.abc import Mapping

from pycomm.parallel.ground.mesh import Mesh
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.models.trunk import Side, Trunk
from pycomm.parallel.sequence.eager import serve_eager
from pycomm.parallel.sequence.sequence_split import SequenceSplit

__all__ = ["split_sequence"]


def split_sequence(trunk: Trunk, sides: Mapping[str, Side], mesh: Mesh, plan: Plan) -> SequenceSplit | None:
    """None: the plan does not cut the sequence. sides: of the modules outside the blocks, by name."""
    if not plan.cuts_sequence:
        return None
    split = SequenceSplit(mesh, plan, sides)
    if split.degree > 1:
        serve_eager(trunk.blocks)
    return split
