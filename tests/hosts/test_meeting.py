"""Parts of pycomm/hosts without ranks: what is said in a meeting and left in its store, which sockets a child
keeps, the addresses of an interface, how UCX and NCCL are begun.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pycomm.hosts import addresses, engine, forks, nccl_engine, probe, ucx
from pycomm.hosts.addresses import Address
from pycomm.hosts.meeting import LostRankError, Meeting
from pycomm.hosts.records import Record
from pycomm.survivors import door

pytestmark = pytest.mark.timeout(60)
LIMIT = 30.0  # seconds; never reached where the code is right


def meetings(number, timeout=LIMIT, hosts=None):
    """Of so many ranks, which share a store."""
    store, hosts = dist.HashStore(), hosts or [0] * number
    labels = [f"node-{chr(ord('a') + host)}" for host in range(max(hosts) + 1)]
    return store, [Meeting(store, rank, hosts, labels, timeout) for rank in range(number)]


# --- the meeting --------------------


def test_a_meeting_leaves_nothing_in_its_store():
    store, all_of_them = meetings(3)
    for one in all_of_them:
        one.arrive("came")
        one.tell("record", {"rank": one.rank, "none": None})
        one.set("part/key", b"\xff")
    for one in all_of_them:
        assert one.hear("record", [2, 0]) == {2: {"rank": 2, "none": None}, 0: {"rank": 0, "none": None}}
        one.wait_for_all("came", 3, "they did not come")
    for one in all_of_them:
        assert store.num_keys() > 0
        one.leave(("came", "record"))
    assert store.num_keys() == 0


def test_the_counters_of_a_group_are_all_removed(monkeypatch):
    """Whatever engines() counts in the store."""
    counted = set()
    arrive = Meeting.arrive
    monkeypatch.setattr(Meeting, "arrive", lambda self, key: counted.add(key) or arrive(self, key))
    monkeypatch.setattr(engine, "_gloo_on", lambda address: lambda store, rank, size: "made")
    store = dist.HashStore()
    made = engine.engines(store, 0, [0], ["node-a"], "token", LIMIT, None, shrinker=None)
    made.point.close()
    assert counted - {"left"} <= set(engine.COUNTERS) and "made" in counted
    assert store.num_keys() == 0


def test_pauses_grow_up_to_a_limit(monkeypatch):
    _, (meeting,) = meetings(1)
    slept = []
    monkeypatch.setattr("pycomm.hosts.meeting.time.sleep", slept.append)
    for _ in range(2):
        for _ in range(100):
            meeting.pause()
        meeting.hurry()
    assert slept == [*sorted(slept[:100])] * 2 and (slept[0], slept[99]) == (0.001, 0.05)


@pytest.mark.parametrize("deadline", [False, True])
def test_a_rank_that_does_not_answer_is_waited_for_so_long(deadline):
    """Each for 30 s, and none longer than the group may take."""
    _, (meeting, _) = meetings(2, hosts=[0, 1], timeout=1000.0)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        two = [Record("stack", "lo", "127.0.0.1", port, False, "gloo")] * 2
        with contextlib.closing(probe.Probe(meeting, two, [0, 1], "token")) as trial:
            trial.look()
            trial.begun[1] -= probe.REACH_S - 10
            trial.look()
            if deadline:
                meeting.deadline = 0.0
            else:
                trial.begun[1] -= 10
            text = r"Cannot reach rank 1 \(node-b, 127\.0\.0\.1\) from rank 0 .* over lo within 30 s\."
            with pytest.raises(RuntimeError, match=text):
                trial.look()


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("end", "kind", "text"),
    [
        ("refuses", RuntimeError, r"Cannot reach rank 1 .* over lo \(Connection refused\)"),
        ("is a stranger", RuntimeError, r"Cannot reach rank 1 .* over lo \(somebody else answers there\)"),
        ("dies", LostRankError, r"Rank 1 \(node-b, 127\.0\.0\.1\) has died while the group was made"),
        ("has failed", ValueError, r"no such interface \(seen by rank 1\)"),
        ("has made the group", None, None),
    ],
)
def test_how_a_rank_that_is_reached_may_end(rank, end, kind, text):
    _, all_of_them = meetings(3, hosts=[0, 1, 2])
    meeting, its = all_of_them[rank], all_of_them[1]
    listener = probe.Listener(Address("lo", "127.0.0.1"), "other" if end == "is a stranger" else "token", 1)
    third = probe.Listener(Address("lo", "127.0.0.1"), "token", 2 - rank)
    ports = {1: listener.port, 2 - rank: third.port, rank: 1}
    three = [Record("stack", "lo", "127.0.0.1", ports[r], False, "gloo") for r in range(3)]
    if end == "is a stranger":
        listener.door._word = door.hello_of("token", 1, probe.KIND, 0)[: door.WORD]
    if end == "refuses":
        listener.close()

    def look_until(happened):
        limit = time.monotonic() + LIMIT
        while not happened():
            assert time.monotonic() < limit
            trial.look()
            listener.answer() if end != "refuses" else None
            third.answer()

    with contextlib.closing(probe.Probe(meeting, three, [0, 1, 2], "token")) as trial:
        assert not trial.done()
        with pytest.raises(kind, match=text) if kind else contextlib.nullcontext():
            look_until(trial.done)
            if end == "has failed":
                its.fail(ValueError("no such interface"))
            for one in all_of_them if end == "has made the group" else ():
                one.arrive("made")
            for one in listener.accepted:
                one.close()
            look_until(lambda: len(trial.selector.get_map()) == 1)
    listener.close()
    third.close()


@pytest.mark.parametrize(
    ("versions", "differs"),
    [
        (["1.13.0", "1.13.9", "1.13.0"], None),
        (["1.13.0", "1.14.0", "1.13.0"], 1),
        (["1.13.0", "1.13.0", "2.13.0"], 2),
    ],
)
def test_versions_of_ucx(versions, differs):
    _, all_of_them = meetings(3, hosts=[0, 0, 1])
    for one in all_of_them[1:]:
        one.tell("ucx", (versions[one.rank], ["YQ==", "Yg=="]))
    wires = [SimpleNamespace(address=b"\x00\xff"), None]
    if differs is None:
        said = ucx._exchange(all_of_them[0], versions[0], wires)
        assert ucx._address(said[0], 0) == b"\x00\xff" and ucx._address(said[0], 1) == b""
        assert [ucx._address(said[2], wire) for wire in (0, 1)] == [b"a", b"b"]
        return
    name = f"rank {differs} (node-{'aab'[differs]})"
    with pytest.raises(RuntimeError) as caught:
        ucx._exchange(all_of_them[0], versions[0], wires)
    assert str(caught.value).startswith(f"Rank 0 (node-a) has UCX 1.13.0 and {name} {versions[differs]}. All")


def test_who_is_missing_is_named_by_host():
    _, all_of_them = meetings(6, hosts=[0, 0, 1, 1, 1, 2])
    for rank in (0, 3):
        all_of_them[rank].tell("record", 1)
    assert (
        all_of_them[0].missing("record", range(6)) == "Rank 1 (node-a), ranks 2, 4 (node-b), rank 5 (node-c)"
    )
    assert all_of_them[0].missing("record", [2, 3]) == "Rank 2 (node-b)"
    all_of_them[0].deadline = 0.0
    with pytest.raises(TimeoutError, match=r"^Rank 5 \(node-c\) did not come within 30 s\.$"):
        all_of_them[0].hear("record", [0, 3, 5])
    with pytest.raises(TimeoutError, match=r"^they did not come within 30 s\.$"):
        all_of_them[0].wait_for_all("record", 3, "they did not come")


FAILURES = [
    (ValueError("no such interface"), ValueError, "no such interface"),
    (TimeoutError("too late"), TimeoutError, "too late"),
    (LostRankError("rank 2 has died", 2), LostRankError, "rank 2 has died"),
    (OSError(24, "Too many open files"), RuntimeError, r"\[Errno 24\] Too many open files"),
    (KeyboardInterrupt(), RuntimeError, r"Interrupted by KeyboardInterrupt\."),
    (RuntimeError(), RuntimeError, "RuntimeError"),
]


@pytest.mark.parametrize(("error", "kind", "text"), FAILURES, ids=[type(one[0]).__name__ for one in FAILURES])
def test_what_one_fails_with_all_raise(error, kind, text):
    _, (first, second, third) = meetings(3)
    assert first.fail(error) is error
    first.raise_failure()  # its own: it raises it already
    for one in (second, third):
        for call in (one.raise_failure, one.check, one.pause, lambda one=one: one.hear("never", [0])):
            with pytest.raises(kind, match=rf"^{text} \(seen by rank 0\)$") as caught:
                call()
            assert getattr(caught.value, "lost_rank", None) == getattr(error, "lost_rank", None)
    again = second.fail(ValueError("its own, later"))
    assert type(again) is kind and str(again).endswith("(seen by rank 0)"), again


def test_what_is_known_from_elsewhere_is_raised():
    store, _ = meetings(1)
    found = [None, ("rank 1 died", 1), ("the group is broken", -1)]
    meeting = Meeting(store, 0, [0, 0], ["node-a"], LIMIT, lambda: found[0])
    for kind in (None, LostRankError, RuntimeError):
        meeting._next_look = 0.0
        if kind is None:
            meeting.check()
        else:
            with pytest.raises(kind, match=f"^{found[0][0]}$") as caught:
                meeting.check()
            assert getattr(caught.value, "lost_rank", -1) == found[0][1]
        found.pop(0)


def ended(name):
    end = time.monotonic() + LIMIT
    while any(one.name == name for one in threading.enumerate()):
        assert time.monotonic() < end, f"the thread {name!r} goes on"
        time.sleep(0.005)


def test_gloos_thread_ends_when_another_rank_has_failed(monkeypatch):
    _, (mine, other) = meetings(2, hosts=[0, 1])
    monkeypatch.setattr(engine, "_gloo_on", lambda address: lambda store, rank, size: store.get("never told"))
    mine.deadline += 100 * LIMIT
    mine.watch = lambda: other.fail(ValueError("cannot"))
    with pytest.raises(ValueError, match=r"cannot \(seen by rank 1\)"):
        engine._make(mine, Address("lo", "127.0.0.1"), [0, 1])
    ended("pycomm Gloo")


# --- NCCL --------------------


class _Nccl:
    def __init__(self, connect):
        self.eager_connect_single_device = connect


def begin_nccl(monkeypatch, connect, look, timeout=LIMIT):
    monkeypatch.setattr(nccl_engine, "process_group", lambda *arguments: _Nccl(connect))
    store = dist.HashStore()
    made = nccl_engine.nccl(store, 0, [0], ["node-a"], "token", timeout, 3, look)
    return made, store


def test_nccl_is_made_on_the_device(monkeypatch):
    devices = []
    made, store = begin_nccl(monkeypatch, devices.append, lambda: None)
    assert isinstance(made, _Nccl) and devices == [torch.device("cuda", 3)] and store.num_keys() == 0


@pytest.mark.parametrize(
    ("seen", "timeout", "kind", "text"),
    [
        ("a death", LIMIT, LostRankError, "rank 1 has died"),
        ("nothing", 0.1, TimeoutError, r"NCCL has not connected all ranks within 0\.1 s\."),
        ("an error", LIMIT, RuntimeError, "NCCL could not connect the ranks: no such device"),
    ],
)
def test_what_goes_wrong_while_nccl_connects(monkeypatch, seen, timeout, kind, text):
    release = threading.Event()

    def connect(device):
        if seen == "an error":
            raise OSError("no such device")
        release.wait(LIMIT)

    def look():
        if seen == "a death":
            raise LostRankError("rank 1 has died", 1)

    begun = time.monotonic()
    try:
        with pytest.raises(kind, match=text):
            begin_nccl(monkeypatch, connect, look, timeout)
    finally:
        release.set()
    assert time.monotonic() - begun < LIMIT / 2


# --- children --------------------


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_a_child_keeps_only_what_is_not_gloos(monkeypatch, ip):
    """Its listening socket, what came there, and what this rank has connected to addresses of others."""
    monkeypatch.setattr(forks, "_KEPT", {})
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with contextlib.ExitStack() as opened:

        def server():
            one = opened.enter_context(contextlib.closing(socket.socket(family)))
            one.bind((ip, 0))
            one.listen()
            os.set_inheritable(one.fileno(), True)
            return one

        def pair(at):
            out = opened.enter_context(contextlib.closing(socket.socket(family)))
            out.connect(at.getsockname())
            came = opened.enter_context(contextlib.closing(at.accept()[0]))
            for one in (out, came):
                os.set_inheritable(one.fileno(), True)
            return out, came

        try:
            mine, theirs, stranger = server(), server(), server()
        except OSError:
            pytest.skip("this machine has no IPv6")
        from_other, accepted = pair(mine)
        connected, at_other = pair(theirs)
        own, others = (
            [b"some" + forks._packed(family, one.getsockname()) + b"more"] for one in (mine, theirs)
        )
        forks.keep_from_children(own, others)
        kept = {mine, accepted, connected}
        for one in (mine, accepted, connected, at_other, from_other, theirs, stranger):
            assert (one.fileno() in forks._KEPT) is (one in kept)
            assert bool(fcntl.fcntl(one, fcntl.F_GETFD) & fcntl.FD_CLOEXEC) is (one in kept)
        forks._after_fork()
        for one in (mine, accepted, connected, at_other, from_other, theirs, stranger):
            assert stat.S_ISCHR(os.fstat(one.fileno()).st_mode) is (one in kept)
        assert not forks._KEPT


def test_addresses_as_they_are_in_memory():
    """IPv6: family, port, flow, address, in the order of struct sockaddr_in6; a zone is not part of them."""
    four = forks._packed(socket.AF_INET, ("10.0.0.6", 0x1234))
    assert four == struct.pack("=H", socket.AF_INET) + b"\x12\x34" + bytes([10, 0, 0, 6])
    six = forks._packed(socket.AF_INET6, ("fe80::1%eth0", 0x1234, 7, 2))
    packed = socket.inet_pton(socket.AF_INET6, "fe80::1")
    assert six == struct.pack("=H", socket.AF_INET6) + b"\x12\x34" + b"\0\0\0\x07" + packed
    with pytest.raises(OSError):
        forks._packed(socket.AF_UNIX, ("/tmp/socket",))


def test_a_number_that_was_given_anew_is_the_users(monkeypatch, tmp_path):
    with open(tmp_path / "file", "w") as file, socket.socket() as one:
        inode = os.fstat(one.fileno()).st_ino
        monkeypatch.setattr(forks, "_KEPT", {file.fileno(): inode, one.fileno(): inode})
        forks._after_fork()
        assert os.readlink(f"/proc/self/fd/{file.fileno()}") == str(tmp_path / "file")
        assert stat.S_ISCHR(os.fstat(one.fileno()).st_mode) and not os.get_inheritable(one.fileno())


# --- addresses of interfaces --------------------

UP, DOWN = 1, 0


class _Kernel:
    """What ioctl says of interfaces: (name, IPv4, flags); None for flags: it is gone since."""

    def __init__(self, entries):
        self.entries = entries

    def ioctl(self, asked, request, argument):
        if request == addresses.SIOCGIFCONF:
            _, place = struct.unpack("iL", argument)
            data = b"".join(
                name.encode().ljust(16, b"\0")
                + struct.pack("=HH", socket.AF_INET, 0)
                + socket.inet_aton(ip).ljust(20, b"\0")
                for name, ip, _ in self.entries
            )
            ctypes.memmove(place, data, len(data))
            return struct.pack("iL", len(data), place)
        name = argument[:16].rstrip(b"\0").decode()
        flags = next(flags for one, _, flags in self.entries if one == name)
        if flags is None:
            raise OSError(errno.ENODEV, "No such device")
        return struct.pack("16sh22x", argument[:16], flags)


def test_addresses_of_interfaces(monkeypatch):
    entries = [
        ("lo", "127.0.0.1", UP),
        ("eth0", "10.0.0.6", UP | 0x1000),
        ("eth0:1", "10.0.0.7", UP),  # an alias is an address of its interface
        ("eth1", "10.1.0.6", DOWN),
        ("a-name-of-15-xx", "192.168.255.1", UP),
        ("gone", "10.2.0.6", None),
    ]
    monkeypatch.setattr(addresses, "fcntl", _Kernel(entries))
    assert addresses._ipv4() == [
        ("lo", "127.0.0.1"),
        ("eth0", "10.0.0.6"),
        ("eth0", "10.0.0.7"),
        ("a-name-of-15-xx", "192.168.255.1"),
    ]


def test_ipv6_addresses_of_interfaces(monkeypatch, tmp_path):
    lines = [
        "00000000000000000000000000000001 01 80 10 80       lo",
        "fd000000000000000000000000000006 02 40 00 80     eth0",
        "fe80000000000000000000000000abcd 02 40 20 80     eth0",  # needs a zone
        "fd000000000000000000000000000007 03 40 00 80     eth1",
    ]
    (tmp_path / "if_inet6").write_text("".join(f"{line}\n" for line in lines))
    monkeypatch.setattr(addresses, "Path", lambda name: tmp_path / name.rpartition("/")[2])
    kernel = [("lo", "127.0.0.1", UP), ("eth0", "10.0.0.6", UP), ("eth1", "10.1.0.6", DOWN)]
    monkeypatch.setattr(addresses, "fcntl", _Kernel(kernel))
    assert addresses._ipv6() == [("lo", "::1"), ("eth0", "fd00::6")]
    (tmp_path / "if_inet6").unlink()
    assert addresses._ipv6() == []


# --- UCX --------------------


@pytest.mark.parametrize("fails", [None, "_exchange", "_greet"])
@pytest.mark.parametrize("rank", [0, 1])
def test_wires_that_are_not_made_are_closed(monkeypatch, rank, fails):
    made = []

    class Wire:
        address = b"address"

        def __init__(self, context, rank, size, spins):
            made.append((rank, size, spins))
            self.closed = False
            wires.append(self)

        def close(self):
            self.closed = True

    def fail(*arguments):
        raise RuntimeError("cannot")

    wires, said = [], {r: ("1.13", ["YQ==", "Yg=="]) for r in range(4)}
    _, all_of_them = meetings(4, hosts=[0, 0, 1, 1])
    monkeypatch.setattr(ucx, "_open", lambda *arguments: SimpleNamespace(version="1.13"))
    monkeypatch.setattr(ucx._C, "UcxWire", Wire)
    monkeypatch.setattr(ucx, "_exchange", lambda *arguments: said)
    monkeypatch.setattr(ucx, "_cores", lambda: 3 - rank)
    greeted = []
    monkeypatch.setattr(ucx, "_greet", lambda meeting, wire, peers, ranks: greeted.append((peers, ranks)))
    if fails:
        monkeypatch.setattr(ucx, fails, fail)
    spins = ucx.SPINS if rank == 0 else 0  # where each rank of the host has a core, and one is left
    with pytest.raises(RuntimeError, match="cannot") if fails else contextlib.nullcontext():
        data, control = ucx.make(all_of_them[rank], Address("lo", "127.0.0.1"), [0, 2])
        assert wires == [one for one in (data, control) if one is not None]
        mine = [({2: b"a", 3: b"a"}, [0, 1, 2, 3]), ({1: b"b"}, [0, 2])]
        assert greeted == mine[: len(wires)]
    assert made == [(rank, 4, spins), (0, 2, spins)][: 2 - rank]
    assert [one.closed for one in wires] == [fails is not None] * len(wires)


def test_devices_of_infiniband_are_in_order(monkeypatch):
    """The same on all machines that have the same."""
    found = [Path(f"/sys/mlx5_{device}/ports/{port}") for device in (1, 0) for port in (2, 1)]
    monkeypatch.setattr(ucx, "INFINIBAND", SimpleNamespace(is_dir=lambda: True, glob=lambda form: found))
    assert ucx.infiniband_devices() == ["mlx5_0:1", "mlx5_0:2", "mlx5_1:1", "mlx5_1:2"]


@pytest.mark.parametrize("infiniband", [[], ["mlx5_0:1", "mlx5_1:2"]], ids=["none", "InfiniBand"])
@pytest.mark.parametrize("ip", ["10.0.0.6", "fd00::6"])
def test_settings_of_ucx(monkeypatch, tmp_path, infiniband, ip):
    """With InfiniBand UCX must see memory being given back, since it keeps what the network knows of it."""
    told, opened = {}, []
    for port in infiniband:
        device, number = port.split(":")
        (tmp_path / device / "ports" / number).mkdir(parents=True)
    monkeypatch.setattr(ucx, "INFINIBAND", tmp_path if infiniband else tmp_path / "none")
    monkeypatch.setattr(ucx.env, "prepare_ucx", told.update)
    monkeypatch.setattr(ucx.env, "ucx_settings", lambda **chosen: chosen)
    monkeypatch.setattr(ucx, "find_library", lambda: "libucp")
    monkeypatch.setattr(ucx._C, "UcxContext", lambda *arguments: opened.append(arguments) or "context")
    _, (meeting, *_) = meetings(3)
    assert ucx._open(meeting, Address("eth0", ip)) == "context"
    devices = {"TLS": ucx.TRANSPORTS, "NET_DEVICES": ",".join(["eth0", *infiniband])}
    assert opened == [("libucp", devices, 3)]
    assert ("UCX_MEM_EVENTS" in told) is (not infiniband)
    assert told["UCX_TCP_AF_PRIO"] == ("inet6,inet" if ":" in ip else "inet,inet6")
    assert ucx.FOR_UCX.items() <= told.items() and told["UCX_HANDLE_ERRORS"] == "none"
