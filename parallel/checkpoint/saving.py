"""Writing this rank's part of a model into a checkpoint; the format: __init__.py.

    save(...)                      values -> files -> renamed                       returns
    save(..., asynchronous=True)   values -> copy                                   returns
                                             copy -> files -> renamed               in a thread

The thread does what the caller would: it talks to those of the other ranks, through a group of its own, whose
operations keep no order with those of the training.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, cast, overload

import torch
import torch.distributed.checkpoint as dcp

from pycomm.parallel.checkpoint.agree import together, together_over
from pycomm.parallel.checkpoint.averages import add_to_save, agree_on_updates
from pycomm.parallel.checkpoint.boxes import Boxes, Saving
from pycomm.parallel.checkpoint.files import check_path, make_room, put_in_place, scratch_of, transfer
from pycomm.parallel.checkpoint.holdings import holdings, persistent_buffers
from pycomm.parallel.checkpoint.state import FORMAT, add_boxes, class_of, whole_model
from pycomm.parallel.ground.comm import Group
from pycomm.parallel.ground.plan import AXES
from pycomm.parallel.parts import parts_of

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch import nn
    from torch.optim import Optimizer

    from pycomm.parallel.checkpoint.boxes import State
    from pycomm.parallel.checkpoint.state import About
    from pycomm.parallel.parts import Parallelized, Saves

    PathText: TypeAlias = str | os.PathLike[str]

__all__ = ["about_of", "save", "to_save"]

T = TypeVar("T")


@overload
def save(model: nn.Module, opt: Optimizer | None, path: PathText, *, extra: object = None) -> None: ...
@overload
def save(
    model: nn.Module,
    opt: Optimizer | None,
    path: PathText,
    *,
    extra: object = None,
    asynchronous: Literal[True],
) -> Saves: ...
@overload
def save(
    model: nn.Module, opt: Optimizer | None, path: PathText, *, extra: object = None, asynchronous: bool
) -> Saves | None: ...
def save(
    model: nn.Module,
    opt: Optimizer | None,
    path: PathText,
    *,
    extra: object = None,
    asynchronous: bool = False,
) -> Saves | None:
    """Writes a checkpoint. Collective over all ranks.

    Args:
        model, opt: as parallelize() returned them; opt None: the model alone.
        path: of a folder, the same on every rank and seen by all. A checkpoint that is there is replaced once
        the new one is complete.
        extra: any object that can be pickled (schedulers' state, step number), equal on all ranks; load
        returns it.
        asynchronous: return once the values are copied, to host memory, and write beside what follows. The
        next save or load waits for it, and so does the end of the interpreter, but not
        destroy_process_group().

    Averages of parallel.ema are written too, but not while one is applied: then the averaged values are what
    is written of the model.

    Returns None; with asynchronous an object whose wait() blocks until the checkpoint is in its place, and
    raises what the writer raised; the next save or load raises it, too, if it was not asked for.

    Raises, on every rank, ValueError when the path holds something else than a checkpoint or differs between
    ranks, RuntimeError when a rank could not write. The checkpoint before it is then left as it was.
    """
    parts, path = parts_of(model, opt), Path(path)
    with parts.writes.inside("save"):
        parts.writes.check("save", parts.mesh.world.rank)
        return _save(parts, opt, path, extra, asynchronous)


def _save(
    parts: Parallelized, opt: Optimizer | None, path: Path, extra: object, asynchronous: bool
) -> Saves | None:
    parts.saves.wait()
    if opt is not None:
        parts.averages.refuse_applied("save (save(model, None, path) writes the averaged values alone)")
    scratch = scratch_of(path, check_path(parts, "save", path))
    on_first = parts.mesh.world.rank == 0
    together(parts, lambda: make_room(path) if on_first else None)
    agree_on_updates(parts)
    state = together(parts, lambda: to_save(parts, opt))
    state["about"], state["extra"] = (
        about_of(parts, opt, whole_model(parts)[0] if opt is not None else {}),
        extra,
    )
    if not asynchronous:
        _Writer(parts.mesh.world, parts.device, state, path, scratch).write()
        parts.saves.last = path
        return None
    copied = together(parts, lambda: _copy_of(state))
    group = parts.saves.group_of(lambda: parts.mesh.apart(*AXES))
    writer = _Writer(group, parts.device, copied, path, scratch)

    def write() -> None:
        writer.write()
        parts.saves.last = path

    parts.saves.start(write)
    return parts.saves


@dataclasses.dataclass(frozen=True)
class _Writer:
    """group: of all ranks; device: for its collectives."""

    group: Group
    device: torch.device
    state: State
    path: Path
    scratch: Path

    def write(self) -> None:
        transfer(
            self.group,
            "save",
            self.scratch,
            lambda **how: dcp.save(
                self.state, storage_writer=dcp.FileSystemWriter(self.scratch), planner=Saving(), **how
            ),
        )
        on_first = self.group.rank == 0
        together_over(
            self.group, self.device, lambda: put_in_place(self.path, self.scratch) if on_first else None
        )


def to_save(parts: Parallelized, opt: Optimizer | None) -> State:
    """Views of what this rank counts. No communication."""
    state: State = {
        f"model/{name}": buffer for name, (buffer, used) in persistent_buffers(parts).items() if used
    }
    for holding in holdings(parts):
        name = holding.info.name
        add_boxes(state, f"model/{name}", holding, holding.values, True)
        if opt is None or holding.part is None or not holding.info.counted:
            continue
        for key, value in opt.state.get(holding.part, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == holding.part.shape:
                add_boxes(state, f"optim/{name}/{key}", holding, value.detach(), True)
            else:
                state[f"optim/{name}/{key}"] = value.detach() if isinstance(value, torch.Tensor) else value
    add_to_save(parts, state)
    return state


def _copy_of(state: State) -> State:
    """The same in host memory of its own."""
    copied: State = {}
    for key, value in state.items():
        if isinstance(value, Boxes):
            copied[key] = boxes = Boxes(value.full_shape, value.dtype)
            boxes.boxes = [box._replace(values=_on_host(box.values)) for box in value.boxes]
        else:
            copied[key] = _on_host(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    return copied


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


def about_of(parts: Parallelized, opt: Optimizer | None, members: Mapping[str, int]) -> About:
    """What is written beside the values. members: of whole_model()."""
    about: About = {"format": FORMAT, "plan": str(parts.plan), "optimizer": None}
    if not parts.averages.applied:
        about["averages"] = {name: average.updates for name, average in parts.averages.all.items()}
    if opt is not None:
        groups = [
            {key: _kept(value) for key, value in group.items() if key not in ("params", "param_names")}
            for group in opt.param_groups
        ]
        about["optimizer"], about["groups"], about["members"] = class_of(opt), groups, members
    return about


def _kept(value: T) -> T:
    """A hyperparameter; one that is a tensor may change before it is written."""
    return cast(T, value.detach().clone()) if isinstance(value, torch.Tensor) else value
