"""What kernels find on a device, with the driver and the peers played by lists: who shares a GPU, who may
signal whom.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from pycomm.fused import machine, ranks


class Peers:
    """A communicator whose exchanges have the answers of all ranks in store; what this rank says goes in its
    place.
    """

    def __init__(self, rank, answers):
        self.rank, self.world_size, self.answers = rank, len(answers[0]), list(answers)
        self.used, self.blocks = False, 64

    def describe(self):
        return {"cuda": {"protocol": "resident", "blocks": str(self.blocks)} if self.used else None}

    def exchange(self, communicator, value):
        answers = list(self.answers.pop(0))
        answers[self.rank] = value
        return answers


ALIKE = {"resident": True, "deaf": [], "arch": 90, "process": 0}
CASES = {
    "a GPU each": (["A", "B"], [], {}, 1, 132, ""),
    "two on each": (["A", "A", "B", "B"], [], {}, 2, 64, ""),  # the group's blocks
    "all on one": (["A"] * 8, [], {}, 8, 16, ""),
    "few processors for each": (["A"] * 44, [], {}, 44, 3, ""),
    "too few": (["A"] * 45, [], {}, 45, 2, "45 ranks share 132 multiprocessors; a rank's kernels need 3"),
    "no atomics here": (["A", "B"], ["B"], {}, 1, 132, "rank 0's GPU has no native atomics"),
    "no atomics there": (
        ["A", "B"],
        [],
        {1: ALIKE | {"deaf": ["A"]}},
        1,
        132,
        "rank 1's GPU has no native atomics",
    ),
    "a peer in stream order": (
        ["A", "A"],
        [],
        {1: ALIKE | {"resident": False}},
        2,
        64,
        "do not run together",
    ),
    "another architecture": (
        ["A", "B"],
        [],
        {1: ALIKE | {"arch": 80}},
        1,
        132,
        "not alike (sm_90 on rank 0, sm_80 on rank 1)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_of(case, monkeypatch):
    uuids, deaf, said, shared, programs, obstacle = CASES[case]
    peers = Peers(0, [uuids, [said.get(rank, ALIKE) for rank in range(len(uuids))]])
    group = SimpleNamespace(
        rank=0,
        size=len(uuids),
        communicator=peers,
        cache=ranks.Cache(),
        all_reduce=lambda x, async_op: setattr(peers, "used", True),
    )
    facts = SimpleNamespace(major=9, minor=0, multi_processor_count=132, uuid=uuids[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)
    monkeypatch.setattr(machine, "exchange", peers.exchange)
    monkeypatch.setattr(machine, "_native_atomics", lambda device, uuid: uuid not in deaf)
    found = machine.of(group, "cuda:0")
    assert (found.arch, found.ranks_on_device, found.programs) == (90, shared, programs)
    assert obstacle in found.obstacle and bool(obstacle) == bool(found.obstacle)
    assert not found.threads  # of this process
    assert machine.of(group, torch.device("cuda", 0)) is found and not peers.answers  # asked once


@pytest.mark.parametrize(("uuids", "threads"), [(["A", "A"], True), (["A", "B"], False)])
def test_ranks_that_are_threads(uuids, threads, monkeypatch):
    """On another device they do not share torch's thread for backward passes."""
    peers = Peers(0, [uuids, [ALIKE | {"process": f"{os.getpid()} {machine._TOKEN}"}] * 2])
    group = SimpleNamespace(
        rank=0,
        size=2,
        communicator=peers,
        cache=ranks.Cache(),
        all_reduce=lambda x, async_op: setattr(peers, "used", 1),
    )
    facts = SimpleNamespace(major=9, minor=0, multi_processor_count=132, uuid="A")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)
    monkeypatch.setattr(machine, "exchange", peers.exchange)
    monkeypatch.setattr(machine, "_native_atomics", lambda device, uuid: True)
    assert machine.of(group, "cuda:0").threads is threads


@pytest.mark.parametrize(
    ("uuid", "failed", "answer", "native"),
    [("B", 0, 1, True), ("B", 0, 0, False), ("B", 1, 1, False), ("C", 0, 1, True), ("hidden", 0, 1, False)],
)
def test_atomics_on_the_memory_of_a_peer(uuid, failed, answer, native, monkeypatch):
    """What the driver says of this GPU and that one, in this order; of a GPU that is hidden, nothing."""
    asked = []

    def attribute(value, *which):
        value._obj.value = answer
        asked.append(which)
        return failed

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid="ABC"[number])
    )
    driver = SimpleNamespace(cuDeviceGetP2PAttribute=attribute)
    monkeypatch.setattr(machine.ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    assert machine._native_atomics(torch.device("cuda", 0), uuid) is native
    assert asked == ([] if uuid == "hidden" else [(3, 0, "ABC".index(uuid))])


def test_alone(monkeypatch):
    facts = SimpleNamespace(major=10, minor=0, multi_processor_count=148, uuid="A")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert machine.of(ranks.ALONE._replace(cache=ranks.Cache()), "cuda:0") == machine.Machine(100, 1, 148, "")


def body(comm):
    first = machine.exchange(comm._comm, {"rank": comm.rank, "text": "ä" * comm.rank})
    with pytest.raises(
        ValueError,
        match=rf"\[rank {comm.rank}/3\] a value of 5002 bytes is too long to exchange, at most 4096",
    ):
        machine.exchange(comm._comm, "x" * 5000)
    with torch.device("meta"):  # a default device is not for what is exchanged
        return first, machine.exchange(comm._comm, None)


def test_exchange():
    from pycomm.testing import run_ranks

    expected = [{"rank": rank, "text": "ä" * rank} for rank in range(3)], [None] * 3
    assert run_ranks(3, body) == [expected] * 3
    assert machine.exchange(None, 5) == [5]
