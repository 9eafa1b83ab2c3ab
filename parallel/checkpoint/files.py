"""The folder of a checkpoint: how it comes into being, and what it must look like to be read.

save() writes to `<path>.saving-<a word of this save>`. When every rank has written, the two folders change
their names in one call of the system, so that a save that fails, or that ends with its processes, leaves the
old checkpoint alone. Where the system cannot (renameat2: Linux, not NFS), the old one is `<path>.old` for a
moment. Reading and writing are torch.distributed.checkpoint's.

A rank that is stopped in a save and wakes up when the others have left it out may go on with that save. It
does so in its own folder, and the others may write the next one in theirs, which removes its own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch.distributed.checkpoint as dcp

from pycomm.parallel.checkpoint.agree import exchange
from pycomm.parallel.checkpoint.boxes import Loading
from pycomm.parallel.ground.comm import Group

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata

    from pycomm.parallel.checkpoint.boxes import State
    from pycomm.parallel.parts import Parallelized

__all__ = [
    "Catalog",
    "Folder",
    "catalog_of",
    "check_path",
    "make_room",
    "put_in_place",
    "scratch_of",
    "transfer",
]

METADATA = ".metadata"  # the file with which torch.distributed.checkpoint ends a checkpoint
RENAME_EXCHANGE, HERE = 2, -100  # of renameat2: exchange the names; AT_FDCWD

What: TypeAlias = Literal["save", "load"]
Catalog: TypeAlias = "dict[str, STORAGE_TYPES]"  # key -> what torch.distributed.checkpoint knows of it


class Folder(NamedTuple):
    """A checkpoint to be read."""

    path: Path
    catalog: Catalog
    group: Group  # of all ranks

    def __str__(self) -> str:
        return str(self.path)

    def read(self, state: State) -> None:
        """Fills the Boxes and tensors, and replaces the objects of `state`. Collective."""
        reader = dcp.FileSystemReader(self.path)
        transfer(
            self.group,
            "load",
            self.path,
            lambda **how: dcp.load(state, storage_reader=reader, planner=Loading(), **how),
        )


def check_path(parts: Parallelized, what: What, path: Path) -> str:
    """Returns a word of this call, the same on all ranks. Raises ValueError where they have other paths."""
    told = exchange(parts, (str(path), secrets.token_hex(8)))
    paths = {one for one, _ in told}
    if len(paths) > 1:
        raise ValueError(
            f"[rank {parts.mesh.world.rank}] {what}: the ranks were given different paths: "
            f"{', '.join(sorted(paths))}"
        )
    return told[0][1]


def scratch_of(path: Path, word: str) -> Path:
    """Where a checkpoint is written first. word: of check_path()."""
    return path.with_name(f"{path.name}.saving-{word}")


def make_room(path: Path) -> None:
    """Removes what saves to this path have left that did not end."""
    if path.exists() and not (path.is_dir() and ((path / METADATA).is_file() or not any(path.iterdir()))):
        raise ValueError(f"save: {path} exists and is no checkpoint; remove it or choose another path")
    left = re.compile(re.escape(path.name) + r"(\.old|\.saving-[0-9a-f]{16})")
    for folder in path.parent.iterdir() if path.parent.is_dir() else ():
        if left.fullmatch(folder.name):
            shutil.rmtree(folder)


def put_in_place(path: Path, scratch: Path) -> None:
    """Raises FileNotFoundError where another save has removed what this one has written."""
    if not scratch.exists():
        raise FileNotFoundError(f"save: {scratch} was removed: another save to {path} has begun meanwhile")
    if not path.exists():
        scratch.rename(path)
    elif _exchange_names(path, scratch):
        shutil.rmtree(scratch)  # the checkpoint before
    else:
        old = path.with_name(path.name + ".old")
        path.rename(old)
        scratch.rename(path)
        shutil.rmtree(old)


def _exchange_names(one: Path, other: Path) -> bool:
    """In one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None or rename(HERE, os.fsencode(one), HERE, os.fsencode(other), RENAME_EXCHANGE) != 0:
        if rename is not None and ctypes.get_errno() == errno.ENOENT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(other))
        return False
    return True


def catalog_of(path: Path) -> Catalog:
    if not (path / METADATA).is_file():
        old = path.with_name(path.name + ".old")
        more = (
            f"; a save was interrupted, the checkpoint before it is {old}"
            if (old / METADATA).is_file()
            else ""
        )
        raise FileNotFoundError(f"load: there is no checkpoint at {path} (no file {METADATA} in it){more}")
    try:
        catalog = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:
        raise ValueError(f"load: {path / METADATA} cannot be read: {error!r}") from error
    if "about" not in catalog or "extra" not in catalog:
        raise ValueError(
            f"load: {path} was not written by parallel.save; read it with torch.distributed.checkpoint"
        )
    return catalog


def transfer(world: Group, what: What, path: Path, call: Callable[..., Metadata | None]) -> None:
    """Runs a function of torch.distributed.checkpoint, which is collective and tells every rank of
    a failure. world: Group of all ranks.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
            call(process_group=world.pg, no_dist=world.size == 1)
    except dcp.CheckpointException as error:
        reasons = "; ".join(
            f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items())
        )
        raise RuntimeError(f"[rank {world.rank}] {what} failed at {path}: {reasons}") from error
