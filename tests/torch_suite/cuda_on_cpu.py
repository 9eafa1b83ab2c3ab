"""Lets the suite's tests that want one GPU per rank, most of those of DDP, run on CPU tensors: "cuda" means
the CPU.

Nothing here touches torch.distributed, except that DDP is not told of GPUs. Which of these tests then still
mean something is decided by Gloo: gloo_passes.txt has those that it passes in the same way.
"""

import contextlib
import functools

import torch
from torch.overrides import TorchFunctionMode


def install(common_distributed):
    """Before the suite is imported; enter CpuDevice() in the process that runs a test."""
    common_distributed.skip_if_lt_x_gpu = lambda *args, **kwargs: lambda function: function
    common_distributed.skip_if_no_gpu = lambda function: function
    common_distributed.init_multigpu_helper = lambda world_size, backend: {
        rank: [rank] for rank in range(world_size)
    }
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.manual_seed = lambda seed: None
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, device=None: self
    torch.nn.Module.to = _with_cpu(torch.nn.Module.to)
    DDP = torch.nn.parallel.DistributedDataParallel
    DDP.__init__ = _without_devices(DDP.__init__)


def _without_devices(init):
    @functools.wraps(init)
    def wrapper(self, module, device_ids=None, output_device=None, *args, **kwargs):
        init(self, module, None, None, *args, **kwargs)

    return wrapper


def _with_cpu(to):
    @functools.wraps(to)
    def wrapper(self, *args, **kwargs):
        return to(self, *map(_device, args), **{name: _device(value) for name, value in kwargs.items()})

    return wrapper


class CpuDevice(TorchFunctionMode):
    """Devices that are given as numbers or as cuda become the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _device(kwargs["device"])}
        if function is torch.Tensor.to and len(args) > 1:
            args = (args[0], _device(args[1]), *args[2:])
        if function is torch.device:
            return torch.device("cpu")
        return function(*args, **kwargs)


def _device(value):
    is_number = isinstance(value, int) and not isinstance(value, bool)
    is_cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return torch.device("cpu") if is_number or is_cuda else value
