"""How ranks of several hosts agree without a store: that two never decide differently, whatever is lost on
the way, and what the point of a rank does with what it does not know.
"""

import contextlib
import json
import os
import random
import socket
import threading
import time

import pytest
from tiers import tier

from pycomm.survivors import agreement, door, points, slots
from pycomm.survivors.survey import Seen

pytestmark = pytest.mark.timeout(60)
MOST_NESTED = 3  # proposals inside of a proposal
ROUNDS = 10  # of proposals
NESTS = 0.2  # of the messages are sent while another rank proposes
UNHEARD = 0.02  # of the answers are lost
KNOWN = 0.1  # of the other ranks hear at once what was decided


@pytest.mark.parametrize(
    ("answered", "certain", "excluded", "expected"),
    [
        ([0, 1, 2, 3], [], [], True),
        ([1, 2, 3], [0], [], True),  # all others are certain to be gone
        ([3], [0, 1, 2], [], True),
        ([0, 1], [], [], True),  # half with the lowest
        ([2, 3], [], [], False),  # half without
        ([2, 3], [], [0, 1], True),  # the caller says that the others are gone
        ([2, 3], [0], [], False),  # 1 may live, and have gone on with 0 before that died
        ([1, 2, 3], [], [], True),
        ([0], [], [], False),
        ([0], [1], [], False),
        ([1, 2], [], [0], True),  # half of those that count, with the lowest of them
        ([2, 3], [], [0], True),
        ([3], [], [0], False),
        ([], [0, 1, 2, 3], [], False),
    ],
)
def test_quorum(answered, certain, excluded, expected):
    assert slots.has_quorum(answered, 4, certain, excluded) is expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6])
def test_two_quorums_meet(world_size):
    """Where nobody is certain to be gone, any two have a rank in common."""
    sets = [[r for r in range(world_size) if bits >> r & 1] for bits in range(1 << world_size)]
    quorums = [set(one) for one in sets if slots.has_quorum(one, world_size, [], [])]
    assert quorums and all(one & other for one in quorums for other in quorums)


class _Network:
    """Points of ranks without sockets; answers get lost, and other ranks propose while one waits."""

    def __init__(self, world_size, chance, loss):
        self.chance, self.loss, self.depth, self.gone = chance, loss, 0, set()
        self.decided = {}  # slot -> [(rank that holds it, word)]
        places = [points.Place("127.0.0.1", 1, 0, "")] * world_size
        self.points = [points.Point("127.0.0.1", "token", rank) for rank in range(world_size)]
        self.agreements = []
        for rank, point in enumerate(self.points):
            point.hosts, point.labels, point.places = [0] * world_size, ["node-a"], places
            one = agreement.Agreement(point, [], False, 10.0)
            one.survey.close()
            one.survey = _Survey(self, rank)
            self.agreements.append(one)

    def propose(self, rank, slot, word):
        self.agreements[rank]._next_proposal = 0.0
        return self.agreements[rank]._propose(slot, word)

    def interrupt(self):
        """Another rank proposes, or ends, in the middle of what one does."""
        if self.depth < MOST_NESTED and self.chance.random() < NESTS:
            self.depth += 1
            self.any_proposes()
            self.depth -= 1
        if self.chance.random() < 0.002 and len(self.gone) < len(self.points) - 1:
            self.gone.add(self.chance.choice([r for r in range(len(self.points)) if r not in self.gone]))

    def any_proposes(self):
        living = [rank for rank in range(len(self.points)) if rank not in self.gone]
        rank, number = self.chance.choice(living), self.chance.randrange(1 << 30)
        slot = len(self.points[rank].slots.words)
        self.propose(rank, slot, {"failed": ["PeerError", rank, f"{slot}: {number}"]})

    def know(self, rank, question):
        """No two living ranks hold different words. Where all who held one have ended, another may come."""
        slots = self.points[rank].slots
        first = len(slots.words)
        self.points[rank].answer(question)
        for slot, word in enumerate(slots.words[first:], first):
            held = self.decided.setdefault(slot, [])
            for other, its in held:
                assert its == word or other in self.gone, f"slot {slot} of ranks {rank} and {other}"
            held.append((rank, word))


class _Survey:
    def __init__(self, network, rank):
        self.network, self.rank = network, rank

    def seen(self):
        return {
            rank: Seen.GONE if rank in self.network.gone else Seen.HERE
            for rank in range(len(self.network.points))
        }

    def ask(self, question, enough, limit):
        """Mostly the smallest majority is reached, another one each time: that is where two meet."""
        network, found = self.network, {}
        chance, size = network.chance, len(network.points)
        others = [rank for rank in range(size) if rank != self.rank and rank not in network.gone]
        reached = chance.randrange(size) if chance.random() < network.loss else size // 2
        order = [self.rank, *chance.sample(others, min(reached, len(others)))]
        chance.shuffle(order)
        for rank in order:
            network.interrupt()
            if self.rank in network.gone:
                return {}  # it has ended: nothing more comes of this
            if rank not in network.gone:
                answer = network.points[rank].answer(json.loads(json.dumps(question)))
                if rank == self.rank or chance.random() >= UNHEARD:
                    found[rank] = json.loads(json.dumps(answer))
        return found

    def tell(self, question):
        for rank in range(len(self.network.points)):
            if rank not in self.network.gone and (rank == self.rank or self.network.chance.random() < KNOWN):
                self.network.know(rank, json.loads(json.dumps(question)))


def decide_across(seed):
    """Ranks propose across each other, messages are lost, and ranks end, between any two messages. Returns
    how many words were decided.
    """
    chance = random.Random(seed)
    network = _Network(chance.choice([2, 3, 3, 3, 4, 5]), chance, chance.choice([0.1, 0.3, 0.5]))
    try:
        for _ in range(ROUNDS):
            if len(network.gone) < len(network.points) - 1:
                network.any_proposes()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from None
    finally:
        for point in network.points:
            point.close()
    return len(network.decided)


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_nobody_decides_differently(first):
    assert sum(decide_across(seed) for seed in range(first, first + 100)) > 100


@tier(slow=1)
@pytest.mark.timeout(900)
def test_nobody_decides_differently_many_times(some):
    for seed in some(range(10_000, 40_000)):
        decide_across(seed)


def test_a_ballot_never_comes_twice():
    """A second call of shrink() proposes something else for the same slot."""
    network = _Network(3, random.Random(0), 0.0)
    ballots = []
    for _ in range(3):
        one = agreement.Agreement(network.points[0], [], False, 10.0)
        one.survey.close()
        one.survey = network.agreements[0].survey
        ask = one.survey.ask
        one.survey.ask = lambda question, *rest, ask=ask: ballots.append(question["ballot"]) or {}
        assert one._propose(0, "over") is None
    assert len(set(ballots)) == 3
    for point in network.points:
        point.close()


# --- the point


@pytest.fixture
def point():
    made = points.Point("127.0.0.1", "token", 0)
    made.serve([0, 1], ["node-a", "node-b"], [made.place, made.place], None, None)
    yield made
    made.close()


def talk(place: points.Place, *lines: bytes) -> bytes:
    """What comes from a point before it closes the connection, or is silent for a while."""
    with socket.create_connection(place[:2], 5) as connection:
        connection.settimeout(10)
        said = b""
        with contextlib.suppress(OSError):  # it has ended the connection, and not read all
            for line in lines:
                connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(1 << 16):
                said += data
    return said


HELLO = door.hello_of("token", 0, points.ASK, 1)
LOOK = b'{"id": 7, "ask": "look"}\n'


def ask(place: points.Place, *lines: bytes) -> list:
    """The answers to a rank of the group."""
    said = talk(place, HELLO, *lines)
    assert door.is_reply(said, "token", 0, points.ASK)
    return [json.loads(line) for line in said[door.WORD :].splitlines()]


GARBAGE = {
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "zero": b"\x00\xff\n" * 100,
    "list": b"[]\n" * 20,
    "a word": b'{"word": "wrong", "id": 1, "ask": "look"}\n',
    "number": b"1" * 9999 + b"\n",
    "nothing": b"",
    "half a hello": HELLO[:20],
    "another group's hello": door.hello_of("other", 0, points.ASK, 1) + LOOK,
    "another rank's hello": door.hello_of("token", 1, points.ASK, 0) + LOOK,
    "a tie": door.hello_of("token", 0, "tie", 1) + LOOK,
    "a hello with a wrong number": HELLO[: door.WORD] + b"rank one" + LOOK,
    "a hello that is not ASCII": b"\xff" * door.HELLO + LOOK,
    "deep": b"[" * 200_000 + b"\n",
    "deep objects": b'{"a":' * 100_000 + b"\n",
    "long": b"x" * (2 << 20),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_a_stranger_gets_no_answer(point: points.Point, garbage: bytes) -> None:
    assert talk(point.place, garbage) == b""
    assert ask(point.place, LOOK) == [{"id": 7, "words": [], "here": None, "left": False}]


@pytest.mark.parametrize(
    "line",
    [b"7\n", b"[]\n", b"{}\n", b'{"id": 8, "ask": "something"}\n', *list(GARBAGE.values())[-3:]],
    ids=["number", "list", "nothing", "unknown", "deep", "deep objects", "long"],
)
def test_a_line_that_cannot_be_answered_ends_its_connection_only(point: points.Point, line: bytes) -> None:
    """Also where it comes from a rank of the group."""
    with (
        socket.create_connection(point.place[:2], 5) as wrong,
        socket.create_connection(point.place[:2], 5) as right,
    ):
        for one in (wrong, right):
            one.settimeout(10)
            one.sendall(HELLO + LOOK)
            answered(one)
        with contextlib.suppress(OSError):
            wrong.sendall(line + LOOK)
            assert wrong.recv(1) == b""
        right.sendall(LOOK)
        assert answered(right) == {"id": 7, "words": [], "here": None, "left": False}


def answered(connection: socket.socket) -> dict:
    said = b""
    while not said.endswith(b"\n"):
        data = connection.recv(1 << 16)
        assert data, "the connection has ended"
        said += data
    return json.loads(said[said.index(b"{") :])


def test_silent_connections_are_few_and_end(point: points.Point, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "SECONDS", 1.0)
    before, silent = len(os.listdir("/proc/self/fd")), []
    for _ in range(4 * door.MOST):
        silent.append(socket.create_connection(point.place[:2], 5))
    assert ask(point.place, LOOK)
    assert len(point.door.waiting) <= door.MOST
    assert len(os.listdir("/proc/self/fd")) - before <= len(silent) + door.MOST
    end = time.monotonic() + 10
    while point.door.waiting:
        assert time.monotonic() < end
        time.sleep(0.05)
    for one in silent:
        one.settimeout(5)
        with contextlib.suppress(ConnectionError):
            assert one.recv(1) == b""
        one.close()


def test_the_thread_ends_with_the_last_point():
    made = points.Point("127.0.0.1", "token", 0)
    made.serve([0], ["node-a"], [made.place], None, None)
    (thread,) = [one for one in threading.enumerate() if one.name == "pycomm survivors"]
    made.close()
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(made.place[:2], 5)


def test_a_closed_group_stays_known_once_it_is_shrunk():
    for words, answers in (([], False), (["over"], False), ([{"members": [0]}, "formed"], True)):
        made = points.Point("127.0.0.1", "token", 0)
        made.serve([0], ["node-a"], [made.place], None, None)
        made.slots.know(words)
        made.is_left = lambda: True
        (thread,) = [one for one in threading.enumerate() if one.name == "pycomm survivors"]
        made.agent.ring()
        if answers:
            (answer,) = ask(made.place, LOOK)
            assert answer["words"] == words
            made.close()
        thread.join(10)
        assert not thread.is_alive(), words
