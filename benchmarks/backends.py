"""One adapter per backend: how it is started, and the call that does one operation.

    pycomm        pycomm.Communicator on torch tensors
    pycomm-torch  torch.distributed with backend "pycomm"
    gloo          torch.distributed with backend "gloo"         host memory only
    mpi, mpi:NAME mpi4py on NumPy arrays                        host memory only
    nccl          torch.distributed with backend "nccl"         CUDA only, one rank per GPU
    nccl4py       NCCL by NVIDIA's bindings (nccl_bindings.py)  CUDA only, one rank per GPU

make_call() returns a function without arguments that does the whole operation and returns when this rank is done, or None where the
backend has no such form: torch.distributed has no out-of-place all_reduce, reduce or broadcast, and a copy of ours before the call would
be measured as theirs. Everything that can be prepared is prepared there, not in the call. torch and mpi4py are imported by the adapter
that needs them: a rank under MPI does without torch.
"""

import abc
import datetime
import importlib.util

from . import device, memory, metrics

HOST_ONLY = "its ranks have host memory only here"
CUDA_ONLY = "it takes CUDA tensors only (--device cuda)"


class Unsupported(Exception):
    """This backend cannot do what was asked (dtype, reduction); the others go on without it."""


class Adapter(abc.ABC):
    """What the harness wants of a backend. rank and world_size are set after start()."""

    device = "cpu"

    @abc.abstractmethod
    def start(self, spec): ...

    @abc.abstractmethod
    def version(self): ...

    @abc.abstractmethod
    def make_call(self, case, form, send, recv): ...

    @abc.abstractmethod
    def barrier(self): ...

    @abc.abstractmethod
    def close(self): ...

    def make_memory(self):
        return memory.DeviceMemory("cuda") if self.device == "cuda" else memory.HostMemory()

    def settle(self):
        """Waits for what was enqueued on this rank's stream, then for all ranks. See [Note: ranks that share a GPU]."""
        if self.device == "cuda":
            import torch

            torch.cuda.current_stream().synchronize()
            self.barrier()

    def enter_device(self, spec):
        """rank, world_size, and with CUDA the rank's GPU and stream."""
        self.rank, self.world_size, self.device = spec["rank"], spec["ranks"], spec["device"]
        self.gpu = self.rank // spec["ranks_per_gpu"]
        if self.device == "cuda":
            device.enter(self.gpu)

    def neighbours(self):
        """(next, previous, partner) of this rank: of the ring of sendrecv, and of the pairs of pingpong."""
        return (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size, self.rank ^ 1


def make_adapter(name):
    """The adapter for a name as the user writes it. Raises ValueError."""
    if name == "pycomm":
        return PycommAdapter()
    if name in ("pycomm-torch", "gloo"):
        return TorchAdapter(name.removesuffix("-torch"))
    if name == "nccl":
        return TorchAdapter(name)
    if name == "nccl4py":
        from .nccl_bindings import Nccl4pyAdapter

        return Nccl4pyAdapter()
    if is_mpi(name):
        return MpiAdapter()
    raise ValueError(f"backend {name!r}: must be pycomm, pycomm-torch, gloo, mpi, mpi:NAME, nccl or nccl4py.")


def why_not(name, on, sharing):
    """Why a backend cannot take part in a run on "cpu" or "cuda", with `sharing` ranks per GPU; None if it can."""
    if on == "cpu":
        return CUDA_ONLY if name.startswith("nccl") else None
    if name == "gloo" or is_mpi(name):
        return HOST_ONLY
    if not name.startswith("nccl"):
        return None
    if sharing > 1:
        return f'{sharing} ranks share a GPU, and NCCL refuses two ranks on one ("Duplicate GPU detected")'
    if name == "nccl":
        import torch.distributed as dist

        return None if dist.is_available() and dist.is_nccl_available() else "this torch is built without NCCL"
    return None if importlib.util.find_spec("nccl") else "nccl4py is not installed (pip install 'pycomm-runtime[nccl]')"


def can_be_threads(name):
    """torch.distributed and MPI have one rank per process."""
    return name == "pycomm"


def is_mpi(name):
    return name == "mpi" or name.startswith("mpi:")


def is_ours(name):
    return name.startswith("pycomm")


def pingpong(rank, send, recv):
    """The call for a round trip; the even rank of a pair begins."""

    def even():
        send()
        recv()

    def odd():
        recv()
        send()

    return odd if rank % 2 else even


def open_store(spec):
    import torch.distributed as dist

    host, port = spec["store"]
    limit = datetime.timedelta(seconds=spec["timeout"])
    return dist.PrefixStore(f"benchmark/{spec['backend']}", dist.TCPStore(host, port, is_master=False, timeout=limit))


def _tensor(array, dtype):
    """A buffer of memory.py as a tensor."""
    import torch

    if isinstance(array, torch.Tensor):
        return array
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor


class PycommAdapter(Adapter):
    def start(self, spec):
        import torch

        import pycomm

        torch.set_num_threads(1)
        self.enter_device(spec)
        self.registered = spec["registered"]
        self.comm = pycomm.Communicator(open_store(spec), self.rank, self.world_size, timeout=spec["timeout"], name="benchmark")

    def version(self):
        import pycomm

        return f"pycomm {pycomm.__version__}"

    def make_memory(self):
        if not self.registered:
            return super().make_memory()
        return memory.DeviceMemory("cuda", lambda count, dtype: self.comm.empty(max(1, count), dtype, device="cuda")[:count])

    def make_call(self, case, form, send, recv):
        comm, root, op, (after, before, partner) = self.comm, case.root, case.redop, self.neighbours()
        x, out, inside = _tensor(send, case.dtype), _tensor(recv, case.dtype), form == "in_place"

        def sendrecv():
            work = comm.send(x, after, async_op=True)
            comm.recv(out, before)
            work.wait()

        match case.op:
            case "all_reduce":
                return (lambda: comm.all_reduce(x, op)) if inside else lambda: comm.all_reduce(x, op, out=out)
            case "reduce":
                return (lambda: comm.reduce(x, root, op)) if inside else lambda: comm.reduce(x, root, op, out=out)
            case "reduce_scatter":
                return lambda: comm.reduce_scatter(x, out, op)
            case "all_gather":
                return lambda: comm.all_gather(x, out)
            case "all_to_all":
                return lambda: comm.all_to_all(x, out)
            case "broadcast":
                return (lambda: comm.broadcast(x, root)) if inside else None
            case "gather":
                return lambda: comm.gather(x, out, root)
            case "scatter":
                return lambda: comm.scatter(x, out, root)
            case "sendrecv":
                return sendrecv
            case "pingpong":
                return pingpong(self.rank, lambda: comm.send(x, partner), lambda: comm.recv(out, partner))
            case "barrier":
                return comm.barrier
        raise AssertionError(case.op)

    def barrier(self):
        self.comm.barrier()

    def close(self):
        self.comm.close()


class TorchAdapter(Adapter):
    def __init__(self, backend):
        self.backend = backend

    def start(self, spec):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.enter_device(spec)
        limit = datetime.timedelta(seconds=spec["timeout"])
        options = {"device_id": torch.device("cuda", self.gpu)} if self.backend == "nccl" else {}
        dist.init_process_group(self.backend, store=open_store(spec), rank=self.rank, world_size=self.world_size, timeout=limit, **options)

    def version(self):
        import torch

        return f"torch {torch.__version__}, backend {self.backend}"

    def make_call(self, case, form, send, recv):
        import torch.distributed as dist

        if self.backend == "gloo" and case.redop == "avg":
            raise Unsupported("Gloo has no avg")
        root, (after, before, partner) = case.root, self.neighbours()
        x, out, inside, is_root = _tensor(send, case.dtype), _tensor(recv, case.dtype), form == "in_place", self.rank == case.root
        op = getattr(dist.ReduceOp, case.redop.upper()) if metrics.OPS[case.op].reduces else None

        def sendrecv():
            work = dist.isend(x, after)
            dist.recv(out, before)
            work.wait()

        match case.op:
            case "all_reduce":
                return (lambda: dist.all_reduce(x, op)) if inside else None
            case "reduce":
                return (lambda: dist.reduce(x, root, op)) if inside else None
            case "reduce_scatter":
                call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the old name, before torch 2.13
                return lambda: call(out, x, op)
            case "all_gather":
                call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                return lambda: call(out, x)
            case "all_to_all":
                return lambda: dist.all_to_all_single(out, x)
            case "broadcast":
                return (lambda: dist.broadcast(x, root)) if inside else None
            case "gather":
                parts = list(out.chunk(self.world_size)) if is_root else None
                return lambda: dist.gather(x, parts, root)
            case "scatter":
                parts = list(x.chunk(self.world_size)) if is_root else None
                return lambda: dist.scatter(out, parts, root)
            case "sendrecv":
                return sendrecv
            case "pingpong":
                return pingpong(self.rank, lambda: dist.send(x, partner), lambda: dist.recv(out, partner))
            case "barrier":
                return dist.barrier
        raise AssertionError(case.op)

    def barrier(self):
        import torch.distributed as dist

        dist.barrier()

    def close(self):
        import torch.distributed as dist

        dist.destroy_process_group()


class MpiAdapter(Adapter):
    def start(self, spec):
        import mpi4py

        mpi4py.rc.thread_level = "funneled"  # one thread calls MPI: the peers may leave out their locks
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.world_size = self.comm.rank, self.comm.size
        if self.world_size != spec["ranks"]:
            raise RuntimeError(f"mpiexec started a world of {self.world_size}, not {spec['ranks']}: mpiexec and the MPI library differ")

    def version(self):
        return self.mpi.Get_library_version().splitlines()[0].strip(" \0")

    def make_call(self, case, form, send, recv):
        if case.dtype in ("f16", "bf16") or case.redop == "avg":
            raise Unsupported(f"mpi4py has no {'avg' if case.redop == 'avg' else case.dtype}")
        comm, root, (after, before, partner), is_root = self.comm, case.root, self.neighbours(), self.rank == case.root
        op = getattr(self.mpi, {"product": "PROD", "none": "OP_NULL"}.get(case.redop, case.redop.upper()))
        inside, here = form == "in_place", self.mpi.IN_PLACE
        match case.op:
            case "all_reduce":
                return (lambda: comm.Allreduce(here, recv, op)) if inside else lambda: comm.Allreduce(send, recv, op)
            case "reduce":
                x, out = (here if inside and is_root else send), (recv if is_root else None)
                return lambda: comm.Reduce(x, out, op, root)
            case "reduce_scatter":  # MPI's in-place form leaves the result at the front, not in the rank's own chunk
                return None if inside else lambda: comm.Reduce_scatter_block(send, recv, op)
            case "all_gather":
                return (lambda: comm.Allgather(here, recv)) if inside else lambda: comm.Allgather(send, recv)
            case "all_to_all":
                return lambda: comm.Alltoall(send, recv)
            case "broadcast":
                return (lambda: comm.Bcast(recv, root)) if inside else None
            case "gather":
                out = recv if is_root else None
                return lambda: comm.Gather(send, out, root)
            case "scatter":
                x = send if is_root else None
                return lambda: comm.Scatter(x, recv, root)
            case "sendrecv":
                return lambda: comm.Sendrecv(send, after, recvbuf=recv, source=before)
            case "pingpong":
                return pingpong(self.rank, lambda: comm.Send(send, partner), lambda: comm.Recv(recv, partner))
            case "barrier":
                return comm.Barrier
        raise AssertionError(case.op)

    def barrier(self):
        self.comm.Barrier()

    def close(self):
        self.mpi.Finalize()
