"""Where a model that tensor parallelism has cut changes its stream of random numbers; why: ground/streams.py.

    outside    column layer | heads or neurons of this rank | row layer    outside
    shared                  | own                           |              shared

Around an adapter the change is at its own edges: its dropout is on what enters. Under megatron_sp the whole
trunk draws from the own stream, and what runs on the whole sequence inside it from the shared one: attention
that is not cut, and the dropout of adapters of column layers.
"""

from pycomm.parallel.ground.streams import Stream
from pycomm.parallel.tensor.adapters import AdapterForward
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
    inside = {part for module in model.modules() if _is_adapter(module) for part in module.modules()}
    for module in model.modules():
        forward = getattr(module, "forward", None)
        if megatron:
            if isinstance(forward, WholeSequence) or _is_adapter(module) and forward.enters is not None:
                _around(module, streams, Stream.SHARED, Stream.OWN)
        elif _is_adapter(module):
            edges = (Stream.SHARED, Stream.OWN) if forward.enters is not None else (Stream.OWN, Stream.SHARED)
            _around(module, streams, *edges)
        elif module in inside:
            continue
        elif isinstance(forward, MultiheadForward):
            _around(module, streams, Stream.OWN, Stream.SHARED)
        elif isinstance(module, ColumnParallelLinear) and not module.gather_output:
            module.register_forward_hook(lambda *_: streams.switch(Stream.OWN))
        elif isinstance(module, RowParallelLinear) and module.input_is_parallel:
            module.register_forward_pre_hook(lambda *_: streams.switch(Stream.SHARED))


def _is_adapter(module):
    return isinstance(getattr(module, "forward", None), AdapterForward)


def _around(module, streams, inside, outside):
    module.register_forward_pre_hook(lambda *_: streams.switch(inside))
    module.register_forward_hook(lambda *_: streams.switch(outside))
