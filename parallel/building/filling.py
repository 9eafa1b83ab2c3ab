"""A model on meta becomes this rank's part of it without ever being there whole.

    step of parallelize     what is on meta                                         memory afterwards
    check ... make_stages   all; modules of other stages stay so                    none
    buffers                 -                                                       buffers of this rank
    cut_tensors, cast       the rest, in the shapes and dtypes of this rank
    hollow                  nothing: parameters have a device, a shape, and the     one element each
                            memory of one number
    make_buckets            their places: buffers, shards, master copies            this rank's share
    fill                    the values, box by box                                  and one module

A value comes from the files of weights= (checkpoint/hub.py), or from the initialisation of its module
(initial.py). It is read into what the optimizer updates, as par.load does it, so a rank reads or computes
nothing but what it holds. What the model computes with is then made from that, as after a step.

Parameters that have values keep them, if the files have none for them.
"""

import torch
from torch import nn

from pycomm.parallel.building.cut import Cut
from pycomm.parallel.building.initial import Initial
from pycomm.parallel.checkpoint.agree import together_over
from pycomm.parallel.checkpoint.holdings import holdings
from pycomm.parallel.checkpoint.hub import HubFiles

__all__ = ["Filling", "give_memory"]


def give_memory(infos):
    """To parameters that Filling.hollow() has left, and no bucket has given a place."""
    for info in infos:
        values = info.param.data
        if values.untyped_storage().nbytes() < values.numel() * values.element_size():
            info.param.data = torch.empty(info.shape, dtype=values.dtype, device=values.device)


class Filling:
    """weights: folder or None. place: (Group of all ranks, device, seed that is equal on all ranks).
    Collective; raises ValueError on all ranks.
    """

    def __init__(self, model, original, weights, place):
        self.group, self.device, seed = place
        named = dict(model.named_parameters())
        self.dtypes = {name: parameter.dtype for name, parameter in named.items()}
        self.empty = {name for name, parameter in named.items() if parameter.is_meta}  # first names
        self.on_meta = self.empty | {name for name, buffer in model.named_buffers() if buffer.is_meta}
        self.initial = self.files = None
        if self.on_meta:
            self.initial = self._together(lambda: Initial(model, seed))
        if weights is not None:
            self.files = self._together(lambda: HubFiles(weights, model, original.first_name, self._spared))
            self.empty = self.empty | set(self.files.keys) & set(named)

    def _spared(self, name):
        """Whether the files may lack a tensor: it has values, or is an adapter, which is initialised."""
        return name not in self.on_meta or self.initial.is_adapter(name)

    def _together(self, action):
        return together_over(self.group, self.device, action)

    def _source(self, name):
        return self.files if self.files is not None and name in self.files else self.initial

    def buffers(self, model: nn.Module, cut: Cut) -> None:
        """Gives their values to all buffers but those of other stages' blocks."""
        absent = cut.absent.blocks if cut.absent is not None else ()
        outside = {id(module) for index in absent for module in cut.trunk.blocks[index].modules()}

        def give():
            made = {}
            for path, module in model.named_modules():
                for key, buffer in module._buffers.items() if id(module) not in outside else ():
                    name = f"{path}.{key}" if path else key
                    saved = self.files is not None and key not in module._non_persistent_buffers_set
                    saved = saved and name in self.files
                    if buffer is None or not (buffer.is_meta or saved):
                        continue
                    if id(buffer) not in made:
                        made[id(buffer)] = buffer, self._whole(name, buffer)
                    module._buffers[key] = made[id(buffer)][1]

        if self.initial is not None or self.files is not None:
            self._together(give)

    def _whole(self, name, like):
        values = self._source(name).read(name, (0,) * like.dim(), tuple(like.shape))
        return values.to(self.device, like.dtype, copy=True)

    def hollow(self, model, cut):
        """Parameters of this rank that are still on meta get a device, and no memory."""
        made = {}
        for path, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                stages = cut.stages_of(f"{path}.{key}" if path else key)
                if any(stage in cut.stages.mine for stage in stages):
                    if id(parameter) not in made:
                        nothing = torch.empty((), dtype=parameter.dtype, device=self.device)
                        made[id(parameter)] = nn.Parameter(
                            nothing.expand(parameter.shape), parameter.requires_grad
                        )
                    module._parameters[key] = made[id(parameter)]

    def fill(self, parts):
        """The values of the parameters, into what the optimizer updates."""
        if not self.empty:
            return

        def read():
            held = [holding for holding in holdings(parts) if holding.info.name in self.empty]
            for source in (self.files, self.initial):
                some = [holding for holding in held if self._source(holding.info.name) is source]
                for holding in sorted(some, key=lambda holding: source.place(holding.info.name)):
                    dtype = self.dtypes[holding.info.name]
                    for box in holding.boxes(holding.values, False):
                        values = source.read(holding.info.name, box.offsets, box.sizes)
                        box.values.copy_(values.to(dtype))
                if source is not None:
                    source.close()

        with torch.no_grad():
            self._together(read)
            for shards in parts.all_shards:
                shards.publish()
            for shards in parts.all_shards:
                shards.wait()
