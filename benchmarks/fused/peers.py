"""The ranks of this benchmark, and the groups that each has: one of pycomm, native or torch's, and torch's
others, with the calls that the unfused forms need. Parts are equal.

Threads have a Communicator. Processes have a torch group of pycomm and one of Gloo (CPU) or, with a GPU for
each, of NCCL; they are forked on the CPU, and new interpreters with CUDA, since one that has used CUDA must
not fork.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from pycomm.benchmarks.common import ranks
from pycomm.benchmarks.common.device import Gate
from pycomm.groups import all_gather_flat, reduce_scatter_flat

if TYPE_CHECKING:
    from pycomm.communicator import Communicator

T = TypeVar("T")


class Collectives(Protocol):
    """What the unfused forms need of a group; parts are equal."""

    @property
    def size(self) -> int: ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> object: ...

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> object: ...

    def all_reduce(self, x: torch.Tensor) -> object: ...


class Native:
    """A pycomm.Communicator."""

    def __init__(self, comm: Communicator) -> None:
        self.handle, self.rank, self.size = comm, comm.rank, comm.world_size
        self.all_gather, self.reduce_scatter = comm.all_gather, comm.reduce_scatter
        self.all_reduce, self.broadcast, self.barrier = comm.all_reduce, comm.broadcast, comm.barrier

    def host_barrier(self) -> None:
        """No kernel waits in it on the GPU: a rank may be making a graph, which waits for those that run."""
        self.all_reduce(torch.zeros(1, device="cpu"))


class Torch:
    """A torch process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.handle, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        all_gather_flat(out, x, group=self.handle)

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        reduce_scatter_flat(out, x, group=self.handle)

    def all_reduce(self, x: torch.Tensor) -> None:
        dist.all_reduce(x, group=self.handle)

    def broadcast(self, x: torch.Tensor) -> None:
        dist.broadcast(x, dist.get_global_rank(self.handle, 0), group=self.handle)

    def barrier(self) -> None:
        dist.barrier(self.handle)

    def host_barrier(self) -> None:
        """As in Native; of pycomm's group alone."""
        dist.all_reduce(torch.zeros(1, device="cpu"), group=self.handle)


class Apart:
    """Collectives that wait for nobody: results of the right shape."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for part in out.chunk(self.size):
            part.copy_(x)

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x.chunk(self.size)[0])

    def all_reduce(self, x: torch.Tensor) -> None:
        pass


class Peers:
    """A rank's groups. ours: of pycomm; others: torch's, by the name of their backend, "gloo" or "nccl".
    device: of the tensors. own_gpu: no other rank of the group uses this rank's GPU.
    """

    def __init__(
        self,
        ours: Native | Torch,
        others: Mapping[str, Torch],
        device: torch.device,
        *,
        own_gpu: bool = False,
        gate: Gate | None = None,
    ) -> None:
        self.ours, self.others, self.device, self.own_gpu = ours, others, device, own_gpu
        self.gate = gate  # of common.device, that all ranks share; None where they are processes
        self.rank, self.size = ours.rank, ours.size


class Place(NamedTuple):
    """Where the ranks run: rank r uses GPU r // ranks_per_gpu. Limits in seconds."""

    mode: Literal["threads", "processes"]
    device: Literal["cpu", "cuda"]
    ranks_per_gpu: int = 1
    operation_timeout: float = 30.0  # of one operation whose peers do not come
    timeout: float = 600.0  # of all

    @property
    def own_gpu(self) -> bool:
        return self.device == "cuda" and self.ranks_per_gpu == 1


def run(world_size: int, place: Place, body: Callable[..., T], *args: object) -> list[T]:
    """body(peers, *args) on every rank; the results by rank. Raises RankError."""
    options: dict[str, Any] = {
        "timeout": place.timeout,
        "operation_timeout": place.operation_timeout,
        "mode": place.mode,
    }
    if place.mode == "processes":
        options["backend"] = "pycomm"
    if place.device == "cuda":
        options["devices"] = [f"cuda:{rank // place.ranks_per_gpu}" for rank in range(world_size)]
        if place.mode == "processes":
            options["mode"] = "spawn"
    gate = Gate() if place.mode == "threads" and place.device == "cuda" else None
    return ranks.run(world_size, _on_rank, place, gate, body, args, **options)


def _on_rank(
    joined: Communicator | int,
    place: Place,
    gate: Gate | None,
    body: Callable[..., T],
    args: tuple[object, ...],
) -> T:
    """joined: with processes the rank's number."""
    if place.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu")
    ours: Native | Torch
    others: dict[str, Torch] = {}
    if not isinstance(joined, int):
        ours = Native(joined)
    else:
        assert dist.group.WORLD is not None  # run_ranks has made it
        ours, other = Torch(dist.group.WORLD), "gloo" if place.device == "cpu" else "nccl"
        if place.device == "cpu" or place.own_gpu and dist.is_nccl_available():
            others[other] = Torch(dist.new_group(backend=other))
    return body(Peers(ours, others, device, own_gpu=place.own_gpu, gate=gate), *args)
