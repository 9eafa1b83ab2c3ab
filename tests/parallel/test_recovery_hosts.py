"""Trainings over hosts that lose ranks, and whole hosts, and go on (parallel/recovery/). Hosts are simulated;
more random kills: tests/recovery_kills.py --hosts.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiers import tier

import pycomm
import pycomm.parallel as par
from pycomm.parallel.recovery import neighbours
from pycomm.parallel.recovery.memory import CopyMemory, Memory, OwnMemory
from pycomm.testing import run_ranks
from pycomm.testing.emulated import Hosts, Unavailable

sys.path.insert(0, str(Path(__file__).parents[1]))
import recovery_kills as kills  # noqa: E402

pytestmark = pytest.mark.timeout(300)
LIMIT = 120.0
alone = functools.cache(kills.alone)


def case(plan, hosts, every=2, **victims):
    """victims: r0=("step", 3, 0.0)."""
    named = {int(rank[1:]): kills.Victim(*victim) for rank, victim in victims.items()}
    return kills.Case(plan, every, False, 0.0, named, hosts)


IN_STEP, IN_COPY = ("step", 4, 0.0), ("piece", 75, 0.0)


@tier(quick=1 / 12, slow=1 / 2)
@pytest.mark.parametrize(
    "one",
    [
        case("dp=4", "0011", r0=IN_STEP),
        case("dp=4", "0011", r0=IN_STEP, r1=IN_STEP),  # a whole host, with rank 0
        case("dp=4,zero=1", "0011", r2=IN_STEP, r3=IN_STEP),
        case("dp=4,zero=1", "0101", r0=IN_COPY, r2=IN_COPY),
        case("dp=4,zero=3", "0011", r0=IN_COPY, r1=IN_COPY),
        case("dp=4,zero=3", "0011", every=1, r1=IN_STEP, r2=("shrink", 1, 0.0)),
        case("dp=2,tp=2", "0011", r0=IN_STEP, r1=IN_STEP),
        case("dp=2,tp=2", "0101", r3=IN_STEP),  # one is left without a part, and holds copies
        case("dp=2,tp=2", "0001", r0=IN_STEP, r1=("rebuild", 1, 0.05), r2=("rebuild", 1, 0.05)),
        case("dp=4,zero=3", "0122", r2=IN_COPY, r3=IN_COPY),  # the first host fetches what the second holds
    ],
    ids=lambda one: f"{one.plan}-{one.hosts}-{''.join(map(str, one.victims))}",
)
def test_killed_ranks_and_hosts_change_nothing(one):
    """Parameters and loss of one process, on every rank that lives, and nothing left."""
    kills.check(one, alone())


@tier(slow=1 / 8)
@pytest.mark.parametrize("seed", range(9001, 9009))
def test_random_kills(seed):
    kills.check(kills.draw_over_hosts(seed), alone())


@tier(slow=1 / 6)
@pytest.mark.parametrize("seed", [1010, 1013])
@pytest.mark.parametrize("change", [kills.with_children, kills.with_save, kills.with_stops])
def test_random_kills_that_are_more_than_kills(change: Callable, seed: int) -> None:
    """Beside forked children, in asynchronous saves, and where some are stopped."""
    kills.check(change(kills.draw_over_hosts(seed), seed), alone())


def test_two_hosts_at_once_are_too_many(tmp_path):
    """Of three hosts in a ring a lost one and the one behind it held what the first had written."""

    def rank_main(rank):
        model, opt = kills.make()
        run = par.resilient(model, opt, par.Plan(dp=3, zero=1), snapshot_every=2)
        par.save(model, opt, tmp_path / "saved")
        for number in range(6):
            if number == 3 and rank != 2:
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(kills.batch(number), clip=1.0, microbatches=2)

    options = {"mode": "processes", "backend": "pycomm", "hosts": "012", "fail": False, "timeout": LIMIT}
    error = run_ranks(3, rank_main, **options)[2]
    assert isinstance(error, RuntimeError), error
    text = str(error)
    assert "what was lost at step 4 cannot be recovered" in text, text
    assert "no snapshot is whole" in text and "a host and the next" in text, text
    assert f"parallel.load(model, opt, '{tmp_path}/saved')" in text, text


@pytest.mark.parametrize(
    ("writers", "hosts", "expected"),
    [
        ([0, 1, 2, 3], [0, 0, 1, 1], {0: 2, 1: 3, 2: 0, 3: 1}),
        ([0, 1, 2, 3], [0, 1, 0, 1], {0: 1, 2: 3, 1: 0, 3: 2}),
        ([0, 1], [0, 0, 1], {0: 2, 1: 2}),  # who has no part holds, too
        ([0, 1, 2], [0, 0, 0, 1], {0: 3, 1: 3, 2: 3}),
        ([0, 1, 2, 3], [0, 1, 2, 2], {0: 1, 1: 2, 2: 0, 3: 0}),
        ([0, 1], [0, 0], {}),
    ],
)
def test_holders(writers, hosts, expected):
    found = neighbours.holders_of(writers, hosts)
    assert found == expected
    assert all(hosts[writer] != hosts[holder] for writer, holder in found.items())


@pytest.mark.parametrize(
    "nbytes", [0, 1, 4095, neighbours.PIECE - 1, neighbours.PIECE, 2 * neighbours.PIECE + 7]
)
def test_a_copy_is_the_same(nbytes):
    values = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)

    def rank_main(comm):
        token = b"0123456789abcdef"
        if comm.rank == 1:
            copy = CopyMemory(token)
            for _ in range(3):
                neighbours.receive_slot(comm, copy, 0)
            opened = Memory.open(copy.address)
            (about, ((key, place),)) = opened.catalog(12)
            same = bool((opened.tensor_at(place, values.shape, torch.uint8) == values).all())
            return sorted(opened.numbers()), about, key, same
        memory = OwnMemory()
        for number in (10, 11, 12):
            memory.write(number, f"about {number}", [("values", values)])
            neighbours.send_slot(comm, memory, number, 1)
        return None

    assert run_ranks(2, rank_main, hosts="01")[1] == ([11, 12], "about 12", "values", True)


def test_a_holder_without_memory():
    """The writer is told, and the holder goes on."""

    class Full(CopyMemory):
        def put(self, place, values):
            raise OSError("no memory")

    def rank_main(comm):
        if comm.rank == 1:
            full = Full(b"0123456789abcdef")
            neighbours.receive_slot(comm, full, 0)
            return full.numbers()
        memory = OwnMemory()
        memory.write(1, None, [("values", torch.ones(5000))])
        with pytest.raises(RuntimeError, match="rank 1 of the crew has no memory for a copy"):
            neighbours.send_slot(comm, memory, 1, 1)
        return comm.rank

    assert run_ranks(2, rank_main, hosts="01") == [0, {}]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1"])
def test_no_copy_is_awaited_when_a_rank_closes(plan, monkeypatch):
    """Who still waited for it would take the group from those that are behind."""

    def rank_main(rank):
        left, close = [], pycomm.Communicator.close

        def look_and_close(comm):
            left.extend(thread.name for thread in threading.enumerate() if thread.name == "pycomm copies")
            close(comm)

        monkeypatch.setattr(pycomm.Communicator, "close", look_and_close)
        model, opt = kills.make()
        run = par.resilient(model, opt, par.Plan.parse(plan), snapshot_every=2, timeout=LIMIT)
        for number in run.steps(3):
            run.step(kills.batch(number), clip=1.0, microbatches=2)
        return left if run.active else None

    found = run_ranks(2, rank_main, mode="processes", backend="pycomm", hosts="01", timeout=LIMIT)
    assert found == [[], []]


@tier(slow=1)
def test_a_stopped_rank_is_left_out(tmp_path):
    """It wakes up while the others still train, and is told; they end as if it had never been."""

    def rank_main(rank):
        model, opt = kills.make()
        run = par.resilient(model, opt, par.Plan(dp=3, zero=1), snapshot_every=2)
        for number in run.steps(kills.STEPS):
            if rank == 2 and number == 4:
                (tmp_path / "stopped").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            if rank == 0 and number == kills.STEPS - 1:
                os.kill(int((tmp_path / "stopped").read_text()), signal.SIGCONT)
                until = time.monotonic() + LIMIT
                while not (tmp_path / "over").exists() and time.monotonic() < until:
                    time.sleep(0.01)
            loss = run.step(kills.batch(number), clip=1.0, microbatches=2)
        return {name: value.numpy() for name, value in par.full_state_dict(model).items()}, loss.item()

    def body(rank):
        try:
            return rank_main(rank)
        finally:
            if rank == 2:
                (tmp_path / "over").write_text("")

    options = {"hosts": "010", "fail": False, "timeout": LIMIT, "operation_timeout": 10.0}
    results = run_ranks(3, body, mode="processes", backend="pycomm", **options)
    assert isinstance(results[2], pycomm.AbortedError), results[2]
    assert "left out" in str(results[2]) and "has to end" in str(results[2])
    parameters, last, _ = alone(False)
    for state, loss in results[:2]:
        assert abs(loss - last) <= kills.TOLERANCE
        for name, value in parameters.items():
            assert (torch.as_tensor(state[name]) - value).abs().max() <= kills.TOLERANCE


@contextlib.contextmanager
def emulated(placement):
    hosts = Hosts(placement)
    try:
        hosts.__enter__()
    except Unavailable as error:
        pytest.skip(f"emulated hosts: {error}")
    with contextlib.closing(hosts):
        yield hosts


@tier(quick=1 / 2)
@pytest.mark.parametrize("end", ["kill", "cut"])
def test_a_host_of_the_network_is_lost(end):
    """Emulated hosts, and all that torch makes from MASTER_ADDR. "kill": all processes of host 0, which has
    the store. "cut": the cable of host 1, whose ranks may live; they learn that they cannot go on.
    """
    host = {"kill": 0, "cut": 1}[end]

    def main(rank, link):
        os.environ["PYCOMM_HOST_TIMEOUT"] = "2"
        model, opt = kills.make()
        run = par.resilient(model, opt, par.Plan(dp=4, zero=1), snapshot_every=2, timeout=LIMIT)
        for number in run.steps(kills.STEPS):
            if number == 5 and rank // 2 == host and end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 5 and end == "cut":
                link.send("ready")
                link.recv()
            loss = run.step(kills.batch(number), clip=1.0, microbatches=2)
        return {name: value.numpy() for name, value in par.full_state_dict(model).items()}, loss.item()

    with emulated("2x2") as hosts, hosts.ranks(main, limit=LIMIT) as ranks:
        if end == "cut":
            assert [ranks.recv(rank, LIMIT) for rank in range(4)] == ["ready"] * 4
            hosts.set_link(1, False)
            for link in ranks.links.values():
                link.send("go")
        found = {rank: outcome.value for rank, outcome in ranks.outcomes(LIMIT).items()}
    parameters, last, _ = alone(False)
    for rank, value in found.items():
        if rank // 2 == host:
            text = "neither more than half nor half with the lowest"
            assert isinstance(value, ChildProcessError) or text in str(value), value
            assert end == "kill" or "There is no checkpoint to go back to" in str(value), value
            continue
        state, loss = value
        assert abs(loss - last) <= kills.TOLERANCE
        for name, expected in parameters.items():
            assert (torch.as_tensor(state[name]) - expected).abs().max() <= kills.TOLERANCE
