"""The ports of a job: those that SECURITY.md lists and no others, on its interfaces; PYCOMM_PORT_RANGE; and
strangers that open many connections. Hosts are emulated by namespaces, or simulated where it says so.
"""

import contextlib
import importlib.util
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from source_tree import ROOT
from test_emulated import open_hosts
from torch_ranks import meeting

import pycomm
from pycomm import env, ports
from pycomm.hosts import probe
from pycomm.survivors import points
from pycomm.testing import run_ranks

LIMIT = 60.0
RANGE = range(29600, 29700)
METRICS = 9400
ANY = ("0.0.0.0", "::")
INTERFACES = {"all": ANY, "the group's": None, "127.0.0.1": ("127.0.0.1",)}


# --- PYCOMM_PORT_RANGE --------------------


@pytest.mark.parametrize("text", ["x", "1", "0-5", "5-4", "1-65536", "1-2-3", "-1-5", "1,2"])
def test_wrong_ranges(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_PORT_RANGE", text)
    with pytest.raises(ValueError, match=r"PYCOMM_PORT_RANGE=.*two ports from 1 to 65535, the lower first"):
        env.port_range()


def test_ports_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is used, then the error says so; a port that is free again is used at once."""
    monkeypatch.delenv("PYCOMM_PORT_RANGE", raising=False)
    with contextlib.closing(ports.listen("127.0.0.1")) as one:
        low = one.getsockname()[1]  # the system's choice: those near it are mostly free
    low = min(low, 65000)
    monkeypatch.setenv("PYCOMM_PORT_RANGE", f"{low}-{low + 9}")
    with contextlib.ExitStack() as opened:
        found = []
        with pytest.raises(RuntimeError, match=f"PYCOMM_PORT_RANGE={low}-{low + 9} are in use. Allow more"):
            for _ in range(11):
                found.append(opened.enter_context(contextlib.closing(ports.listen("127.0.0.1"))))
        numbers = [one.getsockname()[1] for one in found]
        assert (
            len(found) > 0 and len(set(numbers)) == len(found) and set(numbers) <= set(range(low, low + 10))
        )
        with socket.create_connection(("127.0.0.1", numbers[0]), 5):
            found[0].setblocking(True)
            found[0].settimeout(5)
            found[0].accept()[0].close()  # the one that closes first keeps the port for a minute
        found[0].close()
        with contextlib.closing(ports.listen("127.0.0.1")) as again:
            assert again.getsockname()[1] == numbers[0]


# --- the table of SECURITY.md --------------------


def table() -> dict[str, str]:
    """The first words of a row's port -> its interface."""
    text = (ROOT / "SECURITY.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
    assert rows[0][0] == "port" and rows[0][2] == "interface"
    return {row[0]: row[2] for row in rows[2:]}


def listening() -> set[tuple[str, int]]:
    """(address, port) of the sockets of this process that listen."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {place for inode, place in sockets_that_listen() if f"socket:[{inode}]" in mine}


def sockets_that_listen() -> Iterator[tuple[str, tuple[str, int]]]:
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/thread-self/net/{name}") as file:
            for line in list(file)[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == "0A":
                    digits, port = local.split(":")
                    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
                    yield inode, (socket.inet_ntop(family, b"".join(words)), int(port, 16))


def check_sockets(found: set, own: str, expected: dict[str, int]) -> None:
    """expected: how many of each row of the table."""
    rows, left = table(), sorted(found)
    place = env.launch()
    fixed = {"`MASTER_PORT`": place.master_port, "`PYCOMM_METRICS_PORT`": METRICS + place.local_rank}
    for row, count in expected.items():
        (name,) = [name for name in rows if name.startswith(row)]
        allowed = INTERFACES[rows[name].split(";")[0]] or (own,)
        ours = row in ("point", "reach", "the store of `pycomm.shrink_group`")
        for _ in range(count):
            fits = [
                place
                for place in left
                if place[0] in allowed
                and place[1] == fixed.get(row, place[1])
                and (row in fixed or (place[1] in RANGE) == ours)
            ]
            assert fits, f"{row}: none of {left} fits {allowed}"
            left.remove(fits[0])
    assert not left, f"SECURITY.md does not list {left}"


def rank_main(rank: int, link: object) -> str:
    os.environ["PYCOMM_PORT_RANGE"] = f"{RANGE[0]}-{RANGE[-1]}"
    os.environ["PYCOMM_METRICS_PORT"] = str(METRICS)
    own, before = f"10.77.0.{1 + rank // 2}", listening()  # before: of the process that has forked this one
    during = look_while_it_is_made()
    dist.init_process_group("pycomm")
    dist.barrier()
    served = {"`PYCOMM_METRICS_PORT`": int(has_prometheus())}
    store = {"`MASTER_PORT`": int(rank == 0)}
    check_sockets(during - before, own, {**store, "reach": 1, "point": 1})
    check_sockets(listening() - before, own, {**store, **served, "point": 1, "Gloo's": 1})
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(dist.DistBackendError):
        while True:
            dist.all_reduce(torch.ones(3))
    pycomm.shrink_group(timeout=LIMIT)
    dist.barrier()
    store = {"the store of `pycomm.shrink_group`": int(dist.get_rank() == 0)}
    check_sockets(listening() - before, own, {**store, **served, "point": 2, "Gloo's": 1})
    dist.barrier()
    return "equal"


def look_while_it_is_made() -> set:
    """A set that gets what listens when pycomm has opened its ports."""
    found, original = set(), ports.listen

    def listen(ip: str) -> socket.socket:
        made = original(ip)
        found.update(listening())
        return made

    probe.listen = points.listen = listen
    return found


def has_prometheus() -> bool:
    return importlib.util.find_spec("prometheus_client") is not None


def test_a_job_has_the_ports_of_the_table() -> None:
    with contextlib.closing(open_hosts("2+2")) as hosts, hosts.ranks(rank_main, limit=LIMIT) as ranks:
        found = {rank: outcome.value for rank, outcome in ranks.outcomes(LIMIT).items()}
    assert [found[rank] for rank in (1, 2, 3)] == ["equal"] * 3, found


# --- strangers --------------------

FLOOD = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
ip, port, opened = sys.argv[1], int(sys.argv[2]), []
for number in range(2000):
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex((ip, port))
    opened.append(one)
print("flooded", flush=True)
sys.stdin.read()
"""


def test_two_thousand_silent_connections() -> None:
    """The rank still opens files, makes groups, and loses ranks."""

    def body(comm: pycomm.Communicator) -> list:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        together.wait()
        place, flood, found = comm._comm.point.place, None, []
        if comm.rank == 0:
            command = [sys.executable, "-c", FLOOD, place.ip, str(place.port)]
            flood = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert flood.stdout.readline() == "flooded\n"
            time.sleep(0.5)
        comm.barrier()
        found.append(len(os.listdir("/proc/self/fd")) < 300)
        with contextlib.ExitStack() as opened:
            for _ in range(100):
                opened.enter_context(open("/dev/null"))
        part = comm.split(0)
        found.append(part.all_reduce(torch.ones(1)).item())
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(pycomm.CommError):
            while True:
                comm.all_reduce(torch.ones(3))
        new = comm.shrink(timeout=LIMIT)
        found.append(new.all_reduce(torch.ones(1)).item())
        if flood is not None:
            flood.communicate(timeout=LIMIT)
        new.barrier()
        return found

    together = meeting(3)
    results = run_ranks(3, body, hosts="010", mode="processes", fail=False)
    assert results[:2] == [[True, 3.0, 2.0]] * 2, results
