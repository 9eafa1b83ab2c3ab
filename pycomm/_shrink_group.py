"""A process group of torch.distributed that has lost ranks goes on with those that are left."""

import contextlib
import threading

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pycomm import _C, env
from pycomm.communicator import Communicator
from pycomm.options import DEFAULT_HOST_TIMEOUT, seconds
from pycomm.ports import make_store

__all__ = ["shrink_group"]

_LOOPBACK = "127.0.0.1"  # for ranks of one host


def shrink_group(group=None, *, exclude=(), timeout=None):
    """torch.distributed.shrink_group for a group of pycomm, without having to say who is lost: the ranks that
    live find out together.

    Collective among them, after a PeerError or CommTimeoutError; what they must do, who is left out and what
    is raised is as with Communicator.shrink(). If the group is the default one, the new one takes its place,
    ranks are numbered anew, and torch destroys all other groups.

    group: a process group; None: the default one.
    exclude: ranks in the group, living ones, that are to be left out, too; they must not call.
    timeout: seconds, above 0 and at most 1e8; None: the group's.

    torch keeps the groups' store in the process of rank 0, unless a launcher has it. If it is gone, the new
    rank 0 makes another for the new group, so that new_group() works.

    Returns the new process group. Raises TypeError where the group is not one of pycomm.
    """
    old = dist.group.WORLD if group is None else group
    backend = _backend_of(old)
    devices = [device for device in old._device_types if device.type != "cpu"]
    members = backend.shrink_ahead([int(rank) for rank in exclude], seconds(timeout, "the group's"))
    lost = _Lost(sorted(set(range(old.size())) - set(members)))
    _keep_store(old, backend)
    numbers = dist.get_process_group_ranks(old)
    is_default = old == dist.group.WORLD
    new = dist.shrink_group(lost, old)
    # torch (2.13) takes ranks in the group for global ones, and keeps the former numbers of the default group
    numbers = range(len(members)) if is_default else [numbers[rank] for rank in members]
    c10d._world.pg_group_ranks[new] = {number: rank for rank, number in enumerate(numbers)}
    shrunk = _backend_of(new)
    for device in devices:  # torch knows the one for the CPU only
        new._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, shrunk)
    return new


class _Lost(list):
    """Ranks; torch refuses a list that is false. Nobody is lost where a link was cut and has healed."""

    def __bool__(self) -> bool:
        return True


def _backend_of(group):
    with contextlib.suppress(RuntimeError, AttributeError):
        backend = group._get_backend(torch.device("cpu"))
        if isinstance(backend, _C.Backend):
            return backend
    raise TypeError(f"shrink_group: the backend of {group} is not pycomm's")


def _keep_store(old: dist.ProcessGroup, backend: _C.Backend) -> None:
    """Gives torch another store for the new group if one of its ranks cannot reach that of the old one.
    Raises RuntimeError on all ranks.
    """
    name, store = c10d._world.pg_map[old]
    comm = Communicator._around(backend.shrunk_communicator, env.settings())
    if comm.all_reduce(torch.tensor([int(_answers(store))]), "min").item():
        return
    point = comm._comm.point
    host = _LOOPBACK if point is None else point.places[0].ip
    new, error = None, None
    if comm.rank == 0:
        try:
            new = make_store(host)
        except RuntimeError as failure:  # the others must not wait for it
            error = failure
    port = int(comm.broadcast(torch.tensor([new.port if new else 0])))
    if port == 0:
        raise error or RuntimeError(f"shrink_group: rank 0 cannot open a store on {host}; its error says why")
    new = new or dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    c10d._world.pg_map[old] = (name, new)


def _answers(store: dist.Store) -> bool:
    """Whether a store answers within PYCOMM_HOST_TIMEOUT. A client of TCPStore waits for much longer where
    the host of the store is lost; then the thread that asks stays behind.
    """
    found = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # whatever a store raises whose process is gone
            store.check(["pycomm/shrink"])
            found.append(True)

    asking = threading.Thread(target=ask, name="pycomm store", daemon=True)
    asking.start()
    asking.join(env.settings().host_timeout or DEFAULT_HOST_TIMEOUT)
    return bool(found)
