"""par.gathered(): whole parameters for a while, to read and to write, under every plan.

    with par.gathered(model, model.head):
        model.head.weight.clamp_(-1, 1)        names, shapes and modules as in one process

    enter    each rank gathers the values at full precision (whole.py): P bytes of what was asked for
             parameters get them by `p.data`; modules that the plan has replaced or left out come back, with
             nothing of their own but these parameters
    leave    the ranks tell how it went, rank 0's values are broadcast, and each rank puts what it holds of
             them into what the optimizer has; new values are made from that, as after a step

The objects are those that the model has outside, but where this rank has none (parameters of other pipeline
stages, experts of other ranks). What was written is put back at the end of the block only: where a rank has
raised inside, or has exchanged a Parameter, its shape or its dtype, all ranks raise, and the model is as it
was before. Other ways: FSDP's summon_full_params takes each shard from its rank, so a value that the ranks
drew differently becomes a mixture.

Cost: the memory of what is gathered, twice 2(n-1)/n of it sent. For large models: module by module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from pycomm.parallel.checkpoint.agree import exchange, together
from pycomm.parallel.checkpoint.boxes import Box
from pycomm.parallel.checkpoint.holdings import holdings
from pycomm.parallel.checkpoint.whole import gather_parameters
from pycomm.parallel.ground import comm
from pycomm.parallel.parts import Parallelized, parts_of

__all__ = ["gathered"]


@contextlib.contextmanager
def gathered(model: nn.Module, modules: nn.Module | Iterable[nn.Module] | None = None) -> Iterator[None]:
    """A context in which the model, or some modules of it, have whole parameters on every rank, as one
    process has them. At its end rank 0's values hold on all ranks. Collective over all ranks.

    Args:
        model: as parallelize() returned it.
        modules: a module of the model, or several, the same on all ranks; None: all of it.

    Inside, parameters may be read and written in every way: in place, by `p.data = ...`, by
    reset_parameters() and torch.nn.init. They are at full precision (fp32 under precision="bf16"). The
    optimizer's state stays as it is. The model is not called there, and step, evaluate, save and such are
    refused.

    Raises ValueError on every rank where one raises inside (there its own error), where a Parameter was
    exchanged or has got another shape, dtype or device, and before anything is gathered where a write to a
    parameter would have been lost. Nothing is written then: all values are as before.
    """
    parts = parts_of(model)
    with parts.writes.inside("gathered"):
        parts.writes.check("gathered", parts.mesh.world.rank)
        names = _names(parts, modules)
        opened = _Opened(parts, names)
    error: Exception | None = None
    with opened.shown():
        try:
            yield
        except dist.DistError:
            raise
        except Exception as raised:
            error = raised
        values = opened.values()
    with parts.writes.inside("gathered"):
        problem = values if isinstance(values, str) else None
        _refuse_where(parts, error, problem)
        if not isinstance(values, str):
            opened.put_back(values)


def _refuse_where(parts: Parallelized, error: Exception | None, problem: str | None) -> None:
    """Raises on every rank where one has an error or a problem."""
    mine = problem if error is None else f"raised {type(error).__name__}: {error}"
    told = exchange(parts, mine)
    if error is not None:
        raise error
    for rank, each in enumerate(told):
        if each is not None:
            raise ValueError(
                f"[rank {parts.mesh.world.rank}] par.gathered: rank {rank} {each}. Nothing was written: all "
                "values are as they were before the `with` block"
            )


def _names(parts: Parallelized, modules: nn.Module | Iterable[nn.Module] | None) -> list[str]:
    """First names of the parameters of these modules, in order. Raises ValueError on every rank."""

    def find() -> list[str]:
        if modules is None:
            return list(parts.original.names)
        prefixes = {id(module): name for name, module in parts.model.named_modules()}
        wanted = [modules] if isinstance(modules, nn.Module) else list(modules)
        found: set[str] = set()
        for module in wanted:
            prefix = prefixes.get(id(module))
            if prefix is None:
                raise ValueError(
                    f"par.gathered: the {type(module).__name__} is not a module of this model. Give modules "
                    "as the model has them now (model.blocks[0]), or None for all"
                )
            inside = f"{prefix}." if prefix else ""
            found |= _within(parts, inside)
        for _, _, inside in _replaced(parts) * 2:  # twice: one may be tied to another
            if _within(parts, inside) & found:
                found |= _within(parts, inside)
        return [name for name in parts.original.names if name in found]

    names = together(parts, find)
    for rank, other in enumerate(exchange(parts, names)):
        if other != names:
            name = next(iter(sorted(set(other) ^ set(names))))
            raise ValueError(
                f"[rank {parts.mesh.world.rank}] par.gathered: rank {rank} and this one name other modules "
                f"({name!r} on one of them alone). Give the same on all ranks"
            )
    return names


def _within(parts: Parallelized, prefix: str) -> set[str]:
    """First names of the parameters whose names begin so."""
    return {first for name, first in parts.original.first_name.items() if name.startswith(prefix)}


def _replaced(parts: Parallelized) -> list[tuple[nn.Module, str, str]]:
    """(the module around it, its key there, beginning of the names in it) of each module that the plan has
    replaced or left out.
    """
    found, children = [], parts.original.children
    names = [("", parts.model)]
    for prefix, module in names:
        for key, child in children.get(module, {}).items():
            if child is None:
                continue
            if module._modules.get(key) is child:
                names.append((f"{prefix}{key}.", child))
            else:
                found.append((module, key, f"{prefix}{key}."))
    return found


class _Slot(NamedTuple):
    """A place of a parameter in a module, and what stands there outside."""

    table: dict[str, nn.Parameter | None]
    key: str
    outside: nn.Parameter | None


class _Opened:
    """What is gathered. names: of parameters."""

    def __init__(self, parts: Parallelized, names: list[str]) -> None:
        self.parts = parts
        self.flat, self.views = gather_parameters(parts, names)
        own: dict[str, nn.Parameter] = {}
        for info in parts.infos:
            own.setdefault(info.name, info.param)
        self.outside = {name: own[name].data for name in names if name in own}
        trained = parts.trained.now()
        self.params = {
            name: own[name] if name in own else nn.Parameter(view, trained.get(name, False))
            for name, view in self.views.items()
        }

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """The model has the whole parameters."""
        parts, writes = self.parts, self.parts.writes
        with contextlib.ExitStack() as stack:
            replaced = [each for each in _replaced(parts) if _within(parts, each[2]) & set(self.params)]
            for module in dict.fromkeys(module for module, _, _ in replaced):
                before, first = dict(module._modules), parts.original.children[module]
                back = {key: first[key] for each, key, _ in replaced if each is module}
                order = dict.fromkeys(key for key in (*first, *before) if key in before or key in back)
                stack.callback(_set, module._modules, before)
                _set(module._modules, {key: back.get(key, before.get(key)) for key in order})
            slots = self._slots()
            for name, param in self.params.items():
                param.__class__ = nn.Parameter
                param.data = self.views[name]
                for slot in slots[name]:
                    stack.callback(slot.table.__setitem__, slot.key, slot.outside)
                    slot.table[slot.key] = param
            self.slots = slots
            for module in parts.model.modules():
                stack.callback(module.register_forward_pre_hook(_refuse_forward, prepend=True).remove)
            writes.gathered = True
            try:
                yield
            finally:
                writes.gathered = False
                writes.reopen()
                for name, data in self.outside.items():
                    self.params[name].data = data
                writes.note()
                writes.close()

    def _slots(self) -> dict[str, list[_Slot]]:
        """By the first name of a parameter."""
        found: dict[str, list[_Slot]] = {name: [] for name in self.params}
        for prefix, module in self.parts.model.named_modules(remove_duplicate=False):
            for key, parameter in module._parameters.items():
                first = self.parts.original.first_name.get(f"{prefix}.{key}" if prefix else key)
                if first in found:
                    found[first].append(_Slot(module._parameters, key, parameter))
        return found

    def values(self) -> dict[str, torch.Tensor] | str:
        """Of the parameters as they are now, or what is wrong with them. Inside of shown()."""
        found = {}
        for name, param in self.params.items():
            if any(slot.table.get(slot.key) is not param for slot in self.slots[name]):
                return f"has exchanged the Parameter {name!r}; write into the one that is there (copy_)"
            view, data = self.views[name], param.data
            if (data.shape, data.dtype, data.device) != (view.shape, view.dtype, view.device):
                return (
                    f"has made {name!r} {tuple(data.shape)}, {data.dtype}, on {data.device}; it is "
                    f"{tuple(view.shape)}, {view.dtype}, on {view.device}, and must stay so"
                )
            found[name] = data
        return found

    @torch.no_grad()
    def put_back(self, values: dict[str, torch.Tensor]) -> None:
        """Rank 0's hold everywhere. Collective; outside of shown()."""
        parts = self.parts
        if parts.mesh.world.rank == 0:
            for name, view in self.views.items():
                if values[name].data_ptr() != view.data_ptr() or values[name].stride() != view.stride():
                    view.copy_(values[name].clone())  # which may lie in the same memory otherwise
        comm.broadcast(self.flat, 0, parts.mesh.world)
        for holding in holdings(parts):
            whole = self.views.get(holding.info.name)
            if whole is not None:
                for box in holding.boxes(holding.values, False):
                    box.values.copy_(_piece(whole, box))
        written = [
            shards
            for shards in parts.all_shards
            if any(info.name in self.views for info in shards.bucket.infos)
        ]
        for shards in written:
            shards.publish()
        for shards in written:
            shards.wait()


def _piece(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def _set(table: dict[str, nn.Module | None], values: dict[str, nn.Module | None]) -> None:
    """The same table with other entries."""
    table.clear()
    table.update(values)


def _refuse_forward(module: nn.Module, args: object) -> NoReturn:
    raise ValueError(
        f"a call of {type(module).__name__} within par.gathered: the model is not called there. Leave the "
        "`with` block before"
    )
