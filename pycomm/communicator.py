"""The native API: Communicator, and Work, the handle of an asynchronous operation.

    with pycomm.Communicator() as comm:            # under torchrun
        comm.all_reduce(x)                         # in place
        work = comm.all_gather(x, async_op=True)   # progresses while the caller computes
        y = work.wait()

Arrays are torch tensors on the CPU or a CUDA device, NumPy arrays, CuPy arrays, or anything else with `__dlpack__` (JAX): they are used in
place, without a copy, as long as they are dense; a result has the kind of the input.

On CUDA arrays an operation is enqueued in the current stream (CuPy's for CuPy arrays, else torch's) and the call returns at once; with
async_op it runs beside that stream, and Work.wait() orders the stream behind it without blocking the host. Only barrier() blocks. What
went wrong on the device is raised by the next call on the group, by Work.wait() once it is known, and by barrier(). A rank of a group uses
one device; the first operation on it sets the device side up, so all ranks must come to it together.
"""

import contextlib
import os
from typing import NamedTuple

import torch

from pycomm import _C, env

__all__ = ["Communicator", "Work", "empty", "premul_sum"]

DEFAULT_TIMEOUT = 300.0  # seconds

_OPS = {name: index for index, name in enumerate(_C.reduce_ops)}
_ALGORITHMS = {name: index for index, name in enumerate(_C.algorithms)}


class PremulSum(NamedTuple):
    """Reduce op: every rank's input is multiplied by `factor` before it is added."""

    factor: float


def premul_sum(factor):
    """Reduce op for `op=`: the sum of all inputs, each multiplied by `factor` (equal on all ranks; floating and complex dtypes)."""
    return PremulSum(float(factor))


_PLAIN = {name: (code, 1.0) for name, code in _OPS.items() if name != "premul_sum"}


def empty(shape, dtype=torch.float32, *, comm, device="cpu"):
    """Collective on `comm`: a torch tensor of zeros that every rank has mapped. The same as comm.empty(shape, dtype, device=device)."""
    return comm.empty(shape, dtype, device=device)


def _reduction(op):
    """Code and factor of a reduce op as the extension takes them."""
    if plain := _PLAIN.get(op):
        return plain
    if isinstance(op, PremulSum):
        return _OPS["premul_sum"], op.factor
    raise ValueError(f"unknown reduce op {op!r}; expected one of {', '.join(_PLAIN)} or pycomm.premul_sum(factor)")


def _algorithm(name):
    if name is None:
        return 0
    if name not in _ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; expected None or one of {', '.join(_ALGORITHMS)}")
    return _ALGORITHMS[name]


def _tensor(array):
    """A tensor over the memory of any array. No copy."""
    if isinstance(array, torch.Tensor):
        return array
    if type(array).__module__ == "numpy" and hasattr(array, "__array_interface__"):
        if not array.flags.writeable:
            raise ValueError("the NumPy array is read-only; pass a writable one")
        return torch.from_numpy(array)
    if hasattr(array, "__dlpack__"):
        return torch.from_dlpack(array)
    raise TypeError(f"expected a torch tensor, a NumPy array or an array with __dlpack__, got {type(array).__name__}")


def _is_cupy(array):
    return type(array).__module__.partition(".")[0] == "cupy"


def _call(array, function, *args):
    """function(*args) in the stream that the array's library calls current: torch's, where the extension looks, or CuPy's."""
    if isinstance(array, (list, tuple)) and array:
        array = array[0]
    if not _is_cupy(array):
        return function(*args)
    import cupy

    with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr, device=array.device.id)):
        return function(*args)


def _like(tensor, array):
    """A new tensor as the kind of array that the caller uses."""
    if isinstance(array, torch.Tensor):
        return tensor
    if type(array).__module__ == "numpy":
        return tensor.numpy()
    if _is_cupy(array):
        import cupy

        return cupy.from_dlpack(tensor)
    namespace = array.__array_namespace__() if hasattr(array, "__array_namespace__") else None
    return namespace.from_dlpack(tensor) if namespace is not None else tensor


class Work:
    """An operation under way. Keep the arrays alive and unread until it is done (CUDA: until wait() has ordered the stream that reads)."""

    def __init__(self, handle, result):
        self._handle = handle
        self._result = result

    def wait(self, timeout=None):
        """Blocks until the operation is done and returns its result. `timeout` in seconds; None: the operation's own.

        CUDA: orders the current stream behind the operation and returns at once; blocks only if a timeout is given.
        Raises what the operation raised (CommError and its kinds).
        """
        _call(self._result, self._handle.wait, timeout or 0.0)
        return self._result

    def done(self):
        """True once the result is complete; never blocks."""
        return self._handle.done()

    def source(self):
        """The rank that a completed recv came from."""
        return self._handle.source()


class Communicator:
    """A group of ranks on one node and the collectives among them.

    Args:
        store: a torch.distributed Store that all ranks share; None: made from torchrun's environment (MASTER_ADDR, MASTER_PORT), which
            also gives `rank` and `world_size`.
        rank, world_size: of this process in the group.
        timeout: seconds until an operation that misses a rank raises CommTimeoutError.
        name: of the group, for errors and to keep groups apart that share a store.
        staging_bytes: memory per rank for moving data; None: 8 MiB for a process's first group, 1 MiB for each further one.
        threads: threads per rank that move large data; None: from cores and ranks (PYCOMM_THREADS).

    Common to all operations:
        x: dense arrays of any shape (others are copied in and out); all ranks pass equal sizes and dtypes unless said otherwise.
        async_op: return a Work at once instead of the result. Operations of one group run in the order of issue.
        algorithm: None (see pycomm.explain) or the name of one, equal on all ranks.
        timeout: seconds for this operation.
        Raises MismatchError (on all ranks) when ranks called different things, PeerError when a rank died or left, CommTimeoutError,
        AbortedError; ValueError or TypeError for an argument that is wrong on this rank alone, before anything is sent.
    """

    def __init__(self, store=None, rank=None, world_size=None, *, timeout=None, name="default", staging_bytes=None, threads=None):
        settings = env.settings()
        if store is None:
            launch = env.launch()
            rank = launch.rank if rank is None else rank
            world_size = launch.world_size if world_size is None else world_size
            store, _, _ = next(torch.distributed.rendezvous("env://", rank, world_size))  # torchrun's own store where it offers one
        if rank is None or world_size is None:
            raise ValueError("pass rank and world_size together with store")
        timeout = float(timeout if timeout is not None else settings.timeout or DEFAULT_TIMEOUT)
        options = transport_options(settings, name, timeout, world_size, staging_bytes, threads)
        self._store = store
        self._comm = _C.connect(store, rank, world_size, options)
        for op, algorithm in settings.algorithm.items():
            self._comm.set_algorithm(op, algorithm)
        self._splits = 0
        self._timeout = timeout
        self.name = name
        self.rank = rank
        self.world_size = world_size

    # --- collectives ----------------------------------------------------------------------------------------------------------------

    def all_reduce(self, x, op="sum", *, out=None, async_op=False, algorithm=None, timeout=None):
        """Every rank gets the reduction of all ranks' x, in place or in `out`. The bits are equal on all ranks."""
        code, factor = _reduction(op)
        tensor = _tensor(x)
        target = tensor if out is None else _tensor(out)
        handle = _call(x, self._comm.all_reduce, tensor, target, code, factor, async_op, _algorithm(algorithm), timeout or 0.0)
        result = x if out is None else out
        return Work(handle, result) if async_op else result

    def reduce(self, x, root=0, op="sum", *, out=None, async_op=False, algorithm=None, timeout=None):
        """The root gets the reduction of all ranks' x, in place or in `out`; x of the others is unchanged. Returns None on them."""
        code, factor = _reduction(op)
        tensor = _tensor(x)
        target = tensor if out is None else _tensor(out)
        handle = _call(x, self._comm.reduce, tensor, target, root, code, factor, async_op, _algorithm(algorithm), timeout or 0.0)
        result = (x if out is None else out) if self.rank == root else None
        return Work(handle, result) if async_op else result

    def broadcast(self, x, root=0, *, async_op=False, algorithm=None, timeout=None):
        """x of every rank becomes the root's x."""
        handle = _call(x, self._comm.broadcast, _tensor(x), root, async_op, _algorithm(algorithm), timeout or 0.0)
        return Work(handle, x) if async_op else x

    def all_gather(self, x, out=None, *, async_op=False, algorithm=None, timeout=None):
        """Every rank gets every rank's x.

        out: an array of world_size * x.size elements, or a list of world_size arrays, whose sizes may differ (each as the x of its rank).
            None: a new array of shape (world_size, *x.shape).
        """
        tensor = _tensor(x)
        code = _algorithm(algorithm)
        if isinstance(out, (list, tuple)):
            handle = _call(x, self._comm.all_gather, tensor, [_tensor(part) for part in out], async_op, code, timeout or 0.0)
        else:
            if out is None:
                out = _like(tensor.new_empty((self.world_size, *tensor.shape)), x)
            handle = _call(x, self._comm.all_gather_flat, tensor, _tensor(out), async_op, code, timeout or 0.0)
        return Work(handle, out) if async_op else out

    def reduce_scatter(self, x, out=None, op="sum", *, async_op=False, algorithm=None, timeout=None):
        """Rank r gets the reduction of part r of all ranks' x.

        x: an array whose first dimension is a multiple of world_size, or a list of world_size arrays, whose sizes may differ.
        out: an array of the size of this rank's part; None: a new one.
        """
        reduce_op, factor = _reduction(op)
        code = _algorithm(algorithm)
        if isinstance(x, (list, tuple)):
            parts = [_tensor(part) for part in x]
            if out is None:
                if len(parts) != self.world_size:
                    raise self._wrong("reduce_scatter", f"got a list of {len(parts)} arrays for {self.world_size} ranks")
                out = _like(torch.empty_like(parts[self.rank], memory_format=torch.contiguous_format), x[self.rank])
            handle = _call(x, self._comm.reduce_scatter, parts, _tensor(out), reduce_op, factor, async_op, code, timeout or 0.0)
        else:
            tensor = _tensor(x)
            if out is None:
                if tensor.dim() == 0 or tensor.shape[0] % self.world_size:
                    raise self._wrong(
                        "reduce_scatter", f"the first dimension of x, shape {tuple(tensor.shape)}, is not a multiple of world_size"
                    )
                out = _like(tensor.new_empty((tensor.shape[0] // self.world_size, *tensor.shape[1:])), x)
            handle = _call(x, self._comm.reduce_scatter_flat, tensor, _tensor(out), reduce_op, factor, async_op, code, timeout or 0.0)
        return Work(handle, out) if async_op else out

    def all_to_all(self, x, out=None, *, in_splits=None, out_splits=None, async_op=False, algorithm=None, timeout=None):
        """Rank r gets part r of every rank's x, in order of rank.

        x, out: two arrays, cut along the first dimension by the splits (rows per rank; None: evenly), or two lists of world_size arrays,
            whose sizes may differ pairwise. out=None with even splits: a new array like x.
        """
        code = _algorithm(algorithm)
        if isinstance(x, (list, tuple)):
            if out is None:
                raise self._wrong("all_to_all", "with a list of inputs pass a list of outputs")
            handle = _call(
                x, self._comm.all_to_all, [_tensor(part) for part in x], [_tensor(part) for part in out], async_op, code, timeout or 0.0
            )
        else:
            tensor = _tensor(x)
            if out is None:
                rows = sum(out_splits) if out_splits is not None else None
                shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
                out = _like(tensor.new_empty(shape), x)
            handle = _call(
                x, self._comm.all_to_all_flat, tensor, _tensor(out), in_splits or [], out_splits or [], async_op, code, timeout or 0.0
            )
        return Work(handle, out) if async_op else out

    def gather(self, x, out=None, root=0, *, async_op=False, algorithm=None, timeout=None):
        """The root gets every rank's x: in `out` (a list or an array of world_size * x.size elements) or a new array; None elsewhere."""
        tensor = _tensor(x)
        parts = []
        if self.rank == root:
            if out is None:
                out = _like(tensor.new_empty((self.world_size, *tensor.shape)), x)
            parts = (
                [_tensor(part) for part in out] if isinstance(out, (list, tuple)) else self._rows("gather", _tensor(out), tensor.numel())
            )
        handle = _call(x, self._comm.gather, tensor, parts, root, async_op, _algorithm(algorithm), timeout or 0.0)
        result = out if self.rank == root else None
        return Work(handle, result) if async_op else result

    def scatter(self, x, out, root=0, *, async_op=False, algorithm=None, timeout=None):
        """`out` of rank r becomes part r of the root's x (a list, or an array of world_size * out.size elements; ignored on the others)."""
        target = _tensor(out)
        parts = []
        if self.rank == root:
            parts = [_tensor(part) for part in x] if isinstance(x, (list, tuple)) else self._rows("scatter", _tensor(x), target.numel())
        handle = _call(out, self._comm.scatter, parts, target, root, async_op, _algorithm(algorithm), timeout or 0.0)
        return Work(handle, out) if async_op else out

    def barrier(self, *, async_op=False, timeout=None):
        """Returns when all ranks have come here. On timeout the error names every rank that has not."""
        handle = self._comm.barrier(async_op, timeout or 0.0)
        return Work(handle, None) if async_op else None

    # --- point to point -------------------------------------------------------------------------------------------------------------

    def send(self, x, dst, tag=0, *, async_op=False, timeout=None):
        """Sends x to rank dst; complete when a recv with the same tag has taken it."""
        handle = _call(x, self._comm.send, _tensor(x), dst, tag, async_op, timeout or 0.0)
        return Work(handle, None) if async_op else None

    def recv(self, x, src=None, tag=0, *, async_op=False, timeout=None):
        """Receives into x from rank src (None: from any rank). Returns the sender's rank; asynchronously: a Work, see Work.source()."""
        handle = _call(x, self._comm.recv, _tensor(x), -1 if src is None else src, tag, async_op, timeout or 0.0)
        return Work(handle, x) if async_op else handle.source()

    # --- groups, memory, life -------------------------------------------------------------------------------------------------------

    def split(self, color, key=0):
        """Collective: ranks with equal color form a new group, ordered by (key, rank). color=None: this rank joins none and gets None."""
        mine = torch.tensor([-1 if color is None else int(color), int(key)], dtype=torch.int64)
        if color is not None and int(color) < 0:
            raise self._wrong("split", f"color={color} must not be negative")
        entries = self.all_gather(mine).tolist()
        self._splits += 1
        if color is None:
            return None
        members = sorted((entry[1], rank) for rank, entry in enumerate(entries) if entry[0] == int(color))
        ranks = [rank for _, rank in members]
        name = f"{self.name}/{self._splits}.{int(color)}"
        return Communicator(self._store, ranks.index(self.rank), len(ranks), name=name, timeout=self._timeout)

    def empty(self, shape, dtype=torch.float32, *, device="cpu"):
        """Collective: a torch tensor of zeros in memory that every rank has mapped, so that collectives on it skip the staging copies.

        All ranks pass the same shape and dtype. The tensor is an ordinary one and may outlive the communicator. `device`: "cpu", or this
        rank's CUDA device ("cuda": the current one); in a CUDA operation, buffers of all ranks must be registered, or of none.
        """
        shape = [shape] if isinstance(shape, int) else list(shape)
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return self._comm.empty(shape, dtype, device)

    def describe(self):
        """Facts about the group as a dict: how peers' memory is reached, staging, threads, SIMD level. "cuda": None before the first
        operation on a device, then a dict: protocol and why, blocks per operation, access to peers' memory, bytes of staging."""
        return self._comm.describe()

    def abort(self, reason=""):
        """From any thread: every operation under way on any rank, and every later one, raises AbortedError."""
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

    def _rows(self, op, flat, numel):
        """The parts of a contiguous array of world_size * numel elements."""
        if flat.numel() != numel * self.world_size:
            raise self._wrong(op, f"the array of all parts has {flat.numel()} elements, expected world_size * {numel}")
        if not flat.is_contiguous():
            raise self._wrong(op, "the array of all parts must be contiguous; or pass a list of arrays")
        return list(flat.view(-1).chunk(self.world_size)) if numel else [flat.view(-1)] * self.world_size

    def _wrong(self, op, text):
        return ValueError(f"[rank {self.rank}/{self.world_size}] {op}: {text}")


def transport_options(settings, name, timeout, world_size, staging_bytes=None, threads=None):
    """Settings of the environment and arguments of the caller as the extension takes them; arguments win."""
    staging_bytes = staging_bytes or settings.staging_bytes or 0
    threads = threads or settings.threads or default_threads(world_size)
    cuda = (settings.cuda_protocol or "", settings.cuda_connections or 0, settings.cuda_staging_bytes or 0)
    return _C.transport_options(name, timeout, staging_bytes, settings.host_id or "", settings.cma is not False, threads, *cuda)


def default_threads(world_size):
    """Threads per rank that fill the memory bandwidth: the cores that a rank may call its own, at most 4."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // max(1, world_size)))
