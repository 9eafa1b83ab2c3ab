"""Which streams share a hardware queue: something short in stream B, issued behind something long in stream
A, does not run until that has ended.

Looked at are streams as pycomm makes them, those of torch's pool, and some of both. It shows what this GPU
and its driver do ([Note: hardware queues] in csrc/cuda/budget.h), and judges nothing.
"""

import ctypes
import os
import time

import torch

from gpu.ranks import CYCLES_PER_SECOND

LONG = 0.02  # seconds


def aliases(check):
    """Records the map."""
    if check.now != "threads":
        return
    if check.on != "cuda":
        check.record("the map of hardware queues", None, "there is no GPU")
        return
    queues = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", 8))
    torch.cuda.init()
    own = [torch.cuda.ExternalStream(_new_stream()) for _ in range(queues)]
    pool = [torch.cuda.Stream() for _ in range(queues)]
    for name, streams in (("driver", own), ("torch's pool", pool), ("both", [*own[:8], *pool[:8]])):
        shared = pairs(streams)
        text = ", ".join(f"{a}-{b}" for a, b in shared) or "none"
        check.record(f"of {len(streams)} streams ({name}) these share a queue", None, text)


def pairs(streams):
    """The pairs (a, b), a < b, of which one held up the other."""
    held = set()
    for a, stream in enumerate(streams):
        torch.cuda.synchronize()
        ended = _asleep(stream, int(LONG * CYCLES_PER_SECOND))
        others = {b: _asleep(other, 1) for b, other in enumerate(streams) if b != a}
        time.sleep(LONG / 4)
        late = [b for b, done in others.items() if not done()]
        if not ended():  # else the host came too late to see anything
            held |= {tuple(sorted((a, b))) for b in late}
    return sorted(held)


def _asleep(stream, cycles):
    """Occupies the stream for so long; returns a function that says whether that is over."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
        event = torch.cuda.Event()
        event.record()
    return event.query


def _new_stream():
    """A handle of the driver, as pycomm asks for one: a stream that does not wait for the default stream."""
    handle = ctypes.c_void_p()
    if ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), ctypes.c_uint(1)):
        raise RuntimeError("cuStreamCreate failed")
    return handle.value
