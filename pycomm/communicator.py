"""The native API: Communicator, and Work, the handle of an asynchronous operation.

    with pycomm.Communicator() as comm:            # under torchrun, srun or mpiexec
        comm.all_reduce(x)                         # in place
        work = comm.all_gather(x, async_op=True)   # progresses while the caller computes
        y = work.wait()

Arrays are torch tensors on the CPU or a CUDA device, NumPy arrays, CuPy arrays, or anything else with
`__dlpack__` (JAX): they are used in place, without a copy, as long as they are dense; a result has the kind
of the input.

On CUDA arrays an operation is enqueued in the current stream (CuPy's for CuPy arrays, else torch's) and the
call returns at once; with async_op it runs beside that stream, and Work.wait() orders the stream behind it
without blocking the host. Only barrier() blocks. What went wrong on the device is raised by the next call on
the group, by Work.wait() once it is known, and by barrier(). A rank of a group uses one device; the first
operation on it sets the device side up, so all ranks must come to it together.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Generic, Literal, TypeVar, cast, overload

import torch
import torch.distributed as dist

from pycomm import _C, env, hosts, trace
from pycomm.arrays import A, Array, call_in_stream
from pycomm.errors import CommError
from pycomm.membership import Membership
from pycomm.observed import Observed
from pycomm.options import seconds, transport_options

T_co = TypeVar("T_co", covariant=True)
Self = TypeVar("Self", bound="Communicator")

__all__ = ["Communicator", "Work", "empty"]


def empty(
    shape: int | Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    comm: Communicator,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Collective on `comm`: a torch tensor of zeros that every rank has mapped. The same as comm.empty(shape,
    dtype, device=device).
    """
    return comm.empty(shape, dtype, device=device)


class Work(_C.Work, Generic[T_co]):
    """An operation under way. Keep the arrays alive and unread until it is done (CUDA: until wait() has
    ordered the stream that reads).
    """

    __slots__ = ()

    def wait(self, timeout: float | None = None) -> T_co:
        """Blocks until the operation is done and returns its result. `timeout` in seconds; None: the
        operation's own.

        CUDA: orders the current stream behind the operation and returns at once; blocks only if a timeout is
        given.
        Raises what the operation raised (CommError and its kinds).
        """
        limit = 0.0 if timeout is None else seconds(timeout, "the operation's own limit")
        result = self._result
        if result is None or type(result) is torch.Tensor:
            return cast(T_co, self._wait(limit))
        return cast(T_co, call_in_stream(result, self._wait, limit))

    def done(self) -> bool:
        """True once the result is complete; never blocks."""
        return self._done()

    def source(self) -> int:
        """The rank that a completed recv came from."""
        return self._source()


class Communicator(Membership, Observed):
    """A group of ranks, on one node or several, and the collectives among them.

    Args:
        store: a torch.distributed Store that all ranks share; None: made from what torchrun, Slurm,
            Open MPI, MPICH or Intel MPI have set, which also gives `rank` and `world_size`.
        rank, world_size: of this process in the group.
        timeout: seconds until an operation that misses a rank raises CommTimeoutError, above 0 and at most
            1e8; None: PYCOMM_TIMEOUT, else 300.
        name: of the group, for errors and to keep groups apart that share a store.
        staging_bytes: memory per rank for moving data; None: 8 MiB for a process's first group, 1 MiB for
        each further one.
        threads: threads per rank that move large data; None: from cores and ranks (PYCOMM_THREADS).

    Common to all operations:
        x: dense arrays of any shape (others are copied in and out); all ranks pass equal sizes and dtypes
        unless said otherwise.
        async_op: return a Work at once instead of the result. Operations of one group run in the order of
        issue.
        algorithm: None (see pycomm.explain) or the name of one, equal on all ranks.
        timeout: seconds for this operation, above 0 and at most 1e8; None: the group's.
        Raises MismatchError (on all ranks) when ranks called different things, PeerError when a rank died or
        left, CommTimeoutError, AbortedError; ValueError or TypeError for an argument that is wrong on this
        rank alone, before anything is sent.
    """

    def __init__(
        self,
        store: dist.Store | _C.LocalStore | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        timeout: float | None = None,
        name: str = "default",
        staging_bytes: int | None = None,
        threads: int | None = None,
        _origin: tuple[_C.Communicator, list[int]] | None = None,
        _host: str | None = None,
    ) -> None:
        settings = env.settings()
        if _host is not None:  # a word for a simulated host, of this rank alone
            settings = settings._replace(host_id=_host)
        if store is None:
            launch = env.set_launch()
            rank = launch.rank if rank is None else rank
            world_size = launch.world_size if world_size is None else world_size
            # torchrun's own store where it offers one
            store, _, _ = next(torch.distributed.rendezvous("env://", rank, world_size))
        if rank is None or world_size is None:
            raise ValueError("pass rank and world_size together with store")
        timeout = self._own_limit(timeout, settings)
        trace.begin_if_asked()
        options = transport_options(settings, name, timeout, world_size, staging_bytes, threads)
        comm = _C.connect(store, rank, world_size, options, _origin, hosts.makers())
        self._take(comm, store, name, timeout, settings)

    # --- messages; collectives: reductions.py, exchanges.py, rooted.py --------------------

    @overload
    def barrier(self, *, async_op: Literal[False] = False, timeout: float | None = None) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True], timeout: float | None = None) -> Work[None]: ...
    @overload
    def barrier(self, *, async_op: bool, timeout: float | None = None) -> None | Work[None]: ...
    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> None | Work[None]:
        """Returns when all ranks have come here. On timeout the error names every rank that has not."""
        return self._comm.barrier(None, async_op, None, timeout)

    @overload
    def send(
        self,
        x: Array,
        dst: int,
        tag: int = 0,
        *,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> None: ...
    @overload
    def send(
        self, x: Array, dst: int, tag: int = 0, *, async_op: Literal[True], timeout: float | None = None
    ) -> Work[None]: ...
    @overload
    def send(
        self, x: Array, dst: int, tag: int = 0, *, async_op: bool, timeout: float | None = None
    ) -> None | Work[None]: ...
    def send(
        self, x: Array, dst: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> None | Work[None]:
        """Sends x to rank dst; complete when a recv with the same tag has taken it."""
        return self._comm.send(x, dst, tag, None, async_op, None, timeout)

    @overload
    def recv(
        self,
        x: A,
        src: int | None = None,
        tag: int = 0,
        *,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> int: ...
    @overload
    def recv(
        self,
        x: A,
        src: int | None = None,
        tag: int = 0,
        *,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work[A]: ...
    @overload
    def recv(
        self, x: A, src: int | None = None, tag: int = 0, *, async_op: bool, timeout: float | None = None
    ) -> int | Work[A]: ...
    def recv(
        self,
        x: A,
        src: int | None = None,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> int | Work[A]:
        """Receives into x from rank src (None: from any rank). Returns the sender's rank; asynchronously: a
        Work, see Work.source().
        """
        return self._comm.recv(x, -1 if src is None else src, tag, x, async_op, None, timeout)

    # --- memory, life; other groups: membership.py --------------------

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Collective: a torch tensor of zeros in memory that every rank has mapped, so that collectives on it
        skip the staging copies.

        All ranks pass the same shape and dtype. The tensor is an ordinary one and may outlive the
        communicator. `device`: "cpu", or this rank's CUDA device ("cuda": the current one); in a CUDA
        operation, buffers of all ranks must be registered, or of none.
        """
        shape = [shape] if isinstance(shape, int) else list(shape)
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return self._comm.empty(shape, dtype, device)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            with contextlib.suppress(Exception):
                self.abort(f"{kind.__name__}: {value}"[:200])
        try:
            self.close()
        except CommError as error:
            if kind is None:
                raise
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)  # the body's error goes on

    def __repr__(self) -> str:
        return f"pycomm.Communicator(rank={self.rank}, world_size={self.world_size}, name={self.name!r})"
