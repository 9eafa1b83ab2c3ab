"""What a rank in shrink() sees of others, and the store in a point: parts of survivors without ranks."""

import contextlib
import datetime
import os
import socket
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from pycomm.errors import PeerError
from pycomm.survivors import shrinking, survey
from pycomm.survivors.door import reply_of
from pycomm.survivors.points import ASK, Place, Point
from pycomm.survivors.shrinking import _Watcher
from pycomm.survivors.store import PointStore
from pycomm.survivors.survey import Seen, Survey
from pycomm.survivors.ties import KEEPALIVE, _Try

pytestmark = pytest.mark.timeout(60)
LONG = 1e4  # seconds


@contextlib.contextmanager
def points_of(hosts):
    """The points of ranks on these hosts, in this process."""
    made = [Point("127.0.0.1", "token", rank) for rank in range(len(hosts))]
    labels = [f"node-{chr(ord('a') + host)}" for host in range(max(hosts) + 1)]
    try:
        for point in made:
            point.serve(hosts, labels, [one.place for one in made], None, None)
        yield made
    finally:
        for point in made:
            point.close()


# --- what is seen --------------------


@pytest.mark.parametrize("paused", [True, False])
def test_a_rank_that_was_stopped_itself_takes_nobody_for_silent(paused):
    """It received nothing while it was stopped, but the others were not silent."""
    with points_of([0, 1, 2]) as (point, *_), contextlib.closing(Survey(point, 10.0)) as seen:
        now = time.monotonic()
        seen.last_look = now - (LONG if paused else 1.0)
        for peer in seen.peers.values():
            peer.heard, peer.next_try = now - LONG, now + LONG
        seen.look(0)
        found = seen.seen()
        assert [found[rank] for rank in (1, 2)] == [Seen.UNKNOWN if paused else Seen.SILENT] * 2


@pytest.mark.parametrize(
    ("host", "space", "own", "known"),
    [
        (0, "boot pid:[1]", "boot pid:[1]", True),
        (0, "boot pid:[2]", "boot pid:[1]", False),  # another container: its numbers are other processes
        (1, "boot pid:[1]", "boot pid:[1]", False),
        (0, "", "", False),
    ],
)
def test_numbers_of_processes_mean_something_in_one_space(monkeypatch, host, space, own, known):
    monkeypatch.setattr(survey, "_is_stopped", lambda pid: pid == 7)
    with points_of([0, host]) as (point, _), contextlib.closing(Survey(point, LONG)) as seen:
        point.places = [Place("127.0.0.1", 1, 3, own), Place("127.0.0.1", 1, 7, space)]
        seen._look_at_processes()
        assert (seen.peers[1].stopped_since is not None) is known
        assert seen.stopped() == []  # not yet: see PATIENCE_S
        if known:
            seen.peers[1].stopped_since -= LONG
            assert seen.stopped() == [1] and seen.seen()[1] == Seen.STOPPED
            monkeypatch.setattr(survey, "_is_stopped", lambda pid: False)
            seen._look_at_processes()
            assert seen.stopped() == []


@pytest.mark.parametrize(("ever_heard", "expected"), [(False, Seen.UNKNOWN), (True, Seen.ABSENT)])
def test_a_process_of_this_host_that_runs_is_not_silent(ever_heard, expected):
    """It waits for a processor. Others are: those that have ended, and those of which nobody knows."""
    with subprocess.Popen(["sleep", "60"]) as runs, subprocess.Popen(["sleep", "60"]) as zombie:
        zombie.kill()
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        with points_of([0, 0, 0, 0, 1]) as (point, *_), contextlib.closing(Survey(point, 10.0)) as seen:
            pids = {1: runs.pid, 2: zombie.pid, 3: runs.pid, 4: runs.pid}
            for rank, pid in pids.items():
                space = "another container" if rank == 3 else point.place.space
                point.places[rank] = Place("127.0.0.1", 1, pid, space)
            for peer in seen.peers.values():
                peer.heard, peer.ever_heard, peer.gone = time.monotonic() - LONG, ever_heard, False
            assert seen.seen() == {0: Seen.HERE, 1: expected, **dict.fromkeys((2, 3, 4), Seen.SILENT)}
            runs.kill()
            runs.wait()
            assert seen.seen()[1] == Seen.SILENT


def test_names_of_ranks():
    with points_of([0, 0, 1, 1, 1, 2]) as (point, *_):
        assert point.name(4) == "rank 4 (node-b)"
        assert point.names([1]) == "rank 1 (node-a)"
        assert point.names([2, 4]) == "ranks 2, 4 (node-b)"
        assert point.names([0, 3, 1, 5]) == "ranks 0, 1 (node-a), 3 (node-b), 5 (node-c)"


def test_ties_are_kept_alive():
    with points_of([0, 1]) as points:
        places = [point.place for point in points]
        pause = lambda: time.sleep(0.001)  # noqa: E731
        other = threading.Thread(target=points[1].ties.make, args=(places, pause))
        other.start()
        points[0].ties.make(places, pause)
        other.join(20)
        for one in (points[0].ties._sockets[1], points[1].ties._sockets[0]):
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            for option, value in KEEPALIVE.items():
                assert one.getsockopt(socket.IPPROTO_TCP, option) == value


@pytest.mark.parametrize(
    ("error", "lost", "of_others"),
    [
        (PeerError("rank 1 died", peer=1), False, True),
        (PeerError("another rank", peer=None), False, False),
        (OSError(24, "Too many open files"), False, False),
        (OSError(24, "Too many open files"), True, True),
        (PeerError("rank 0 died", peer=0), False, True),
    ],
)
def test_whose_failure_it_is_that_a_group_was_not_made(monkeypatch, error, lost, of_others):
    """A death of another one is seen soon after it."""
    looks, slept = [], []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(shrinking, "time", clock)

    def watch():
        looks.append(None)
        if lost and len(looks) == 2:
            raise PeerError("rank 2 was lost", peer=2)

    assert shrinking._is_of_others(error, SimpleNamespace(watch=watch)) is of_others
    assert len(looks) == 2 if lost else 1.0 <= sum(slept) < 1.1


@pytest.mark.parametrize("fails", [(), (False,), (True, False, True)])
def test_the_new_group_has_the_limit_of_the_old_one(monkeypatch, fails):
    """Not what shrink() had left. Each group that not all have made is closed, and so is the old one at the
    end, when all ties have told those that were left out. fails: of the rounds that are over, whether this
    rank has failed itself.
    """
    events, rounds = [], iter([*fails, None])
    whole = iter([*(False for failed in fails if not failed), True])

    class Rounds:
        def __init__(self, *given):
            self.watch = self.give_up = None

        def __enter__(self):
            return self

        def __exit__(self, *error):
            events.append("end")

        def agree(self):
            return SimpleNamespace(store=0, members=[0, 2], round=len(events))

        def form(self, made):
            events.append(f"form {made}")
            return made and next(whole)

    class Group:
        timeout = 3.25  # of a new one: what shrink() had left

        def __init__(self, name):
            self.name = name

        def set_timeout(self, limit):
            self.timeout = limit

        def close(self):
            events.append(f"close {self.name}")

    def join(*given):
        if next(rounds):
            raise PeerError("rank 1 died", peer=1)
        return Group("new")

    old, point = Group("old"), SimpleNamespace(end_ties=lambda: events.append("ties"))
    old.timeout = 77.5
    for name, value in {
        "_check": lambda *given: None,
        "Agreement": Rounds,
        "PointStore": lambda *given: SimpleNamespace(watcher=given[2]),
        "_join": join,
        "_is_of_others": lambda error, agreement: True,
    }.items():
        monkeypatch.setattr(shrinking, name, value)
    made, ranks = shrinking.shrink(point, old, [], False, 5.0, None)
    assert (made.name, made.timeout, ranks) == ("new", 77.5, [0, 2])
    over = [["form False"] if failed else ["form True", "close new"] for failed in fails]
    assert events == [*sum(over, []), "form True", "end", "ties", "close old"]


def test_a_watcher_looks_now_and_then():
    looks = []
    watch = _Watcher(lambda: looks.append(time.monotonic()))
    for _ in range(1000):
        watch()
    assert len(looks) <= 1 + (looks[-1] - looks[0]) / 0.015
    watch.next = 0.0
    with watch.lock:  # another thread is at it
        watch()
    before = len(looks)
    watch()
    assert len(looks) == before + 1


# --- the store of a point --------------------


@pytest.mark.parametrize("rank", [0, 1], ids=["own", "of another rank"])
def test_the_store_of_a_point(rank):
    with points_of([0, 1]) as points:
        store = PointStore(points[rank], 0)
        assert not store.check(["a"]) and store.num_keys() == 0
        store.set("a", bytes(range(256)))
        store.set("b", "text é")
        assert store.get("a") == bytes(range(256)) and store.get("b") == "text é".encode()
        assert store.check(["a"]) and store.check(["a", "b"]) and not store.check(["a", "c"])
        assert not store.check(["c", "a"]) and store.check([])
        assert [store.add("n", one) for one in (1, 5, 0, -7)] == [1, 6, 6, -1]
        store.set("n", "300")
        assert store.add("n", 1) == 301 and store.get("n") == b"301"
        assert store.num_keys() == 3
        assert store.delete_key("a") is True and store.delete_key("a") is False and store.num_keys() == 2
        store.wait(["b", "n"])
        with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0.05 s, keys: \['b', 'a'\]"):
            store.wait(["b", "a"], datetime.timedelta(seconds=0.05))
        assert store.host == "127.0.0.1"
        store.close()
        assert store.get("b") == "text é".encode()  # it connects again
        assert PointStore(points[1 - rank], 0).num_keys() == 2
        store.close()


@contextlib.contextmanager
def somebody_at(point, rank, answer):
    """At the port of a rank something else answers, with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        stop = threading.Event()

        def serve():
            opened = []
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    opened.append(server.accept()[0])
                    opened[-1].sendall(answer)
                    if not answer:
                        opened.pop().close()
            for one in opened:
                one.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            point.places[rank] = point.places[rank]._replace(port=server.getsockname()[1])
            yield
        finally:
            stop.set()
            thread.join(20)


STRANGERS = {
    "HTTP": (b"HTTP/1.1 400 Bad Request" + b"\r\n" * 100, "somebody else answers there"),
    "of another group": (reply_of("other", 0, ASK), "somebody else answers there"),
    "of another rank": (reply_of("token", 1, ASK), "somebody else answers there"),
    "nothing": (b"", "the other side has ended|Connection reset"),
}


@pytest.mark.parametrize(("answer", "text"), STRANGERS.values(), ids=STRANGERS)
def test_somebody_else_at_the_port_of_a_rank(answer, text):
    with points_of([0, 1]) as points, somebody_at(points[1], 0, answer):
        with pytest.raises(PeerError, match=rf"the store of rank 0 \(node-a\) does not answer: .*({text})"):
            PointStore(points[1], 0).add("n", 1)
        with contextlib.closing(Survey(points[1], LONG)) as seen:
            peer, end = seen.peers[0], time.monotonic() + 20
            tried = peer.next_try
            while peer.next_try == tried or peer.socket is not None:
                assert time.monotonic() < end, "the stranger is not left"
                seen.look()
            assert seen.seen()[0] == Seen.UNKNOWN and not peer.ever_heard
        one, end = _Try(), time.monotonic() + 20
        while one.socket is None:  # it connects
            assert points[1].ties._go_on(one, 0, points[1].places[0]) is None
        while one.socket is not None:
            assert points[1].ties._go_on(one, 0, points[1].places[0]) is None
            assert time.monotonic() < end


def test_who_waits_in_the_store_of_a_point_is_called_away():
    class LostError(Exception):
        pass

    def look():
        raise LostError

    with points_of([0, 1]) as points:
        store = PointStore(points[1], 0, look)
        for call in (lambda: store.get("never"), lambda: store.add("n", 1), lambda: store.check(["n"])):
            with pytest.raises(LostError):
                call()
        store.watcher = None
        assert store.add("n", 1) == 1
        points[0].close()
        for _ in range(2):
            with pytest.raises(PeerError, match=r"the store of rank 0 \(node-a\) does not answer") as caught:
                store.add("n", 1)
            assert (caught.value.peer, caught.value.rank) == (0, 1)
