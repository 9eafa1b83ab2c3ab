"""Lets pycomm take the place of another backend of torch.distributed, by name or as the default; both only
when asked for.

torch.distributed passes every backend name a user gives, to init_process_group, new_group, split_group, and
each part of "cpu:gloo,cuda:nccl", through the constructor Backend(name), and only then looks for who makes
the group. We wrap that constructor. What lost: registering our creator as "gloo" (before torch 2.14 Gloo is
not in the table but an `if`); changing Backend.GLOO (the same `if` compares with it); wrapping
init_process_group and new_group (callers hold references to them, and there are more than two).

dist.get_backend() then truthfully says "pycomm". torch's own use of the class ProcessGroupGloo is not
touched.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycomm import env

_replaced: set[str] = set()  # backend names that mean pycomm in this process
_announced: set[str] = set()  # those of them of which the log says so already


def replace_backends(names: Iterable[str], ours: str, devices: Sequence[str]) -> None:
    """From now on these backend names, of "gloo" and "nccl", mean `ours`, a backend for `devices`.
    PYCOMM_REPLACE in the environment calls this.
    """
    _replaced.update(names)
    _wrap_backend_names(ours, devices)


def set_default(device: str, ours: str, devices: Sequence[str]) -> None:
    """From now on `ours`, a registered backend for `devices`, is torch's default for `device`."""
    dist.Backend.default_device_backend_map[device] = ours
    _wrap_backend_names(ours, devices)


def _wrap_backend_names(ours: str, devices: Sequence[str]) -> None:
    if not dist.is_available() or hasattr(dist.Backend.__new__, "wrapped_by_pycomm"):
        return
    original: Any = dist.Backend.__new__

    def resolved(cls: type[dist.Backend], name: str) -> str:
        return _resolve(str(original(cls, name)), ours, devices)

    resolved.wrapped_by_pycomm = True  # type: ignore[attr-defined]  # functions take attributes
    # torch has no other place through which all names go
    dist.Backend.__new__ = staticmethod(resolved)  # type: ignore[method-assign]  # on purpose


def _resolve(name: str, ours: str, devices: Sequence[str]) -> str:
    """The name in lower case that torch shall use for what the user called `name`: "gloo",
    "cpu:gloo,cuda:nccl", "undefined".
    """
    if name == dist.Backend.UNDEFINED:
        # No backend given. torch <= 2.13 assumes in one place that only NCCL or Gloo can be the default, so
        # say the name here.
        default = _meaning(dist.Backend.default_device_backend_map.get(_default_device(), name), ours)
        return default if default == ours else name
    if ":" not in name:
        return _meaning(name, ours)
    pairs = [pair.rpartition(":") for pair in name.split(",")]
    meanings = [_meaning(backend, ours) for _, _, backend in pairs]
    # [Note: device-qualified names on torch <= 2.13] is why a name that is pycomm throughout must lose its
    # devices.
    if set(meanings) == {ours} and {device for device, _, _ in pairs} <= set(devices):
        return ours
    return ",".join(
        device + colon + meaning for (device, colon, _), meaning in zip(pairs, meanings, strict=True)
    )


def _meaning(name: str, ours: str) -> str:
    if name not in _replaced:
        return name
    if name not in _announced:
        _announced.add(name)
        if env.is_first_rank():
            env.logger().warning(
                "the torch.distributed backend %r means %s here, because of PYCOMM_REPLACE", name, ours
            )
    return ours


def _default_device() -> str:
    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None else device.type
