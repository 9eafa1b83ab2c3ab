"""Where a model that tensor parallelism has cut changes its stream of random numbers; why: ground/streams.py.

    outside    column layer | heads or neurons of this rank | row layer    outside
    shared                  | own                           |              shared

Under megatron_sp the whole trunk draws from the own stream, and what runs on the whole sequence inside it
from the shared one.
"""

from pycomm.parallel.ground.streams import Stream
from pycomm.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from pycomm.parallel.tensor.multihead import MultiheadForward
from pycomm.parallel.tensor.whole_sequence import WholeSequence

__all__ = ["switch_at_edges"]


def switch_at_edges(model, streams, megatron):
    """Hooks that change `streams` (RandomStreams) at the edges of the sublayers that were cut. megatron: the
    activations in the trunk differ between the ranks of tp.
    """
    if not streams.cut:
        return
    for module in model.modules():
        forward = getattr(module, "forward", None)
        if megatron:
            if isinstance(forward, WholeSequence):
                _around(module, streams, Stream.SHARED, Stream.OWN)
        elif isinstance(forward, MultiheadForward):
            _around(module, streams, Stream.OWN, Stream.SHARED)
        elif isinstance(module, ColumnParallelLinear) and not module.gather_output:
            module.register_forward_hook(lambda *_: streams.switch(Stream.OWN))
        elif isinstance(module, RowParallelLinear) and module.input_is_parallel:
            module.register_forward_pre_hook(lambda *_: streams.switch(Stream.SHARED))


def _around(module, streams, inside, outside):
    module.register_forward_pre_hook(lambda *_: streams.switch(inside))
    module.register_forward_hook(lambda *_: streams.switch(outside))
