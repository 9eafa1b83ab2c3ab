"""Hosts that are emulated by namespaces: what they are, and Gloo's contexts between them. Skipped, with the
reason, where the system does not permit them.
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_engines import exchange, failing, make
from tiers import tier

import pycomm
from pycomm import env
from pycomm.hosts import engine
from pycomm.testing import emulated
from pycomm.testing.emulated import Hosts, Unavailable, parse_placement

COMMAND = [sys.executable, "-m", "pycomm.testing.emulated"]
LIMIT = 60


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("2x1", [0, 1]),
        ("2x3", [0, 0, 0, 1, 1, 1]),
        ("1x2", [0, 0]),
        ("3+5", [0, 0, 0, 1, 1, 1, 1, 1]),
        ("1+4+1", [0, 1, 1, 1, 1, 2]),
        ("0101", [0, 1, 0, 1]),
        ("00", [0, 0]),
    ],
)
def test_placements(text, hosts):
    assert parse_placement(text) == hosts


@pytest.mark.parametrize("text", ["", "2", "2x", "0x2", "2x0", "3+0", "1010", "0202", "2x2x2", "a", "999x1"])
def test_wrong_placements(text):
    with pytest.raises(ValueError, match=re.escape(f"placement {text!r}: must be like 2x4")):
        parse_placement(text)


def open_hosts(placement, **options):
    hosts = Hosts(placement, **options)
    try:
        hosts.__enter__()
    except Unavailable as error:
        pytest.skip(f"emulated hosts: {error}")
    return hosts


@pytest.fixture(scope="module")
def two_by_two():
    hosts = open_hosts("2x2", rate="1gbit")
    yield hosts
    hosts.close()


def run(hosts, body, ranks=None):
    """body(rank, link) on every rank: {rank: what it returned, or its exception}."""
    with hosts.ranks(body, limit=LIMIT, ranks=ranks) as processes:
        return {rank: outcome.value for rank, outcome in processes.outcomes(40).items()}


def read(path):
    return Path(path).read_text().strip()


# --- what they are --------------------


def test_each_host_is_one(two_by_two):
    def body(rank, link):
        place = tuple(env.for_child()[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"))
        boot = read("/proc/sys/kernel/random/boot_id")
        rates = subprocess.run(["tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True).stdout
        names = [socket.gethostbyname(name) for name in ("host0", "host1", "localhost")]
        stack = os.readlink("/proc/self/ns/net")
        return place, socket.gethostname(), boot, stack, "rate 1Gbit" in rates, names, os.getcwd()

    found = run(two_by_two, body)
    boots = [found[rank][2] for rank in range(4)]
    stacks = [found[rank][3] for rank in range(4)]
    for kinds in (boots, stacks):
        assert kinds[0] == kinds[1] != kinds[2] == kinds[3]
    assert read("/proc/sys/kernel/random/boot_id") not in boots
    for rank in range(4):
        place, name, _, _, limited, names, folder = found[rank]
        assert place == (str(rank), str(rank % 2), "4", "10.77.0.1")
        assert name == f"host{rank // 2}" and limited and folder == os.getcwd()
        assert names == ["10.77.0.1", "10.77.0.2", "127.0.0.1"]


def test_this_process_stays_where_it_is(two_by_two):
    run(two_by_two, lambda rank, link: None)
    assert "eth0" not in [name for _, name in socket.if_nameindex()] or not _has("10.77.0.1")


def _has(ip):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((ip, 0))
            return True
        except OSError:
            return False


def test_killed_ranks_and_links(two_by_two):
    """A link that is down loses what is sent; one that is up again brings it."""

    def body(rank, link):
        if rank == 0:
            with socket.create_server(("10.77.0.1", 0)) as server:
                link.send(server.getsockname())
                while True:
                    server.accept()[0].close()
        address = link.recv()
        while True:
            try:
                with socket.create_connection(address, timeout=link.recv()):
                    link.send("there")
            except OSError as error:
                link.send(type(error).__name__)

    with two_by_two.ranks(body, limit=LIMIT, ranks=[0, 2]) as ranks:
        ranks.links[2].send(ranks.recv(0, 20))

        def ask(limit):
            ranks.links[2].send(limit)
            return ranks.recv(2, 20)

        assert ask(20) == "there"
        two_by_two.set_link(1, False)
        assert ask(2.5) in ("TimeoutError", "OSError")  # long enough that the host is about to give up
        two_by_two.set_link(1, True)
        assert ask(20) == "there"
        ranks.kill(0)
        ranks.processes[0].join(20)
        assert ask(20) == "ConnectionRefusedError"


def test_hosts_leave_nothing(two_by_two):
    before = set(os.listdir("/proc/self/fd"))
    with contextlib.closing(open_hosts("2x1")) as hosts:
        keepers = [keeper.pid for keeper in (*hosts.keepers, hosts.switch)]
    assert len(keepers) == 3 and not any(os.path.exists(f"/proc/{pid}") for pid in keepers)
    assert set(os.listdir("/proc/self/fd")) == before


# --- the command --------------------


def command(*arguments, **variables):
    done = subprocess.run(
        [*COMMAND, *arguments], env=env.for_child(**variables), capture_output=True, text=True, timeout=100
    )
    if done.returncode == emulated.SKIPPED and not variables:
        pytest.skip(done.stderr.strip())
    return done


def test_the_command():
    said = (
        'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $(hostname) $MASTER_ADDR ${PYCOMM_HOST_ID}-"'
    )
    done = command("1+2", "--rate", "1gbit", "--ipv6", "--", "sh", "-c", said)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 0 3 1 host0 fd77::1 -",
        "1 0 3 2 host1 fd77::1 -",
        "2 1 3 2 host1 fd77::1 -",
    ]


def test_a_rank_that_fails_ends_the_others():
    done = command("2x1", "--", "sh", "-c", 'if [ "$RANK" = 1 ]; then exit 3; fi; exec sleep 1000')
    assert done.returncode == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["2x"], "placement '2x': must be like"), (["2x2"], "what each rank is to run must stand after --")],
)
def test_wrong_arguments(arguments, text):
    done = command(*arguments, "--", *(["true"] if arguments == ["2x"] else []))
    assert done.returncode == 2 and text in done.stderr


def test_where_it_is_not_permitted(tmp_path):
    done = command("2x1", "--", "true", PATH=str(tmp_path))
    assert done.returncode == emulated.SKIPPED
    assert done.stderr.startswith("skip: there is no ip, tc, unshare")


def test_all_ends_with_the_command():
    length = f"1000.{os.getpid()}"  # to find the ranks by

    def ranks():
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:  # it has ended
                continue
            if words[:2] == [b"sleep", length.encode()]:
                found.append(path.parent.name)
        return found

    process = subprocess.Popen([*COMMAND, "2x2", "--", "sleep", length], stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: len(ranks()) == 4 or process.poll() is not None)
        if process.poll() == emulated.SKIPPED:
            pytest.skip(process.stderr.read().strip())
        process.kill()
        until(lambda: not ranks())
    finally:
        process.kill()
        process.communicate()


def until(happened, limit=30):
    deadline = time.monotonic() + limit
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- Gloo between them --------------------


def use(rank, store, hosts):
    data, control = make(rank, store, hosts)
    world_size = len(hosts)
    assert exchange(data, rank, world_size, 3) == {p: [p] * 3 for p in range(world_size) if p != rank}
    if control is not None:
        exchange(control, hosts[rank], max(hosts) + 1, 4)
    return "ok"


def own_store():
    return next(dist.rendezvous("env://"))[0]


@tier(quick=1 / 4)
@pytest.mark.parametrize("placement", ["2x2", "3+1", "0101", "1+1+2"])
@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_contexts_between_hosts(placement, ipv6):
    with contextlib.closing(open_hosts(placement, ipv6=ipv6)) as hosts:
        found = run(hosts, lambda rank, link: use(rank, own_store(), hosts.placement))
    assert found == dict.fromkeys(range(len(hosts.placement)), "ok")


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_the_host_of_the_store_may_call_itself_loopback(two_by_two, tmp_path, name):
    """As where /etc/hosts has the machine's own name at 127.0.1.1."""

    def body(rank, link):
        os.environ["MASTER_ADDR"] = name if rank < 2 else "10.77.0.1"
        return use(rank, dist.FileStore(str(tmp_path / "store"), 4), two_by_two.placement)

    assert run(two_by_two, body) == dict.fromkeys(range(4), "ok")


def test_without_any_name_of_a_host(two_by_two, tmp_path):
    """The only address beside loopback."""

    def body(rank, link):
        del os.environ["MASTER_ADDR"]
        return use(rank, dist.FileStore(str(tmp_path / "store"), 4), two_by_two.placement)

    assert run(two_by_two, body) == dict.fromkeys(range(4), "ok")


def assert_all_say(found, kind, text):
    for failure in found.values():
        assert failure.kind == kind, failure
        assert re.fullmatch(text + r"( \(seen by rank \d\))?", failure.text), failure


def test_loopback_that_was_asked_for(two_by_two):
    def body(rank, link):
        os.environ["PYCOMM_SOCKET_IFNAME"] = "lo"
        return failing(rank, own_store(), two_by_two.placement)

    text = r"Rank 0 \(node-a\) has the address 127\.0\.0\.1 \(lo\), which other hosts cannot reach\. .*"
    assert_all_say(run(two_by_two, body), "ValueError", text)


def test_the_same_address_on_two_hosts(two_by_two):
    """As docker0 has it."""

    def body(rank, link):
        if rank % 2 == 0:
            for action in ("link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0"):
                subprocess.run(["ip", *action.split()], check=True)
            subprocess.run(["ip", "link", "set", "docker0", "up"], check=True)
        store = own_store()
        store.add("interfaces", rank % 2 == 0)
        until(lambda: store.add("interfaces", 0) == 2)
        os.environ["PYCOMM_SOCKET_IFNAME"] = "docker"
        failure = failing(rank, store, two_by_two.placement)
        os.environ["PYCOMM_SOCKET_IFNAME"] = "^docker"
        return failure, make(rank, store, two_by_two.placement, token="second") is not None

    found = run(two_by_two, body)
    text = r"Rank 0 \(node-a\) and rank 2 \(node-b\) are on different machines and have the same address, "
    failures = {rank: failure for rank, (failure, made) in found.items() if made}
    assert len(failures) == 4
    assert_all_say(
        failures, "ValueError", text + r"172\.17\.0\.1 \(docker0\)\. .*\^docker0 leaves this one out\."
    )


def test_a_link_that_is_down_when_a_group_is_made(two_by_two, tmp_path):
    def body(rank, link):
        store = dist.FileStore(str(tmp_path / "store"), 4)
        return failing(rank, store, two_by_two.placement, timeout=3.0)

    two_by_two.set_link(1, False)
    try:
        found = run(two_by_two, body)
    finally:
        two_by_two.set_link(1, True)
    text = (
        r"Cannot reach rank [02] \(node-[ab], 10\.77\.0\.[12]\) "
        r"from rank [02] \(node-[ab], 10\.77\.0\.[12]\) over eth0( within 3 s| \(No route to host\))"
        r"\. Is a firewall in the way\? All ports between hosts are used\."
    )
    assert_all_say(found, "RuntimeError", text)


def test_a_link_that_goes_down_while_contexts_are_made(two_by_two, tmp_path):
    """Nobody sits out the limit of Gloo, which is years."""

    def body(rank, link):
        original = engine._make

        def after_the_link(*arguments):
            link.send("reached")
            link.recv()
            return original(*arguments)

        engine._make = after_the_link
        store = dist.FileStore(str(tmp_path / "store"), 4)
        return failing(rank, store, two_by_two.placement, timeout=4.0)

    with two_by_two.ranks(body, limit=LIMIT) as ranks:
        try:
            for rank in range(4):
                assert ranks.recv(rank, 20) == "reached"
            two_by_two.set_link(1, False)
            for rank in range(4):
                ranks.links[rank].send("go on")
            found = {rank: outcome.value for rank, outcome in ranks.outcomes(40).items()}
        finally:
            two_by_two.set_link(1, True)
    assert_all_say(found, "TimeoutError", r"Gloo has not connected all ranks within 4 s\.")


def test_a_host_that_dies_names_itself_soon(two_by_two, tmp_path):
    """All ranks of a host are killed while contexts are made."""

    def body(rank, link):
        if rank >= 2:
            engine._make = lambda *arguments: os._exit(9)
        return failing(rank, dist.FileStore(str(tmp_path / "store"), 4), two_by_two.placement)

    found = run(two_by_two, body)
    assert all(isinstance(found.pop(rank), ChildProcessError) for rank in (2, 3))
    text = r"Rank [23] \(node-b, 10\.77\.0\.2\) has died while the group was made\."
    assert_all_say(found, "LostRankError", text)
    assert all(failure.seconds < 15 for failure in found.values())


def test_tensors_are_what_was_sent(two_by_two):
    """More than a link's bucket holds, both ways at once."""

    def body(rank, link):
        data, _ = make(rank, own_store(), two_by_two.placement)
        peer, count = 3 - rank, 1 << 20
        got, sent = torch.zeros(count), torch.arange(count).float() + rank
        works = [data.recv([got], peer, 1), data.send([sent], peer, 1)]
        for work in works:
            work.wait()
        return bool((got == torch.arange(count).float() + peer).all())

    assert run(two_by_two, body) == dict.fromkeys(range(4), True)


def test_who_has_sent_all_may_leave():
    """The link needs 6 s for what the root has sent when it closes its group; word of that comes first."""

    def body(rank, link):
        x = torch.full((1 << 20,), 7.0 if rank == 0 else 0.0)
        with pycomm.Communicator(own_store(), rank, 2, timeout=30.0) as comm:
            comm.barrier()
            comm.broadcast(x)
        if rank == 0:
            link.recv()  # its connections end with the process
        else:
            link.send("got it")
        return bool((x == 7).all())

    with contextlib.closing(open_hosts("1+1", rate="5mbit")) as hosts:
        with hosts.ranks(body, limit=LIMIT) as processes:
            processes.recv(1, LIMIT)
            processes.links[0].send("go on")
            found = {rank: outcome.value for rank, outcome in processes.outcomes(40).items()}
    assert found == {0: True, 1: True}
