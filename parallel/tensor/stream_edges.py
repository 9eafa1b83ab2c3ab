"""Where a model that tensor parallelism has cut changes its stream of random numbers; why: ground/streams.py.

    outside    column layer | heads or neurons of this rank | row layer    outside
    shared                  | own                           |              shared

Around an adapter the change is at its own edges: its dropout is on what enters. Under megatron_sp the whole
trunk draws from the own stream, and what runs on the whole sequence inside it from the shared one: attention
that is not cut, and the dropout of adapters of column layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from pycomm.parallel.ground.streams import RandomStreams, Stream
from pycomm.parallel.models.modes import as_written
from pycomm.parallel.tensor.adapters import AdapterForward
from pycomm.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from pycomm.parallel.tensor.multihead import MultiheadForward
from pycomm.parallel.tensor.whole_sequence import WholeSequence

if TYPE_CHECKING:
    from torch import nn

    from pycomm.parallel.given import Tree

__all__ = ["switch_at_edges"]


def switch_at_edges(model: nn.Module, streams: RandomStreams, megatron: bool) -> None:
    """Hooks that change `streams` at the edges of the sublayers that were cut. megatron: the
    activations in the trunk differ between the ranks of tp.
    """
    if not streams.cut:
        return
    adapters = {
        module: forward
        for module in model.modules()
        if isinstance(forward := _forward(module), AdapterForward)
    }
    inside = {part for adapter in adapters for part in adapter.modules()}
    for module in model.modules():
        forward, adapter = _forward(module), adapters.get(module)
        if megatron:
            if isinstance(forward, WholeSequence) or adapter is not None and adapter.enters is not None:
                _around(module, streams, Stream.SHARED, Stream.OWN)
        elif adapter is not None:
            edges = (Stream.SHARED, Stream.OWN) if adapter.enters is not None else (Stream.OWN, Stream.SHARED)
            _around(module, streams, *edges)
        elif module in inside:
            continue
        elif isinstance(forward, MultiheadForward):
            _around(module, streams, Stream.OWN, Stream.SHARED)
        elif isinstance(module, ColumnParallelLinear) and not module.gather_output:
            module.register_forward_hook(lambda *_: streams.switch(Stream.OWN))
        elif isinstance(module, RowParallelLinear) and module.input_is_parallel:
            module.register_forward_pre_hook(lambda *_: streams.switch(Stream.SHARED))


def _forward(module: nn.Module) -> Callable[..., Tree] | None:
    """Its forward without what reads.py has put around it."""
    forward = as_written(getattr(module, "forward", None))
    while isinstance(forward, functools.partial) and forward.args:
        forward = as_written(forward.args[-1])
    return forward


def _around(module: nn.Module, streams: RandomStreams, inside: Stream, outside: Stream) -> None:
    module.register_forward_pre_hook(lambda *_: streams.switch(inside))
    module.register_forward_hook(lambda *_: streams.switch(outside))
