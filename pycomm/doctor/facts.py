"""What one rank finds out about its machine. Nothing here judges, and nothing raises: what cannot be found
out is None, or a sentence in a field named `problem`.

All values are plain (numbers, texts, lists, dicts), so that facts travel as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib
import importlib.metadata
import os
import platform
import re
import resource
import socket
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pycomm
from pycomm import env

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from pycomm.communicator import Communicator

# Package -> the distributions that bring it.
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "cupy": ("cupy", "cupy-cuda13x", "cupy-cuda12x"),
    "nccl4py": ("nccl4py",),
}
# Of the variables that may be set to something wrong.
READERS = (
    env.settings,
    env.replaced_backends,
    env.port_range,
    env.wire,
    env.nccl_checks,
    env.fused,
    env.trace_bytes,
    env.statistics,
    env.metrics_port,
    env.replacement,
    env.logger,
)
WARM_UP, CALLS = 50, 201  # of the small all_reduce that is timed
GROUP_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Extension:
    """pycomm._C. `problem` None: it can be loaded."""

    problem: str | None
    built_for: str | None = None  # version of torch
    simd: str | None = None
    cuda: bool = False  # with kernels for CUDA tensors
    architectures: list[str] = dataclasses.field(default_factory=list)  # of these, as "90"; []: unknown


@dataclasses.dataclass(frozen=True)
class Gpus:
    problem: str | None  # why torch cannot use the GPUs that the machine has
    names: list[str] = dataclasses.field(default_factory=list)
    no_peer_access: list[list[int]] = dataclasses.field(default_factory=list)  # pairs of numbers
    architectures: list[str] = dataclasses.field(default_factory=list)  # of each GPU, as "90"


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of pycomm that was made to try it: `ranks` processes of this machine."""

    problem: str | None
    ranks: int = 0
    reach: str | None = None  # how ranks get at each other's memory, Communicator.describe()["reach"]
    all_reduce_us: float | None = None  # median of 8 bytes, whole Python call


@dataclasses.dataclass(frozen=True)
class Facts:
    rank: int
    host: str
    python: str
    versions: dict[str, str | None]  # by package; "pycomm" too
    extension: Extension
    cores: list[int]  # that this process may use
    machine_cores: int
    load: float  # processes that run or want to, average of the last minute
    numa: dict[str, list[int]]  # node -> cores
    max_files: int | None  # RLIMIT_NOFILE, soft; None: no limit
    max_locked: int | None  # RLIMIT_MEMLOCK, bytes
    autogroup: str | None  # the scheduler's group of this process; None: autogroups are off
    huge_pages: str | None  # for shared memory: always, advise, within_size, never ...
    gpus: Gpus
    settings: dict[str, str]  # variables of pycomm that are set
    settings_problem: str | None
    group: Group | None = None


def gather(rank: int = 0) -> Facts:
    """The facts of this process. `group` is still None: a group takes all ranks (ranks.py)."""
    versions: dict[str, str | None] = {name: _version(names) for name, names in PACKAGES.items()}
    return Facts(
        rank=rank,
        host=socket.gethostname(),
        python=platform.python_version(),
        versions={"pycomm": pycomm.__version__, **versions},
        extension=_extension(),
        cores=sorted(os.sched_getaffinity(0)),
        machine_cores=os.cpu_count() or 1,
        load=round(os.getloadavg()[0], 1),
        numa=_numa_nodes(),
        max_files=_limit(resource.RLIMIT_NOFILE),
        max_locked=_limit(resource.RLIMIT_MEMLOCK),
        autogroup=_autogroup(),
        huge_pages=_chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        gpus=_gpus(),
        settings=env.set_variables(),
        settings_problem=_settings_problem(),
    )


def try_two_ranks() -> Group:
    """A group of two forked processes."""
    try:
        from pycomm import testing  # imports torch and the extension, which may be missing

        results = testing.run_ranks(2, measure, mode="processes", timeout=GROUP_SECONDS)
        return Group(None, 2, *results[0])
    except Exception as error:
        return Group(f"{type(error).__name__}: {error}")


def try_ranks(store: dist.Store, rank: int, world_size: int) -> Group:
    """A group of all ranks that the launcher started. Collective."""
    try:
        from pycomm.communicator import Communicator  # as above

        with Communicator(store, rank, world_size, timeout=GROUP_SECONDS, name="doctor") as comm:
            reach, median = measure(comm)
            comm.barrier()
        return Group(None, world_size, reach, median)
    except Exception as error:
        return Group(f"{type(error).__name__}: {error}")


def measure(comm: Communicator) -> tuple[str, float]:
    """How peers' memory is reached, and the median time of a small all_reduce in microseconds."""
    import torch  # is there if a group could be made

    x = torch.zeros(2)
    times = []
    for _ in range(WARM_UP + CALLS):
        start = time.perf_counter()
        comm.all_reduce(x)
        times.append(time.perf_counter() - start)
    return comm.describe()["reach"], round(statistics.median(times[WARM_UP:]) * 1e6, 1)


def _version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _extension() -> Extension:
    try:
        from pycomm import _C  # imports torch
    except Exception as error:
        return Extension(f"{type(error).__name__}: {error}")
    built = importlib.import_module("pycomm._build_info")  # the build writes it beside the extension
    architectures = getattr(built, "CUDA_ARCHITECTURES", ())  # older builds do not say
    return Extension(
        None, built.TORCH_VERSION, str(_C.simd_level()), _C.built_with_cuda(), list(architectures)
    )


def _numa_nodes() -> dict[str, list[int]]:
    nodes = {}
    for folder in sorted(glob.glob("/sys/devices/system/node/node[0-9]*")):
        cores = _numbers(_read(f"{folder}/cpulist") or "")
        if cores:
            nodes[folder.rsplit("node", 1)[1]] = cores
    return nodes


def _numbers(text: str) -> list[int]:
    """ "0-2,5" as [0, 1, 2, 5]."""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return found


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _autogroup() -> str | None:
    if _read("/proc/sys/kernel/sched_autogroup_enabled") != "1":
        return None
    return (_read("/proc/self/autogroup") or "unknown").split()[0]


def _chosen(path: str) -> str | None:
    """The word in brackets: "always [madvise] never" is "madvise"."""
    match = re.search(r"\[(\w+)\]", _read(path) or "")
    return match[1] if match else None


def _gpus() -> Gpus:
    """Asks CUDA only where there is a device file: elsewhere CUDA is not initialised."""
    if not glob.glob("/dev/nvidia[0-9]*"):
        return Gpus(None)
    try:
        import torch  # may be missing
    except Exception as error:
        return Gpus(f"torch cannot be imported: {error}")
    if torch.version.cuda is None:
        return Gpus(f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        return Gpus(f"torch {torch.__version__} finds no usable GPU")
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return Gpus(
        None,
        [torch.cuda.get_device_name(number) for number in range(count)],
        [[a, b] for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)],
        ["{}{}".format(*torch.cuda.get_device_capability(number)) for number in range(count)],
    )


def _settings_problem() -> str | None:
    try:
        for read in READERS:
            read()
    except ValueError as error:
        return str(error)
    return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
