"""Writing this rank's part of a model into a checkpoint; the format: __init__.py."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from pycomm.parallel.checkpoint.agree import together
from pycomm.parallel.checkpoint.boxes import Saving
from pycomm.parallel.checkpoint.files import check_path, make_room, put_in_place, transfer
from pycomm.parallel.checkpoint.holdings import holdings, persistent_buffers
from pycomm.parallel.checkpoint.state import FORMAT, add_boxes, class_of, whole_model
from pycomm.parallel.parts import parts_of

__all__ = ["save"]


def save(model, opt, path, *, extra=None):
    """Writes a checkpoint. Collective over all ranks.

    Args:
        model, opt: as parallelize() returned them; opt None: the model alone.
        path: of a folder, the same on every rank and seen by all. A checkpoint that is there is replaced once
        the new one is complete.
        extra: any object that can be pickled (schedulers' state, step number), equal on all ranks; load
        returns it.

    Raises, on every rank, ValueError when the path holds something else than a checkpoint or differs between
    ranks, RuntimeError when a rank could not write.
    """
    parts, path = parts_of(model, opt), Path(path)
    check_path(parts, "save", path)
    scratch = path.with_name(path.name + ".saving")
    on_first = parts.mesh.world.rank == 0
    together(parts, lambda: make_room(path, scratch) if on_first else None)
    state = together(parts, lambda: _to_save(parts, opt))
    state["about"], state["extra"] = _about(parts, opt), extra
    transfer(
        parts,
        "save",
        scratch,
        lambda **how: dcp.save(state, storage_writer=dcp.FileSystemWriter(scratch), planner=Saving(), **how),
    )
    together(parts, lambda: put_in_place(path, scratch) if on_first else None)


def _to_save(parts, opt):
    state = {f"model/{name}": buffer for name, (buffer, used) in persistent_buffers(parts).items() if used}
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
    return state


def _about(parts, opt):
    members, _ = whole_model(parts)
    about = {"format": FORMAT, "plan": str(parts.plan), "optimizer": None}
    if opt is not None:
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in opt.param_groups
        ]
        about.update(optimizer=class_of(opt), groups=groups, members=members)
    return about
