"""The one place where pycomm reads environment variables; from here the values are passed down
(tests/test_layering.py holds this).

    variable                     value                      default     meaning
    RANK                         0 to WORLD_SIZE-1          see below   \\
    WORLD_SIZE                   1 or more                  see below    | set by torchrun, read where a
    MASTER_ADDR                  host name                  see below    | Communicator is made without store;
    MASTER_PORT                  1 to 65535                 see below    | the meaning is torch.distributed's
    LOCAL_RANK                   0 or more                  RANK        /
    PYCOMM_TIMEOUT               seconds, above 0 to 1e8    300         how long an operation waits for peers
    PYCOMM_ALGORITHM             op=algorithm,...           a table     algorithm of an operation, e.g.
                                                                        all_reduce=ring,broadcast=direct
    PYCOMM_REPLACE               gloo | nccl | gloo,nccl    nothing     these names of torch.distributed
                                                                        backends mean pycomm
    PYCOMM_HOST_ID               a word                     boot id     ranks with the same word share memory:
                                                                        simulates several hosts on one
    PYCOMM_HOST_TIMEOUT          seconds, above 0 to 1e8    10          a host of the group that is silent for
                                                                        so long is lost
    PYCOMM_SOCKET_IFNAME         eth,ib0 | =eth0 | ^docker  the route   interfaces between hosts: what their
                                                                        names begin with; after = whole
                                                                        names; after ^ all but these
    PYCOMM_PORT_RANGE            29600-29699                any port    where pycomm itself listens; Gloo and
                                                                        NCCL choose freely
    PYCOMM_WIRE                  gloo | ucx                 gloo        what carries bytes between hosts; UCX
                                                                        must be installed (docs/hosts.md)
    PYCOMM_NCCL_CHECKS           beside | before | off      beside      when calls on CUDA tensors over hosts
                                                                        are compared (docs/hosts.md)
    PYCOMM_THREADS               1 or more                  by cores    threads that reduce and copy, per rank
    PYCOMM_STAGING_BYTES         bytes, or 512K, 8M, 1G     built in    staging memory of a group, per rank
    PYCOMM_CMA                   0 | 1                      probed      may a rank read the memory of another
                                                                        (process_vm_readv)
    PYCOMM_CUDA_PROTOCOL         resident | stream_ordered  by devices  how ranks wait for each other on a GPU
                                                                        (csrc/cuda/protocol.h)
    PYCOMM_CUDA_STAGING_BYTES    bytes, or 8M, 1G           16M         staging memory of a group on a device,
                                                                        per rank
    PYCOMM_FUSED                 auto plain chunked fused   auto        form of the operations of pycomm.fused
                                                                        (pycomm/fused/choice.py)
    PYCOMM_TUNED                 a file | 0                 see below   the table that `python -m
                                                                        pycomm.benchmarks tune` has written;
                                                                        0: use the built-in one
    PYCOMM_CACHE                 a folder                   see below   what was measured on this machine
                                                                        (pycomm/fused/tuner.py, tuned.py)
    PYCOMM_TRACE                 a folder                   nothing     every rank writes there what it does
                                                                        (docs/trace.md)
    PYCOMM_TRACE_BYTES           bytes, or 1M, 64M          16M         of the ring that keeps the last of it,
                                                                        per process
    PYCOMM_STATISTICS            0 | 1                      0           Communicator.statistics() has seconds,
                                                                        too, without a trace
    PYCOMM_METRICS_PORT          1 to 65535                 nothing     counters as a Prometheus endpoint, at
                                                                        this port + LOCAL_RANK of localhost
    GLOO_SOCKET_IFNAME           eth0,ib0                   the route   Gloo's, where PYCOMM_SOCKET_IFNAME is
                                                                        not set: the first interface there is
    UCX_TLS, UCX_NET_DEVICES     UCX's                      see below   with PYCOMM_WIRE=ucx: transports and
                                                                        devices
    TRITON_INTERPRET             0 | 1                      0           Triton's: kernels run in its
                                                                        interpreter, on CPU tensors
    CUDA_DEVICE_MAX_CONNECTIONS  1 to 32                    8           the driver's: hardware queues, which
                                                                        ranks as threads on one GPU need
    PYCOMM_REPLACEMENT           0 or more                  not set     set by pycomm.run: 0 for its first
                                                                        processes; the number of one that
                                                                        takes the place of a dead one
    PYCOMM_LOG                   debug info warning error   warning     what the logger "pycomm" lets through

Where RANK and WORLD_SIZE are not set, the variables of Slurm, Open MPI, MPICH and Intel MPI count, for
LOCAL_RANK, MASTER_ADDR and MASTER_PORT, too: see pycomm/launchers.py.

PYCOMM_CACHE is by default pycomm in the folder XDG_CACHE_HOME, which is by default ~/.cache. PYCOMM_TUNED is
by default tuned-CPU-CORES.json in PYCOMM_CACHE, with the machine's processor and its number of cores.

UCX_TLS and UCX_NET_DEVICES are by default all transports but shared memory and CUDA, over the interface that
pycomm has chosen and all InfiniBand devices (pycomm/hosts/ucx.py). UCX reads its other variables itself.

A value that is empty counts as not set. A wrong one raises ValueError with the variable's name, the value and
what is allowed. Each function reads what is set when it is called; only logger() keeps its first answer.
THREAD_RANKS are variables of CUDA's that pycomm sets itself, where ranks are threads.
"""

import contextlib
import functools
import logging
import os
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Literal, NamedTuple, get_args

from pycomm.values import algorithms, integer, nbytes, one_of, seconds, wrong

Wire = Literal["gloo", "ucx"]  # what PYCOMM_WIRE may name
CudaProtocol = Literal["resident", "stream_ordered"]  # what PYCOMM_CUDA_PROTOCOL may name
NcclChecks = Literal["beside", "before", "off"]
FusedForm = Literal["auto", "plain", "chunked", "fused"]

LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
BACKENDS = ("gloo", "nccl")  # what PYCOMM_REPLACE may name
LOG_LEVELS = ("debug", "info", "warning", "error")
# all variables of pycomm's own; tests/test_doctor.py compares them with the table above
VARIABLES = (
    "PYCOMM_TIMEOUT PYCOMM_ALGORITHM PYCOMM_REPLACE PYCOMM_HOST_ID PYCOMM_HOST_TIMEOUT "
    "PYCOMM_SOCKET_IFNAME PYCOMM_PORT_RANGE PYCOMM_WIRE PYCOMM_NCCL_CHECKS PYCOMM_THREADS "
    "PYCOMM_STAGING_BYTES PYCOMM_CMA PYCOMM_CUDA_PROTOCOL PYCOMM_CUDA_STAGING_BYTES PYCOMM_FUSED "
    "PYCOMM_TUNED PYCOMM_CACHE PYCOMM_REPLACEMENT PYCOMM_TRACE PYCOMM_TRACE_BYTES PYCOMM_STATISTICS "
    "PYCOMM_METRICS_PORT PYCOMM_LOG"
).split()


class Launch(NamedTuple):
    """Who this process is, as its launcher says."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int


class Settings(NamedTuple):
    """The PYCOMM_ variables of the runtime. None means: not set, the runtime decides."""

    timeout: float | None  # seconds
    algorithm: dict[str, str]  # operation -> algorithm
    host_id: str | None
    host_timeout: float | None  # seconds
    threads: int | None
    staging_bytes: int | None
    cma: bool | None
    cuda_protocol: CudaProtocol | None
    cuda_staging_bytes: int | None
    cuda_connections: int | None


def launch() -> Launch:
    """Who this process is: by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or where RANK and
    WORLD_SIZE are not set by what other launchers set (launchers.py). Raises ValueError if something is
    missing or wrong.
    """
    if _get("RANK") is None and _get("WORLD_SIZE") is None:
        found = _launchers().find_launch(os.environ)
        if found is not None:
            return Launch(*found)
    world_size = integer("WORLD_SIZE", _required("WORLD_SIZE"), 1)
    rank = integer("RANK", _required("RANK"), 0, world_size - 1)
    local_rank = _get("LOCAL_RANK")
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None else integer("LOCAL_RANK", local_rank, 0),
        master_addr=_required("MASTER_ADDR"),
        master_port=integer("MASTER_PORT", _required("MASTER_PORT"), 1, 65535),
    )


def set_launch() -> Launch:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in this process as torchrun would, where
    another launcher has started it and they are not set. For programs that read them: torch does in
    init_process_group(). Returns what launch() does, and raises ValueError.
    """
    found = launch()
    values = (found.rank, found.world_size, found.local_rank, found.master_addr, found.master_port)
    for name, value in zip(LAUNCH, values, strict=True):
        if _get(name) is None:
            os.environ[name] = str(value)
    return found


def launched_by_others() -> bool:
    """True where RANK and WORLD_SIZE are not set, and a launcher that is not torchrun has started this
    process as one of several. Raises ValueError where launchers disagree.
    """
    if _get("RANK") is not None or _get("WORLD_SIZE") is not None:
        return False
    place = _launchers().find_place(os.environ)
    return place is not None and place.world_size > 1


def _launchers() -> ModuleType:
    from pycomm import launchers  # `import torch` loads this file, and need not load that one

    return launchers


def settings() -> Settings:
    """Reads the PYCOMM_ variables of the runtime. Raises ValueError if one is wrong."""
    threads, cma = _get("PYCOMM_THREADS"), _get("PYCOMM_CMA")
    if cma is not None and cma not in ("0", "1"):
        raise wrong("PYCOMM_CMA", cma, "0 or 1")
    connections = _get("CUDA_DEVICE_MAX_CONNECTIONS")
    protocols: tuple[CudaProtocol, ...] = get_args(CudaProtocol)
    return Settings(
        timeout=seconds("PYCOMM_TIMEOUT", _get("PYCOMM_TIMEOUT")),
        algorithm=algorithms("PYCOMM_ALGORITHM", _get("PYCOMM_ALGORITHM")),
        host_id=_get("PYCOMM_HOST_ID"),
        host_timeout=seconds("PYCOMM_HOST_TIMEOUT", _get("PYCOMM_HOST_TIMEOUT")),
        threads=None if threads is None else integer("PYCOMM_THREADS", threads, 1, 1024),
        staging_bytes=nbytes("PYCOMM_STAGING_BYTES", _get("PYCOMM_STAGING_BYTES")),
        cma=None if cma is None else cma == "1",
        cuda_protocol=one_of("PYCOMM_CUDA_PROTOCOL", _get("PYCOMM_CUDA_PROTOCOL"), protocols),
        cuda_staging_bytes=nbytes("PYCOMM_CUDA_STAGING_BYTES", _get("PYCOMM_CUDA_STAGING_BYTES")),
        cuda_connections=None
        if connections is None
        else integer("CUDA_DEVICE_MAX_CONNECTIONS", connections, 1),
    )


def simulate_host(word: str) -> None:
    """Sets PYCOMM_HOST_ID for the groups that this process makes from now on."""
    os.environ["PYCOMM_HOST_ID"] = word


def socket_interface() -> tuple[str, str] | None:
    """Which interfaces may be used between hosts: (variable, value), or None where neither
    PYCOMM_SOCKET_IFNAME nor GLOO_SOCKET_IFNAME is set.
    """
    for name in ("PYCOMM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if (value := _get(name)) is not None:
            return name, value
    return None


def port_range() -> tuple[int, int] | None:
    """Reads PYCOMM_PORT_RANGE: the lowest and the highest port, or None. Raises ValueError."""
    value = _get("PYCOMM_PORT_RANGE")
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", value, re.ASCII)
    if found is None or not 1 <= int(found[1]) <= int(found[2]) <= 65535:
        raise wrong("PYCOMM_PORT_RANGE", value, "two ports from 1 to 65535, the lower first: 29600-29699")
    return int(found[1]), int(found[2])


def use_gloo_interface(name: str) -> None:
    """Sets GLOO_SOCKET_IFNAME in this process, for a torch in which nothing else chooses the interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = name


def wire() -> Wire:
    """Reads PYCOMM_WIRE. Raises ValueError."""
    words: tuple[Wire, ...] = get_args(Wire)
    return one_of("PYCOMM_WIRE", _get("PYCOMM_WIRE"), words) or "gloo"


def use_wire(name: Wire) -> None:
    """Sets PYCOMM_WIRE in this process."""
    os.environ["PYCOMM_WIRE"] = name


def prepare_ucx(settings: Mapping[str, str]) -> None:
    """Sets variables that UCX reads itself in this process, where they are not set."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def ucx_settings(**defaults: str) -> list[tuple[str, str]]:
    """[(name without UCX_, value)]: of these settings those that the user has not set."""
    return [(name, value) for name, value in defaults.items() if _get(f"UCX_{name}") is None]


def nccl_checks() -> NcclChecks:
    """Reads PYCOMM_NCCL_CHECKS: when calls on CUDA tensors over hosts are compared. Raises ValueError."""
    words: tuple[NcclChecks, ...] = get_args(NcclChecks)
    return one_of("PYCOMM_NCCL_CHECKS", _get("PYCOMM_NCCL_CHECKS"), words) or "beside"


@contextlib.contextmanager
def nccl_spares_the_process() -> Iterator[None]:
    """While this lasts, a ProcessGroupNCCL that is made does not end the process over an error, and wait() of
    its works blocks no thread of the host: torch reads the variables when it makes one.
    """
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT")
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(dict.fromkeys(names, "0"))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
        os.environ.update(before)


def master_address() -> str | None:
    """MASTER_ADDR, or None."""
    return _get("MASTER_ADDR")


def replaced_backends() -> tuple[str, ...]:
    """Reads PYCOMM_REPLACE: the names of torch.distributed backends that mean pycomm, often none. Raises
    ValueError.
    """
    value = _get("PYCOMM_REPLACE")
    if value is None:
        return ()
    names = tuple(name.strip().lower() for name in value.split(","))
    if not set(names) <= set(BACKENDS):
        raise wrong("PYCOMM_REPLACE", value, "gloo, nccl or both with a comma between them")
    return names


def fused() -> FusedForm:
    """Reads PYCOMM_FUSED: the form that the operations of pycomm.fused are to take, "auto" where a table
    chooses. Raises ValueError.
    """
    words: tuple[FusedForm, ...] = get_args(FusedForm)
    return one_of("PYCOMM_FUSED", _get("PYCOMM_FUSED"), words) or "auto"


def tuned_file() -> str | None:
    """What PYCOMM_TUNED says: a path, "0", or None where it is not set."""
    return _get("PYCOMM_TUNED")


def use_built_in_table() -> None:
    """Sets PYCOMM_TUNED to 0 in this process and those it starts: what is measured must not depend on what
    was measured before.
    """
    os.environ["PYCOMM_TUNED"] = "0"


def cache_folder() -> str:
    """The folder for what was measured, by PYCOMM_CACHE or XDG_CACHE_HOME; it may not exist."""
    return _get("PYCOMM_CACHE") or os.path.join(
        _get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "pycomm"
    )


def trace_folder() -> str | None:
    """What PYCOMM_TRACE says: a folder, or None."""
    return _get("PYCOMM_TRACE")


def trace_bytes() -> int:
    """Reads PYCOMM_TRACE_BYTES: bytes of the ring of a process's trace. Raises ValueError."""
    return nbytes("PYCOMM_TRACE_BYTES", _get("PYCOMM_TRACE_BYTES")) or 16 << 20


def statistics() -> bool:
    """Reads PYCOMM_STATISTICS: whether operations are timed without a trace. Raises ValueError."""
    value = _get("PYCOMM_STATISTICS")
    if value is not None and value not in ("0", "1"):
        raise wrong("PYCOMM_STATISTICS", value, "0 or 1")
    return value == "1"


def metrics_port() -> int | None:
    """The port of this process's Prometheus endpoint, or None: PYCOMM_METRICS_PORT and its LOCAL_RANK. Raises
    ValueError.
    """
    value = _get("PYCOMM_METRICS_PORT")
    if value is None:
        return None
    port, local_rank = integer("PYCOMM_METRICS_PORT", value, 1, 65535), _get("LOCAL_RANK")
    return port + (0 if local_rank is None else integer("LOCAL_RANK", local_rank, 0))


def triton_interpret() -> bool:
    """Reads TRITON_INTERPRET as Triton does."""
    return (_get("TRITON_INTERPRET") or "0").lower() in ("1", "true", "on", "yes", "y")


# For ranks that are threads of one process. A hardware queue for each stream; and all kernels are loaded when
# CUDA begins (4 s and 0.6 GiB of an H100 with torch 2.11): one that is loaded at its first use can wait for
# the kernels that run, which may wait for this rank.
THREAD_RANKS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}


def allow_thread_ranks() -> None:
    """Sets what CUDA must know for ranks that are threads of one process (THREAD_RANKS), where it is not set.

    In time only before CUDA is first used in the process.
    """
    for name, value in THREAD_RANKS.items():
        os.environ.setdefault(name, value)


def launched() -> bool:
    """True where a launcher such as torchrun, srun or mpiexec has started this process as one of several."""
    return (_get("RANK") is not None and _get("WORLD_SIZE") is not None) or launched_by_others()


def replacement() -> int | None:
    """The number that pycomm.run gave this process, 0 if it takes nobody's place; None: another launcher."""
    value = _get("PYCOMM_REPLACEMENT")
    return None if value is None else integer("PYCOMM_REPLACEMENT", value, 0)


def threads_of_ranks(ranks: int) -> dict[str, int]:
    """Variables that share the cores of this process among so many; none where OMP_NUM_THREADS is set."""
    cores = len(os.sched_getaffinity(0))
    return {} if _get("OMP_NUM_THREADS") is not None else {"OMP_NUM_THREADS": max(1, cores // ranks)}


def set_variables() -> dict[str, str]:
    """All variables PYCOMM_... that are set, name -> value, also those that pycomm does not know."""
    return {
        name: os.environ[name] for name in sorted(os.environ) if name.startswith("PYCOMM_") and _get(name)
    }


def is_first_rank() -> bool:
    """True on rank 0, and where there are no ranks: the one process that says what all would say."""
    if _get("RANK") is not None:
        return _get("RANK") == "0"
    place = _launchers().find_place(os.environ)
    return place is None or place.rank == 0


@functools.cache
def logger() -> logging.Logger:
    """The logger "pycomm", at the level of PYCOMM_LOG when that is set. Raises ValueError."""
    log, level = logging.getLogger("pycomm"), _get("PYCOMM_LOG")
    if level is not None:
        if level.lower() not in LOG_LEVELS:
            raise wrong("PYCOMM_LOG", level, ", ".join(LOG_LEVELS))
        log.setLevel(level.upper())
        # the level was asked for: show it, even in a program that set up no logging
        if not log.hasHandlers():
            log.addHandler(logging.StreamHandler())
    return log


def set_place(rank: int, world_size: int, **others: str) -> None:
    """Sets in this process what torchrun would, for libraries that read their place from there (DeepSpeed);
    others: further variables of theirs, as texts.
    """
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ.update(place | others)


def for_child(**variables: object) -> dict[str, str]:
    """The environment for a process that we start: a copy of ours, in which these variables are set, or
    removed where None.
    """
    child = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return {name: value for name, value in child.items() if variables.get(name, value) is not None}


def _get(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None


def _required(name: str) -> str:
    value = _get(name)
    if value is None:
        advice = "Start with torchrun, srun or mpiexec, or pass store, rank and world_size."
        raise ValueError(f"{name} is not set in the environment. {advice}")
    return value
