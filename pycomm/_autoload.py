"""Makes torch.distributed know the backend name "pycomm", without `import pycomm`.

torch calls autoload() at the end of `import torch` (entry point torch.backends), and torch 2.14+ calls
register() when it first meets the name (entry point torch.distributed.backends). Every program with torch
pays for this file, so it only writes a table entry; the extension is loaded when the first group is made
(create).
"""

from __future__ import annotations

import datetime
import functools
import importlib

TYPE_CHECKING = False  # every program with torch pays for this file
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    import torch.distributed as dist

NAME = "pycomm"
DEVICES = ["cpu", "cuda"]  # a list: torch <= 2.13 takes a plain string apart into characters


def autoload() -> None:
    """Registers the backend and, if PYCOMM_REPLACE is set, lets it take the names of others. Raises
    ValueError if that is wrong.
    """
    from pycomm import env

    register()
    names = env.replaced_backends()
    if names:
        from pycomm import _replace  # most programs do not need it

        _replace.replace_backends(names, NAME, DEVICES)


def register() -> None:
    """Registers the backend; does nothing when it is registered already, or when torch was built without
    torch.distributed.
    """
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        _prepare_old_torch(dist.Backend)
        _allow_monitored_barrier(dist.distributed_c10d, dist)
        _allow_pg_timeout(dist.distributed_c10d)
    _understand_launchers()
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=DEVICES)


def set_default_cpu_backend() -> None:
    """Makes pycomm the default backend for CPU tensors, in place of Gloo.

    Call it before init_process_group(). Then init_process_group() without a backend makes a pycomm group on a
    machine without an accelerator, and torch.distributed.get_default_backend_for_device("cpu"), which FSDP2,
    DCP and others ask, is "pycomm". Groups that name a backend are not affected. Raises RuntimeError if this
    torch has no torch.distributed.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("This torch was built without torch.distributed.")
    from pycomm import _replace  # most programs do not need it

    register()
    _replace.set_default("cpu", NAME, DEVICES)


def create(options: Any, pg_options: object) -> dist.Backend:
    """Makes the backend of one group (arguments: torch's DistributedBackendOptions and what the caller gave
    as pg_options).
    """
    from pycomm import torch_backend

    return torch_backend.create(options, pg_options)


# [Note: device-qualified names on torch <= 2.13] For a name with a device in it, such as "cpu:gloo", these
# versions take as the group's default backend: NCCL if it is named; else CUSTOM if the first registered
# plug-in is named (a comparison of "PYCOMM" with "pycomm", which is never true); else, if there are plug-ins
# at all, none; else Gloo. So a plug-in that is merely installed takes the default backend, and with it
# sequence numbers and hooks, from groups of others. We do not show our name to that question, and give it an
# answer for ourselves: Backend("cpu:pycomm") looks up the attribute "CPU:PYCOMM" of Backend, and so becomes
# plain "pycomm".
class _Plugins(dict):  # type: ignore[type-arg]  # in Python's words it would be evaluated at import
    def keys(self) -> list[str]:  # type: ignore[override]  # torch iterates
        return [name for name in self if name != NAME.upper()]


def _prepare_old_torch(backend_class: Any) -> None:
    backend_class._plugins = _Plugins(backend_class._plugins)
    for device in DEVICES:
        setattr(backend_class, f"{device}:{NAME}".upper(), NAME)


def _allow_monitored_barrier(c10d: Any, dist: Any) -> None:
    """torch <= 2.13 refuses dist.monitored_barrier for every backend name but gloo, in Python; the C++ below
    it reaches any backend.
    """
    original = c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> object:
        if not c10d.is_initialized() or c10d._rank_not_in_group(group) or c10d.get_backend(group) != NAME:
            return original(group, timeout, wait_all_ranks)
        if timeout is None:
            timeout = c10d.default_pg_timeout
        elif not isinstance(timeout, datetime.timedelta):
            timeout = datetime.timedelta(seconds=timeout)
        process_group = c10d._get_default_group() if group is None else group
        return process_group.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    for module in (c10d, dist):
        module.monitored_barrier = monitored_barrier


def _allow_pg_timeout(c10d: Any) -> None:
    """torch <= 2.13 sets the timeout of Gloo's and NCCL's groups alone, and warns for others."""
    original = c10d._set_pg_timeout

    @functools.wraps(original)
    def set_pg_timeout(timeout: datetime.timedelta, group: Any = None) -> object:
        group = c10d._get_default_group() if group is None else group
        if c10d._rank_not_in_group(group) or c10d.get_backend(group) != NAME:
            return original(timeout, group)
        for device in group._device_types:
            group._get_backend(device)._set_default_timeout(timeout)
        return None

    c10d._set_pg_timeout = set_pg_timeout


def _understand_launchers() -> None:
    """init_process_group() without a store reads RANK and others, which torchrun alone sets. Under srun and
    MPI launchers torch would raise that they are missing; they are set first, from what those say.
    """
    handlers = getattr(importlib.import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    original = handlers.get("env")
    if original is None:  # another version of torch: it raises as before
        return

    @functools.wraps(original)
    def by_environment(*args: Any, **kwargs: Any) -> Iterator[Any]:
        from pycomm import env

        if env.launched_by_others():
            env.set_launch()
        return original(*args, **kwargs)

    handlers["env"] = by_environment
