"""Makes what carries bytes between the ranks of several hosts, Gloo's contexts or UCX's workers (ucx.py): see
the head of the package.
"""

import contextlib
import datetime
import functools
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from pycomm import env
from pycomm.hosts import forks, probe, records, ucx
from pycomm.hosts.meeting import SHORTEST_S, Meeting
from pycomm.survivors import Place, Point

# Gloo's own limit of an operation, in seconds. pycomm's limits are shorter: an operation that reached this
# one would end in words that name nobody.
GLOO_TIMEOUT_S = 1e8
THREADS = 1  # of Gloo's collectives, which are not used; messages go by the thread of the device
COUNTERS = ("came", "record", "second", "reached", "tied", "ucx", "made")


class Request(NamedTuple):
    """What the extension asks for.

    store: torch.distributed Store that all ranks share.
    rank: of this process in the group.
    hosts: for each rank the number of its host; hosts are numbered by their lowest rank.
    labels: for each host its name in messages, such as "node-a".
    token: a word of this attempt to make the group, different from that of all others on the store.
    timeout: seconds for all of it.
    look: Meeting's, where more is known of the ranks than they say here.
    """

    store: dist.Store
    rank: int
    hosts: list
    labels: list
    token: str
    timeout: float
    look: Callable | None = None


def engines(*fields, shrinker=None):
    """What connects the ranks of a group that spans hosts. Collective over them; fields of a Request.
    shrinker: Point.serve's.

    Returns (data, control, point): torch.distributed.ProcessGroupGloo, or with PYCOMM_WIRE=ucx _C.UcxWire,
    over all ranks, and over the leaders, the lowest rank of each host, in order of the hosts; None on other
    ranks; and this rank's pycomm.survivors.Point, which answers from now on.

    Raises ValueError, RuntimeError or TimeoutError. What one rank fails with, all raise, in the same words;
    the others add who has seen it.
    """
    request = Request(*fields)
    store = dist.PrefixStore(f"pycomm.hosts/{request.token}", request.store)
    meeting = Meeting(store, request.rank, request.hosts, request.labels, request.timeout, request.look)
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as points:
        # what is closed tells others that this rank has ended
        try:
            data, control, point, places = _meet_and_make(meeting, request, opened, points)
        except BaseException as error:
            problem = meeting.fail(error)
            if problem is error:
                raise
            raise problem from None
        points.pop_all()
    point.serve(request.hosts, request.labels, places, request.store, shrinker)
    meeting.leave(COUNTERS)
    return data, control, point


def _meet_and_make(meeting, request, opened, points):
    """(data, control, this rank's Point, the Place of each rank)."""
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
    if mine.wire == "ucx":
        made = ucx.make(meeting, mine.address, leaders)
    else:
        made = _make(meeting, mine.address, leaders)
    meeting.arrive("made")
    meeting.wait_for_all("made", meeting.world_size, "The connections of the other ranks were not made")
    return *made, point, places


def _tie(meeting: Meeting, point: Point, places: list) -> None:
    """Collective: each rank has a connection to each other one, by which it learns of a death."""

    def pause() -> None:
        meeting.pause()
        if meeting.late():
            late = meeting.missing("tied", range(meeting.world_size))
            raise TimeoutError(f"{late} did not connect to all others within {meeting.timeout:g} s.")

    meeting.hurry()
    point.ties.make(places, pause)
    meeting.tell("tied", True)


def _meet(meeting, store, token, opened, points):
    """(the Record of each rank, this rank's Listener, its Point)."""
    address, chosen = records.own_address(store)

    def listen():
        listener = opened.enter_context(contextlib.closing(probe.Listener(address, token, meeting.rank)))
        point = points.enter_context(contextlib.closing(Point(address.ip, token, meeting.rank)))
        return listener, point, records.make_record(address, listener.port, chosen, point.place[1:])

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
    return everyone, listener, point


# [Note: Gloo's constructor] It publishes this rank's addresses in the store, waits for those of all others,
# and connects. It waits in the store, so no other thread could use it, and for as long as operations may
# take: the limit is the same. So it gets a store that waits in short steps and can be told to give up, and
# runs in a thread of its own. Should it hang nevertheless, the thread is left behind, and the group is not
# made.


class _Steps(dist.Store):
    """A part of the meeting's store that never waits inside it."""

    def __init__(self, meeting, part):
        super().__init__()
        self.meeting, self.part, self.given_up = meeting, part, False
        self.said, self.heard = [], []

    def set(self, key, value):
        self.said.append(bytes(value))
        self.meeting.set(f"{self.part}/{key}", value)

    def get(self, key):
        self.wait([key])
        self.heard.append(bytes(self.meeting.store.get(f"{self.part}/{key}")))
        return self.heard[-1]

    def check(self, keys):
        return self.meeting.store.check([f"{self.part}/{key}" for key in keys])

    def wait(self, keys, timeout=None):
        while not self.check(keys):
            if self.given_up or time.monotonic() > self.meeting.deadline:
                raise RuntimeError("another rank has failed, or has not come")
            time.sleep(SHORTEST_S)


class _Constructor(threading.Thread):
    """Makes the contexts; `made` or `error` is set at its end."""

    def __init__(self, meeting, address, leaders):
        super().__init__(name="pycomm Gloo", daemon=True)
        self.meeting, self.address, self.leaders = meeting, address, leaders
        self.stores = [_Steps(meeting, "data"), _Steps(meeting, "control")]
        self.made = self.error = None

    def run(self):
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

    def give_up(self):
        for store in self.stores:
            store.given_up = True


def _make(meeting, address, leaders):
    """(data, control). Raises RuntimeError, TimeoutError."""
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
    if constructor.error is not None:
        meeting.listen()
        where = f"on {address.ip} ({address.interface})"
        raise RuntimeError(f"Gloo could not connect the ranks {where}: {constructor.error}")
    return constructor.made


def _gloo_on(address):
    """make(store, rank, world_size): a context on one device, a listening socket and the thread that moves
    the bytes. Where this torch has no such device, the context finds the interface by its name.
    """
    limit, gloo = datetime.timedelta(seconds=GLOO_TIMEOUT_S), dist.ProcessGroupGloo
    if not (hasattr(gloo, "create_device") and hasattr(getattr(gloo, "_Options", None), "_devices")):
        env.use_gloo_interface(address.interface)
        return functools.partial(gloo, timeout=limit)
    options = gloo._Options()
    options._devices, options._threads = [gloo.create_device(hostname=address.ip)], THREADS
    options._timeout = limit
    return lambda store, rank, world_size: gloo(store, rank, world_size, options)
