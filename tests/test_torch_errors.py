"""Errors of the torch backend: classes and texts in Python, for synchronous calls, works and futures;
timeouts, abort, a dead rank.
"""

import contextlib
import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from forked import check_delays, queued
from torch_ranks import data, equal, meeting, spawn

import pycomm


def check_mismatches(r, n):
    def as_future(x, **options):
        dist.all_reduce(x, async_op=True, **options).get_future().wait()

    def as_work(x, **options):
        dist.all_reduce(x, async_op=True, **options).wait()

    for call in (dist.all_reduce, as_work, as_future):
        for c in (4, 100_000):
            with pytest.raises(pycomm.MismatchError, match=f"{c} here|{c + 1} here") as caught:
                call(torch.ones(c + (r == n - 1)))
            assert (
                isinstance(caught.value, dist.DistBackendError)
                and caught.value.rank == r
                and caught.value.op == "all_reduce"
            )
        with pytest.raises(pycomm.MismatchError, match="i32"):
            call(torch.ones(3, dtype=torch.int32 if r else torch.float32))
        with pytest.raises(pycomm.MismatchError, match="max"):
            call(torch.ones(3), op=dist.ReduceOp.MAX if r else dist.ReduceOp.SUM)
    with pytest.raises(pycomm.MismatchError, match="broadcast"):
        dist.all_reduce(torch.ones(3)) if r else dist.broadcast(torch.ones(3), 0)
    with pytest.raises(pycomm.MismatchError, match="root"):
        dist.broadcast(torch.ones(3), min(r, 1))
    if r < 2:
        with pytest.raises(pycomm.MismatchError, match="count="):
            dist.send(torch.ones(302), 1) if r == 0 else dist.recv(torch.ones(303), 0)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    wrong = [
        (lambda: backend.allreduce([torch.ones(2, device="meta")]), "device"),
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG), "avg"),
        (lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND), "band"),
        (lambda: backend.broadcast([torch.ones(2).to_sparse()], dist.BroadcastOptions()), "dense"),
        (lambda: dist.all_gather([torch.ones(2)] * (n + 1), torch.ones(2)), "list"),
        (lambda: dist.all_gather_into_tensor(torch.ones(n * 3), torch.ones(2)), "elements"),
        (lambda: dist.all_to_all_single(torch.ones(n + 1), torch.ones(n + 1)), "rows"),
    ]
    for call, text in wrong:
        with pytest.raises((ValueError, NotImplementedError), match=text):
            call()
    x = data(r, 100_000)
    dist.all_reduce(x)  # the group is as good as new
    equal(x, sum(data(p, 100_000) for p in range(n)))


def test_mismatches():
    spawn(3, check_mismatches)


def check_timeouts(r, n):
    if r == n - 1:
        time.sleep(2)
        return
    limit = datetime.timedelta(seconds=0.5)
    with pytest.raises(pycomm.CommTimeoutError, match=f"rank {n - 1} did not arrive") as caught:
        if r == 0:
            dist.barrier(async_op=True).wait(timeout=limit)
        else:
            dist.group.WORLD.barrier(_options(dist.BarrierOptions, timeout=limit)).wait()
    assert caught.value.peer == n - 1 and isinstance(caught.value, TimeoutError)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.get_error() == torch._C._distributed_c10d.ErrorType.TIMEOUT
    with pytest.raises(pycomm.CommError):
        dist.all_reduce(torch.ones(1))


def _options(cls, **values):
    options = cls()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def test_timeouts():
    spawn(3, check_timeouts)


def check_set_timeout(r, n):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    limits = [datetime.timedelta(seconds=s) for s in (50, 40, 0.3)]
    setters = [
        backend.set_timeout,
        backend._set_default_timeout,
        dist.distributed_c10d._set_pg_timeout,
    ]
    for limit, setter in zip(limits, setters, strict=True):
        setter(limit)
        assert backend.options._timeout == limit
    if r == 0:
        with pytest.raises(pycomm.CommTimeoutError, match="0.3"):
            dist.all_reduce(torch.ones(1))
    else:
        time.sleep(1)


def test_set_timeout():
    spawn(2, check_set_timeout)


def check_batch(r, n):
    """The first part of a batch is there after 1.2 of the 1.6 s of its wait, the second one never is."""
    first, second = torch.ones(1), torch.ones(1)
    if r:
        time.sleep(1.2)
        dist.send(first, 0, tag=1)
        with contextlib.suppress(pycomm.CommError):
            dist.recv(second, 0)  # until rank 0 ends the group
        return
    (work,) = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, x, 1, tag=tag) for tag, x in enumerate((first, second), 1)]
    )
    began = time.monotonic()
    with pytest.raises(pycomm.CommTimeoutError, match="rank 1 did not"):
        work.wait(datetime.timedelta(seconds=1.6))
    assert 1.2 < time.monotonic() - began < 1.6 + 1.0


def test_the_limit_of_a_batch_is_that_of_all_its_parts():
    spawn(2, check_batch)


def check_abort(r, n):
    if r == 0:
        threading.Timer(0.2, dist.group.WORLD.abort).start()
    with pytest.raises(pycomm.AbortedError, match="rank 0"):
        dist.recv(torch.ones(1), 1) if r == 0 else dist.all_reduce(torch.ones(1))
    dist.group.WORLD.shutdown()
    dist.group.WORLD.shutdown()
    with pytest.raises(pycomm.CommError):
        dist.all_reduce(torch.ones(1))


def test_abort():
    spawn(3, check_abort)


UNATTENDED = {
    "recv": lambda: dist.irecv(torch.ones(4), 1),
    "recv from any": lambda: dist.irecv(torch.ones(4)),
    "send": lambda: dist.isend(torch.ones(400), 1),
    "large send": lambda: dist.isend(torch.ones(1 << 22), 1),
    "all_reduce": lambda: dist.all_reduce(torch.ones(4), async_op=True),
    "large all_reduce": lambda: dist.all_reduce(torch.ones(1 << 20), async_op=True),
    "barrier": lambda: dist.barrier(async_op=True),
}


def check_future_of_a_death(r, n, operation):
    """Nobody waits or polls: a future is all that the program has."""
    moment = torch.tensor([time.monotonic() + 0.3], dtype=torch.float64)
    dist.broadcast(moment, 1)
    if r == 1:
        time.sleep(max(0.0, moment.item() - time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    before = queued()
    future = UNATTENDED[operation]().get_future()
    while not future.done():
        time.sleep(0.002)
        assert time.monotonic() - moment.item() < 10, "the future has not seen the death"
    delay = time.monotonic() - moment.item() - (queued() - before)
    with pytest.raises(pycomm.PeerError, match="rank 1 died"):
        future.wait()
    with contextlib.suppress(pycomm.CommError):
        dist.destroy_process_group()
    return delay


@pytest.mark.parametrize("operation", UNATTENDED)
def test_a_future_sees_a_death(operation):
    # a recv from any source waits for the others as long as one of them lives
    delays = spawn(2, check_future_of_a_death, operation, expect_deaths=[1])[:1]
    check_delays(delays)


def check_future_of_the_end(r, n, together):
    """A recv from any source, and one from a rank; the program has their futures alone. Rank 0 ends first."""
    dist.barrier()
    futures = [dist.irecv(torch.ones(4), *source, tag=5).get_future() for source in ((), (1 - r,))]
    together.wait()
    if r == 0:
        dist.destroy_process_group()
    deadline = time.monotonic() + 10
    for future in futures:
        while not future.done():
            time.sleep(0.002)
            assert time.monotonic() < deadline, "the future has not seen the end of the group"
        with pytest.raises(pycomm.PeerError if r else pycomm.AbortedError, match="closed"):
            future.wait()
    together.wait()


@pytest.mark.parametrize("hosts", [None, [0, 1]])
def test_a_future_sees_the_end_of_its_group(hosts):
    spawn(2, check_future_of_the_end, meeting(2), hosts=hosts)


def check_death(r, n, together):
    dist.barrier()
    together.wait()
    if r == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(pycomm.PeerError, match="rank 1 died") as caught:
        for _ in range(100):
            dist.all_reduce(torch.ones(100_000), async_op=True).wait()
    assert caught.value.peer == 1 and time.monotonic() - start < 5
    with contextlib.suppress(pycomm.CommError):
        dist.destroy_process_group()


def test_death():
    spawn(3, check_death, meeting(3), expect_deaths=[1])
