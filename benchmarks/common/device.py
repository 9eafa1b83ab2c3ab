"""CUDA on this machine, as the benchmark needs it: is it there, which GPU is a rank's, clocks, graphs and the
copy that bounds are made of.

[Note: ranks that share a GPU] A rank's kernel may wait for the kernel of another rank. Whatever makes the
host or the whole device wait meanwhile (loading a kernel, freeing memory, synchronising the device) can then
wait for a kernel that waits for us. So every rank has a stream of its own, allocates before a barrier, and
waits for its stream and a barrier after the collectives, before it checks. Likewise a graph is brought to the
device where it is made, while no kernel waits: its first replay would do that otherwise, when the kernels of
a peer's replay may be waiting already. Between making and the first replay lies a barrier on the host.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# A gate stays closed so long; threads that take turns at the interpreter enqueue meanwhile.
GATE_SECONDS = 20e-3
CYCLES_PER_SECOND = 2e9  # of torch.cuda._sleep, about

_capturing = threading.Lock()  # torch's allocator and generators know of one capture at a time


def why_no_torch() -> str | None:
    """One line that says what is missing, or None."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error})"
    return (
        None
        if torch.distributed.is_available()
        else f"torch {torch.__version__} is built without torch.distributed"
    )


def why_no_cuda() -> str | None:
    """One line that says what is missing, or None when torch can use a GPU."""
    if missing := why_no_torch():
        return missing
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no usable GPU (nvidia-smi says whether there is a driver)"
    return None


def count_devices() -> int:
    import torch

    return torch.cuda.device_count()


def ranks_per_gpu(ranks: int, devices: int, given: int | None = None) -> int:
    """How many ranks share a GPU: as given, else as few as possible. Raises ValueError if the GPUs are too
    few.
    """
    if given is None:
        return -(-ranks // devices)
    if given * devices < ranks:
        raise ValueError(
            f"--ranks {ranks} with --ranks-per-gpu {given} needs {-(-ranks // given)} GPUs, here are "
            f"{devices}."
        )
    return given


def synchronize() -> None:
    """Waits for what was enqueued on the current stream."""
    import torch

    torch.cuda.current_stream().synchronize()


def enter(index: int) -> torch.cuda.Stream:
    """Makes GPU `index` and a new stream the current ones of this thread."""
    import torch

    torch.cuda.set_device(index)
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    return stream


class Gate:
    """Lets what ranks have enqueued begin together, for ranks that are threads of one process on one GPU.

    Such ranks take turns at Python's interpreter, so without it the first one waits on the GPU for what the
    last one enqueues milliseconds later, and a batch of short operations measures that. close(): a kernel
    that sleeps, on a stream of its own; enter(): the current stream waits for it. A rank that comes too late
    finds the gate open: then the figure is too large, never too small. To be made before any rank is at work.
    """

    def __init__(self) -> None:
        import torch

        self.stream, self.open = torch.cuda.Stream(), torch.cuda.Event()
        self.close()  # loads the kernel
        self.stream.synchronize()

    def close(self) -> None:
        """By one rank, before a barrier of all."""
        import torch

        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(int(GATE_SECONDS * CYCLES_PER_SECOND))
            self.open.record(self.stream)

    def enter(self) -> None:
        """By every rank, after that barrier."""
        import torch

        torch.cuda.current_stream().wait_event(self.open)


def time_batches(
    call: Callable[[], object],
    iters: int,
    batches: int,
    barrier: Callable[[], object],
    gate: Gate | None = None,
    closes: bool = False,
) -> list[float]:
    """Seconds of one call for each batch, between two events on the current stream. gate: a Gate that all
    ranks share; `closes` is true on one of them.
    """
    import torch

    stream = torch.cuda.current_stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for _ in range(batches):
        barrier()
        if gate is not None:
            if closes:
                gate.close()
            barrier()
            gate.enter()
        start.record(stream)
        for _ in range(iters):
            call()
        end.record(stream)
        end.synchronize()
        samples.append(start.elapsed_time(end) / iters / 1e3)
    return samples


def capture(call: Callable[[], object], iters: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph with `iters` calls on the current stream. Not run yet, but on the device; the calls must
    have been run once before. To be followed by a barrier on the host where ranks share a GPU.
    """
    import torch

    graph = torch.cuda.CUDAGraph()
    torch.cuda.current_stream().synchronize()
    with _capturing:
        graph.capture_begin(capture_error_mode="thread_local")  # other ranks' threads go on
        try:
            for _ in range(iters):
                call()
        finally:
            graph.capture_end()
        _upload(graph)
    return graph


def _upload(graph: torch.cuda.CUDAGraph) -> None:
    """See [Note: ranks that share a GPU]. Where this torch does not show the graph, its first replay does
    it.
    """
    import torch

    if not hasattr(graph, "raw_cuda_graph_exec"):
        return
    stream = torch.cuda.current_stream()
    made, into = (ctypes.c_void_p(handle) for handle in (graph.raw_cuda_graph_exec(), stream.cuda_stream))
    if error := ctypes.CDLL("libcuda.so.1").cuGraphUpload(made, into):
        raise RuntimeError(f"cuGraphUpload failed: error {error}")
    stream.synchronize()


def copy_gbps(nbytes: int, batches: int) -> list[float]:
    """GB/s of a copy of nbytes inside the current GPU's memory, bytes read and bytes written both counted; a
    number for each batch.
    """
    import torch

    source, target = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.fill_(1)
    iters = max(1, min(50, (1 << 28) // nbytes))
    for _ in range(2):
        target.copy_(source)
    return [
        2 * nbytes / seconds / 1e9
        for seconds in time_batches(lambda: target.copy_(source), iters, batches, lambda: None)
    ]


def describe() -> dict[str, str | int | float | None]:
    """The GPU, for reports."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "multiprocessors": properties.multi_processor_count,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }
