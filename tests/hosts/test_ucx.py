"""PYCOMM_WIRE=ucx: what tests say of groups over Gloo holds over UCX, too. Skipped, with the reason, where
UCX is not installed; requirements-test.txt brings it.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_deaths
import test_emulated
import test_host_faults as faults
import test_message_faults
import test_two_levels
import torch
import torch.distributed as dist
from forked import Group, attempt
from held import held, held_after
from source_tree import ROOT
from test_engines import assert_all_say, failing, make, on_rank, run
from test_messages import random_messages
from tiers import tier

from pycomm import _C
from pycomm.hosts import ucx
from pycomm.testing import run_ranks

INCLUDES = [Path(ucx.wheel() or "none/lib/none").parent.parent / "include", Path("/usr/include")]


def why_no_ucx():
    """Asked in a process of its own: ranks are forked from this one, which must not have opened UCX."""
    code = f"import ctypes; ctypes.CDLL({ucx.LIBRARY!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode == 0 or ucx.wheel():
        return None
    return done.stderr.strip().splitlines()[-1]


MISSING = why_no_ucx()
with_ucx = pytest.mark.skipif(MISSING is not None, reason=f"UCX is not installed: {MISSING}")


@pytest.fixture(autouse=True)
def wire(monkeypatch):
    monkeypatch.setenv("PYCOMM_WIRE", "ucx")


# --- the choice --------------------


def test_no_such_engine(monkeypatch):
    monkeypatch.setenv("PYCOMM_WIRE", "tcp")
    text = r"PYCOMM_WIRE='tcp' in the environment: must be gloo or ucx\."
    assert_all_say(run(failing), "ValueError", text)


@pytest.mark.parametrize("other", [1, 2])
def test_ranks_that_choose_differently(other):
    body = on_rank([other], lambda rank: os.environ.update(PYCOMM_WIRE="gloo"))
    host = "node-a" if other == 1 else "node-b"
    text = rf"PYCOMM_WIRE is ucx on rank 0 \(node-a\) and gloo on rank {other} \({host}\)\. "
    assert_all_say(run(body), "ValueError", text + r"All ranks must use the same engine\.")


def library(tmp_path, code):
    """A shared library of this C, to be taken for UCX's."""
    (tmp_path / "ucp.c").write_text(code)
    subprocess.run(["gcc", "-shared", "-fPIC", "ucp.c", "-o", "ucp.so"], check=True, cwd=tmp_path)
    return str(tmp_path / "ucp.so")


VERSION = "void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) {{ *a = {}; *b = {}; *c = 3; }}"


@tier(quick=1 / 5)
@with_ucx
@pytest.mark.parametrize(
    ("code", "why"),
    [
        (None, r".*cannot open shared object file.*"),
        (VERSION.format(1, 9), r"it is UCX 1\.9\.3, which is too old"),
        (VERSION.format(2, 0), r"it is UCX 2\.0\.3, another interface than 1\.13 and later"),
        (VERSION.format(1, 30), "it has no ucp_config_read"),
        ("", "it has no ucp_get_version"),
    ],
    ids=["none", "too old", "another major", "a part", "not UCX"],
)
def test_without_a_usable_ucx(code, why, tmp_path):
    """Said by all ranks, with what to install."""
    file = "libno-ucp.so" if code is None else library(tmp_path, code)

    def prepare(rank):
        ucx.find_library = lambda: file

    text = rf"PYCOMM_WIRE=ucx, and UCX cannot be used on rank 2 \(node-b\): {why}\. "
    text += r"UCX 1\.13 or later is needed: .*pip install libucx-cu12.*libucx0.*InfiniBand, too\."
    assert_all_say(run(on_rank([2], prepare)), "RuntimeError", text, seen_by=[2])


@with_ucx
def test_versions_that_differ():
    def prepare(rank):
        exchange = ucx._exchange
        ucx._exchange = lambda meeting, version, wires: exchange(meeting, "1.9.0", wires)

    text = r"Rank 0 \(node-a\) has UCX [\d.]+ and rank 3 \(node-b\) 1\.9\.0\. All ranks must have the same "
    assert_all_say(run(on_rank([3], prepare)), "RuntimeError", text + r"version\.")


@with_ucx
def test_a_rank_that_does_not_greet():
    def prepare(rank):
        def never(meeting, *_):
            while True:
                meeting.pause()

        ucx._greet = never

    text = r"UCX has not connected rank \d \(node-a\) to rank 3 \(node-b\) within 3 s\."
    assert_all_say(run(on_rank([3], prepare, timeout=3.0)), "TimeoutError", text, seen_by=[0, 1])


@with_ucx
def test_who_carries_the_bytes(monkeypatch):
    def body(comm):
        return comm.describe()["wire"]

    versions = run_ranks(2, body, hosts="1+1", mode="processes")
    assert len(set(versions)) == 1 and re.fullmatch(r"ucx 1\.\d+\.\d+", versions[0])
    monkeypatch.setenv("PYCOMM_WIRE", "gloo")
    assert run_ranks(2, body, hosts="1+1", mode="processes") == ["gloo"] * 2
    assert run_ranks(2, body, hosts="1+1") == ["threads"] * 2
    assert run_ranks(2, body) == [None] * 2


# --- UCX's interface --------------------


@pytest.mark.parametrize("folder", INCLUDES, ids=["the wheel", "the system"])
def test_what_is_declared_is_what_the_headers_say(folder):
    if not (folder / "ucp" / "api" / "ucp.h").exists():
        pytest.skip(f"{folder} has no headers of UCX")
    source = ROOT / "tests" / "cpp" / "ucx_layout.cc"
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", "-I", folder, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- the wire alone --------------------


def on_two(body):
    """body(rank, wire, peer): with the wires of two ranks over loopback."""

    def main(rank, store, hosts):
        data, control = make(rank, store, hosts)
        assert isinstance(data, _C.UcxWire) and isinstance(control, _C.UcxWire)
        return body(rank, data, 1 - rank)

    return run(main, hosts=[0, 1])


@with_ucx
def test_a_greeting_came_from_all():
    assert on_two(lambda rank, wire, peer: wire.missing()) == {0: [], 1: []}


@with_ucx
def test_a_process_stays_as_it_is():
    """UCX takes no signals of a crash, and without InfiniBand replaces no functions of the C library."""
    fatal = [signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL]

    def facts():
        caught = int(re.search(r"SigCgt:\s*(\w+)", Path("/proc/self/status").read_text())[1], 16)
        library = ctypes.CDLL(None)
        code = [ctypes.string_at(getattr(library, name), 16) for name in ("munmap", "madvise", "brk")]
        return [caught >> (number - 1) & 1 for number in fatal], code if not ucx.infiniband_devices() else []

    before = run(lambda rank, store, hosts: facts(), hosts=[0, 1])
    assert on_two(lambda rank, wire, peer: facts()) == before


# --- groups --------------------


@with_ucx
def test_values():
    test_two_levels.check(4, list(test_two_levels.table(4, [0, 3, 256, 4099])), hosts="2+2", mode="processes")


@with_ucx
@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_long_buffers(name):
    """Beyond two segments, on three hosts."""
    count = int(test_two_levels.LONG[name] * test_two_levels.SEGMENT / 4) + 1003
    assert all(run_ranks(3, test_two_levels.long, name, count, hosts="1+1+1", mode="processes"))


@with_ucx
def test_messages():
    for seed in (10, 11):
        assert run_ranks(4, random_messages, seed, hosts="0110", mode="processes", timeout=60) == [[]] * 4


@with_ucx
def test_a_mismatch_goes_on():
    def body(comm):
        _, report = attempt(comm.all_reduce, torch.ones(4096 + comm.rank // 3))
        return report["kind"], "on rank 3 (host1)" in report["text"], comm.all_reduce(torch.ones(2)).tolist()

    found = run_ranks(4, body, hosts="2+2", mode="processes", timeout=30)
    assert found[:3] == [("MismatchError", True, [4.0, 4.0])] * 3


FAULTS = {
    "kill a leader, small": lambda _: faults.test_kill(2, 0),
    "kill another, small": lambda _: faults.test_kill(2, 3),
    "kill a leader, large": lambda _: faults.test_kill(1 << 20, 2),
    "kill another, large": lambda _: faults.test_kill(1 << 20, 1),
    "kill while others wait": lambda _: faults.test_kill_while_others_wait(0),
    "stop a leader": lambda patch: test_deaths.test_a_stopped_leader(4000, 0, patch),
    "end by the error": lambda _: test_deaths.name_the_dead("0101", 2),
    "a leader dies, its connection lives": (
        lambda _: faults.test_a_leader_dies_while_others_wait_for_another_host()
    ),
    "fork": lambda _: faults.test_fork(),
    "close": lambda _: faults.test_closing_is_prompt(),
    "death in a message": lambda _: test_message_faults.test_the_death_of_a_rank_ends_messages(300007),
    "Ctrl-C": lambda _: test_message_faults.test_interrupt_in_a_wait(),
    "fork with messages": lambda _: test_message_faults.test_a_forked_child_leaves_the_links_alone(),
}


@tier(quick=1 / 12)
@with_ucx
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault, monkeypatch):
    FAULTS[fault](monkeypatch)


@with_ucx
def test_a_stopped_rank():
    def body(comm, link):
        comm.barrier()
        link.send("started")
        link.recv()
        return attempt(comm.all_reduce, torch.ones(4000))[1]

    with Group(4, body, hosts="2+2", operation_timeout=4.0) as group:
        group.expect("started")
        group.kill(3, signal.SIGSTOP)
        group.send(0, 1, 2)
        for rank in range(3):
            report = group.get(rank)
            assert (report["kind"], report["peer"]) == ("CommTimeoutError", 3), report
            assert "rank 3 (host1) did not arrive within" in report["text"], report
        group.kill(3, signal.SIGCONT)


@with_ucx
@pytest.mark.parametrize("count", [2, 3_000_000], ids=["small", "large"])
def test_abort_in_an_operation(count):
    def body(comm, link):
        comm.barrier()
        link.send("started")
        if comm.rank == 1:
            time.sleep(0.3)
            comm.abort("enough")
        while True:
            comm.all_reduce(torch.ones(count))

    with Group(4, body, hosts="2+2") as group:
        group.expect("started")
        for rank in range(4):
            report = group.get(rank)
            assert (
                report["kind"] == "AbortedError"
                and "rank 1 (host0) aborted the group: enough" in report["text"]
            )


@with_ucx
def test_fifty_groups_leave_nothing():
    """Descriptors, threads, memory maps."""

    def body(comm):
        for number in range(50):
            part = comm.split(0)
            part.all_reduce(torch.ones(3000))
            part.close()
            del part
            comm.barrier()
            if number == 9:
                before = held()
                comm.barrier()
        after = held_after(before)
        comm.barrier()
        return before, after

    for before, after in run_ranks(2, body, hosts="1+1", mode="processes", timeout=100):
        assert after.threads <= before.threads and after.files <= before.files, (before, after)


# --- emulated hosts --------------------


@pytest.fixture(scope="module")
def two_by_two():
    hosts = test_emulated.open_hosts("2x2", rate="1gbit")
    yield hosts
    hosts.close()


def sums(rank, n):
    import pycomm

    with pycomm.Communicator(test_emulated.own_store(), rank, n, timeout=30.0) as comm:
        small, large = torch.full((2,), rank + 1.0), torch.full((3_000_000,), rank + 1.0)
        total = n * (n + 1) / 2
        return [bool((comm.all_reduce(x) == total).all()) for x in (small, large)], comm.describe()["wire"][
            :3
        ]


@with_ucx
@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_between_hosts(ipv6):
    hosts = test_emulated.open_hosts("2x2", ipv6=ipv6)
    try:
        found = test_emulated.run(hosts, lambda rank, link: sums(rank, 4))
    finally:
        hosts.close()
    assert found == dict.fromkeys(range(4), ([True, True], "ucx"))


@with_ucx
def test_a_link_that_goes_down(two_by_two):
    """In the middle of operations, and while nobody is in one."""

    def body(rank, link):
        import pycomm

        os.environ["PYCOMM_HOST_TIMEOUT"] = "3"
        comm = pycomm.Communicator(test_emulated.own_store(), rank, 4, timeout=60.0)
        comm.barrier()
        link.send("started")
        while True:
            seconds, report = attempt(comm.all_reduce, torch.ones(200_000))
            if isinstance(report, dict):
                return report["kind"], report["text"]

    with two_by_two.ranks(body, limit=60) as ranks:
        try:
            for rank in range(4):
                assert ranks.recv(rank, 30) == "started"
            two_by_two.set_link(1, False)
            found = {rank: outcome.value for rank, outcome in ranks.outcomes(40).items()}
        finally:
            two_by_two.set_link(1, True)
    for rank, (kind, text) in found.items():
        other = "host1 (ranks 2 to 3)" if rank < 2 else "host0 (ranks 0 to 1)"
        assert kind == "PeerError" and f"{other} has not been heard for 3 s" in text, (rank, text)


@with_ucx
def test_a_link_that_goes_down_while_workers_connect(two_by_two, tmp_path):
    def body(rank, link):
        original = ucx._greet

        def after_the_link(*arguments):
            link.send("reached")
            link.recv()
            ucx._greet = original
            return original(*arguments)

        ucx._greet = after_the_link
        store = dist.FileStore(str(tmp_path / "store"), 4)
        return failing(rank, store, two_by_two.placement, timeout=4.0)

    with two_by_two.ranks(body, limit=60) as ranks:
        try:
            for rank in range(4):
                assert ranks.recv(rank, 20) == "reached"
            two_by_two.set_link(1, False)
            for rank in range(4):
                ranks.links[rank].send("go on")
            found = {rank: outcome.value for rank, outcome in ranks.outcomes(40).items()}
        finally:
            two_by_two.set_link(1, True)
    other = r"rank \d \(node-[ab]\)"
    text = rf"UCX has not connected {other} to {other}(, {other})?( within 4 s|: Endpoint timeout)\."
    kind = found[0].kind  # UCX may give up first
    assert kind in ("TimeoutError", "RuntimeError")
    test_emulated.assert_all_say(found, kind, text)


@with_ucx
def test_who_has_sent_all_may_leave():
    test_emulated.test_who_has_sent_all_may_leave()
