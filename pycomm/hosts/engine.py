"""Makes what carries bytes between the ranks of several hosts, Gloo's contexts or UCX's workers (ucx.py): see
the head of the package.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch.distributed as dist

from pycomm import env
from pycomm.hosts import forks, probe, records, ucx
from pycomm.hosts.meeting import SHORTEST_S, Meeting
from pycomm.survivors import Place, Point

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Backend

    from pycomm import _C
    from pycomm.hosts.addresses import Address
    from pycomm.hosts.meeting import Look
    from pycomm.hosts.probe import Listener
    from pycomm.hosts.records import Record
    from pycomm.survivors.points import Shrinker

Wire: TypeAlias = "Backend | _C.UcxWire"  # torch's ProcessGroupGloo; with PYCOMM_WIRE=ucx the other
Wires: TypeAlias = "tuple[Wire, Wire | None]"  # over all ranks, and over the leaders
# Makes a context of a store, a rank and a number of ranks.
MakeGloo: TypeAlias = "Callable[[dist.Store, int, int], Backend]"


# Gloo's own limit of an operation, in seconds. pycomm's limits are shorter: an operation that reached this
# one would end in words that name nobody.
GLOO_TIMEOUT_S = 1e8
THREADS = 1  # of Gloo's collectives, which are not used; messages go by the thread of the device
COUNTERS = ("came", "record", "second", "reached", "tied", "ucx", "made")


class Request(NamedTuple):
    """What the extension asks for.

    store: all ranks share it.
    rank: of this process in the group.
    hosts: for each rank the number of its host; hosts are numbered by their lowest rank.
    labels: for each host its name in messages, such as "node-a".
    token: a word of this attempt to make the group, different from that of all others on the store.
    timeout: seconds for all of it.
    look: Meeting's, where more is known of the ranks than they say here.
    """

    store: dist.Store
    rank: int
    hosts: Sequence[int]
    labels: Sequence[str]
    token: str
    timeout: float
    look: Look | None = None


class Engines(NamedTuple):
    """What connects the ranks of a group that spans hosts."""

    data: Wire  # over all ranks
    control: Wire | None  # over the leaders, the lowest rank of each host, in order of the hosts
    point: Point  # this rank's


def engines(*fields: Any, shrinker: Shrinker) -> Engines:
    """Collective over the ranks; fields of a Request. The point answers from now on.

    Raises ValueError, RuntimeError or TimeoutError. What one rank fails with, all raise, in the same words;
    the others add who has seen it.
    """
    request = Request(*fields)
    store = dist.PrefixStore(f"pycomm.hosts/{request.token}", request.store)
    meeting = Meeting(store, request.rank, request.hosts, request.labels, request.timeout, request.look)
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as points:
        # what is closed tells others that this rank has ended
        try:
            made, places = _meet_and_make(meeting, request, opened, points)
        except BaseException as error:
            problem = meeting.fail(error)
            if problem is error:
                raise
            raise problem from None
        points.pop_all()
    made.point.serve(request.hosts, request.labels, places, request.store, shrinker)
    meeting.leave(COUNTERS)
    return made


def _meet_and_make(
    meeting: Meeting, request: Request, opened: contextlib.ExitStack, points: contextlib.ExitStack
) -> tuple[Engines, list[Place]]:
    """What was made, and the Place of each rank."""
    store, token = request.store, request.token
    leaders = [meeting.hosts.index(host) for host in range(len(meeting.labels))]
    meeting.arrive("came")
    meeting.raise_failure()
    everyone, listener, point = _meet(meeting, store, token, opened, points)
    if text := records.problem(everyone, meeting.label):
        raise ValueError(text)
    trial = opened.enter_context(contextlib.closing(probe.Probe(meeting, everyone, leaders, token)))
    probe.check_reach(meeting, trial, listener)
    meeting.watch = trial.look
    places = [Place(one.ip, *one.point) for one in everyone]
    _tie(meeting, point, places)
    mine = everyone[meeting.rank]
    made: Wires
    if mine.wire == "ucx":
        made = ucx.make(meeting, mine.address, leaders)
    else:
        made = _make(meeting, mine.address, leaders)
    meeting.arrive("made")
    meeting.wait_for_all("made", meeting.world_size, "The connections of the other ranks were not made")
    return Engines(*made, point), places


def _tie(meeting: Meeting, point: Point, places: list[Place]) -> None:
    """Collective: each rank has a connection to each other one, by which it learns of a death."""

    def pause() -> None:
        meeting.pause()
        if meeting.late():
            late = meeting.missing("tied", range(meeting.world_size))
            raise TimeoutError(f"{late} did not connect to all others within {meeting.timeout:g} s.")

    meeting.hurry()
    point.ties.make(places, pause)
    meeting.tell("tied", True)


class _Met(NamedTuple):
    everyone: list[Record]  # of each rank
    listener: Listener  # this rank's
    point: Point  # this rank's


class _Listening(NamedTuple):
    """Of this rank."""

    listener: Listener
    point: Point
    record: Record


def _meet(
    meeting: Meeting,
    store: dist.Store,
    token: str,
    opened: contextlib.ExitStack,
    points: contextlib.ExitStack,
) -> _Met:
    address, chosen = records.own_address(store)

    def listen() -> _Listening:
        listener = opened.enter_context(contextlib.closing(probe.Listener(address, token, meeting.rank)))
        point = points.enter_context(contextlib.closing(Point(address.ip, token, meeting.rank)))
        record = records.make_record(address, listener.port, chosen, point.place[1:])
        return _Listening(listener, point, record)

    listener, point, record = listen()
    meeting.tell("record", record)
    said = meeting.hear("record", range(meeting.world_size))
    everyone = [records.Record(*said[rank]) for rank in range(meeting.world_size)]
    again = records.must_choose_again(everyone)
    if meeting.rank in again:
        address = records.address_towards(everyone, meeting.rank) or address
        point.close()
        listener, point, record = listen()
        meeting.tell("second", record)
    for rank, second in meeting.hear("second", again).items():
        everyone[rank] = records.Record(*second)
    return _Met(everyone, listener, point)


# [Note: Gloo's constructor] It publishes this rank's addresses in the store, waits for those of all others,
# and connects. It waits in the store, so no other thread could use it, and for as long as operations may
# take: the limit is the same. So it gets a store that waits in short steps and can be told to give up, and
# runs in a thread of its own. Should it hang nevertheless, the thread is left behind, and the group is not
# made.


class _Steps(dist.Store):
    """A part of the meeting's store that never waits inside it."""

    def __init__(self, meeting: Meeting, part: str) -> None:
        super().__init__()
        self.meeting, self.part, self.given_up = meeting, part, False
        self.said: list[bytes] = []
        self.heard: list[bytes] = []

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # bytes come; a stub for text
        self.said.append(bytes(value))
        self.meeting.set(f"{self.part}/{key}", value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        self.heard.append(bytes(self.meeting.store.get(f"{self.part}/{key}")))
        return self.heard[-1]

    def check(self, keys: Sequence[str]) -> bool:
        return self.meeting.store.check([f"{self.part}/{key}" for key in keys])

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        while not self.check(keys):
            if self.given_up or time.monotonic() > self.meeting.deadline:
                raise RuntimeError("another rank has failed, or has not come")
            time.sleep(SHORTEST_S)


class _Constructor(threading.Thread):
    """Makes the contexts; `made` or `error` is set at its end."""

    def __init__(self, meeting: Meeting, address: Address, leaders: list[int]) -> None:
        super().__init__(name="pycomm Gloo", daemon=True)
        self.meeting, self.address, self.leaders = meeting, address, leaders
        self.stores = [_Steps(meeting, "data"), _Steps(meeting, "control")]
        self.made: Wires | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        meeting = self.meeting
        try:
            make = _gloo_on(self.address)
            data, control = make(self.stores[0], meeting.rank, meeting.world_size), None
            if meeting.rank in self.leaders:
                control = make(self.stores[1], self.leaders.index(meeting.rank), len(self.leaders))
            for store in self.stores:
                forks.keep_from_children(store.said, store.heard)
            self.made = data, control
        except Exception as error:
            self.error = error

    def give_up(self) -> None:
        for store in self.stores:
            store.given_up = True


def _make(meeting: Meeting, address: Address, leaders: list[int]) -> Wires:
    """Raises RuntimeError, TimeoutError."""
    constructor = _Constructor(meeting, address, leaders)
    meeting.hurry()
    constructor.start()
    try:
        while constructor.is_alive():
            meeting.pause()
            if meeting.late():
                raise TimeoutError(f"Gloo has not connected all ranks within {meeting.timeout:g} s.")
    finally:
        constructor.give_up()
    if constructor.made is None:
        meeting.listen()
        where = f"on {address.ip} ({address.interface})"
        raise RuntimeError(f"Gloo could not connect the ranks {where}: {constructor.error}")
    return constructor.made


def _gloo_on(address: Address) -> MakeGloo:
    """The context is on one device, a listening socket and the thread that moves the bytes. Where this torch
    has no such device, the context finds the interface by its name.
    """
    limit, gloo = datetime.timedelta(seconds=GLOO_TIMEOUT_S), dist.ProcessGroupGloo
    kind = getattr(gloo, "_Options", None)
    if kind is None or not (hasattr(gloo, "create_device") and hasattr(kind, "_devices")):
        env.use_gloo_interface(address.interface)
        return functools.partial(gloo, timeout=limit)
    options = kind()
    options._devices, options._threads = [gloo.create_device(hostname=address.ip)], THREADS
    options._timeout = limit
    return lambda store, rank, world_size: gloo(store, rank, world_size, options)
