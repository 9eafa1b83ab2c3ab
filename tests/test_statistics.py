"""Communicator.statistics(): the same program has the same numbers on one host and over several."""

import pytest
import torch

from pycomm.testing import run_ranks


def counted(comm):
    """{operation: {size: (operations, bytes)}} of what follows."""
    before = comm.statistics()
    for count in (1, 5, 3000):
        comm.all_reduce(torch.ones(count))
        comm.broadcast(torch.ones(count), comm.world_size - 1)
        comm.all_to_all(torch.ones(4 * count))
    for sender in range(comm.world_size):
        for other in range(comm.world_size):
            if other != sender and comm.rank == sender:
                comm.send(torch.ones(2 + other), other)
        if comm.rank != sender:
            comm.recv(torch.ones(2 + comm.rank), sender)
    comm.all_gather(torch.ones(7), async_op=True).wait()
    comm.barrier()
    found = {}
    for name, sizes in comm.statistics().items():
        for size, cell in sizes.items():
            old = before.get(name, {}).get(size, {"operations": 0, "bytes": 0})
            found[name, size] = tuple(cell[key] - old[key] for key in ("operations", "bytes"))
    return found


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 2, 3], [0, 1, 1, 1]])
def test_hosts_make_no_difference(hosts):
    expected = run_ranks(4, counted)
    assert run_ranks(4, counted, hosts=hosts) == expected
    assert expected[0]["barrier", "64 B"] == (1, 0) and len(expected[0]) > 10, expected[0]
    for rank, found in enumerate(expected):
        sent = sum(number for (name, _), (number, _) in found.items() if name == "send")
        assert sent == 3 and found["recv", "64 B"] == (3, 3 * 4 * (2 + rank)), found
