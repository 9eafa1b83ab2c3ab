"""model.state_dict() and model.load_state_dict() under a plan: hooks on modules, which never communicate.

    what this rank holds of a parameter                 state_dict() gives     load_state_dict() takes
    all of it (dp, zero 1 and 2, ring, ulysses)         the tensor             a whole tensor
    rows or columns that are Shard(d) over tp           a DTensor              that DTensor, or a whole tensor
    other parts of tp (fused q/k/v, shared kv heads)    ValueError             a whole tensor
    a shard of zero=3, nothing (pp), experts (ep)       ValueError             ValueError

People call state_dict() on one rank alone, so it cannot ask for what other ranks hold. The errors name the
calls that can: sharded_dicts.py and whole.py.

A DTensor's Shard(d) is cut as torch.chunk cuts. Whether all ranks of tp have such parts of a parameter is
asked once, when the hooks are made (one all_reduce), as ranks must take the same decision.

[Note: master copies] Under precision="bf16" the optimizer updates copies in fp32. state_dict() gives the bf16
values, of which zero 1 and 2 have all on every rank. load_state_dict() writes into both: a value in fp32
becomes the copy; a copy stays where it rounds to the bf16 value that is loaded, so that
model.load_state_dict(model.state_dict()) changes nothing.

What can go wrong: a load on some of the ranks only, which leaves the ranks with different values, as under
torch's DistributedDataParallel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from pycomm.parallel.ground import comm
from pycomm.parallel.parts import parts_of
from pycomm.parallel.pipeline.absent import is_absent

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    from torch.distributed.tensor import DTensor

    from pycomm.parallel.data.bucket import ParamInfo
    from pycomm.parallel.ground.layout import Layout
    from pycomm.parallel.parts import Parallelized

__all__ = ["Cuts", "WAY_OUT", "dtensor_or_none", "guard_state_dicts", "num_parameters", "set_values"]

WAY_OUT = (
    "Call on all ranks par.full_state_dict(model) for whole tensors, par.state_dict(model) for DTensors, or "
    "par.save(model, opt, path) for a checkpoint"
)
_WAY_IN = "Call par.load_state_dict(model, state), or par.load(model, opt, path), on all ranks"


def num_parameters(model: nn.Module, trainable_only: bool = False) -> int:
    """How many parameters the model has: sum(p.numel() for p in model.parameters()) of one process, tied ones
    counted once. Equal on all ranks, no communication.

    trainable_only: only those with requires_grad. Raises ValueError for a model that has not been through
    parallelize().
    """
    parts = parts_of(model)
    trained = set(parts.original.trained)
    for name, flag in parts.trained.now().items():  # experts of other ranks are not in it
        (trained.add if flag else trained.discard)(name)
    shapes = parts.original.shapes
    return sum(
        math.prod(shapes[name]) for name in parts.original.names if name in trained or not trainable_only
    )


class Cuts:
    """What of the parameters is here, as DTensors have it. Collective over tp when made."""

    def __init__(self, parts: Parallelized) -> None:
        self.parts = parts
        cut = [info for info in parts.infos if info.layout.dim is not None] if parts.plan.tp > 1 else []
        tp = parts.mesh.group("tp")
        other = torch.tensor([not _is_chunk(info.layout, tp) for info in cut], device=parts.device).int()
        if cut:
            comm.all_reduce(other, tp, torch.distributed.ReduceOp.MAX)
        self.dims = {
            info.name: cast(int, info.layout.dim)
            for info, is_other in zip(cut, other.tolist(), strict=True)
            if not is_other
        }

    def dtensor(self, local: torch.Tensor, info: ParamInfo, call: str) -> torch.Tensor:
        """`local`, of the shape of the parameter here, as the part of a DTensor; itself when it is whole."""
        if info.layout.dim is None:
            return local
        if info.name not in self.dims:
            raise ValueError(
                f"{call}: under Plan({self.parts.plan}) this rank holds {_ranges_of(info.layout)} of "
                f"{info.name!r}, whose shape is {info.layout.full_shape}: no DTensor describes that cut. "
                f"{WAY_OUT}"
            )
        from torch.distributed.tensor import DTensor, Shard

        assert self.parts.mesh.device_mesh is not None  # tp has several ranks
        shape = torch.Size(info.layout.full_shape)
        return DTensor.from_local(
            local,
            self.parts.mesh.device_mesh["tp"],
            [Shard(self.dims[info.name])],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )

    def local(self, value: torch.Tensor, info: ParamInfo, call: str) -> torch.Tensor | None:
        """What this rank holds of a whole tensor, or of a DTensor whose part is here; None where the shape is
        not the parameter's.
        """
        dtensor = dtensor_or_none(value)
        if dtensor is not None:
            mine = self._own_part(dtensor, info)
            if mine is None:
                raise ValueError(
                    f"{call}: {info.name!r} is a DTensor with {dtensor.placements} over "
                    f"{dtensor.device_mesh}, of which this rank needs another part under "
                    f"Plan({self.parts.plan}). {_WAY_IN}"
                )
            if mine.shape == info.shape and tuple(value.shape) == info.layout.full_shape:
                return mine
            value = mine
        if info.layout.dim is None:
            return value
        return info.layout.take(value.detach()) if tuple(value.shape) == info.layout.full_shape else None

    def _own_part(self, value: DTensor, info: ParamInfo) -> torch.Tensor | None:
        if all(placement.is_replicate() for placement in value.placements):
            return value.to_local()
        mesh = self.parts.mesh.device_mesh
        if info.name not in self.dims or mesh is None or value.device_mesh != mesh["tp"]:
            return None
        (placement,) = value.placements
        return value.to_local() if placement.is_shard(self.dims[info.name]) else None


def dtensor_or_none(value: object) -> DTensor | None:
    """The value, if it is one; without importing torch.distributed.tensor, which takes a second."""
    if any(kind.__name__ == "DTensor" for kind in type(value).__mro__):
        return cast("DTensor", value)
    return None


def _is_chunk(layout: Layout, tp: comm.Group) -> bool:
    """Whether the part is what Shard(dim) gives. Where parts overlap, one rank's is not."""
    if layout.dim is None:
        return False
    ends = list(layout.ranges)
    if any(stop != start for (_, stop), (start, _) in zip(ends, ends[1:], strict=False)):
        return False
    length = layout.full_shape[layout.dim]
    chunk = -(-length // tp.size)
    start = min(chunk * tp.rank, length)
    return bool(ends) and (ends[0][0], ends[-1][1]) == (start, min(start + chunk, length))


def _ranges_of(layout: Layout) -> str:
    found = [f"{start} to {stop - 1}" for start, stop in layout.ranges]
    shown = ", ".join(found[:4]) + (" and others" if len(found) > 4 else "")
    return f"the indices {shown} of dim {layout.dim}"


def guard_state_dicts(parts: Parallelized) -> Cuts:
    """Hooks on all modules of the model. Collective over tp."""
    cuts = Cuts(parts)
    hooks = _Hooks(cuts)
    for module in parts.model.modules():
        part = hooks.has_part(module)
        calls = (hooks.saves, hooks.saved, hooks.loads, hooks.loaded)
        saves, saved, loads, loaded = (_Hook(parts, part, each) for each in calls)
        module.register_state_dict_pre_hook(saves)
        handle = module.register_state_dict_post_hook(saved)
        order = cast("OrderedDict[int, object]", module._state_dict_hooks)
        order.move_to_end(handle.id, last=False)  # the user's hooks get what it gives
        module.register_load_state_dict_pre_hook(loads)
        module.register_load_state_dict_post_hook(loaded)
    return cuts


class _Hook:
    """As a module holds it. In a copy of the module, without a plan, it does nothing; a module with parts
    of parameters cannot be copied.
    """

    def __init__(self, parts: Parallelized, has_part: bool, call: Callable[..., None]) -> None:
        self.plan, self.writes, self.has_part, self.call = parts.plan, parts.writes, has_part, call

    def __call__(self, *args: object) -> None:
        if not self.writes.gathered:  # inside of par.gathered() the parameters are whole
            self.call(*args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        if self.has_part:
            raise ValueError(
                f"this module has one rank's part of its parameters under Plan({self.plan}): it cannot be "
                f"copied or pickled. {WAY_OUT}"
            )
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*_: object) -> None:
    """The hook of a copy."""


class _Hooks:
    """Of the modules of one model."""

    def __init__(self, cuts: Cuts) -> None:
        self.cuts, self.parts = cuts, cuts.parts
        self.info_of = {id(info.param): info for info in self.parts.infos}
        self.given: dict[int, torch.Tensor] = {}  # id of a parameter -> what it is loaded with, see the Note

    # --- saving --------------------

    def saves(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Before module.state_dict()."""
        self._refuse(module, "state_dict()", WAY_OUT)

    def saved(
        self, module: nn.Module, state: MutableMapping[str, object], prefix: str, _: Mapping[str, object]
    ) -> None:
        """After it: its own parts of parameters become DTensors."""
        for key, parameter in module._parameters.items():
            info, value = self.info_of.get(id(parameter)), state.get(prefix + key)
            if info is not None and isinstance(value, torch.Tensor) and tuple(value.shape) == info.shape:
                state[prefix + key] = self.cuts.dtensor(value, info, "state_dict()")

    # --- loading --------------------

    def loads(
        self,
        module: nn.Module,
        state: MutableMapping[str, object],
        prefix: str,
        metadata: Mapping[str, object],
        *rest: object,
    ) -> None:
        """Before module.load_state_dict(): whole tensors and DTensors become what the module holds."""
        self._refuse(module, "load_state_dict()", _WAY_IN)
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        if metadata.get("assign_to_params_buffers") or swaps:
            how = "set_swap_module_params_on_conversion(True)" if swaps else "assign=True"
            raise ValueError(
                f"load_state_dict() with {how} would replace parameters, and Plan({self.parts.plan}) keeps "
                "them in its buffers. Load with assign=False, which copies the values"
            )
        errors = cast("list[str]", rest[-1])
        for key, parameter in [*module._parameters.items(), *module._buffers.items()]:
            name, value = prefix + key, state.get(prefix + key)
            if parameter is None or not isinstance(value, torch.Tensor):
                continue
            info = self.info_of.get(id(parameter))
            if info is None:
                state[name] = _whole(value, name)
                continue
            local = self.cuts.local(value, info, "load_state_dict()")
            if local is None:
                errors.append(
                    f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, "
                    f"the shape in current model is {torch.Size(info.layout.full_shape)}."
                )
                local = parameter.detach()
            elif local.dtype != parameter.dtype and local.shape == parameter.shape:
                self.given[id(parameter)] = local.detach()
            state[name] = local

    def loaded(self, module: nn.Module, _: object) -> None:
        """After it: copies that the optimizer updates, see [Note: master copies]."""
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) in self.info_of:
                given = self.given.pop(id(parameter), None)
                set_masters(self.parts, parameter, parameter.detach() if given is None else given)
                self.parts.writes.note_of(parameter)

    def _refuse(self, module: nn.Module, call: str, way_out: str) -> None:
        """Raises ValueError where this rank lacks values of the module, or may lack them as others do."""
        parts, whole = self.parts, module is self.parts.model
        lack = None
        if parts.units is not None and next(module.parameters(), None) is not None:
            lack = "a shard of each parameter"
        elif parts.plan.pp > 1 and (whole or _lacks_values(module)):
            lack = "the parameters of its stages"
        elif parts.plan.ep > 1 and (whole or self._has_experts(module)):
            lack = "a part of the experts"
        if lack is not None:
            raise ValueError(
                f"{call}: under Plan({parts.plan}) this rank holds only {lack} of this "
                f"{type(module).__name__}, and the call does not communicate. {way_out}"
            )

    def has_part(self, module: nn.Module) -> bool:
        """Whether its own parameters, without its submodules', are not whole here."""
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        infos = [self.info_of.get(id(parameter)) for parameter in own]
        return (
            (self.parts.units is not None and bool(own))
            or any(is_absent(parameter) for parameter in own)
            or any(info is not None and info.layout.dim is not None for info in infos)
        )

    def _has_experts(self, module: nn.Module) -> bool:
        dealt = {id(moe) for moe in self.parts.moes}
        dealt |= {id(self.parts.model.get_submodule(name)) for name in self.parts.original.stacked_names}
        return any(id(each) in dealt for each in module.modules())


def _lacks_values(module: nn.Module) -> bool:
    tensors: Sequence[torch.Tensor] = [*module.parameters(), *module.buffers()]
    return any(is_absent(tensor) for tensor in tensors)


def _whole(value: torch.Tensor, name: str) -> torch.Tensor:
    """Of a buffer."""
    dtensor = dtensor_or_none(value)
    if dtensor is None:
        return value
    if not all(placement.is_replicate() for placement in dtensor.placements):
        raise ValueError(f"load_state_dict(): the buffer {name!r} is a DTensor that is cut. {_WAY_IN}")
    return dtensor.to_local()


@torch.no_grad()
def set_masters(parts: Parallelized, parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Brings the values of a local parameter, all of them, into the copy that the optimizer updates, where it
    is another tensor. What a copy in fp32 rounds to is left as it is.
    """
    for shards in parts.all_shards:
        if shards.master is None or shards.master is shards.values_here:
            continue
        for info, piece, master in shards.owned:
            if info.param is not parameter:
                continue
            new = values.reshape(-1)[piece.start : piece.stop].view(master.shape)
            set_values(master, new, parameter.dtype)


def set_values(master: torch.Tensor, new: torch.Tensor, narrow: torch.dtype) -> None:
    """In place. narrow: the dtype in which the model computes, see [Note: master copies]."""
    new = new.to(master.device)
    if new.dtype == narrow != master.dtype:
        new = torch.where(master.to(narrow) == new, master, new.to(master.dtype))
    master.copy_(new)
