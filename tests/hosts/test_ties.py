"""Which ends of a tie say that a rank is dead (pycomm/survivors/ties.py): a FIN alone, and nothing else."""

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from pycomm.survivors.door import HELLO, MOST, WORD, hello_of, is_reply
from pycomm.survivors.points import Point
from pycomm.survivors.ties import KIND, Fate, Ties

pytestmark = pytest.mark.timeout(60)
LIMIT = 20.0
WORDS = [{"members": [1], "store": 1}, "formed"]


def made(point: Point, places: list) -> Ties:
    end = time.monotonic() + LIMIT

    def pause() -> None:
        assert time.monotonic() < end
        time.sleep(0.001)

    point.ties.make(places, pause)
    return point.ties


def fate_of(end: Callable[[Ties, socket.socket], None]) -> tuple:
    """(Fate, words) that rank 0 sees of rank 1, a process that runs end(its ties, its socket)."""
    points = [Point("127.0.0.1", "token", rank) for rank in range(2)]
    places = [point.place for point in points]
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # those of this process were closed by the fork, as they must be
            ours = Ties(points[1].socket, "127.0.0.1", "token", 1)
            points[1].ties = ours
            made(points[1], places)
            os.write(tell, b"r")
            end(ours, ours._sockets[0])
            time.sleep(LIMIT)
        finally:
            os._exit(1)
    try:
        ties = made(points[0], places)
        assert os.read(ready, 1) == b"r"
        limit = time.monotonic() + LIMIT
        while not (found := ties.look())[0]:
            assert time.monotonic() < limit, "the tie does not end"
            time.sleep(0.005)
        return found[0][1], found[1]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)
        for point in points:
            point.close()


def kill_self(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_self_with_a_child(*_: object) -> None:
    if os.fork() == 0:
        time.sleep(3)
        os._exit(0)
    time.sleep(0.2)
    kill_self()


def leave(ties: Ties, _: socket.socket) -> None:
    ties.end({"words": WORDS, "left": True})


def leave_and_die(ties: Ties, _: socket.socket) -> None:
    leave(ties, _)
    kill_self()


def reset(_: Ties, connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def say_half(_: Ties, connection: socket.socket) -> None:
    connection.send(b'{"words": [')
    kill_self()


def cannot_say(ties: Ties, connection: socket.socket) -> None:
    """The message does not fit: nobody reads, so it stays in part."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ties.end({"words": ["x" * (1 << 24)], "left": True})


@pytest.mark.parametrize(
    ("end", "fate", "words"),
    [
        (kill_self, Fate.DIED, []),
        (kill_self_with_a_child, Fate.DIED, []),
        (lambda *_: os._exit(0), Fate.DIED, []),
        (leave, Fate.LEFT, [WORDS]),
        (leave_and_die, Fate.LEFT, [WORDS]),
        (reset, Fate.LOST, []),
        (say_half, Fate.LOST, []),
        (cannot_say, Fate.LOST, []),
    ],
    ids=["killed", "with a child", "exits", "leaves", "leaves and dies", "reset", "half a word", "too long"],
)
def test_what_an_end_says(end: Callable, fate: Fate, words: list) -> None:
    assert fate_of(end) == (fate, words)


def test_a_killed_rank_with_unread_bytes_is_not_certain() -> None:
    """Its kernel sends a reset, as a firewall does: so nobody sends on a tie."""
    points = [Point("127.0.0.1", "token", rank) for rank in range(2)]
    places = [point.place for point in points]
    thread = threading.Thread(target=made, args=(points[1], places))
    thread.start()
    ties = made(points[0], places)
    thread.join(LIMIT)
    ties._sockets[1].send(b"a byte")
    time.sleep(0.1)
    points[1].ties._drop(0).close()  # as the kernel does when a process ends
    limit = time.monotonic() + LIMIT
    while not (fates := ties.look()[0]):
        assert time.monotonic() < limit
    assert fates == {1: Fate.LOST}
    for point in points:
        point.close()


def test_the_last_try_of_a_rank_counts() -> None:
    """A firewall may reset a tie while it is made; the rank that connects tries again. Rank 2 still waits for
    rank 1 then; where it waits for nobody else, see the head of ties.py.
    """
    points = [Point("127.0.0.1", "token", rank) for rank in range(3)]
    places = [point.place for point in points]
    threads = [threading.Thread(target=made, args=(point, places)) for point in points]
    threads[2].start()
    with socket.create_connection(places[2][:2], LIMIT) as first:
        first.sendall(hello_of("token", 2, KIND, 0))
        first.settimeout(LIMIT)
        assert is_reply(first.recv(WORD), "token", 2, KIND)
    threads[0].start()
    limit = time.monotonic() + LIMIT
    while 2 not in points[0].ties._sockets:
        assert time.monotonic() < limit, "rank 0 has no answer to its second try"
        time.sleep(0.005)
    threads[1].start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert [point.ties.look() for point in points] == [({}, [])] * 3
    for point in points:
        point.close()


def test_strangers_do_not_keep_ranks_from_their_ties() -> None:
    points = [Point("127.0.0.1", "token", rank) for rank in range(3)]
    places = [point.place for point in points]
    strangers = []
    for number in range(2 * MOST):
        stranger = socket.create_connection(places[1 + number % 2][:2], LIMIT)
        stranger.send([b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * HELLO, b"[" * 5000][number % 4])
        strangers.append(stranger)
    threads = [threading.Thread(target=made, args=(point, places)) for point in points]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert [sorted(point.ties._sockets) for point in points] == [[1, 2], [0, 2], [0, 1]]
    for one in (*strangers, *points):
        one.close()
