"""Of two sides of a group that cannot reach each other one at most goes on, whatever a firewall does to their
packets, and whether the link heals; and a rank that is killed is left out at once. Hosts are emulated by
namespaces; skipped, with the reason, where the system does not permit them.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from firewall import KINDS, Firewall
from test_emulated import open_hosts, own_store
from tiers import tier

import pycomm
import pycomm.parallel as par

pytestmark = pytest.mark.timeout(600)
LIMIT = 60.0  # seconds; never reached where the code is right
HOST_TIMEOUT = 3.0
STEP = 0.1  # seconds between two operations: the processors are for the many processes of a test
CALM = 4 * HOST_TIMEOUT  # seconds after which a group that is whole was not harmed by the cut
HEALS = (("drop", 4.5, False), ("reset", 2.0, False), ("unreachable", 5.5, False))  # after so many seconds
# placement -> (the host that is cut off, the ranks that go on)
CUTS = {"1+1": (1, [0]), "2+2": (1, [0, 1]), "1+1+1": (0, [1, 2]), "3+1": (0, [0, 1, 2])}


class Play(NamedTuple):
    """A group on hosts of its own. heals: seconds after which the link is back, None: never. killed: the rank
    that is killed while the firewall begins, None: none.
    """

    kind: str
    heals: float | None
    killed: int | None
    hosts: object
    ranks: object
    firewall: Firewall

    @property
    def name(self) -> str:
        killed = "" if self.killed is None else f", rank {self.killed} killed"
        return f"{self.kind}, {'stays' if self.heals is None else f'heals after {self.heals:g} s'}{killed}"


def late(end: float) -> torch.Tensor:
    """By this all ranks end in the same step."""
    return torch.tensor([float(time.monotonic() > end)])


# --- what a rank does: until its side goes on, or cannot --------------------


def by_shrink(rank: int, size: int, cut: Callable[[], None]) -> list[int]:
    comm = pycomm.Communicator(own_store(), rank, size, timeout=LIMIT)
    comm.barrier()
    cut()
    end = time.monotonic() + CALM
    with contextlib.suppress(pycomm.CommError):
        while not comm.all_reduce(late(end), "max"):
            time.sleep(STEP)
        return list(range(size))
    new = comm.shrink(timeout=LIMIT)
    return new.all_gather(torch.tensor([rank])).flatten().tolist()


def by_shrink_group(rank: int, size: int, cut: Callable[[], None]) -> list[int]:
    dist.init_process_group("pycomm")
    dist.barrier()
    cut()
    end, ends = time.monotonic() + CALM, torch.zeros(1)
    with contextlib.suppress(dist.DistBackendError):
        while not ends:
            ends = late(end)
            dist.all_reduce(ends, dist.ReduceOp.MAX)
            time.sleep(STEP)
        return list(range(size))
    pycomm.shrink_group(timeout=LIMIT)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, rank)
    part = dist.new_group(list(range(len(found))))
    dist.barrier(part)
    return found


def by_resilient(rank: int, size: int, cut: Callable[[], None]) -> list[int]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run = par.resilient(model, opt, f"dp={size}", snapshot_every=1, timeout=LIMIT)
    end = time.monotonic() + 10 * LIMIT
    for number in run.steps(1000000):
        target = torch.full((3, 4), 1e9 * late(end).item())
        loss = run.step((torch.ones(3, 4), target), torch.nn.functional.mse_loss, sharded=True)
        time.sleep(3 * STEP)
        if number == 1:
            cut()
            end = time.monotonic() + CALM
        if run.recoveries or loss > 1e6:  # the loss is that of all ranks
            break
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, rank)
    return found


# Every cut and every way; the other pairs are deep.
SLOW = [("1+1", "resilient"), ("2+2", "shrink"), ("1+1+1", "shrink_group"), ("3+1", "shrink_group")]
WAYS = {"shrink": by_shrink, "shrink_group": by_shrink_group, "resilient": by_resilient}


def rank_main(rank: int, link: object, way: str, size: int) -> tuple:
    os.environ["PYCOMM_HOST_TIMEOUT"] = str(HOST_TIMEOUT)
    os.environ["PYCOMM_TIMEOUT"] = str(LIMIT)  # how long resilient waits for ranks that live and gave up
    torch.set_num_threads(1)

    def cut() -> None:
        link.send("ready")
        assert link.recv() == "go"

    try:
        found = True, sorted(WAYS[way](rank, size, cut))
    except (pycomm.CommError, dist.DistError) as error:
        found = False, f"{type(error).__name__}: {error}"
    link.send("done")
    link.recv()  # whoever has ended could be taken for dead by the others
    return found


# --- what the test does --------------------


def run_plays(placement: str, way: str, kinds: tuple) -> dict[Play, dict]:
    """{play: {rank: (whether it goes on, with whom or why not)}}. kinds: (kind, heals, whether a rank is
    killed). All plays run at the same time, since most of it is waiting.
    """
    found, (cut_off, going_on) = {}, CUTS[placement]
    with contextlib.ExitStack() as opened:
        plays = []
        for kind, heals, kills in kinds:
            hosts = opened.enter_context(contextlib.closing(open_hosts(placement)))
            size = len(hosts.placement)
            ranks = opened.enter_context(hosts.ranks(rank_main, way, size, limit=3 * LIMIT))
            firewall = Firewall(hosts, cut_off, kind)
            opened.callback(firewall.end)
            plays.append(Play(kind, heals, going_on[-1] if kills else None, hosts, ranks, firewall))
        for play in plays:
            for rank in play.ranks.links:
                assert play.ranks.recv(rank, LIMIT) == "ready"
        for play in plays:
            if play.killed is not None:
                play.ranks.kill(play.killed, signal.SIGKILL)
            play.firewall.begin()
        begun = time.monotonic()
        for play in plays:
            for rank in living(play):
                play.ranks.links[rank].send("go")
        for play in sorted((play for play in plays if play.heals is not None), key=lambda play: play.heals):
            time.sleep(max(0.0, begun + play.heals - time.monotonic()))
            play.firewall.end()
        for play in plays:
            for rank in living(play):
                said = play.ranks.recv(rank, 2 * LIMIT)
                assert said == "done", f"{play.name}: rank {rank}: {said}"
            for rank in living(play):
                play.ranks.links[rank].send("end")
            outcomes = play.ranks.outcomes(LIMIT)
            found[play] = {rank: outcomes[rank].value for rank in living(play)}
    return found


def living(play: Play) -> list[int]:
    return [rank for rank in play.ranks.links if rank != play.killed]


def check(placement: str, way: str, kinds: tuple) -> None:
    for play, found in run_plays(placement, way, kinds).items():
        shown = f"{play.name}: {found}"
        assert all(isinstance(value, tuple) for value in found.values()), shown
        groups = {tuple(value) for goes_on, value in found.values() if goes_on}
        assert len(groups) <= 1, f"two sides go on: {shown}"
        for group in groups:
            assert sorted(rank for rank, (goes_on, _) in found.items() if goes_on) == list(group), shown
        if play.heals is None and play.killed is None:
            assert groups == {tuple(CUTS[placement][1])}, shown


KILLS = (("reset", None, True), ("unreachable", 3.0, True))
ALL = (*((kind, None, False) for kind in KINDS), *HEALS, *KILLS)
REJECTS = tuple((kind, None, False) for kind in ("reset", "unreachable"))


@pytest.mark.parametrize(
    ("placement", "way"),
    [("1+1", "shrink"), pytest.param("1+1+1", "shrink_group", marks=pytest.mark.slow)],
)
def test_a_firewall_that_rejects(placement: str, way: str) -> None:
    """Each side sees the ports of the other refuse, and its connections reset: no death is certain."""
    check(placement, way, REJECTS)


@tier(slow=1)
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("placement", "way"),
    [
        pytest.param(placement, way, marks=[pytest.mark.deep] * ((placement, way) not in SLOW))
        for placement in CUTS
        for way in WAYS
    ],
)
def test_one_side_at_most_goes_on(placement: str, way: str, deep: bool) -> None:
    """shrink_group and resilient shrink as shrink() does, and take more processor: without --deep each of
    their three runs has a third of the plays.
    """
    for run in range(20 if deep else 3):
        check(placement, way, ALL if deep or way == "shrink" else ALL[run::3])


# --- deaths --------------------


@pytest.mark.parametrize(
    ("dead", "child"), [(0, False), (1, True)], ids=["rank 0", "rank 1, which has a child"]
)
def test_a_kill_needs_no_quorum(dead: int, child: bool) -> None:
    """One rank per host. The other one does not wait for a silence of PYCOMM_HOST_TIMEOUT."""

    def main(rank: int, link: object) -> tuple:
        os.environ["PYCOMM_HOST_TIMEOUT"] = str(LIMIT)
        comm = pycomm.Communicator(own_store(), rank, 2, timeout=LIMIT)
        comm.barrier()
        if rank == dead:
            if child and os.fork() == 0:
                link.close()
                time.sleep(LIMIT)
                os._exit(0)
            time.sleep(0.3)  # the child closes what it has of its parent
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(pycomm.CommError):
            comm.barrier(timeout=5.0)
        begun = time.monotonic()
        new = comm.shrink(timeout=LIMIT)
        return new.former_ranks, time.monotonic() - begun

    with contextlib.closing(open_hosts("1+1")) as hosts, hosts.ranks(main, limit=LIMIT) as ranks:
        members, took = ranks.outcomes(LIMIT)[1 - dead].value
    assert members == [1 - dead] and took < LIMIT / 4, (members, took)


def test_a_side_that_has_gone_on_and_ended() -> None:
    """Its sockets are closed when the link heals. That is not taken for a death before the shrink."""

    def main(rank: int, link: object) -> tuple:
        os.environ["PYCOMM_HOST_TIMEOUT"] = "2"
        comm = pycomm.Communicator(own_store(), rank, 2, timeout=LIMIT)
        comm.barrier()
        link.send("ready")
        assert link.recv() == "go"
        with contextlib.suppress(pycomm.CommError):
            while True:
                comm.all_reduce(torch.ones(3))
        if rank == 0:
            new = comm.shrink(timeout=LIMIT)
            new.close()
            return new.former_ranks
        errors = []
        for _ in range(3):
            with pytest.raises((pycomm.PeerError, pycomm.AbortedError)) as caught:
                comm.shrink(timeout=LIMIT)
            errors.append(type(caught.value).__name__)
            link.send("refused")
            assert link.recv() == "again"
        return errors

    with contextlib.closing(open_hosts("1+1")) as hosts, hosts.ranks(main, limit=LIMIT) as ranks:
        for rank in range(2):
            assert ranks.recv(rank, LIMIT) == "ready"
        firewall = Firewall(hosts, 1, "drop")
        firewall.begin()
        for link in ranks.links.values():
            link.send("go")
        assert ranks.recv(1, LIMIT) == "refused"
        ranks.processes[0].join(LIMIT)
        assert ranks.processes[0].exitcode == 0
        firewall.end()
        for again in range(3):
            ranks.links[1].send("again")
            if again < 2:
                assert ranks.recv(1, LIMIT) == "refused"
        found = {rank: outcome.value for rank, outcome in ranks.outcomes(LIMIT).items()}
    assert found[0] == [0] and found[1][0] == "PeerError" and len(found[1]) == 3, found
