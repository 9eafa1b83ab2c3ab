"""What traces and counters have of messages in a group that spans hosts."""

from collections import Counter

import pytest
import torch
from places import over_hosts

import pycomm
from pycomm import _C
from pycomm.testing import run_ranks
from pycomm.trace.files import DONE, FAILED, MESSAGE
from pycomm.trace.joined import load

HOSTS = [0, 0, 1]  # of ranks 0, 1, 2
SIZES = (3, 50000)  # floats: with their frame, and asked for


def every_way(comm, folder):
    with comm.trace(folder):
        for count in SIZES:
            for src, dst in ((0, 2), (2, 1), (0, 1)):  # between hosts twice, and inside one
                if comm.rank == src:
                    comm.send(torch.ones(count), dst)
                if comm.rank == dst:
                    comm.recv(torch.ones(count), src)
        comm.barrier()
        for src in (1, 2):  # to any source: one is of this host, one is not
            if comm.rank == src:
                comm.send(torch.ones(7), 0, tag=5)
            if comm.rank == 0:
                comm.recv(torch.ones(7), tag=5)
            comm.barrier()
    return comm.statistics()


def messages(trace):
    """Of each rank a Counter of (kind, peer, bytes)."""
    found = {row.rank: Counter() for row in trace.rows}
    for row in trace.rows:
        for each in row.operations[row.operations["type"] == MESSAGE]:
            assert each["outcome"] == DONE
            assert 0 < each["issued"] <= (each["arrived"] or each["issued"]) <= each["ended"]  # 0: not known
            found[row.rank][_C.kinds[each["kind"]], int(each["last"]), int(each["nbytes"])] += 1
    return found


def test_each_message_is_there_once(tmp_path):
    statistics = run_ranks(3, every_way, str(tmp_path), mode="processes", hosts=HOSTS, timeout=100)
    expected = {rank: Counter() for rank in range(3)}
    pairs = [(src, dst, 4 * n) for n in SIZES for src, dst in ((0, 2), (2, 1), (0, 1))]
    for src, dst, nbytes in (*pairs, (1, 0, 28), (2, 0, 28)):
        expected[src]["send", dst, nbytes] += 1
        expected[dst]["recv", src, nbytes] += 1
    assert messages(load(tmp_path)) == expected
    for rank, found in enumerate(statistics):
        for kind in ("send", "recv"):
            cells = found.get(kind, {}).values()
            mine = {key: count for key, count in expected[rank].items() if key[0] == kind}
            assert sum(cell["operations"] for cell in cells) == sum(mine.values())
            assert sum(cell["measured"] for cell in cells) == sum(mine.values())
            assert sum(cell["bytes"] for cell in cells) == sum(key[2] * n for key, n in mine.items())


def differ(comm, folder):
    with comm.trace(folder), pytest.raises(pycomm.MismatchError):
        comm.send(torch.ones(3), 1) if comm.rank == 0 else comm.recv(torch.ones(4), 0)
    comm.barrier()
    return comm.statistics()


def test_a_mismatch_is_recorded_as_failed(tmp_path):
    statistics = over_hosts("apart")(2, differ, str(tmp_path))
    for row in load(tmp_path).rows:
        assert row.operations["outcome"][row.operations["type"] == MESSAGE].tolist() == [FAILED]
    assert not any({"send", "recv"} & found.keys() for found in statistics)
