"""How a group comes together when something goes wrong meanwhile: ranks that die, fail by themselves, come
too late, lack descriptors. The others learn it soon, and the next try under the same name succeeds.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import threading
import time

import pytest
import torch
from forked import HARD_LIMIT, Group, attempt, check_named
from tiers import tier

from pycomm import _C, Communicator
from pycomm.testing import run_ranks

SOON = 5.0  # seconds without those for which a process had no core; the timeouts are far above


def is_open(fd):
    try:
        return fcntl.fcntl(fd, fcntl.F_GETFD) >= 0
    except OSError:
        return False


@contextlib.contextmanager
def descriptors_left(count):
    """This process can open `count` further descriptors. None: as many as it likes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if count is not None:
        free = [fd for fd in range(200) if not is_open(fd)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def network_store(comm):
    """A store that opens nothing once it is made."""
    port = torch.zeros(1, dtype=torch.int64)
    store = None
    if comm.rank == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, comm.world_size, True, wait_for_workers=False)
        port[0] = store.port
    comm.broadcast(port, 0)
    return store or torch.distributed.TCPStore("127.0.0.1", port.item(), comm.world_size, False)


def works(comm):
    return (
        comm.all_reduce(torch.full((20000,), comm.rank + 1.0))
        .eq(sum(range(comm.world_size + 1)))
        .all()
        .item()
    )


def make(comm, store, count=None, **options):
    """Whether a second group of the same ranks works, made with `count` descriptors."""

    def create():
        with descriptors_left(count):
            return Communicator(store, comm.rank, comm.world_size, **{"name": "second", **options})

    with create() as second:
        return works(second)


def check_failures(outcomes, victim):
    """The victim says what it lacked, the others name it. Returns whether there was anything to say."""
    if all(result is True for _, result in outcomes):
        return False
    for rank, (seconds, report) in enumerate(outcomes):
        assert seconds.own < SOON, outcomes
        assert report["kind"] == ("CommError" if rank == victim else "PeerError"), outcomes
        assert report["peer"] == victim and "no free file descriptor" in report["text"], outcomes
    return True


# --- descriptors --------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_group_without_a_free_descriptor(victim):
    """However many are left: the group is made, or all say at once why not, and the next try succeeds."""

    def body(comm, link):
        store = network_store(comm)
        outcomes = []
        for count in range(6):
            for left in (count if comm.rank == victim else None, None):
                outcomes.append(attempt(make, comm, store, left, timeout=30.0))
                comm.barrier()
        return outcomes

    with Group(2, body) as group:
        outcomes = list(zip(group.get(0), group.get(1), strict=True))
    assert all(result is True for pair in outcomes[1::2] for _, result in pair), outcomes
    failed = [check_failures(pair, victim) for pair in outcomes[::2]]
    assert failed[0] and failed[1] and not failed[5], failed


@pytest.mark.parametrize("victim", [0, 1])
def test_registered_buffer_without_a_free_descriptor(victim):
    """A failure on one rank is one of all, and later buffers are the same ones on all ranks."""

    def body(comm, link):
        def create(count):
            with descriptors_left(count):
                return comm.empty(30000).numel() == 30000

        outcomes, buffers = [], []
        for count in range(4):
            outcomes.append(attempt(create, count if comm.rank == victim else None))
            buffers.append(comm.empty(50000).fill_(1.0))
            other = comm.empty(50000)
            for x in (*buffers, other.fill_(1.0)):
                assert comm.all_reduce(x, algorithm="direct").eq(2).all()
                x.fill_(1.0)
            assert works(comm)
        return outcomes

    with Group(2, body) as group:
        outcomes = list(zip(group.get(0), group.get(1), strict=True))
    failed = []
    for pair in outcomes:
        failed.append(any(result is not True for _, result in pair))
        for seconds, report in pair if failed[-1] else ():
            assert seconds.own < SOON and report["kind"] == "CommError", pair
            assert report["peer"] == victim and f"rank {victim}: " in report["text"], pair
            assert "no free file descriptor" in report["text"], pair
    assert failed[0] and not failed[3], failed


@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_keeps_no_memory_where_another_has_none(victim):
    def body(comm, link):
        def segments():
            with open("/proc/self/maps") as maps:
                return maps.read().count("memfd:pycomm ")

        before = segments()
        with descriptors_left(0 if comm.rank == victim else None):
            _, report = attempt(comm.empty, 30000)
        return report["kind"], report["peer"], segments() - before, works(comm)

    with Group(2, body, hosts="1+1") as group:
        group.expect(("CommError", victim, 0, True))


def test_many_groups_and_buffers_with_few_descriptors():
    """None of them keeps one that carries no lock, and groups of the same processes share those that do."""

    def body(comm, link):
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        before = len(os.listdir("/proc/self/fd"))
        groups = [comm.split(0, key=-comm.rank if i % 2 else comm.rank) for i in range(70)]
        halves = [comm.split(comm.rank // 2) for _ in range(3)]
        buffers = [comm.empty(1000).fill_(1.0) for _ in range(70)]
        more = len(os.listdir("/proc/self/fd")) - before
        assert all(works(group) for group in (*groups, *halves))
        assert all(comm.all_reduce(x).eq(3).all() for x in buffers)
        comm.barrier()
        groups[0].close()
        return more, works(groups[1]), works(comm)

    with Group(3, body) as group:
        assert [group.get(rank) for rank in range(3)] == [(0, True, True)] * 3


def test_a_group_that_shares_locks_outlives_the_others():
    """The deaths of its ranks are seen when the group whose locks it uses has gone."""

    def body(comm, link):
        second = comm.split(0, key=-comm.rank)  # rank 1 is its rank 0
        comm.barrier()
        comm.close()
        comm._comm = None
        assert works(second)
        link.send("started")
        while True:
            second.all_reduce(torch.ones(3))

    with Group(2, body) as group:
        group.expect("started")
        group.kill(1)
        check_named(group.get(0), 0)


@pytest.mark.parametrize("dead", [0, 2])
def test_a_group_of_some_ranks_lends_no_locks_to_one_of_all(dead, monkeypatch):
    """The first has ranks 1 and 0 of the second. Deaths are seen by the locks alone."""
    monkeypatch.setenv("PYCOMM_CMA", "0")

    def body(comm, link):
        store, rank = comm._store, comm.rank
        comm.barrier()
        comm.close()
        comm._comm = None
        pair = Communicator(store, 1 - rank, 2, name="pair") if rank < 2 else None
        group = Communicator(store, rank, 3, name="all", timeout=30.0)
        assert works(group) and (pair is None or works(pair))
        link.send("started")
        while True:
            group.all_reduce(torch.ones(3))

    with Group(3, body) as group:
        group.expect("started")
        group.kill(dead)
        for rank in group.others(dead):
            check_named(group.get(rank), dead)


# --- deaths --------------------


class ToldStore(torch.distributed.Store):
    """Calls tell(number of the call, name, key) after each call."""

    def __init__(self, store, tell):
        super().__init__()
        self._store, self._tell, self._calls = store, tell, 0

    def _done(self, result, name, key):
        self._calls += 1
        self._tell(self._calls, name, key)
        return result

    def set(self, key, value):
        return self._done(self._store.set(key, value), "set", key)

    def get(self, key):
        return self._done(self._store.get(key), "get", key)

    def check(self, keys):
        return self._done(self._store.check(keys), "check", keys[0])

    def deleteKey(self, key):  # noqa: N802 (torch's name)
        return self._done(self._store.delete_key(key), "delete", key)

    delete_key = deleteKey


@pytest.mark.parametrize("victim", [0, 1])
def test_death_while_others_are_missing(victim):
    """Ranks 0 and 1 wait for rank 2, which never comes; one of them dies."""

    def body(comm, link):
        if comm.rank == 2:
            return link.recv()
        written = []

        def tell(number, name, key):
            if name == "set" and key.endswith(f"/{comm.rank}"):
                written.append(key)
            elif name == "check" and key.endswith("/2") and written:
                link.send("waits")
                written.clear()

        store = ToldStore(comm._store, tell)
        return Communicator(store, comm.rank, 3, name="second", timeout=60.0)

    with Group(3, body) as group:
        for rank in (0, 1):
            assert group.get(rank) == "waits"
        then = group.kill(victim)
        report = group.get(1 - victim)
        (delay,) = group.delays(then, [report], victim)
    check_named(report, victim)
    assert delay < HARD_LIMIT, report


def test_death_between_lock_and_record():
    """The others have no record of rank 1, but have seen its lock."""

    def body(comm, link):
        class Stuck(ToldStore):
            def set(self, key, value):
                if key.endswith("/1"):
                    link.send("locked")
                    signal.pause()
                super().set(key, value)

        store = Stuck(comm._store, lambda *ignored: None) if comm.rank == 1 else comm._store
        return Communicator(store, comm.rank, 3, name="second", timeout=60.0)

    with Group(3, body) as group:
        assert group.get(1) == "locked"
        time.sleep(0.3)  # some looks of the others
        then = group.kill(1)
        reports = [group.get(rank) for rank in (0, 2)]
        delays = group.delays(then, reports, 1)
    for report in reports:
        check_named(report, 1)
    assert max(delays) < HARD_LIMIT, delays


@tier(quick=1 / 4)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("hosts", [None, "1+2", "2+1"])
def test_death_in_a_split(victim, call, hosts):
    """Whatever the victim has said of itself: the others have a group with it, which knows that it died."""

    def body(comm, link):
        class Dying(ToldStore):
            checks = 0

            def check(self, keys):
                self.checks += 1
                if self.checks == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().check(keys)

        if comm.rank == victim:
            link.send(time.monotonic())
            comm._store = Dying(comm._store, lambda *ignored: None)
        return comm.split(0).all_reduce(torch.ones(1))

    with Group(3, body, hosts=hosts) as group:
        then = group.moment(group.get(victim))
        reports = [group.get(rank) for rank in group.others(victim)]
        delays = group.delays(then, reports, victim)
    for report in reports:
        assert (report["kind"], report["peer"]) == ("PeerError", victim), report
    assert max(delays) < HARD_LIMIT, delays


@tier(quick=1 / 2)
@pytest.mark.parametrize("victim", [0, 1])
def test_death_at_any_moment(victim):
    """A rank dies after each of its calls to the store in turn. The others raise and name it: soon where it
    had come, at the deadline where nobody can know that it had.
    """
    late = 1.5

    def body(comm, link):
        def tell(number, name, key):
            if comm.rank == victim and number == last:
                os.kill(os.getpid(), signal.SIGKILL)

        last = comm.all_reduce(torch.tensor([link.recv()])).item() // comm.world_size
        store = ToldStore(comm._store, tell)
        return attempt(make, comm, store, timeout=late)

    for last in range(1, 12):
        with Group(3, body) as group:
            for link in group.links.values():
                link.send(last)
            for rank in group.others(victim):
                seconds, report = group.get(rank)
                if report is True:  # the group was complete
                    continue
                assert report["kind"] in ("PeerError", "CommTimeoutError"), report
                assert seconds.own < late + HARD_LIMIT and f"{victim}" in report["text"], (seconds, report)
                if report["kind"] == "PeerError":
                    assert report["peer"] == victim, report


# --- tries that fail --------------------


@pytest.mark.parametrize("early", [[0], [1], [0, 2], [1, 2]], ids=str)
def test_again_under_the_same_name(early):
    """Some ranks try alone, in vain; then all come, as often as they like."""

    def body(comm, link):
        store, outcomes = comm._store, []
        for turn in range(2):
            if comm.rank in early:
                outcomes.append(attempt(make, comm, store, timeout=0.3))
            comm.barrier()
            time.sleep(0.2 * turn * (comm.rank == 0))  # the others look first, and see the try of before
            outcomes.append(attempt(make, comm, store, timeout=30.0))
        return outcomes

    with Group(3, body) as group:
        for rank in range(3):
            outcomes = group.get(rank)
            assert [result for _, result in outcomes if not isinstance(result, dict)] == [True, True], (
                outcomes
            )
            failures = [result for _, result in outcomes if isinstance(result, dict)]
            assert [report["kind"] for report in failures] == ["CommTimeoutError"] * 2 * (rank in early)


def test_again_among_threads():
    store = _C.LocalStore()

    def body(comm):
        outcomes = []
        for i in range(6):
            alone = i % 3
            if comm.rank == alone:
                outcomes.append(attempt(make, comm, store, timeout=0.05)[1]["kind"])
            comm.barrier()
            outcomes.append(attempt(make, comm, store, timeout=30.0)[1])
        return outcomes

    for outcomes in run_ranks(3, body):
        assert sorted(map(str, outcomes)) == ["CommTimeoutError"] * 2 + ["True"] * 6


def test_a_flood_of_connections_has_a_deadline():
    """Somebody connects to the leader's socket without end, and takes nothing."""

    def body(comm, link):
        if comm.rank == 1:
            return link.recv()
        stop, sockets, threads = threading.Event(), set(), []

        def flood(name):
            while not stop.is_set():
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
                    s.settimeout(0.1)
                    s.connect("\0" + name)
                    sockets.add(name)

        def tell(number, name, key):
            if name == "set" and key.endswith("/leader") and not threads:
                threads.append(threading.Thread(target=flood, args=(store.get(key).decode().split("\n")[1],)))
                threads[0].start()

        store = comm._store
        outcome = attempt(make, comm, ToldStore(store, tell), timeout=1.0)
        stop.set()
        threads[0].join()
        return outcome, len(sockets)

    with Group(2, body) as group:
        (seconds, report), sockets = group.get(0)
    assert sockets == 1 and report["kind"] == "CommTimeoutError" and seconds.own < SOON, (seconds, report)


# --- who breaks a group, and dies of it --------------------


def group_segments():
    with open("/proc/self/maps") as maps:
        return {int(line.split("-")[0], 16) for line in maps if "/memfd:pycomm " in line}


def test_reporter_dies_before_it_has_told():
    """A rank dies after it has claimed to write why the group is broken, and before it has written it."""
    broken_at, claim = 64, 2 * 0 + 1  # GroupHeader (csrc/transport/layout.h), rank 0's (health.h)

    def body(comm, link):
        before = group_segments()
        second = comm.split(0)
        (segment,) = group_segments() - before
        second.barrier()
        link.send("started")
        if comm.rank == 0:
            ctypes.c_uint32.from_address(segment + broken_at).value = claim
            os.kill(os.getpid(), signal.SIGKILL)
        link.recv()
        return (
            attempt(second.barrier),
            attempt(second.barrier),
            attempt(second.recv, torch.ones(1), 3 - comm.rank),
        )

    with Group(3, body) as group:
        group.expect("started")
        group.join(0)
        group.send(1, 2)
        for outcomes in (group.get(1), group.get(2)):
            for seconds, report in outcomes:
                check_named(report, 0)
                assert seconds.own < HARD_LIMIT and "The group is broken" in report["text"], report


# --- hosts --------------------


@pytest.mark.parametrize("names", [("rack 1", "rack 1"), ("rack 1", "rack 2"), ("", "a\nb c")], ids=str)
def test_names_of_hosts(names):
    """PYCOMM_HOST_ID may be any text; ranks with different ones form a group over hosts."""

    def body(comm, link):
        os.environ["PYCOMM_HOST_ID"] = names[comm.rank]
        seconds, result = attempt(make, comm, comm._store, timeout=HARD_LIMIT)
        return result

    with Group(2, body) as group:
        for rank in range(2):
            assert group.get(rank) is True
