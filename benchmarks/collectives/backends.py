"""One adapter per backend: how it is started, and the call that does one operation.

    pycomm        pycomm.Communicator on torch tensors
    pycomm:ucx    the same with PYCOMM_WIRE=ucx                 emulated hosts only
    pycomm-torch  torch.distributed with backend "pycomm"
    gloo          torch.distributed with backend "gloo"         host memory only
    mpi, mpi:NAME mpi4py on NumPy arrays (mpi.py)               host memory only
    deepspeed     its shared-memory kernel (deepspeed_shm.py)   host memory only, all_reduce alone
    nccl          torch.distributed with backend "nccl"         CUDA only, one rank per GPU
    nccl4py       NCCL by NVIDIA's bindings (nccl.py)           CUDA only, one rank per GPU

calls() returns, for each operation, its forms (out of place, in place): a function without arguments that
does the whole operation and returns when this rank is done, or None where the backend has no such form.
torch.distributed has no out-of-place all_reduce, reduce or broadcast, and a copy of ours before the call
would be measured as theirs. Everything that can be prepared is prepared there, not in the call. torch and
mpi4py are imported by the adapter that needs them: a rank under MPI does without torch.

With --groups the world is cut into groups of consecutive ranks, which are all at work at once: then rank and
world_size are those in the group, where the operations run, and only barrier() is of the world.
"""

from __future__ import annotations

import abc
import datetime
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pycomm import env
from pycomm.benchmarks.collectives.cases import FORMS, OPS, Case, Form, OpName
from pycomm.benchmarks.common import data, device
from pycomm.quantities import GlobalRank

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from pycomm.benchmarks.collectives.spec import Spec
    from pycomm.benchmarks.common.data import Buffer, DtypeName
    from pycomm.options import ReduceName

Call: TypeAlias = Callable[[], object]
Forms: TypeAlias = tuple[Call | None, Call | None]  # as FORMS has them
UCX = "pycomm:ucx"
HOST_ONLY = "its ranks have host memory only here"
CUDA_ONLY = "it takes CUDA tensors only (--device cuda)"


class Unsupported(Exception):
    """This backend cannot do what was asked (dtype, reduction); the others go on without it."""


class Neighbours(NamedTuple):
    """after, before: in the ring of send_recv; partner: in the pairs of pingpong."""

    after: int
    before: int
    partner: int


class Adapter(abc.ABC):
    """What the benchmark wants of a backend. rank and world_size, in the group, are set by start()."""

    device = "cpu"
    group, global_rank = 0, 0  # number of the group; rank in the world
    rank: int
    world_size: int

    @abc.abstractmethod
    def start(self, spec: Spec) -> None: ...

    @abc.abstractmethod
    def version(self) -> str: ...

    @abc.abstractmethod
    def calls(self, case: Case, send: Buffer, recv: Buffer) -> Mapping[OpName, Forms]:
        """What runs each operation; case.op is among them. The adapter allocated send and recv."""

    @abc.abstractmethod
    def barrier(self) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    def make_call(self, case: Case, form: Form, send: Buffer, recv: Buffer) -> Call | None:
        return self.calls(case, send, recv)[case.op][FORMS.index(form)]

    def make_memory(self) -> data.HostMemory | data.DeviceMemory:
        return data.DeviceMemory("cuda") if self.device == "cuda" else data.HostMemory()

    def host_barrier(self) -> None:
        """A barrier in which no kernel waits on the GPU: a rank may be making a graph, which waits for the
        kernels that run.
        """
        self.barrier()

    def settle(self) -> None:
        """Waits for what was enqueued on this rank's stream, then for all ranks. See [Note: ranks that share
        a GPU].
        """
        if self.device == "cuda":
            device.synchronize()
            self.barrier()

    def enter_group(self, global_rank: GlobalRank, spec: Spec) -> None:
        """Where this rank is."""
        self.global_rank, self.world_size = global_rank, spec["ranks"] // spec["groups"]
        self.group, self.rank = divmod(global_rank, self.world_size)

    def enter_device(self, spec: Spec) -> None:
        """The rank's group, and with CUDA its GPU and stream."""
        self.enter_group(spec["rank"], spec)
        self.device, self.gpu = spec["device"], spec["rank"] // spec["ranks_per_gpu"]
        if self.device == "cuda":
            device.enter(self.gpu)

    def neighbours(self) -> Neighbours:
        n = self.world_size
        return Neighbours((self.rank + 1) % n, (self.rank - 1) % n, self.rank ^ 1)


def make_adapter(name: str) -> Adapter:
    """The adapter for a name as the user writes it. Raises ValueError."""
    if name in ("pycomm", UCX):
        return PycommAdapter("ucx" if name == UCX else None)
    if name in ("pycomm-torch", "gloo", "nccl"):
        return TorchAdapter(name.removesuffix("-torch"))
    home = {"nccl4py": "nccl", "deepspeed": "deepspeed_shm"}.get(name, "mpi" if is_mpi(name) else None)
    if home:  # each needs a package of its own
        return importlib.import_module(f"pycomm.benchmarks.collectives.{home}").make_adapter()
    names = "pycomm, pycomm:ucx, pycomm-torch, gloo, mpi, mpi:NAME, deepspeed, nccl or nccl4py"
    raise ValueError(f"backend {name!r}: must be {names}.")


def why_not(name: str, on: str, sharing: int, groups: int = 1) -> str | None:
    """Why a backend cannot take part in a run on "cpu" or "cuda", with `sharing` ranks per GPU and so many
    groups at once; None if it can.
    """
    if on == "cpu":
        if name == "deepspeed" and groups > 1:
            return "its kernel knows one group, the world"
        if name == "deepspeed" and not importlib.util.find_spec("deepspeed"):
            return "DeepSpeed is not installed (pip install -r requirements-frameworks.txt)"
        return CUDA_ONLY if name.startswith("nccl") else None
    if name in ("gloo", "deepspeed") or is_mpi(name):
        return HOST_ONLY
    if not name.startswith("nccl"):
        return None
    if sharing > 1:
        return f'{sharing} ranks share a GPU, and NCCL refuses two ranks on one ("Duplicate GPU detected")'
    if name == "nccl":
        import torch.distributed as dist

        there = dist.is_available() and dist.is_nccl_available()
        return None if there else "this torch is built without NCCL"
    if importlib.util.find_spec("nccl"):
        return None
    return "nccl4py is not installed (pip install 'pycomm-runtime[nccl]')"


def can_be_threads(name: str) -> bool:
    """torch.distributed and MPI have one rank per process."""
    return name == "pycomm"


def is_mpi(name: str) -> bool:
    return name == "mpi" or name.startswith("mpi:")


def is_ours(name: str) -> bool:
    return name.startswith("pycomm")


def both(call: Call) -> Forms:
    """The same call in both forms: what differs is the buffers."""
    return call, call


def pingpong(rank: int, send: Call, recv: Call) -> Forms:
    """The forms of a round trip; the even rank of a pair begins."""

    def even() -> None:
        send()
        recv()

    def odd() -> None:
        recv()
        send()

    return both(odd if rank % 2 else even)


def open_store(spec: Spec) -> dist.Store:
    import torch.distributed as dist

    host, port = spec["store"]
    limit = datetime.timedelta(seconds=spec["timeout"])
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    return dist.PrefixStore(f"benchmark/{spec['backend']}", store)


def tensor_of(buffer: Buffer, dtype: DtypeName) -> torch.Tensor:
    """A buffer of data.py as a tensor."""
    import torch

    if isinstance(buffer, torch.Tensor):
        return buffer
    tensor = torch.from_numpy(buffer)
    return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor


class PycommAdapter(Adapter):
    """wire: what PYCOMM_WIRE is to say, None: as it is set."""

    def __init__(self, wire: env.Wire | None = None) -> None:
        self.wire = wire

    def start(self, spec: Spec) -> None:
        import torch

        import pycomm

        if self.wire is not None:
            env.use_wire(self.wire)
        torch.set_num_threads(1)
        self.enter_device(spec)
        self.registered, self.pycomm = spec["registered"], pycomm
        place = self.global_rank, spec["ranks"]
        world = pycomm.Communicator(open_store(spec), *place, timeout=spec["timeout"], name="benchmark")
        self.word = torch.zeros(1)
        self.world = self.comm = world
        if spec["groups"] > 1:
            part = world.split(self.group, self.rank)
            assert part is not None  # every rank has a group
            self.comm = part

    def version(self) -> str:
        wire = self.world.describe()["wire"]
        return f"pycomm {self.pycomm.__version__}" + (f" over {wire}" if wire else "")

    def make_memory(self) -> data.HostMemory | data.DeviceMemory:
        if not self.registered:
            return super().make_memory()
        return data.DeviceMemory(
            "cuda", lambda count, dtype: self.comm.empty(max(1, count), dtype, device="cuda")[:count]
        )

    def calls(self, case: Case, send: Buffer, recv: Buffer) -> Mapping[OpName, Forms]:
        comm, root, (after, before, partner) = self.comm, case.root, self.neighbours()
        op: ReduceName = "sum" if case.redop == "none" else case.redop
        x, out = tensor_of(send, case.dtype), tensor_of(recv, case.dtype)

        def send_recv() -> None:
            work = comm.send(x, after, async_op=True)
            comm.recv(out, before)
            work.wait()

        return {
            "all_reduce": (lambda: comm.all_reduce(x, op, out=out), lambda: comm.all_reduce(x, op)),
            "reduce": (lambda: comm.reduce(x, root, op, out=out), lambda: comm.reduce(x, root, op)),
            "reduce_scatter": both(lambda: comm.reduce_scatter(x, out, op)),
            "all_gather": both(lambda: comm.all_gather(x, out)),
            "all_to_all": both(lambda: comm.all_to_all(x, out)),
            "broadcast": (None, lambda: comm.broadcast(x, root)),
            "gather": both(lambda: comm.gather(x, out, root)),
            "scatter": both(lambda: comm.scatter(x, out, root)),
            "send_recv": both(send_recv),
            "pingpong": pingpong(self.rank, lambda: comm.send(x, partner), lambda: comm.recv(out, partner)),
            "barrier": both(comm.barrier),
        }

    def barrier(self) -> None:
        self.world.barrier()

    def host_barrier(self) -> None:
        self.world.all_reduce(self.word)

    def close(self) -> None:
        self.comm.close()
        self.world.close()


class TorchAdapter(Adapter):
    def __init__(self, backend: str) -> None:
        self.backend = backend

    def start(self, spec: Spec) -> None:
        import torch
        import torch.distributed as dist

        from pycomm import _autoload, groups

        _autoload.register()  # for a pycomm that is on the path but not installed
        torch.set_num_threads(1)
        self.enter_device(spec)
        self.dist, self.groups = dist, groups
        dist.init_process_group(
            self.backend,
            store=open_store(spec),
            rank=self.global_rank,
            world_size=spec["ranks"],
            timeout=datetime.timedelta(seconds=spec["timeout"]),
            device_id=torch.device("cuda", self.gpu) if self.backend == "nccl" else None,
        )
        self.among = dist.new_subgroups(self.world_size)[0] if spec["groups"] > 1 else None

    def version(self) -> str:
        import torch

        return f"torch {torch.__version__}, backend {self.backend}"

    def calls(self, case: Case, send: Buffer, recv: Buffer) -> Mapping[OpName, Forms]:
        dist = self.dist
        if self.backend == "gloo" and case.redop == "avg":
            raise Unsupported("Gloo has no avg")
        group = self.among
        root, after, before, partner = (self.in_world(rank) for rank in (case.root, *self.neighbours()))
        x, out, is_root = tensor_of(send, case.dtype), tensor_of(recv, case.dtype), self.rank == case.root
        op = getattr(dist.ReduceOp, case.redop.upper()) if OPS[case.op].reduces else None
        reduce_scatter, all_gather = self.groups.reduce_scatter_flat, self.groups.all_gather_flat
        ins = list(x.chunk(self.world_size)) if is_root and case.op == "scatter" else None
        outs = list(out.chunk(self.world_size)) if is_root and case.op == "gather" else None

        def send_recv() -> None:
            work = dist.isend(x, after, group)
            dist.recv(out, before, group)
            work.wait()

        return {
            "all_reduce": (None, lambda: dist.all_reduce(x, op, group)),
            "reduce": (None, lambda: dist.reduce(x, root, op, group)),
            "reduce_scatter": both(lambda: reduce_scatter(out, x, op, group)),
            "all_gather": both(lambda: all_gather(out, x, group)),
            "all_to_all": both(lambda: dist.all_to_all_single(out, x, group=group)),
            "broadcast": (None, lambda: dist.broadcast(x, root, group)),
            "gather": both(lambda: dist.gather(x, outs, root, group)),
            "scatter": both(lambda: dist.scatter(out, ins, root, group)),
            "send_recv": both(send_recv),
            "pingpong": pingpong(
                self.rank, lambda: dist.send(x, partner, group), lambda: dist.recv(out, partner, group)
            ),
            "barrier": both(lambda: dist.barrier(group)),
        }

    def in_world(self, rank: int) -> GlobalRank:
        """By which torch names ranks. rank: in the group."""
        return GlobalRank(self.group * self.world_size + rank)

    def barrier(self) -> None:
        self.dist.barrier()

    def close(self) -> None:
        self.dist.destroy_process_group()
