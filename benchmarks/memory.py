"""Buffers of a rank, on the host or on a GPU: allocated, filled, poisoned and checked by what data.py says.

A buffer on the host is a NumPy array, the same for every backend. On a GPU it is a torch tensor, and only what one period of the pattern
holds crosses from the host: PERIOD elements to fill it or to compare with, and one number back.
"""

import abc

import numpy as np

from . import data


class Memory(abc.ABC):
    """What worker.py wants of buffers. Slices and len() are the buffer's own."""

    @abc.abstractmethod
    def empty(self, count, dtype): ...

    @abc.abstractmethod
    def fill(self, buffer, period): ...

    @abc.abstractmethod
    def poison(self, buffer): ...

    @abc.abstractmethod
    def zero(self, buffer): ...

    @abc.abstractmethod
    def count_wrong(self, buffer, segments, case, n, salt): ...


class HostMemory(Memory):
    empty = staticmethod(data.empty)
    fill = staticmethod(data.fill)
    poison = staticmethod(data.poison)
    count_wrong = staticmethod(data.count_wrong)

    def zero(self, buffer):
        buffer[:] = 0


class DeviceMemory(Memory):
    """On `device` (anything torch knows). allocate(count, torch dtype) replaces torch.empty where buffers must be registered."""

    def __init__(self, device, allocate=None):
        import torch

        self.torch, self.device = torch, device
        self.allocate = allocate or (lambda count, dtype: torch.empty(count, dtype=dtype, device=device))
        self.dtypes = {
            "i8": torch.int8,
            "u8": torch.uint8,
            "f16": torch.float16,
            "bf16": torch.bfloat16,
            "i32": torch.int32,
            "f32": torch.float32,
            "i64": torch.int64,
            "f64": torch.float64,
        }

    def empty(self, count, dtype):
        return self.allocate(count, self.dtypes[dtype])

    def fill(self, buffer, period):
        period = self._on_device(period, buffer.dtype)
        whole = len(buffer) // data.PERIOD * data.PERIOD
        buffer[:whole].view(-1, data.PERIOD)[:] = period
        buffer[whole:] = period[: len(buffer) - whole]

    def poison(self, buffer):
        buffer.view(self.torch.uint8).fill_(data.POISON)

    def zero(self, buffer):
        buffer.zero_()

    def count_wrong(self, buffer, segments, case, n, salt):
        wrong = 0
        for segment in segments:
            period = np.roll(data.pattern(case, n, segment.source, salt), -(segment.offset % data.PERIOD))
            period = self._on_device(period, buffer.dtype)
            part = buffer[segment.start : segment.start + segment.length]
            whole = len(part) // data.PERIOD * data.PERIOD
            wrong += int((part[:whole].view(-1, data.PERIOD) != period).sum()) + int((part[whole:] != period[: len(part) - whole]).sum())
        return wrong

    def _on_device(self, period, dtype):
        """A pattern of data.py, whose bf16 are bits in uint16."""
        period = self.torch.from_numpy(np.ascontiguousarray(period))
        return (period.view(dtype) if dtype == self.torch.bfloat16 else period).to(self.device)
