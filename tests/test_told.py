"""An error names the rank that found the failure."""

import pytest
import torch
from torch_ranks import meeting

import pycomm
from pycomm.testing import run_ranks


def aborts(comm, other):
    comm.abort("enough")


def waits_in_vain(comm, other):
    with pytest.raises(pycomm.CommTimeoutError):
        comm.recv(torch.zeros(1), other, timeout=0.1)


@pytest.mark.parametrize(("mode", "hosts"), [("threads", None), ("processes", None), ("threads", "2+1")])
@pytest.mark.parametrize("seer", range(3))
@pytest.mark.parametrize("fails", [aborts, waits_in_vain])
def test_who_has_seen_it(fails, seer, hosts, mode):
    """Every later call of the other ranks names it. Its own errors need not, within a host."""

    def body(comm, together):
        together.wait()  # all have the group
        if comm.rank == seer:
            fails(comm, (seer + 1) % 3)
        together.wait()
        texts = []
        for call in (comm.barrier, lambda: comm.send(torch.zeros(1), (comm.rank + 1) % 3)):
            with pytest.raises(pycomm.CommError) as info:
                call()
            texts.append(str(info.value))
        return texts

    for rank, texts in enumerate(run_ranks(3, body, meeting(3), mode=mode, hosts=hosts, timeout=20)):
        for text in texts:
            assert f"[rank {rank}/3]" in text
            assert f"(seen by rank {seer}" in text or rank == seer, text
            assert text.count("(seen by") == 1 or rank == seer, text
            assert "(seen by" not in text or rank != seer or hosts, text
