"""Lets pycomm take the place of another backend of torch.distributed, by name or as the default; both only when asked for.

torch.distributed passes every backend name a user gives, to init_process_group, new_group, split_group, and each part of
"cpu:gloo,cuda:nccl", through the constructor Backend(name), and only then looks for who makes the group. We wrap that constructor. What
lost: registering our creator as "gloo" (before torch 2.14 Gloo is not in the table but an `if`); changing Backend.GLOO (the same `if`
compares with it); wrapping init_process_group and new_group (callers hold references to them, and there are more than two).

dist.get_backend() then truthfully says "pycomm". torch's own use of the class ProcessGroupGloo is not touched.
"""

from pycomm import _autoload, env

_replaced = set()  # backend names that mean pycomm in this process
_announced = set()  # those of them of which the log says so already


def replace_backends(names):
    """From now on these backend names, of "gloo" and "nccl", mean pycomm. PYCOMM_REPLACE in the environment calls this."""
    _replaced.update(names)
    _wrap_backend_names()


def set_default_cpu_backend():
    """Makes pycomm the default backend for CPU tensors, in place of Gloo.

    Call it before init_process_group(). Then init_process_group() without a backend makes a pycomm group on a machine without an
    accelerator, and torch.distributed.get_default_backend_for_device("cpu"), which FSDP2, DCP and others ask, is "pycomm".
    Groups that name a backend are not affected. Raises RuntimeError if this torch has no torch.distributed.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("This torch was built without torch.distributed.")
    _autoload.register()
    dist.Backend.default_device_backend_map["cpu"] = _autoload.NAME
    _wrap_backend_names()


def _wrap_backend_names():
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend.__new__, "wrapped_by_pycomm"):
        return
    original = dist.Backend.__new__

    def resolved(cls, name):
        return _resolve(str(original(cls, name)), dist.Backend)

    resolved.wrapped_by_pycomm = True
    dist.Backend.__new__ = staticmethod(resolved)


def _resolve(name, backend_class):
    """The name in lower case that torch shall use for what the user called `name`: "gloo", "cpu:gloo,cuda:nccl", "undefined"."""
    if name == backend_class.UNDEFINED:
        # No backend given. torch <= 2.13 assumes in one place that only NCCL or Gloo can be the default, so say the name here.
        default = _meaning(backend_class.default_device_backend_map.get(_default_device(), name))
        return default if default == _autoload.NAME else name
    if ":" not in name:
        return _meaning(name)
    pairs = [pair.rpartition(":") for pair in name.split(",")]
    meanings = [_meaning(backend) for _, _, backend in pairs]
    # [Note: device-qualified names on torch <= 2.13] is why a name that is pycomm throughout must lose its devices.
    if set(meanings) == {_autoload.NAME} and {device for device, _, _ in pairs} <= set(_autoload.DEVICES):
        return _autoload.NAME
    return ",".join(device + colon + meaning for (device, colon, _), meaning in zip(pairs, meanings, strict=True))


def _meaning(name):
    if name not in _replaced:
        return name
    if name not in _announced:
        _announced.add(name)
        if env.is_first_rank():
            env.logger().warning("the torch.distributed backend %r means pycomm here, because of PYCOMM_REPLACE", name)
    return _autoload.NAME


def _default_device():
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None else device.type
