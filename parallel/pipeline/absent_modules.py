"""Which modules of the model other stages have, and what this rank has instead of them.

    module                            its parameters here                   a call of it gives
    block of another rank             on the meta device                    stand-ins for its results
    outside the blocks, of another    on meta; once the model is cut,       stand-ins for its results
    rank                              stand-ins (absent.py)
    around the blocks                 stand-ins where neither end is here   its own results: all stages run it
    used by two stages of this rank   a copy for each stage                 its own results

A stand-in has the shape that the module's forward computes on the meta device (templates.py). It is also put
where a block keeps values on itself (`self.aux_loss = ...`).

What can go wrong: the shape of a result depends on values; the forward reads the parameters of an absent
module itself (a head that is tied by hand). Both are refused where they happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import torch
from torch import nn

from pycomm.parallel.given import Tree
from pycomm.parallel.ground.leaves import leaves
from pycomm.parallel.ground.mesh import device_of
from pycomm.parallel.models.shared_state import SharedState
from pycomm.parallel.models.trunk import Side, Trunk
from pycomm.parallel.pipeline.absent import absent_like, absent_parameter
from pycomm.parallel.pipeline.placement import Stages
from pycomm.parallel.pipeline.templates import Templates

if TYPE_CHECKING:
    from pycomm.parallel.ground.layout import Layout

__all__ = ["AbsentModules"]

Owner: TypeAlias = tuple[str, nn.Module, Side]  # see models/trunk.py, owners()


class _Cut(Protocol):
    """A module that tensor parallelism has cut."""

    def layouts(self) -> Mapping[str, Layout]: ...


class AbsentModules:
    """What the stages of this rank do not have of a model. Making it takes the parameters away.

    owners: owners() of the model.
    """

    def __init__(self, model: nn.Module, trunk: Trunk, stages: Stages, owners: Sequence[Owner]) -> None:
        self.trunk, self.stages, self.owners = trunk, stages, owners
        present = {index for stage in stages.mine for index in range(*stages.bounds[stage])}
        self.blocks = set(range(len(trunk.blocks))) - present  # indices of those that other ranks have
        inside = [module for block in trunk.blocks for module in block.modules()]
        # Of blocks (by index) and of modules in front of them (by name).
        self.templates = Templates(SharedState(inside, model.modules()))
        self._take_blocks()
        self._take_owners(device_of(model))
        if stages.last > 0:
            self._untie()

    def _take_blocks(self) -> None:
        for index, block in enumerate(self.trunk.blocks):
            if index in self.blocks:
                block.to("meta")
            if index < self.stages.bounds[-1][0]:
                self.templates.keep(index, block, guess=True)

    def _take_owners(self, device: torch.device) -> None:
        for name, module, side in self.owners:
            if not self.stages.here(side):
                # Not module.to("meta"): its children have entries of their own.
                for key, parameter in module._parameters.items():
                    if parameter is None:
                        continue
                    full = f"{name}.{key}" if name else key
                    around = side is Side.AROUND
                    module._parameters[key] = (
                        absent_parameter(parameter, repr(full), device) if around else _to_meta(parameter)
                    )
            if side in (Side.BEFORE, Side.BETWEEN):
                self.templates.keep(name, module)

    def _untie(self) -> None:
        """Of a weight that several stages on this rank use each gets its own copy, as on several ranks, so
        that gradients add up alike.
        """
        stages = self.stages
        keepers: dict[int, int] = {}  # id of a parameter -> the stage that keeps it
        copies: dict[tuple[int, int], nn.Parameter] = {}  # (id of a parameter, another stage) -> its copy
        for stage in stages.mine:
            blocks = self.trunk.blocks[slice(*stages.bounds[stage])]
            outside = [
                module
                for _, module, side in self.owners
                if side is not Side.AROUND and stages.of(side) == (stage,)
            ]
            for module in [part for block in blocks for part in block.modules()] + outside:
                for key, parameter in module._parameters.items():
                    if parameter is None or keepers.setdefault(id(parameter), stage) == stage:
                        continue
                    own = copies.setdefault((id(parameter), stage), _copy_of(parameter))
                    module._parameters[key], keepers[id(own)] = own, stage

    def mark_parameters(self, model: nn.Module) -> None:
        """Replaces the parameters of absent modules outside the blocks, as they are after all cuts, by
        stand-ins.

        They are for a forward that reads them itself, or asks for their sizes: those of one process, also
        where tensor parallelism has cut them.
        """
        device = device_of(model)
        for name, _, side in self.owners:
            if side is Side.AROUND:
                continue
            module = model.get_submodule(name)
            layouts = cast(_Cut, module).layouts() if hasattr(module, "layouts") else {}
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    whole: torch.Tensor = parameter
                    if key in layouts:
                        shape = layouts[key].full_shape
                        whole = torch.empty(shape, dtype=parameter.dtype, device="meta")
                    module._parameters[key] = absent_parameter(whole, repr(f"{name}.{key}"), device)

    def result_of_block(
        self, index: int, block: nn.Module, args: Sequence[Tree], kwargs: Mapping[str, Tree]
    ) -> Tree:
        """Stand-ins for what a block returns, and, where another rank has it, for what it keeps on itself."""
        origin, device = f"block {index}", _device_of((args, kwargs))
        out = self.templates.of(index, origin, args, kwargs)
        if index in self.blocks:
            for (name, attribute), value in self.templates.left[index].items():
                stand_in = absent_like(value, f"{origin} ({attribute!r})", device)
                block.get_submodule(name).__dict__[attribute] = stand_in
        return absent_like(out, origin, device)

    def result_of(self, name: str, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> Tree:
        """Stand-ins for what a module outside the blocks returns."""
        out = self.templates.of(name, repr(name), args, kwargs)
        return absent_like(out, repr(name), _device_of((args, kwargs)))


def _device_of(values: Tree) -> torch.device | str:
    tensors = (leaf for leaf in leaves(values) if isinstance(leaf, torch.Tensor))
    return next((leaf.device for leaf in tensors), "cpu")


def _copy_of(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


def _to_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
