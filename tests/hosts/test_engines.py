"""Gloo's contexts between real processes: what is made works; what goes wrong on one rank is said by all, in
the same words and soon.
"""

import datetime
import os
import re
import signal
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from held import held, held_after
from tiers import tier

from pycomm import hosts as hosts_package
from pycomm import values
from pycomm.hosts import addresses, engine, probe, records
from pycomm.hosts.meeting import Meeting
from pycomm.survivors import door
from pycomm.testing import RankProcesses

TIMEOUT = 20.0
TWO_AND_TWO = [0, 0, 1, 1]


def serve(rank, link):
    """A store, in a process of its own: the one that forks the ranks must have no threads."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link.send(server.port)
    link.recv()


def run(body, hosts=TWO_AND_TWO, ranks=None, store="tcp", tmp_path=None):
    """body(rank, store, hosts) in a process for each rank: {rank: what it returned, or its exception}."""

    def main(rank, link, port):
        if store == "file":
            mine = dist.FileStore(str(tmp_path / "store"), len(hosts))
        else:
            limit = datetime.timedelta(seconds=TIMEOUT)
            mine = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        return body(rank, mine, hosts)

    chosen = range(len(hosts)) if ranks is None else ranks
    with RankProcesses([0], serve, limit=100) as server:
        port = server.recv(0, 30)
        with RankProcesses(chosen, main, port, limit=60) as processes:
            return {rank: outcome.value for rank, outcome in processes.outcomes(40).items()}


def make(rank, store, hosts, token="first", timeout=TIMEOUT):
    labels = [f"node-{chr(ord('a') + host)}" for host in range(max(hosts) + 1)]
    data, control, point = hosts_package.makers().engines(store, rank, hosts, labels, token, timeout)
    point.close()
    return data, control


def exchange(group, rank, world_size, tag):
    """Every rank sends its number to every other one: what arrived, by sender."""
    others = [peer for peer in range(world_size) if peer != rank]
    found = {peer: torch.full((3,), -1) for peer in others}
    works = [group.recv([found[peer]], peer, tag) for peer in others]
    works += [group.send([torch.full((3,), rank)], peer, tag) for peer in others]
    for work in works:
        work.wait()
    return {peer: found[peer].tolist() for peer in others}


def use(rank, store, hosts):
    data, control = make(rank, store, hosts)
    leaders = [hosts.index(host) for host in range(max(hosts) + 1)]
    assert (control is not None) == (rank in leaders)
    assert exchange(data, rank, len(hosts), 7) == {p: [p] * 3 for p in range(len(hosts)) if p != rank}
    if control is not None:
        assert control.size() == len(leaders) and control.rank() == hosts[rank]
        exchange(control, hosts[rank], len(leaders), 8)
    return "ok"


@tier(quick=1 / 5)
@pytest.mark.parametrize("hosts", [[0, 1], TWO_AND_TWO, [0, 1, 0, 1], [0, 1, 1, 1, 2], [0]], ids=str)
@pytest.mark.parametrize("store", ["tcp", "file"])
def test_all_ranks_and_all_leaders_exchange_messages(hosts, store, tmp_path):
    found = run(use, hosts, store=store, tmp_path=tmp_path)
    assert found == dict.fromkeys(range(len(hosts)), "ok")


def test_where_torch_does_not_let_choose_a_device(monkeypatch):
    """Then the interface is named in the environment."""
    monkeypatch.delattr(dist.ProcessGroupGloo, "create_device")

    def body(rank, store, hosts):
        assert use(rank, store, hosts) == "ok"
        return os.environ["GLOO_SOCKET_IFNAME"]

    assert run(body) == dict.fromkeys(range(4), "lo")


def test_an_operation_has_no_limit_of_gloos():
    """The limit is given when a context is made; a later one does not reach it."""

    def body(rank, store, hosts):
        context = engine._gloo_on(addresses.Address("lo", "127.0.0.1"))(store, 0, 1)
        return context.options._timeout

    assert run(body, hosts=[0]) == {0: datetime.timedelta(seconds=engine.GLOO_TIMEOUT_S)}
    assert engine.GLOO_TIMEOUT_S >= values.LONGEST_TIMEOUT


@tier(slow=1)
def test_two_hundred_groups_leave_nothing(tmp_path):
    def body(rank, store, hosts):
        def meet(number):
            store.add(f"met {number}", 1)
            while store.add(f"met {number}", 0) < len(hosts):
                time.sleep(0.001)

        for number in range(200):
            data, control = make(rank, store, hosts, token=f"attempt {number}")
            del data, control
            if number == 9:
                meet(1)
                keys, before = store.num_keys(), held()
                meet(2)
        meet(3)
        more, after = store.num_keys() - keys, held_after(before)
        meet(4)
        return more, before, after

    for more, before, after in run(body, hosts=[0, 1]).values():
        assert more <= 3, "a group left keys in the store"
        assert after.threads <= before.threads and after.files <= before.files, (before, after)


# --- failures --------------------


class Failure(NamedTuple):
    kind: str
    text: str
    seconds: float


def failing(rank, store, hosts, timeout=TIMEOUT):
    start = time.monotonic()
    try:
        make(rank, store, hosts, timeout=timeout)
    except Exception as error:
        return Failure(type(error).__name__, str(error), time.monotonic() - start)
    raise AssertionError("the group was made")


def on_rank(faulty, prepare, **options):
    """A body that calls prepare(), on some ranks alone, before it fails."""

    def body(rank, store, hosts):
        if rank in faulty:
            prepare(rank)
        return failing(rank, store, hosts, **options)

    return body


def assert_all_say(found, kind, text, within=10.0, seen_by=None):
    """All raise the same words. Those that have seen it themselves say no more, the others who has; seconds
    are far below the limit, and above what a busy machine takes.
    """
    pattern = re.compile(text + r"( \(seen by rank (\d+)\))?")
    seen = set()
    for rank, failure in found.items():
        assert isinstance(failure, Failure), (rank, failure)
        match = pattern.fullmatch(failure.text)
        assert match and failure.kind == kind and failure.seconds < within, (rank, failure)
        seen.add(rank if match[1] is None else int(match[2]))
    assert len(seen) == 1 and seen <= set(found if seen_by is None else seen_by), (seen, found)


def test_a_rank_that_does_not_come():
    found = run(lambda *of: failing(*of, timeout=2.0), ranks=[0, 1, 2])
    assert_all_say(found, "TimeoutError", r"Rank 3 \(node-b\) did not come within 2 s\.")


def test_ranks_that_do_not_come():
    found = run(lambda *of: failing(*of, timeout=2.0), hosts=[0, 0, 1, 1, 2], ranks=[0, 2])
    text = r"Rank 1 \(node-a\), rank 3 \(node-b\), rank 4 \(node-c\) did not come within 2 s\."
    assert_all_say(found, "TimeoutError", text)


def test_one_that_comes_late_hears_why_there_is_no_group():
    def body(rank, store, hosts):
        if rank == 3:
            store.wait(["pycomm.hosts/first/failure"])
        return failing(rank, store, hosts, timeout=2.0)

    assert_all_say(
        run(body), "TimeoutError", r"Rank 3 \(node-b\) did not come within 2 s\.", seen_by=[0, 1, 2]
    )


def test_no_such_interface():
    body = on_rank([2], lambda rank: os.environ.update(PYCOMM_SOCKET_IFNAME="eth9"))
    text = r"PYCOMM_SOCKET_IFNAME='eth9' in the environment: no such interface has an address here\. "
    assert_all_say(run(body), "ValueError", text + r"There are .*lo \(127\.0\.0\.1.*\)\.", seen_by=[2])


def test_a_name_that_does_not_resolve(tmp_path):
    body = on_rank([1], lambda rank: os.environ.update(MASTER_ADDR="node-a.invalid"))
    found = run(body, store="file", tmp_path=tmp_path)
    text = r"MASTER_ADDR 'node-a\.invalid' cannot be resolved here \(.+\)\. Is the name known to all hosts\? "
    assert_all_say(found, "ValueError", text + r"An address works, too\.", seen_by=[1])


def pretend(**fields):
    """Records say this of their ranks: field -> value, or a function of the rank."""

    def prepare(rank):
        original = records.make_record

        def make_record(*arguments):
            values = {name: value(rank) if callable(value) else value for name, value in fields.items()}
            return original(*arguments)._replace(**values)

        records.make_record = make_record

    return prepare


def test_loopback_between_machines():
    body = on_rank(range(4), pretend(stack=lambda rank: f"boot of {rank // 2}"))
    text = r"Rank 0 \(node-a\) has the address 127\.0\.0\.1 \(lo\), which other hosts cannot reach\. "
    assert_all_say(run(body), "ValueError", text + r".*PYCOMM_SOCKET_IFNAME chooses the interface\.")


def test_an_address_that_two_machines_have():
    prepare = pretend(stack=lambda rank: f"boot of {rank // 2}", ip="172.17.0.1", interface="docker0")
    text = (
        r"Rank 0 \(node-a\) and rank 2 \(node-b\) are on different machines and have the same address, "
        r"172\.17\.0\.1 \(docker0\)\. .*PYCOMM_SOCKET_IFNAME=\^docker0 leaves this one out\."
    )
    assert_all_say(run(on_rank(range(4), prepare)), "ValueError", text)


CANNOT = r"Cannot reach rank 3 \(node-b, 127\.0\.0\.1\) from rank 0 \(node-a, 127\.0\.0\.1\) over lo"
ADVICE = r"\. Is a firewall in the way\? All ports between hosts are used\."


def test_a_port_that_refuses():
    found = run(on_rank([3], pretend(port=1)))
    assert_all_say(found, "RuntimeError", CANNOT + r" \(Connection refused\)" + ADVICE, seen_by=[0])


def test_a_rank_that_does_not_answer():
    def prepare(rank):
        probe.Listener.answer = lambda self: None

    body = on_rank([3], prepare, timeout=2.0)
    assert_all_say(run(body), "RuntimeError", CANNOT + " within 2 s" + ADVICE, seen_by=[0])


def test_somebody_else_at_the_address():
    def prepare(rank):
        door.reply_of = lambda *names: b"HTTP/1.1 400 Bad Request, friend"

    body = on_rank([3], prepare)
    text = CANNOT + r" \(somebody else answers there\)" + ADVICE
    assert_all_say(run(body), "RuntimeError", text, seen_by=[0])


def test_an_engine_that_cannot_be_made():
    def prepare(rank):
        def refuse(address):
            raise OSError("Too many open files")

        engine._gloo_on = refuse

    text = r"Gloo could not connect the ranks on 127\.0\.0\.1 \(lo\): Too many open files"
    assert_all_say(run(on_rank([3], prepare)), "RuntimeError", text, seen_by=[3])


def test_an_engine_that_hangs_on_one_rank():
    def prepare(rank):
        engine._gloo_on = lambda address: time.sleep(100)

    text = r"Gloo has not connected all ranks within 8 s\."  # all have met by then
    assert_all_say(run(on_rank([3], prepare, timeout=8.0)), "TimeoutError", text, within=30.0)


@pytest.mark.parametrize("when", ["before the contexts", "after its own"])
def test_a_rank_that_dies_while_the_group_is_made(when):
    def body(rank, store, hosts):
        if rank == 3:
            if when == "after its own":
                Meeting.wait_for_all = lambda *arguments: os._exit(9)
            else:
                engine._make = lambda *arguments: os._exit(9)
        if rank == 1 and when == "after its own":
            original = engine._make

            def late(meeting, *arguments):
                made = original(meeting, *arguments)
                store.wait(["pycomm.hosts/first/failure"])
                return made

            engine._make = late
        return failing(rank, store, hosts)

    found = run(body)
    assert isinstance(found.pop(3), ChildProcessError)
    text = r"Rank 3 \(node-b, 127\.0\.0\.1\) has died while the group was made\."
    assert_all_say(found, "LostRankError", text, seen_by=[0])


def test_ctrl_c_is_said_too():
    def body(rank, store, hosts):
        if rank == 2:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            with pytest.raises(KeyboardInterrupt):
                make(rank, store, hosts)
            return "interrupted"
        return failing(rank, store, hosts)

    found = run(body, ranks=[0, 1, 2])
    assert found.pop(2) == "interrupted"
    assert_all_say(found, "RuntimeError", r"Interrupted by KeyboardInterrupt\.", seen_by=[2, 0, 1])
