"""The folder of a checkpoint: how it comes into being, and what it must look like to be read.

save() writes to `<path>.saving`. When every rank has written, the folder is renamed, so that a save that
fails leaves the old checkpoint alone. Reading and writing are torch.distributed.checkpoint's.
"""

import shutil
import warnings

import torch.distributed.checkpoint as dcp

from pycomm.parallel.checkpoint.agree import exchange

__all__ = ["catalog_of", "check_path", "make_room", "put_in_place", "transfer"]

METADATA = ".metadata"  # the file with which torch.distributed.checkpoint ends a checkpoint


def check_path(parts, what, path):
    paths = exchange(parts, str(path))
    if len(set(paths)) > 1:
        raise ValueError(
            f"[rank {parts.mesh.world.rank}] {what}: the ranks were given different paths: "
            f"{', '.join(sorted(set(paths)))}"
        )


def make_room(path, scratch):
    if path.exists() and not (path.is_dir() and ((path / METADATA).is_file() or not any(path.iterdir()))):
        raise ValueError(f"save: {path} exists and is no checkpoint; remove it or choose another path")
    for folder in (scratch, path.with_name(path.name + ".old")):
        if folder.exists():
            shutil.rmtree(folder)


def put_in_place(path, scratch):
    old = path.with_name(path.name + ".old")
    if path.exists():
        path.rename(old)
    scratch.rename(path)
    if old.exists():
        shutil.rmtree(old)


def catalog_of(path):
    """{key: metadata} of the checkpoint."""
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


def transfer(parts, what, path, call):
    """Runs a function of torch.distributed.checkpoint, which is collective and tells every rank of
    a failure.
    """
    world = parts.mesh.world
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
            call(process_group=world.pg, no_dist=world.size == 1)
    except dcp.CheckpointException as error:
        reasons = "; ".join(
            f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items())
        )
        raise RuntimeError(f"[rank {world.rank}] {what} failed at {path}: {reasons}") from error
