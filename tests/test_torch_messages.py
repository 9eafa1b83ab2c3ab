"""send and recv through torch.distributed: what pipeline schedules ask of isend and irecv."""

import os
import random
import select

import pytest
import torch
import torch.distributed as dist
from tiers import tier
from torch_ranks import equal, spawn

from pycomm import CommTimeoutError


def activation(r, microbatch, count):
    return torch.arange(count, dtype=torch.float32).add_(1000 * r + microbatch)


def check_pipeline(r, n, count, seed):
    """Activations down and gradients up between neighbours, all of one tag and many at once; each rank waits
    in an order of its own.
    """
    microbatches, order = 12, random.Random(100 * seed + r)
    sends, recvs = [], []
    for microbatch in range(microbatches):
        steps = [(send, peer) for peer in (r - 1, r + 1) if 0 <= peer < n for send in (True, False)]
        order.shuffle(steps)  # no rank knows whether its peer sends or receives first
        for send, peer in steps:
            if send:
                x = activation(r, microbatch, count)
                sends.append((dist.isend(x, peer), x))
            else:
                x = torch.empty(count)
                recvs.append((dist.irecv(x, peer), x, activation(peer, microbatch, count)))
        if microbatch == 5:
            dist.all_reduce(torch.ones(30000))  # overtakes the messages
    for waiting in (recvs, sends) if order.random() < 0.5 else (sends, recvs):
        order.shuffle(waiting)
        for work, *_ in waiting:
            work.wait()
    for _, x, expected in recvs:
        equal(x, expected)


def check_unwaited(r, n, count, pipe):
    """A sender that drops work and tensor at once, and only computes: the message still arrives, and memory
    is reused only afterwards.
    """
    if r == 0:
        for microbatch in range(6):
            dist.isend(activation(0, microbatch, count), 1)
            torch.full((count,), -1.0)
        while not select.select([pipe[0]], [], [], 0)[0]:  # no call of pycomm's
            torch.ones(1000).sum()
    else:
        outs = [torch.empty(count) for _ in range(6)]
        works = [dist.irecv(out, 0) for out in outs]
        for work in reversed(works):
            work.wait()
        os.write(pipe[1], b"done")
        equal(outs, [activation(0, microbatch, count) for microbatch in range(6)])
    dist.barrier()


def check_neighbours_in_groups(r, n):
    """Two groups of the same ranks do not mix their messages; parts of one tensor travel at once."""
    other = dist.new_group(list(range(n)))
    dst, src = (r + 1) % n, (r - 1) % n
    out, out_other = torch.empty(4, 3000), torch.empty(4, 3000)
    works = [dist.irecv(out_other[i], src, group=other) for i in range(4)] + [
        dist.irecv(out[i], src) for i in range(4)
    ]
    for i in range(4):
        works.append(dist.isend(activation(r, i, 3000), dst))
        works.append(dist.isend(activation(r, 10 + i, 3000), dst, group=other))
    for work in works:
        work.wait()
    equal(out, torch.stack([activation(src, i, 3000) for i in range(4)]))
    equal(out_other, torch.stack([activation(src, 10 + i, 3000) for i in range(4)]))
    batch = [dist.P2POp(dist.irecv, out[0], src), dist.P2POp(dist.isend, activation(r, 7, 3000), dst)]
    for work in dist.batch_isend_irecv(batch if r % 2 else batch[::-1]):
        work.wait()
    equal(out[0], activation(src, 7, 3000))


def check_unmatched(r, n, pipe):
    """Nothing hangs: an irecv whose send never comes ends with the group, a wait that takes too long names
    the peer.
    """
    x = torch.zeros(3000)
    if r == 0:
        work = dist.irecv(x, 1)
        dist.barrier()
        with pytest.raises(CommTimeoutError, match="recv.*rank 1"):
            work.wait()
        os.write(pipe[1], b"done")
    else:
        dist.barrier()
        os.read(pipe[0], 4)


@tier(quick=1 / 2)
@pytest.mark.parametrize("cma", ["1", "0"])
@pytest.mark.parametrize("count", [100, 5000, 400000])
def test_torch_pipeline_traffic(monkeypatch, cma, count):
    monkeypatch.setenv("PYCOMM_CMA", cma)
    for n in (2, 3):
        spawn(n, check_pipeline, count, n + count)
    pipe = os.pipe()
    spawn(2, check_unwaited, count, pipe)
    for end in pipe:
        os.close(end)


def test_torch_messages_of_two_groups():
    for n in (2, 3):
        spawn(n, check_neighbours_in_groups)


def test_torch_message_that_never_comes():
    pipe = os.pipe()
    spawn(2, check_unmatched, pipe, timeout=2.0)
    for end in pipe:
        os.close(end)
