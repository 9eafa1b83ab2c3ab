"""Which address is chosen, as a table; what the addresses of all ranks must be for a group."""

import re
import socket

import pytest
import torch.distributed as dist

from pycomm.hosts import addresses, records
from pycomm.hosts.addresses import Address, choose
from pycomm.hosts.records import Record

LO, ETH0, ETH0_6 = Address("lo", "127.0.0.1"), Address("eth0", "10.0.0.6"), Address("eth0", "fd00::6")
ETH1, DOCKER, IB = Address("eth1", "10.1.0.6"), Address("docker0", "172.17.0.1"), Address("ib0", "10.2.0.6")
ALL = [LO, DOCKER, ETH0, ETH1, IB, ETH0_6, Address("lo", "::1")]
OURS, GLOOS = "PYCOMM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("wanted", "routed", "expected"),
    [
        # nothing is asked for: the route decides
        (None, "10.0.0.6", ETH0),
        (None, "fd00::6", ETH0_6),
        (None, "127.0.0.1", LO),
        # a beginning of names, or a whole one
        ((OURS, "eth"), "127.0.0.1", ETH0),
        ((OURS, "eth"), "10.1.0.6", ETH1),
        ((OURS, "eth1"), "10.0.0.6", ETH1),
        ((OURS, "=eth1"), "10.0.0.6", ETH1),
        ((OURS, "ib,eth"), "127.0.0.1", IB),
        ((OURS, "wlan, eth"), None, ETH0),
        ((OURS, "lo"), None, LO),
        # all but some
        ((OURS, "^lo,docker"), None, ETH0),
        ((OURS, "^lo,docker"), "10.2.0.6", IB),
        ((OURS, "^docker"), "172.17.0.1", ETH0),
        ((OURS, "^=docker0,eth0"), None, ETH1),
        ((OURS, "^eth,ib,docker"), None, LO),
        # the kind of address that the route has
        ((OURS, "eth0"), "fd00::99", ETH0_6),
        ((OURS, "eth0"), "10.9.9.9", ETH0),
        # Gloo's variable: whole names, the first that exists
        ((GLOOS, "eth9,eth1,eth0"), "10.0.0.6", ETH1),
        ((GLOOS, "eth0"), "fd00::6", ETH0_6),
    ],
)
def test_choice(wanted, routed, expected):
    assert choose(wanted, ALL, routed) == expected


def test_choice_without_a_route():
    assert choose(None, [LO, ETH0], None) == ETH0
    assert choose(None, [LO, ETH0_6, ETH0], None) == ETH0
    assert choose(None, [LO], None) == LO
    with pytest.raises(ValueError, match=r"Cannot tell which .* chooses one of lo \(127.0.0.1\), eth0 \("):
        choose(None, [LO, ETH0, ETH1], None)
    with pytest.raises(ValueError, match=r"Cannot tell which .* chooses one of no interfaces"):
        choose(None, [], None)


@pytest.mark.parametrize(
    "wanted", [(OURS, "eth9"), (OURS, "=eth"), (OURS, "^lo,eth,ib,docker"), (OURS, "^"), (GLOOS, "eth")]
)
def test_no_such_interface(wanted):
    found = ALL if wanted[1] != "^" else []
    with pytest.raises(ValueError) as error:
        choose(wanted, found, "10.0.0.6")
    assert str(error.value).startswith("{}={!r} in the environment: no such interface".format(*wanted))
    assert "eth0 (10.0.0.6, fd00::6)" in str(error.value) or not found


def test_this_machine():
    """What the kernel says of itself."""
    found = addresses.local_addresses()
    assert LO in found
    assert {address.interface for address in found} <= {name for _, name in socket.if_nameindex()}
    assert addresses.route_to("127.0.0.1") == "127.0.0.1"
    assert addresses.route_to("localhost") in ("127.0.0.1", "::1")
    assert addresses.network_stack() == addresses.network_stack() != ""
    routed = addresses.default_route()
    assert routed is None or routed in [address.ip for address in found]


def test_the_stores_host(tmp_path):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert records.host_of(dist.PrefixStore("a", dist.PrefixStore("b", server))) == "127.0.0.1"
    assert records.host_of(dist.FileStore(str(tmp_path / "store"), 1)) is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({OURS: "^docker", GLOOS: "eth0"}, (OURS, "^docker")),
        ({OURS: "", GLOOS: "eth0"}, (GLOOS, "eth0")),
    ],
)
def test_variables(monkeypatch, variables, expected):
    for name in (OURS, GLOOS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert records.env.socket_interface() == expected


@pytest.fixture
def clean(monkeypatch, tmp_path):
    for name in (OURS, GLOOS, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(records, "local_addresses", lambda: ALL)
    return dist.FileStore(str(tmp_path / "store"), 1)


def test_a_name_that_does_not_resolve_matters_only_where_it_is_asked(monkeypatch, clean):
    monkeypatch.setenv("MASTER_ADDR", "node-a.invalid")
    with pytest.raises(ValueError, match="MASTER_ADDR 'node-a.invalid' cannot be resolved here"):
        records.own_address(clean)
    monkeypatch.setenv(OURS, "ib")
    assert records.own_address(clean) == (IB, True)


def test_without_a_host_the_default_route_counts(monkeypatch, clean):
    monkeypatch.setattr(records, "default_route", lambda: "10.1.0.6")
    assert records.own_address(clean) == (ETH1, False)


def record(stack, address, chosen=False):
    return Record(stack, *address, 1, chosen, "gloo")


@pytest.mark.parametrize(
    ("ranks", "again"),
    [
        ([record("a", LO), record("a", LO)], []),
        ([record("a", LO), record("a", ETH0), record("b", ETH1)], [0]),
        ([record("a", LO, True), record("b", ETH1)], []),
        ([record("a", LO), record("b", LO)], [0, 1]),
    ],
)
def test_who_chooses_again(ranks, again):
    assert records.must_choose_again(ranks) == again


def test_the_second_choice_leads_to_the_others(monkeypatch):
    monkeypatch.setattr(records, "local_addresses", lambda: ALL)
    monkeypatch.setattr(records, "route_to", {"10.1.0.7": "10.1.0.6"}.get)
    ranks = [record("a", LO), record("a", IB), record("b", LO), record("b", Address("eth1", "10.1.0.7"))]
    assert records.address_towards(ranks, 0) == ETH1
    assert records.address_towards(ranks[:1] + ranks[2:3], 0) is None


A6, B7, B7_6 = record("a", ETH0), record("b", Address("eth0", "10.0.0.7")), record("b", ETH0_6)


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ([A6, A6, B7, B7], None),
        ([A6, A6, A6, A6], None),
        ([record("a", LO)] * 4, None),
        ([A6, record("a", LO), B7, B7], r"Rank 1 \(host0\) has the address 127.0.0.1 \(lo\), which other"),
        ([A6, A6, record("b", DOCKER), record("a", DOCKER)], r"Rank 2 \(host1\) and rank 3 \(host1\) are on"),
        (
            [A6, A6, record("b", ETH0), B7],
            r"Rank 0 \(host0\) and rank 2 \(host1\).*10.0.0.6 \(eth0\).*\^eth0",
        ),
        ([A6, A6, B7_6, B7], r"Rank 0 \(host0\) has the address 10.0.0.6 and rank 2 \(host1\) fd00::6: one"),
    ],
)
def test_what_is_wrong_with_all(ranks, problem):
    found = records.problem(ranks, lambda rank: f"host{rank // 2}")
    assert found is None if problem is None else re.match(problem, found)
