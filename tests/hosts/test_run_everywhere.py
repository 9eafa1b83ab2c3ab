"""The exit status of a command on emulated hosts, and the ends of its ranks; here the hosts are this one."""

import subprocess
from types import SimpleNamespace

import pytest

from pycomm.testing import emulated
from pycomm.testing.emulated import Hosts, run_everywhere

LONG = "exec sleep 100"


def hosts(placement="00"):
    placed = emulated.parse_placement(placement)
    return SimpleNamespace(
        placement=placed, environment=lambda rank: {"RANK": str(rank)}, command=lambda host: ["env"]
    )


def status(*ends, placement="00"):
    """Of a command whose ranks end so."""
    cases = " ".join(f"{rank}) {end};;" for rank, end in enumerate(ends))
    return run_everywhere(hosts(placement), ["sh", "-c", f"case $RANK in {cases} esac"])


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (["exit 0", "exit 0"], 0),
        (["exit 3", "exit 0"], 3),
        (["exit 0", "exit 3"], 3),
        (["exit 3", "exit 4"], 3),  # the first
        (["kill -9 $$", "exit 0"], 137),
        (["exit 0", "kill -15 $$"], 143),
        (["exit 255", "exit 1"], 255),
    ],
)
def test_ranks_that_end_at_the_same_time(monkeypatch, ends, expected):
    monkeypatch.setattr(emulated, "POLL_S", 0.4)  # both have ended at the first look
    assert status(*ends) == expected


@pytest.mark.parametrize("last", ["exit 5", "kill -9 $$"])
def test_the_others_are_ended(monkeypatch, last):
    """Also one that does not end by itself."""
    started, start = [], subprocess.Popen
    monkeypatch.setattr(emulated, "END_S", 0.1)
    monkeypatch.setattr(
        emulated.subprocess,
        "Popen",
        lambda *given, **how: started.append(start(*given, **how)) or started[-1],
    )
    found = status(LONG, f"trap '' TERM; {LONG}", last, placement="000")
    assert found == (5 if last == "exit 5" else 137)
    assert [one.returncode for one in started][:2] in ([-15, -9], [-15, -15])  # it may not have begun


def test_the_others_have_time_to_end(monkeypatch, tmp_path):
    """They get SIGTERM, and are killed only where they do not end."""
    started, start, ready = [], subprocess.Popen, tmp_path / "ready"
    monkeypatch.setattr(
        emulated.subprocess,
        "Popen",
        lambda *given, **how: started.append(start(*given, **how)) or started[-1],
    )
    first = f"trap 'kill $!; sleep 0.1; exit 7' TERM; sleep 100 & touch {ready}; wait"
    second = f"while [ ! -e {ready} ]; do sleep 0.01; done; exit 5"
    assert status(first, second) == 5 and [one.returncode for one in started] == [7, 5]


def test_places_of_ranks():
    made = Hosts("0110")
    found = [made.environment(rank) for rank in range(4)]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "0", "1", "1"]
    assert [one["RANK"] for one in found] == list("0123")
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MASTER_ADDR"]) for one in found} == {
        ("4", "2", "10.77.0.1")
    }
    uneven = Hosts("1+3", ipv6=True)
    assert [uneven.environment(rank)["LOCAL_WORLD_SIZE"] for rank in range(4)] == ["1", "3", "3", "3"]
    assert uneven.environment(3)["MASTER_ADDR"] == "fd77::1" and uneven.address(15, True) == "fd77::10"
    assert uneven.address(249) == "10.77.0.250" and uneven.names == ["host0", "host1"]
