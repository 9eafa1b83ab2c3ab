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

import contextlib

import torch

from pycomm import _C, env, hosts, metrics, trace
from pycomm.arrays import as_tensor, as_tensors, call_in_stream, like
from pycomm.membership import Membership
from pycomm.observed import Observed
from pycomm.options import seconds, transport_options

__all__ = ["Communicator", "Work", "empty"]

DEFAULT_TIMEOUT = 300.0  # seconds


def empty(shape, dtype=torch.float32, *, comm, device="cpu"):
    """Collective on `comm`: a torch tensor of zeros that every rank has mapped. The same as comm.empty(shape,
    dtype, device=device).
    """
    return comm.empty(shape, dtype, device=device)


class Work(_C.Work):
    """An operation under way. Keep the arrays alive and unread until it is done (CUDA: until wait() has
    ordered the stream that reads).
    """

    __slots__ = ()

    def wait(self, timeout=None):
        """Blocks until the operation is done and returns its result. `timeout` in seconds; None: the
        operation's own.

        CUDA: orders the current stream behind the operation and returns at once; blocks only if a timeout is
        given.
        Raises what the operation raised (CommError and its kinds).
        """
        limit = 0.0 if timeout is None else seconds(timeout, "the operation's own limit")
        result = self._result
        if result is None or type(result) is torch.Tensor:
            return self._wait(limit)
        return call_in_stream(result, self._wait, limit)

    def done(self):
        """True once the result is complete; never blocks."""
        return self._done()

    def source(self):
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
        store=None,
        rank=None,
        world_size=None,
        *,
        timeout=None,
        name="default",
        staging_bytes=None,
        threads=None,
        _origin=None,
        _host=None,
    ):
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

    def _take(self, comm, store, name, timeout, settings):
        for op, algorithm in settings.algorithm.items():
            comm.set_algorithm(op, algorithm)
        metrics.watch(comm, name)
        self._comm = comm
        self._store = store
        self._splits = 0
        self._timeout = timeout
        self._settings = settings
        self.name = name
        self.rank = comm.rank
        self.world_size = comm.world_size

    # --- collectives --------------------

    def all_reduce(self, x, op="sum", *, out=None, async_op=False, algorithm=None, timeout=None):
        """Every rank gets the reduction of all ranks' x, in place or in `out`. The bits are equal on all
        ranks.
        """
        out = x if out is None else out
        return self._comm.all_reduce(x, out, op, out, async_op, algorithm, timeout)

    def reduce(self, x, root=0, op="sum", *, out=None, async_op=False, algorithm=None, timeout=None):
        """The root gets the reduction of all ranks' x, in place or in `out`; x of the others is unchanged.
        Returns None on them.
        """
        out = x if out is None else out
        result = out if self.rank == root else None
        return self._comm.reduce(x, out, op, root, result, async_op, algorithm, timeout)

    def broadcast(self, x, root=0, *, async_op=False, algorithm=None, timeout=None):
        """x of every rank becomes the root's x."""
        return self._comm.broadcast(x, root, x, async_op, algorithm, timeout)

    def all_gather(self, x, out=None, *, async_op=False, algorithm=None, timeout=None):
        """Every rank gets every rank's x.

        out: an array of world_size * x.size elements, or a list of world_size arrays, whose sizes may differ
            (each as the x of its rank). None: a new array of shape (world_size, *x.shape).
        """
        if isinstance(out, (list, tuple)):
            return self._comm.all_gather(x, out, out, async_op, algorithm, timeout)
        if out is None:
            out = self._of_all(x)
        return self._comm.all_gather_flat(x, out, out, async_op, algorithm, timeout)

    def _of_all(self, x):
        """A new array for every rank's x."""
        tensor = as_tensor(x)
        return like(tensor.new_empty((self.world_size, *tensor.shape)), x)

    def reduce_scatter(self, x, out=None, op="sum", *, async_op=False, algorithm=None, timeout=None):
        """Rank r gets the reduction of part r of all ranks' x.

        x: an array whose first dimension is a multiple of world_size, or a list of world_size arrays, whose
            sizes may differ.
        out: an array of the size of this rank's part; None: a new one.
        """
        if out is None:
            out = self._own_part(x)
        if isinstance(x, (list, tuple)):
            return self._comm.reduce_scatter(x, out, op, out, async_op, algorithm, timeout)
        return self._comm.reduce_scatter_flat(x, out, op, out, async_op, algorithm, timeout)

    def _own_part(self, x):
        """A new array for this rank's part of x."""
        n, mine = self.world_size, self.rank
        if isinstance(x, (list, tuple)):
            if len(x) != n:
                raise self._wrong("reduce_scatter", f"got a list of {len(x)} arrays for {n} ranks")
            part = torch.empty_like(as_tensor(x[mine]), memory_format=torch.contiguous_format)
            return like(part, x[mine])
        source = as_tensor(x)
        if source.dim() == 0 or source.shape[0] % n:
            shape = tuple(source.shape)
            raise self._wrong(
                "reduce_scatter", f"the first dimension of x, shape {shape}, is not a multiple of world_size"
            )
        return like(source.new_empty((source.shape[0] // n, *source.shape[1:])), x)

    def all_to_all(
        self, x, out=None, *, in_splits=None, out_splits=None, async_op=False, algorithm=None, timeout=None
    ):
        """Rank r gets part r of every rank's x, in order of rank.

        x, out: two arrays, cut along the first dimension by the splits (rows per rank; None: evenly), or two
            lists of world_size arrays, whose sizes may differ pairwise. out=None with even splits: a new
            array like x.
        """
        if isinstance(x, (list, tuple)):
            if out is None:
                raise self._wrong("all_to_all", "with a list of inputs pass a list of outputs")
            return self._comm.all_to_all(x, out, out, async_op, algorithm, timeout)
        if out is None:
            tensor = as_tensor(x)
            rows = sum(out_splits) if out_splits is not None else None
            shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
            out = like(tensor.new_empty(shape), x)
        return self._comm.all_to_all_flat(x, out, in_splits, out_splits, out, async_op, algorithm, timeout)

    def gather(self, x, out=None, root=0, *, async_op=False, algorithm=None, timeout=None):
        """The root gets every rank's x: in `out` (a list or an array of world_size * x.size elements) or a
        new array; None elsewhere.
        """
        parts, result = [], None
        if self.rank == root:
            result = self._of_all(x) if out is None else out
            parts = self._parts("gather", result, as_tensor(x).numel())
        return self._comm.gather(x, parts, root, result, async_op, algorithm, timeout)

    def scatter(self, x, out, root=0, *, async_op=False, algorithm=None, timeout=None):
        """`out` of rank r becomes part r of the root's x (a list, or an array of world_size * out.size
        elements; ignored on the others).
        """
        parts = self._parts("scatter", x, as_tensor(out).numel()) if self.rank == root else []
        return self._comm.scatter(out, parts, root, out, async_op, algorithm, timeout)

    def barrier(self, *, async_op=False, timeout=None):
        """Returns when all ranks have come here. On timeout the error names every rank that has not."""
        return self._comm.barrier(None, async_op, None, timeout)

    # --- point to point --------------------

    def send(self, x, dst, tag=0, *, async_op=False, timeout=None):
        """Sends x to rank dst; complete when a recv with the same tag has taken it."""
        return self._comm.send(x, dst, tag, None, async_op, None, timeout)

    def recv(self, x, src=None, tag=0, *, async_op=False, timeout=None):
        """Receives into x from rank src (None: from any rank). Returns the sender's rank; asynchronously: a
        Work, see Work.source().
        """
        return self._comm.recv(x, -1 if src is None else src, tag, x, async_op, None, timeout)

    # --- memory, life; other groups: membership.py --------------------

    def empty(self, shape, dtype=torch.float32, *, device="cpu"):
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

    def describe(self):
        """Facts about the group as a dict: how peers' memory is reached, staging, threads, SIMD level.
        "cuda": None before the first operation on a device, then a dict: protocol and why, blocks per
        operation, access to peers' memory, bytes of staging."""
        return self._comm.describe()

    def abort(self, reason=""):
        """From any thread: every operation under way on any rank, and every later one, raises
        AbortedError.
        """
        self._comm.abort(reason)

    def close(self):
        """Leaves the group. Peers that still wait for this rank raise PeerError. Closing twice is allowed."""
        self._comm.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is not None:
            with contextlib.suppress(Exception):
                self.abort(f"{kind.__name__}: {value}"[:200])
        self.close()

    def __repr__(self):
        return f"pycomm.Communicator(rank={self.rank}, world_size={self.world_size}, name={self.name!r})"

    def _parts(self, op, arrays, numel):
        """The tensors of a list of arrays, or of a contiguous array the parts of numel elements each."""
        if isinstance(arrays, (list, tuple)):
            return as_tensors(arrays)
        flat = as_tensor(arrays)
        if flat.numel() != numel * self.world_size:
            raise self._wrong(
                op, f"the array of all parts has {flat.numel()} elements, expected world_size * {numel}"
            )
        if not flat.is_contiguous():
            raise self._wrong(op, "the array of all parts must be contiguous; or pass a list of arrays")
        return list(flat.view(-1).chunk(self.world_size)) if numel else [flat.view(-1)] * self.world_size

    def _set_timeout(self, timeout):
        self._comm.set_timeout(timeout)
        self._timeout = timeout

    def _limit(self, timeout):
        return seconds(timeout, "the group's") or self._timeout

    @staticmethod
    def _own_limit(timeout, settings=None):
        own = (settings or env.settings()).timeout or DEFAULT_TIMEOUT
        return seconds(timeout, "PYCOMM_TIMEOUT or 300") or own

    def _wrong(self, op, text):
        return ValueError(f"[rank {self.rank}/{self.world_size}] {op}: {text}")
