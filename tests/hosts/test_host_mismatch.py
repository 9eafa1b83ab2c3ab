"""Calls that do not match over hosts: every rank raises MismatchError with both values and the other's rank
and host, no output is written, no process dies, and the group goes on.
"""

import re

import pytest
import torch
from collective_cases import whole
from test_mismatch import CASES, UNTOUCHED, caught

from pycomm.testing import run_ranks
from pycomm.testing.groups import hosts_of

PLACEMENTS = {"1+1": 2, "2+2": 4, "0101": 4, "1+2+1": 4}


def goes_on(comm):
    """Small and large, from every root, and messages of unequal sizes."""
    n, r = comm.world_size, comm.rank
    for count in (9, 5003):
        v = whole(n, count, seed=count)
        assert torch.equal(comm.all_reduce(v[r].clone()), v.sum(0))
        for root in range(n):
            assert torch.equal(comm.broadcast(v[r].clone(), root), v[root])
        assert torch.equal(comm.all_gather(v[r].clone()), v)
        parts = comm.all_to_all([v[r][: p + r] for p in range(n)], [torch.zeros(r + p) for p in range(n)])
        assert all(torch.equal(parts[p], v[p][: p + r]) for p in range(n))


def check_text(error, case, comm, odd, hosts):
    text = str(error)
    assert (error.rank, error.world_size) == (comm.rank, comm.world_size), text
    assert text.startswith(f"[rank {comm.rank}/{comm.world_size}] {error.op} #{error.sequence}: "), text
    assert error.peer == odd if comm.rank != odd else error.peer != odd, text
    field, _, usual = case.usual_value.rpartition("=")
    mine, theirs = (case.odd_value, usual) if comm.rank == odd else (usual, case.odd_value)
    where = f"rank {error.peer} (host{hosts[error.peer]})"
    if field:
        assert f"{field}={mine} here, {theirs} on {where}." in text, text
    else:
        assert mine in text and theirs in text, text
        named = re.findall(r"rank (\d+)(?: \(host(\d+)\))?", text.split(": ", 1)[1])
        assert all(host == str(hosts[int(rank)]) for rank, host in named), text


def mismatch(comm, name, odd, hosts):
    case = CASES[name]
    for async_op in (False, True):
        outputs = []

        def keep(tensor, outputs=outputs):
            outputs.append(tensor)
            return tensor

        call = case.odd if comm.rank == odd else case.usual
        how = dict(async_op=async_op)
        error = caught(lambda keep=keep, call=call, how=how: call(comm, keep, how), async_op)
        check_text(error, case, comm, odd, hosts)
        for output in outputs:
            assert output.eq(UNTOUCHED).all(), "an output was written"
        goes_on(comm)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", CASES)
def test_mismatch(name, placement):
    """The odd one is the last rank: on the host of another, or alone on its own."""
    n = PLACEMENTS[placement]
    run_ranks(n, mismatch, name, n - 1, hosts_of(placement, n), hosts=placement, timeout=20.0)


@pytest.mark.parametrize("name", ["dtype", "reduce op large", "root", "splits", "operation"])
def test_mismatch_on_a_leader(name):
    run_ranks(4, mismatch, name, 2, hosts_of("2+2", 4), hosts="2+2", wire_delay_us=200, timeout=20.0)


@pytest.mark.parametrize("name", [name for name in CASES if "large" in name or "size" in name])
def test_mismatch_in_the_middle_of_a_host(name):
    run_ranks(4, mismatch, name, 1, hosts_of("3+1", 4), hosts="3+1", timeout=20.0)


@pytest.mark.parametrize("name", ["size 1 and 2", "size 2^20 and 2^20+512", "operation and route", "splits"])
def test_no_process_dies(name):
    """Over Gloo, which ends a process over a message of another size than its receive."""
    run_ranks(4, mismatch, name, 3, hosts_of("2+2", 4), hosts="2+2", mode="processes", timeout=30.0)
