"""Peak memory of a rank, measured in the same way for every variant.

    tensors    bytes of all storages that live tensors hold, after each operation that torch dispatches: the
               largest sum
    process    growth of the process' largest resident set (VmHWM of /proc/self/status) since before the
               model was made

`tensors` is exact and the same from run to run. A TorchDispatchMode sees every tensor that goes in or out of
an operation, wherever its memory comes from: ordinary memory, registered memory of a backend, optimizer
state, what autograd saves, gradients. It holds its storage by a weak reference, and asks each for its size
anew, since sharded parameters are freed by resizing storages to zero. Subclasses such as DTensor are let
through first, so that the tensors inside are what is counted; fake tensors, by which DTensor finds shapes,
hold nothing.
What it cannot see: memory inside one operation (equal for all variants) and memory inside a backend (staging
segments of pycomm, buffers of Gloo).

`process` has all of that, and the allocator's slack with it. Large blocks are mapped on their own (mallopt),
so that freed memory goes back to the system at once and the figure is not a matter of heap order. Pages that
ranks share are counted in each rank that touched them, so registered memory counts once per rank here.

A profiler's allocation events were the alternative: they miss what other threads free and memory that is not
from torch's allocator.
"""

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PLAIN = (torch.Tensor, torch.nn.Parameter)
M_MMAP_THRESHOLD, OWN_MAPPING = -3, 64 << 10  # see mallopt(3)


class LiveBytes(TorchDispatchMode):
    """now(): bytes of live storages of tensors that an operation has touched since the mode began. peak: the
    largest seen since reset().
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(kind not in (*PLAIN, FakeTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if type(leaf) in PLAIN and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        total = 0
        for key, reference in list(self.storages.items()):
            storage = reference()
            if storage is None:
                del self.storages[key]
            else:
                total += storage.nbytes()
        return total

    def reset(self) -> None:
        self.peak = self.now()


def steady_heap() -> None:
    """Blocks from 64 KiB on are mapped on their own and unmapped when they are freed."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, OWN_MAPPING)


def reset_resident_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def resident_peak() -> int:
    """Bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
