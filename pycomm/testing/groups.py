"""The group that a rank of run_ranks is in: a Communicator, or the default group of torch.distributed."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from typing import TYPE_CHECKING, TypedDict, cast

import torch
import torch.distributed as dist

from pycomm import _autoload, env
from pycomm.communicator import Communicator
from pycomm.groups import hosts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Unpack

    from pycomm import _C


class OfCommunicator(TypedDict, total=False):
    """Options of a Communicator that run_ranks passes on."""

    name: str
    staging_bytes: int
    threads: int


class Options(OfCommunicator, total=False):
    """Options of run_ranks that are about the group."""

    backend: str | None
    devices: Sequence[str] | None
    hosts: str | Sequence[int] | None
    wire_delay_us: int
    operation_timeout: float


@dataclasses.dataclass(frozen=True)
class GroupOptions:
    """What group the ranks form, and on which devices.

    Attributes:
        backend: None: a Communicator. A name: the default group of torch.distributed, of this backend.
        devices: the CUDA device of each rank, such as ["cuda:0", "cuda:0"]. It is made the current one, with
            a stream of the rank's own: ranks that share a device need one each. None: the current device; a
            stream of its own for a rank that is a thread, wherever there is CUDA.
        operation_timeout: seconds of one operation whose peers do not come.
        making_timeout: seconds for making the group, where it is on one host: ranks start late on a busy
            machine, however short their operations may be.
        in_threads: the ranks are threads of one process.
        hosts: for each rank the number of its simulated host; None: all are on this one.
        wire_delay_us: of messages between simulated hosts of threads, at most.
    """

    backend: str | None
    devices: Sequence[str] | None
    operation_timeout: float
    making_timeout: float
    communicator: OfCommunicator
    in_threads: bool
    hosts: Sequence[int] | None = None
    wire_delay_us: int = 0

    @contextlib.contextmanager
    def join(
        self, store: dist.Store | _C.LocalStore, rank: int, world_size: int
    ) -> Iterator[Communicator | int]:
        """Forms the group, for as long as the context lasts. Its value is what the rank's function gets: the
        Communicator, or this rank's number. Left by an error, it does not wait for the peers.
        """
        host = None if self.hosts is None else f"host{self.hosts[rank]}"
        with self._on_device(rank):
            if self.backend is None:
                making_timeout, options = self.making_timeout, self.communicator
                with Communicator(
                    store, rank, world_size, _host=host, timeout=making_timeout, **options
                ) as comm:
                    comm._set_timeout(self.operation_timeout)
                    yield comm
                return
            if host is not None:
                env.simulate_host(host)
            _autoload.register()  # for a pycomm that is on the path but not installed
            making, of_operations = (
                datetime.timedelta(seconds=limit) for limit in (self.making_timeout, self.operation_timeout)
            )
            of_processes = cast("dist.Store", store)  # threads have a Communicator
            dist.init_process_group(
                self.backend, store=of_processes, rank=rank, world_size=world_size, timeout=making
            )
            if self.backend != _autoload.NAME:
                dist.barrier()  # of Gloo, whoever ends while peers still connect makes them fail
            dist.distributed_c10d._set_pg_timeout(of_operations)
            yield rank  # not the group, which the caller would keep alive after destroy_process_group
            if dist.is_initialized():  # the function may have done it
                dist.destroy_process_group()

    def _on_device(self, rank: int) -> contextlib.AbstractContextManager[None]:
        if self.devices is not None:
            torch.cuda.set_device(self.devices[rank])
        elif not (self.in_threads and torch.cuda.is_available()):
            return contextlib.nullcontext()  # making the first stream initialises CUDA
        return torch.cuda.stream(torch.cuda.Stream())


def make_options(
    world_size: int,
    timeout: float,
    *,
    in_threads: bool,
    backend: str | None = None,
    devices: Sequence[str] | None = None,
    hosts: str | Sequence[int] | None = None,
    wire_delay_us: int = 0,
    operation_timeout: float | None = None,
    **others: Unpack[OfCommunicator],
) -> GroupOptions:
    """Raises ValueError."""
    if operation_timeout is None:
        operation_timeout = timeout
    if backend is not None and in_threads:
        raise ValueError(f"backend={backend!r} with threads: a process has one default group")
    if backend is not None and (others or wire_delay_us):
        names = [*others, *(["wire_delay_us"] if wire_delay_us else [])]
        raise ValueError(f"{', '.join(names)}: for a Communicator, not with backend={backend!r}")
    if devices is not None and len(devices) != world_size:
        raise ValueError(f"devices={devices!r}: one for each of {world_size} ranks")
    if wire_delay_us and not (hosts and in_threads):
        raise ValueError(f"wire_delay_us={wire_delay_us!r}: for simulated hosts of threads")
    of_ranks = None if hosts is None else hosts_of(hosts, world_size)
    making = operation_timeout if of_ranks else max(timeout, operation_timeout)
    return GroupOptions(
        backend, devices, operation_timeout, making, others, in_threads, of_ranks, wire_delay_us
    )
