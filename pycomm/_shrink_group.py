"""A process group of torch.distributed that has lost ranks goes on with those that are left.

    1  the ranks that live agree, and have a new group             Backend.shrink_ahead
    2  they have a store that all of them reach, and a clone of it _common_store
    3  torch puts the new group in the place of the old one        dist.shrink_group: it asks nobody

torch's stores wait, for up to 300 s and without a look at anything else, for a process that has ended or is
stopped. So whatever may wait in step 2 runs in a thread of its own, while this one looks at the lives of the
new group. If another rank is lost in 2, its group is the one that loses a rank, and 1 begins anew with it.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pycomm import _C, env
from pycomm.communicator import Communicator
from pycomm.errors import PeerError
from pycomm.options import seconds
from pycomm.ports import make_store

__all__ = ["shrink_group"]

Result = TypeVar("Result")

_LOOPBACK = "127.0.0.1"  # for ranks of one host
_ANSWER_S = 2.0  # for the old group's store
_CONNECT_S = 2.0  # for one try to reach a new store
_STORE_S = 300.0  # the limit of a TCPStore for later, torch's own
_LOOK_S = 0.01  # between two looks at the lives of the others


def shrink_group(
    group: dist.ProcessGroup | None = None, *, exclude: Iterable[int] = (), timeout: float | None = None
) -> dist.ProcessGroup:
    """torch.distributed.shrink_group for a group of pycomm, without having to say who is lost: the ranks that
    live find out together.

    Collective among them, after a PeerError or CommTimeoutError; what they must do, who is left out and what
    is raised is as with Communicator.shrink(). If the group is the default one, the new one takes its place,
    ranks are numbered anew, and torch destroys all other groups.

    group: a process group; None: the default one.
    exclude: ranks in the group, living ones, that are to be left out, too; they must not call.
    timeout: seconds, above 0 and at most 1e8; None: the group's.

    torch keeps the groups' store in the process of rank 0, unless a launcher has it. If it is gone, the new
    rank 0 makes another for the new group, so that new_group() works. A rank that dies meanwhile is left out
    as well. After an error the call may be made again.

    Returns the new process group. Raises TypeError where the group is not one of pycomm.
    """
    old = c10d._get_default_group() if group is None else group
    backend = _backend_of(old)
    devices = [device for device in old._device_types if device.type != "cpu"]
    limit = seconds(timeout, "the group's") or backend.communicator.timeout
    deadline = time.monotonic() + limit
    left_out = [int(rank) for rank in exclude]
    while True:
        members = backend.shrink_ahead(left_out, max(deadline - time.monotonic(), _LOOK_S))
        try:
            store, clone = _common_store(old, backend, deadline)
            break
        except PeerError:  # in the new group, which is the one to shrink now
            left_out = []
    lost = _Lost(sorted(set(range(old.size())) - set(members)))
    numbers = dist.get_process_group_ranks(old)
    is_default = old == dist.group.WORLD
    name, _ = c10d._world.pg_map[old]
    c10d._world.pg_map[old] = (name, _Cloned(clone))
    new = dist.shrink_group(lost, old)
    c10d._world.pg_map[new] = (name, store)
    # torch (2.13) takes ranks in the group for global ones, and keeps the former numbers of the default group
    numbers = list(range(len(members))) if is_default else [numbers[rank] for rank in members]
    c10d._world.pg_group_ranks[new] = {number: rank for rank, number in enumerate(numbers)}
    shrunk = _backend_of(new)
    for device in devices:  # torch knows the one for the CPU only
        kind = dist.ProcessGroup.BackendType.CUSTOM
        new._register_backend(device, kind, shrunk)  # type: ignore[arg-type]  # two stubs of one class
    return new


def _backend_of(group: dist.ProcessGroup) -> _C.Backend:
    with contextlib.suppress(RuntimeError, AttributeError):
        backend = group._get_backend(torch.device("cpu"))
        if isinstance(backend, _C.Backend):
            return backend
    raise TypeError(f"shrink_group: the backend of {group} is not pycomm's")


class _Lost(list[int]):
    """Ranks; torch refuses a list that is false. Nobody is lost where a link was cut and has healed."""

    def __bool__(self) -> bool:
        return True


class _Cloned(dist.PrefixStore):
    """For torch, which clones the store of a group that it shrinks: it need not reach the store for that."""

    def __init__(self, clone: dist.Store) -> None:
        super().__init__("", clone)
        self._clone = clone

    def clone(self) -> dist.Store:
        return self._clone


class _Stores(NamedTuple):
    """A store that all ranks of the new group reach, and a clone of it."""

    store: dist.Store
    clone: dist.Store


def _common_store(old: dist.ProcessGroup, backend: _C.Backend, deadline: float) -> _Stores:
    """Those of the old group, or new ones. Collective among the ranks of the new group.

    Raises PeerError where one has died, CommTimeoutError.
    """
    store = c10d._world.pg_map[old][1]
    comm = Communicator._around(backend.shrunk_communicator, env.settings())
    clone: dist.Store | None = None
    with contextlib.suppress(TimeoutError):
        clone = _watched(comm, lambda _: _clone_of(store), min(deadline, time.monotonic() + _ANSWER_S))
    answers = comm.all_reduce(torch.tensor([clone is not None]), "min", timeout=_left(deadline)).item()
    if clone is not None and answers:
        return _Stores(store, clone)
    point = comm._comm.point
    host = _LOOPBACK if point is None else point.places[0].ip
    own, port = None, 0
    if comm.rank == 0:
        try:
            own = make_store(host)
        except Exception as error:  # whatever torch raises; the others must not wait
            comm.abort(f"shrink_group: rank 0 cannot open a store on {host}: {error}")
            raise
        port = own.port
    port = int(comm.broadcast(torch.tensor([port]), timeout=_left(deadline)))
    try:
        stores = _watched(comm, lambda stop: _connect(own, host, port, stop), deadline)
    except TimeoutError:
        text = f"shrink_group: the store of rank 0, {host}:{port}, did not answer within the timeout"
        comm._comm.fail_late(0, text)  # raises
        raise
    comm.barrier(timeout=_left(deadline))  # nobody goes on alone
    return stores


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), _LOOK_S)


def _cloned(store: Any) -> dist.Store:
    return store.clone()  # torch's stub of stores does not have it


def _clone_of(store: dist.Store) -> dist.Store | None:
    """None: the store does not answer."""
    try:
        store.check(["pycomm/shrink"])
        return _cloned(store)
    except Exception:  # whatever a store raises whose process is gone
        return None


def _connect(own: dist.Store | None, host: str, port: int, stop: threading.Event) -> _Stores:
    """The store at the port. own: this rank's, if it has the store."""
    limit = datetime.timedelta(seconds=_CONNECT_S)
    while True:
        try:
            store: dist.Store = own or dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=limit
            )
            clone = _cloned(store)
            break
        except dist.DistError:
            if stop.is_set():
                raise
    for one in (store, clone):
        one.set_timeout(datetime.timedelta(seconds=_STORE_S))
    return _Stores(store, clone)


def _watched(comm: Communicator, call: Callable[[threading.Event], Result], deadline: float) -> Result:
    """What call(stop) returns or raises, which runs in a thread of its own. stop: an Event, set when nobody
    waits for it any more. Raises PeerError where a rank of the group has died, TimeoutError.
    """
    result: list[tuple[Any, Exception | None]] = []
    stop = threading.Event()

    def run() -> None:
        try:
            result.append((call(stop), None))
        except Exception as error:
            result.append((None, error))

    thread = threading.Thread(target=run, name="pycomm store", daemon=True)
    thread.start()
    try:
        while not result:
            thread.join(_LOOK_S)
            comm._comm.look_at_lives()
            if not result and time.monotonic() > deadline:
                raise TimeoutError
    finally:
        stop.set()
    value, error = result[0]
    if error is not None:
        raise error
    return value
