"""The group that a rank of run_ranks is in: a Communicator, or the default group of torch.distributed."""

import contextlib
import dataclasses
import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pycomm import _autoload, env
from pycomm.communicator import Communicator
from pycomm.groups import hosts_of


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
        communicator: further options of a Communicator: name, staging_bytes, threads.
        in_threads: the ranks are threads of one process.
        hosts: for each rank the number of its simulated host; None: all are on this one.
        wire_delay_us: of messages between simulated hosts of threads, at most.
    """

    backend: str | None
    devices: Sequence[str] | None
    operation_timeout: float
    making_timeout: float
    communicator: dict
    in_threads: bool
    hosts: Sequence[int] | None = None
    wire_delay_us: int = 0

    @contextlib.contextmanager
    def join(self, store, rank, world_size):
        """Forms the group, for as long as the context lasts. Its value is what the rank's function gets: the
        Communicator, or this rank's number. Left by an error, it does not wait for the peers.
        """
        host = None if self.hosts is None else f"host{self.hosts[rank]}"
        with self._on_device(rank):
            if self.backend is None:
                options = {"timeout": self.making_timeout, **self.communicator}
                with Communicator(store, rank, world_size, _host=host, **options) as comm:
                    comm._set_timeout(self.operation_timeout)
                    yield comm
                return
            if host is not None:
                env.simulate_host(host)
            _autoload.register()  # for a pycomm that is on the path but not installed
            making, of_operations = (
                datetime.timedelta(seconds=limit) for limit in (self.making_timeout, self.operation_timeout)
            )
            dist.init_process_group(
                self.backend, store=store, rank=rank, world_size=world_size, timeout=making
            )
            if self.backend != _autoload.NAME:
                dist.barrier()  # of Gloo, whoever ends while peers still connect makes them fail
            dist.distributed_c10d._set_pg_timeout(of_operations)
            yield rank  # not the group, which the caller would keep alive after destroy_process_group
            if dist.is_initialized():  # the function may have done it
                dist.destroy_process_group()

    def _on_device(self, rank):
        if self.devices is not None:
            torch.cuda.set_device(self.devices[rank])
        elif not (self.in_threads and torch.cuda.is_available()):
            return contextlib.nullcontext()  # making the first stream initialises CUDA
        return torch.cuda.stream(torch.cuda.Stream())


def make_options(world_size, timeout, *, in_threads, backend=None, devices=None, hosts=None, **others):
    """GroupOptions of the options of run_ranks. Raises ValueError."""
    operation_timeout = others.pop("operation_timeout", timeout)
    if backend is not None and in_threads:
        raise ValueError(f"backend={backend!r} with threads: a process has one default group")
    if backend is not None and others:
        raise ValueError(f"{', '.join(others)}: for a Communicator, not with backend={backend!r}")
    if devices is not None and len(devices) != world_size:
        raise ValueError(f"devices={devices!r}: one for each of {world_size} ranks")
    delay = others.pop("wire_delay_us", 0)
    if delay and not (hosts and in_threads):
        raise ValueError(f"wire_delay_us={delay!r}: for simulated hosts of threads")
    hosts = None if hosts is None else hosts_of(hosts, world_size)
    making = operation_timeout if hosts else max(timeout, operation_timeout)
    return GroupOptions(backend, devices, operation_timeout, making, others, in_threads, hosts, delay)
