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

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from pycomm.parallel.building.cut import Cut
from pycomm.parallel.building.initial import Initial
from pycomm.parallel.checkpoint.agree import together_over
from pycomm.parallel.checkpoint.holdings import holdings
from pycomm.parallel.checkpoint.hub import HubFiles

if TYPE_CHECKING:
    from pycomm.parallel.building.alike import Folder
    from pycomm.parallel.data.bucket import ParamInfo
    from pycomm.parallel.ground.comm import Group
    from pycomm.parallel.parts import Original, Parallelized

__all__ = ["Common", "Filling", "give_memory"]

ResultT = TypeVar("ResultT")


class Source(Protocol):
    """Where values come from."""

    def place(self, name: str) -> Any:
        """In which order to read: numbers, or texts."""

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of a parameter or a buffer."""

    def close(self) -> None: ...


class Common(NamedTuple):
    """What all ranks have."""

    group: Group  # all ranks
    device: torch.device  # of this rank
    seed: int  # equal on all


def give_memory(infos: Iterable[ParamInfo]) -> None:
    """To parameters that Filling.hollow() has left, and no bucket has given a place."""
    for info in infos:
        values = info.param.data
        if values.untyped_storage().nbytes() < values.numel() * values.element_size():
            info.param.data = torch.empty(info.shape, dtype=values.dtype, device=values.device)


class Filling:
    """Collective; raises ValueError on all ranks."""

    def __init__(self, model: nn.Module, original: Original, weights: Folder | None, common: Common) -> None:
        self.group, self.device = common.group, common.device
        named = dict(model.named_parameters())
        self.dtypes = {name: parameter.dtype for name, parameter in named.items()}
        self.empty = {name for name, parameter in named.items() if parameter.is_meta}  # first names
        self.on_meta = self.empty | {name for name, buffer in model.named_buffers() if buffer.is_meta}
        self.initial: Initial | None = None
        self.files: HubFiles | None = None
        if self.on_meta:
            self.initial = self._together(lambda: Initial(model, common.seed))
        if weights is not None:
            self.files = self._together(lambda: HubFiles(weights, model, original.first_name, self._spared))
            self.empty = self.empty | set(self.files.keys) & set(named)

    def _spared(self, name: str) -> bool:
        """Whether the files may lack a tensor: it has values, or is an adapter, which is initialised."""
        return self.initial is None or name not in self.on_meta or self.initial.is_adapter(name)

    def _together(self, action: Callable[[], ResultT]) -> ResultT:
        return together_over(self.group, self.device, action)

    def _source(self, name: str) -> Source:
        """name: of what is in `empty` or on meta, or in the files."""
        if self.files is not None and name in self.files:
            return self.files
        assert self.initial is not None  # something is on meta
        return self.initial

    def buffers(self, model: nn.Module, cut: Cut) -> None:
        """Gives their values to all buffers but those of other stages' blocks."""
        absent = cut.absent.blocks if cut.absent is not None else ()
        blocks = cut.trunk.blocks if cut.trunk is not None else []
        outside = {id(module) for index in absent for module in blocks[index].modules()}

        def give() -> None:
            made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: the buffer, its values
            for path, module in model.named_modules():
                for key, buffer in module._buffers.items() if id(module) not in outside else ():
                    name = f"{path}.{key}" if path else key
                    saved = key not in module._non_persistent_buffers_set
                    saved = saved and self.files is not None and name in self.files
                    if buffer is None or not (buffer.is_meta or saved):
                        continue
                    if id(buffer) not in made:
                        made[id(buffer)] = buffer, self._whole(name, buffer)
                    module._buffers[key] = made[id(buffer)][1]

        if self.initial is not None or self.files is not None:
            self._together(give)

    def _whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        values = self._source(name).read(name, (0,) * like.dim(), tuple(like.shape))
        return values.to(self.device, like.dtype, copy=True)

    def hollow(self, model: nn.Module, cut: Cut) -> None:
        """Parameters of this rank that are still on meta get a device, and no memory."""
        made: dict[int, nn.Parameter] = {}
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

    def fill(self, parts: Parallelized) -> None:
        """The values of the parameters, into what the optimizer updates."""
        if not self.empty:
            return

        def read() -> None:
            held = [holding for holding in holdings(parts) if holding.info.name in self.empty]
            sources: list[Source] = [each for each in (self.files, self.initial) if each is not None]
            for source in sources:
                some = [holding for holding in held if self._source(holding.info.name) is source]
                for holding in sorted(some, key=lambda holding: source.place(holding.info.name)):
                    dtype = self.dtypes[holding.info.name]
                    for box in holding.boxes(holding.values, False):
                        values = source.read(holding.info.name, box.offsets, box.sizes)
                        box.values.copy_(values.to(dtype))
                source.close()

        with torch.no_grad():
            self._together(read)
            for shards in parts.all_shards:
                shards.publish()
            for shards in parts.all_shards:
                shards.wait()
