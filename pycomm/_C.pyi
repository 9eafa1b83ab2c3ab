"""The extension (csrc/bindings/). tests/test_stub.py compares this with what the extension has."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from pycomm.arrays import Array
from pycomm.communicator import Work as _PythonWork
from pycomm.options import Algorithm, Reduction
from pycomm.quantities import Bytes, GlobalRank

_T = TypeVar("_T")
# (operation, size class, operations, bytes, measured, ns waiting, ns moving)
_Cell: TypeAlias = tuple[str, int, int, int, int, int, int]
_Counters: TypeAlias = tuple[list[_Cell], list[_Cell]]  # of the host, of the device
# (communicator of which the members are, their ranks in it)
_Origin: TypeAlias = tuple[Communicator, Sequence[int]]
# what the extension calls where a group spans hosts: pycomm.hosts.Makers
_Makers: TypeAlias = tuple[Callable[..., Any], Callable[..., Any], Callable[[], str]]

dtypes: list[str]
reduce_ops: list[str]
kinds: list[str]
algorithms: list[str]
slot_payload_bytes: int
card_payload: int  # bytes
longest_timeout: float  # seconds
oldest_ucx: tuple[int, int]
trace_size_classes: int

class WireError(RuntimeError): ...

class Work:
    _result: Any
    def _wait(self, limit: float, /) -> Any: ...
    def _done(self) -> bool: ...
    def _source(self) -> int: ...

class LocalStore:
    def __init__(self, wire_delay_us: int = 0) -> None: ...

class PageStore: ...
class TransportOptions: ...

class TunedRows:
    # (ranks, cores, access, operation, up to which size, algorithm)
    def __init__(self, lines: Sequence[tuple[int, int, str, str, int, str]], /) -> None: ...
    def has(self, world_size: int, cores: int, /) -> bool: ...

class WatchedCounters:
    def __init__(self, comm: Communicator, /) -> None: ...
    def get(self) -> _Counters | None: ...

class UcxContext:
    def __init__(self, file: str, settings: Sequence[tuple[str, str]], peers: int) -> None: ...
    @property
    def version(self) -> str: ...

class UcxWire:
    def __init__(self, context: UcxContext, rank: int, world_size: int, spins: int) -> None: ...
    @property
    def address(self) -> bytes: ...
    def connect(self, addresses: Mapping[int, bytes]) -> None: ...
    def missing(self) -> list[int]: ...
    def close(self) -> None: ...

class Communicator:
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @property
    def point(self) -> Any: ...  # pycomm.survivors.Point over hosts, else None
    def set_timeout(self, seconds: float, /) -> None: ...
    def set_algorithm(self, op: str, algorithm: str, /) -> None: ...
    def describe(self) -> dict[str, Any]: ...
    def counters(self) -> _Counters: ...
    def look_at_lives(self) -> None: ...
    def fail_late(self, peer: int, text: str, /) -> None: ...
    def abort(self, reason: str, /) -> None: ...
    def close(self) -> str: ...
    def raise_deferred_error(self) -> None: ...
    def hold_deferred_errors(self, hold: bool, /) -> None: ...
    def shrink(self, exclude: Sequence[int], timeout: float, /) -> tuple[Communicator, list[int]]: ...
    def successor_options(self, name: str, timeout: float, /) -> TransportOptions: ...
    def pages(self) -> PageStore: ...

    # Collectives and messages end with (result, async_op, algorithm, timeout) and return the result, or the
    # handle whose wait() returns it.
    def all_reduce(
        self,
        x: Array,
        out: Array,
        op: Reduction,
        result: _T,
        async_op: bool,
        algorithm: Algorithm | None,
        timeout: float | None,
        /,
    ) -> _T | _PythonWork[_T]: ...
    def reduce(
        self,
        x: Array,
        out: Array,
        op: Reduction,
        root: int,
        result: _T,
        async_op: bool,
        algorithm: Algorithm | None,
        timeout: float | None,
        /,
    ) -> _T | _PythonWork[_T]: ...
    def reduce_scatter(
        self,
        x: Sequence[Array],
        out: Array,
        op: Reduction,
        result: _T,
        async_op: bool,
        algorithm: Algorithm | None,
        timeout: float | None,
        /,
    ) -> _T | _PythonWork[_T]: ...
    def reduce_scatter_flat(
        self,
        x: Array,
        out: Array,
        op: Reduction,
        result: _T,
        async_op: bool,
        algorithm: Algorithm | None,
        timeout: float | None,
        /,
    ) -> _T | _PythonWork[_T]: ...
    def broadcast(
        self,
        x: Array,
        root: int,
        result: _T,
        async_op: bool,
        algorithm: Algorithm | None,
        timeout: float | None,
        /,
    ) -> _T | _PythonWork[_T]: ...
    def all_gather(
        self,
        x: Array,
        out: Sequence[Array],
        result: _T,
        async_op: bool,
        algorithm: Algorithm | None,
        timeout: float | None,
        /,
    ) -> _T | _PythonWork[_T]: ...
    def all_gather_flat(
        self,
        x: Array,
        out: Array,
        result: _T,
        async_op: bool,
        algorithm: Algorithm | None,
        timeout: float | None,
        /,
    ) -> _T | _PythonWork[_T]: ...
    def all_to_all(
        self,
        x: Sequence[Array],
        out: Sequence[Array],
        result: _T,
        async_op: bool,
        algorithm: Algorithm | None,
        timeout: float | None,
        /,
    ) -> _T | _PythonWork[_T]: ...
    def all_to_all_flat(
        self,
        x: Array,
        out: Array,
        in_splits: Sequence[int] | None,
        out_splits: Sequence[int] | None,
        result: _T,
        async_op: bool,
        algorithm: Algorithm | None,
        timeout: float | None,
        /,
    ) -> _T | _PythonWork[_T]: ...
    def gather(
        self,
        x: Array,
        out: Sequence[Array],
        root: int,
        result: _T,
        async_op: bool,
        algorithm: Algorithm | None,
        timeout: float | None,
        /,
    ) -> _T | _PythonWork[_T]: ...
    def scatter(
        self,
        out: Array,
        x: Sequence[Array],
        root: int,
        result: _T,
        async_op: bool,
        algorithm: Algorithm | None,
        timeout: float | None,
        /,
    ) -> _T | _PythonWork[_T]: ...
    def send(
        self,
        x: Array,
        peer: int,
        tag: int,
        result: _T,
        async_op: bool,
        algorithm: None,
        timeout: float | None,
        /,
    ) -> _T | _PythonWork[_T]: ...
    # At once it returns the sender's rank.
    def recv(
        self,
        x: Array,
        peer: int,
        tag: int,
        result: _T,
        async_op: bool,
        algorithm: None,
        timeout: float | None,
        /,
    ) -> int | _PythonWork[_T]: ...
    def barrier(
        self, result: _T, async_op: bool, algorithm: None, timeout: float | None, /
    ) -> _T | _PythonWork[_T]: ...

    # registered memory, and what kernels of pycomm.fused need of it
    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, /) -> torch.Tensor: ...
    def peer_addresses(self, tensor: torch.Tensor, /) -> list[int]: ...
    def enter_line(self, device: torch.device, /) -> None: ...
    def leave_line(self, device: torch.device, /) -> None: ...
    def launch_begins(self, device: torch.device, stream: int, /) -> None: ...
    def launch_ends(self, device: torch.device, /) -> None: ...

class Backend(dist.Backend):
    @property
    def communicator(self) -> Communicator: ...
    @property
    def shrunk_communicator(self) -> Communicator: ...
    @property
    def options(self) -> Any: ...  # torch's Backend.Options
    def get_error(self) -> Any: ...  # torch's ErrorType
    def shrink_ahead(self, exclude: Sequence[int], timeout: float, /) -> list[int]: ...
    def _set_default_timeout(self, timeout: timedelta) -> None: ...
    def perform_nocolor_split(self, device: object, /) -> None: ...

def connect(
    store: dist.Store | LocalStore | PageStore,
    rank: int,
    world_size: int,
    options: TransportOptions,
    origin: _Origin | None,
    makers: _Makers | None,
    /,
) -> Communicator: ...
def create_backend(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: float,
    options: TransportOptions,
    algorithms: Mapping[int, int],
    global_ranks: Sequence[GlobalRank],
    makers: _Makers,
    /,
) -> Backend: ...
def transport_options(
    name: str,
    timeout: float,
    staging_bytes: int,
    host_id: str,
    cma: bool,
    threads: int,
    cuda_protocol: str,
    cuda_connections: int,
    cuda_staging_bytes: int,
    tuned: TunedRows | None,
    host_timeout: float,
    /,
) -> TransportOptions: ...
def flight_records() -> list[dict[str, Any]]: ...

# which algorithm a call would take
def choose(
    kind: int,
    nbytes: Bytes,
    world_size: int,
    cores: int,
    kernel_ahead: bool,
    mapped: bool,
    kernel_reads: bool,
    algorithm: int,
    tuned: TunedRows | None,
    /,
) -> tuple[str, int, str, bool]: ...
def choose_on_device(
    kind: int, nbytes: Bytes, world_size: int, one_device: bool, registered: bool, algorithm: int, /
) -> tuple[str, str]: ...
def hand_off() -> tuple[float | None, bool]: ...
def simd_level() -> str: ...
def set_simd_limit(level: str | None, /) -> None: ...
def built_with_cuda() -> bool: ...
def cuda_problem() -> str: ...
def ranks_are_threads(device: int, /) -> bool: ...

# pycomm.trace
def measure(on: bool, /) -> None: ...
def trace_begin(folder: str, ring_bytes: int, /) -> None: ...
def trace_end() -> None: ...
def trace_active() -> bool: ...
def trace_folder() -> str: ...
def trace_generation() -> int: ...
def trace_name(text: str, /) -> int | None: ...
def trace_axis(group: str, axis: str, /) -> None: ...
def trace_span(name: int, begin: int, end: int, a: int, b: int, c: int, /) -> None: ...
