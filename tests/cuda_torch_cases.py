"""torch.distributed in tests/test_cuda_python.py: each function runs in a process of its own, on CUDA tensors
of tests/fake_cuda.py.
"""

import datetime
import os
import signal
import threading
import time

import fake_cuda
import torch
import torch.distributed as dist
from cuda_native_cases import raises
from torch.distributed.distributed_c10d import _coalescing_manager
from torch_ranks import DIED, data, equal, meeting, spawn

import pycomm
from pycomm import _C

SIZE = 1000


def ranks(world_size, body, *args, **options):
    """body(rank, world_size, *args) in forked ranks of a default group, each in a stream of its own; each
    checks that it leaves nothing.
    """

    def rank(r, n):
        with fake_cuda.stream():
            body(r, n, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        fake_cuda.check_nothing_left()

    return spawn(world_size, rank, **options)


def cuda(*args, **options):
    return data(*args, **options).to("cuda")


def empty(*shape):
    return torch.full(shape, 77.0, device="cuda")


def total(n, *shape):
    return sum(data(p, *shape) for p in range(n))


# --- the operations: fn(rank, n, call) -> (result, expected); call(f, *args) runs it synchronously or not


def all_reduce(r, n, call):
    x = cuda(r, SIZE)
    call(dist.all_reduce, x)
    return x, total(n, SIZE)


def all_reduce_average(r, n, call):
    x = cuda(r, 3, SIZE).t()
    call(dist.all_reduce, x, op=dist.ReduceOp.AVG)
    return x * n, total(n, 3, SIZE).t()


def reduce(r, n, call):
    x = cuda(r, SIZE)
    call(dist.reduce, x, n - 1)
    return x, total(n, SIZE) if r == n - 1 else data(r, SIZE)


def broadcast(r, n, call):
    x = cuda(r, SIZE, 2)
    call(dist.broadcast, x, 1)
    return x, data(1, SIZE, 2)


def all_gather(r, n, call):
    out = [empty(SIZE + p) for p in range(n)]
    call(dist.all_gather, out, cuda(r, SIZE + r))
    return out, [data(p, SIZE + p) for p in range(n)]


def all_gather_into_tensor(r, n, call):
    out = empty(n * SIZE)
    call(dist.all_gather_into_tensor, out, cuda(r, SIZE))
    return out, torch.cat([data(p, SIZE) for p in range(n)])


def reduce_scatter(r, n, call):
    out = empty(SIZE)
    call(dist.reduce_scatter, out, list(cuda(r, n * SIZE).chunk(n)))
    return out, total(n, n * SIZE).chunk(n)[r]


def reduce_scatter_tensor(r, n, call):
    out = empty(SIZE)
    call(dist.reduce_scatter_tensor, out, cuda(r, n * SIZE))
    return out, total(n, n * SIZE).chunk(n)[r]


def all_to_all_single(r, n, call):
    out = empty(n * SIZE)
    call(dist.all_to_all_single, out, cuda(r, n * SIZE))
    return out, torch.cat([data(p, n * SIZE).chunk(n)[r] for p in range(n)])


def all_to_all_single_uneven(r, n, call):
    splits = [[3 * p + q for q in range(n)] for p in range(n)]
    mine, theirs = splits[r], [row[r] for row in splits]
    out = empty(sum(theirs), 5)
    call(dist.all_to_all_single, out, cuda(r, sum(mine), 5), theirs, mine)
    return out, torch.cat([data(p, sum(splits[p]), 5).split(splits[p])[r] for p in range(n)])


def all_to_all(r, n, call):
    out = [empty(SIZE + p) for p in range(n)]
    call(dist.all_to_all, out, [cuda(10 * r + q, SIZE + r) for q in range(n)])
    return out, [data(10 * p + r, SIZE + p) for p in range(n)]


def gather(r, n, call):
    out = [empty(SIZE) for _ in range(n)] if r == 0 else None
    call(dist.gather, cuda(r, SIZE), out, dst=0)
    return (out, [data(p, SIZE) for p in range(n)]) if r == 0 else ([], [])


def scatter(r, n, call):
    out = empty(SIZE)
    call(dist.scatter, out, [cuda(p, SIZE) for p in range(n)] if r == 0 else None, src=0)
    return out, data(r, SIZE)


OPERATIONS = [
    all_reduce,
    all_reduce_average,
    reduce,
    broadcast,
    all_gather,
    all_gather_into_tensor,
    reduce_scatter,
    reduce_scatter_tensor,
]
OPERATIONS += [all_to_all_single, all_to_all_single_uneven, all_to_all, gather, scatter]


def on_host(x):
    return [part.cpu() for part in x] if isinstance(x, list) else x.cpu()


def every_operation(r, n):
    def at_once(function, *args, **options):
        assert function(*args, **options) is None

    def later(function, *args, **options):
        work = function(*args, async_op=True, **options)
        assert work.wait() is True or work.wait() is None
        assert work.exception() is None

    for call in (at_once, later):
        for operation in OPERATIONS:
            result, expected = operation(r, n, call)
            try:
                equal(on_host(result), expected)
            except AssertionError as error:
                raise AssertionError(f"{operation.__name__} {call.__name__}: {error}") from error
    dist.barrier()


def messages(r, n):
    left, right = (r - 1) % n, (r + 1) % n
    out = empty(2, SIZE).t()
    sent = dist.isend(cuda(r, 2, SIZE).t(), right, tag=3)
    received = dist.irecv(out, left, tag=3)
    received.wait()
    sent.wait()
    equal(out.cpu(), data(left, 2, SIZE).t())
    batched_messages(r, n)


def batched_messages(r, n):
    left, right = (r - 1) % n, (r + 1) % n
    out, other = empty(SIZE), empty(7)
    ops = [dist.P2POp(dist.isend, cuda(r, SIZE), right), dist.P2POp(dist.irecv, out, left)]
    ops += [dist.P2POp(dist.isend, cuda(r, 7), left), dist.P2POp(dist.irecv, other, right)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    equal([out.cpu(), other.cpu()], [data(left, SIZE), data(right, 7)])
    if r == 0:
        dist.send(cuda(0, 5), 1)
    elif r == 1:
        x = empty(5)
        assert dist.recv(x, 0) == 0
        equal(x.cpu(), data(0, 5))


def coalescing(r, n):
    xs = [cuda(r + 10 * i, SIZE + i) for i in range(4)]
    with _coalescing_manager(device=torch.device("cuda", 0), async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    equal(on_host(xs), [sum(data(p + 10 * i, SIZE + i) for p in range(n)) for i in range(4)])
    outs = [empty(n * SIZE) for _ in range(3)]
    with _coalescing_manager():
        for i, out in enumerate(outs):
            dist.all_gather_into_tensor(out, cuda(r + 10 * i, SIZE))
    equal(on_host(outs), [torch.cat([data(p + 10 * i, SIZE) for p in range(n)]) for i in range(3)])


def futures(r, n):
    """A callback runs in stream order, at once for the host; its value orders the stream of whoever waits for
    it.
    """
    x = cuda(r, SIZE)
    dist.all_reduce(x.clone())
    fake_cuda.synchronize()
    gate = fake_cuda.gate()
    work = dist.all_reduce(x, async_op=True)
    seen = []

    def twice(future):
        (value,) = future.value()
        seen.append(fake_cuda.driver.current_stream(0))
        out = torch.empty_like(value)
        out.copy_(value)
        return out

    future = work.get_future().then(twice)
    out = torch.empty(SIZE, device="cuda")
    out.copy_(future.wait())
    assert len(seen) == 1 and seen[0] != fake_cuda.driver.current_stream(0)
    assert not fake_cuda.idle() and not work.is_completed()
    gate.open()
    equal(out.cpu(), total(n, SIZE))
    fake_cuda.wait_until(work.is_completed)
    assert work.is_success()


def host_runs_ahead(r, n):
    x, y = cuda(r, SIZE), cuda(r, 10)
    dist.all_reduce(y.clone())
    fake_cuda.synchronize()
    gate = fake_cuda.gate()
    dist.all_reduce(x)
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    x.copy_(x.clone())
    assert not fake_cuda.idle()
    gate.open()
    equal([x.cpu(), y.cpu()], [total(n, SIZE), total(n, 10)])


def block_current_stream(r, n):
    """The stream waits, the host does not: the last rank comes when rank 0 has called everything."""
    x, store = cuda(r, SIZE), dist.distributed_c10d._get_default_store()
    dist.all_reduce(x.clone())
    if r == n - 1:
        store.wait(["called"])
    work = dist.all_reduce(x, async_op=True)
    work.block_current_stream()
    out = torch.empty_like(x)
    out.copy_(x)
    if r == 0:
        time.sleep(0.1)  # for a stream that does not wait to show it
        store.set("called", "")
    equal(out.cpu(), total(n, SIZE))


def both_devices(r, n):
    for _ in range(3):
        host, device = data(r, SIZE), cuda(r, SIZE)
        works = [dist.all_reduce(device, async_op=True), dist.all_reduce(host, async_op=True)]
        for work in works:
            work.wait()
        equal([host, device.cpu()], [total(n, SIZE)] * 2)
        dist.barrier()
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": r})
    assert objects == [{"rank": p} for p in range(n)]


def new_groups(r, n):
    dist.all_reduce(cuda(r, 10))
    pair = dist.new_group([0, 1])
    everyone = dist.new_group(list(range(n)))
    x, y = cuda(r, SIZE), cuda(r, SIZE)
    if r < 2:
        dist.all_reduce(x, group=pair)
        equal(x.cpu(), total(2, SIZE))
    dist.all_reduce(y, group=everyone)
    equal(y.cpu(), total(n, SIZE))
    if r < 2:
        dist.destroy_process_group(pair)


def data_parallel(r, n):
    """DistributedDataParallel over CUDA parameters: the averaged gradients are those of one process with all
    the data.
    """
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    model.load_state_dict(alone.state_dict())
    if r:
        torch.nn.init.zeros_(model[0].weight)  # rank 0's values count
    ddp = torch.nn.parallel.DistributedDataParallel(model.to("cuda"))
    for step in range(2):
        inputs = torch.cat([data(10 * step + p, 2, 8) for p in range(n)])
        (alone(inputs).square().sum() / n).backward()
        ddp(inputs.chunk(n)[r].to("cuda")).square().sum().backward()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def traced(r, n):
    """The flight recorder sees what runs in a stream, with numbers and ends; what is synchronous stays in the
    caller's stream.
    """
    x = cuda(r, SIZE)
    dist.all_reduce(x.clone())
    fake_cuda.synchronize()
    streams = fake_cuda.driver.calls("cuStreamCreateWithPriority")
    gate = fake_cuda.gate()
    dist.all_reduce(x)
    assert fake_cuda.driver.calls("cuStreamCreateWithPriority") == streams
    seen = [record for record in _C.flight_records() if record["name"] == "pycomm:all_reduce"]
    assert [record["sequence"] for record in seen] == [1, 2], seen
    assert not seen[1]["completed_ns"], seen
    gate.open()
    fake_cuda.synchronize()
    fake_cuda.wait_until(lambda: all(record["completed_ns"] for record in _C.flight_records()))
    hooked = []
    dist.group.WORLD._register_on_completion_hook(hooked.append)
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    fake_cuda.wait_until(lambda: len(hooked) == 2)


def under_way(r, n):
    """destroy_process_group with operations that a stream has not come to."""
    x = cuda(r, SIZE)
    dist.all_reduce(x)
    fake_cuda.synchronize()
    gate = fake_cuda.gate()
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    gate.open()
    dist.destroy_process_group()
    del works


def mismatch(r, n):
    dist.all_reduce(cuda(r, 4))
    with raises(pycomm.MismatchError, "count", rank=r, world_size=n, op="all_reduce"):
        work = dist.all_reduce(cuda(r, SIZE + r), async_op=True)
        fake_cuda.wait_until(lambda: work.is_completed())
        work.wait()


def wrong_arguments(r, n):
    x = cuda(r, 4)
    with raises(ValueError, "all_gather", "different devices"):
        dist.all_gather([torch.zeros(4) for _ in range(n)], x)
    with raises(ValueError, "Float4_e2m1fn_x2 is not supported"):
        dist.all_reduce(torch.empty(4, dtype=torch.float4_e2m1fn_x2, device="cuda"))
    dist.all_reduce(x)
    equal(x.cpu(), total(n, 4))
    with raises(ValueError, "definite source"):
        dist.recv(x)
    dist.barrier()


def allocate_tensor(r, n):
    """Registered memory by torch's hook: whole and in slices; freed in another order on each rank, while
    peers go on with theirs.
    """
    backend, device = dist.group.WORLD._get_backend(torch.device("cuda")), torch.device("cuda")

    def registered(count):
        assert backend.supports_tensor_alloc(device)
        x = backend.allocate_tensor(count, dtype=torch.float32, device=device)
        assert x.shape == (count,) and x.device == torch.device("cuda", 0) and not x.cpu().any()
        return x

    x = registered(n * SIZE)
    mine = x.chunk(n)[r]
    x.copy_(data(r, n * SIZE))
    dist.reduce_scatter_tensor(mine, x)
    equal(mine.cpu(), total(n, n * SIZE).chunk(n)[r])
    dist.all_gather_into_tensor(x, mine)
    equal(x.cpu(), total(n, n * SIZE))
    for rounds in range(5):
        xs = [registered(SIZE + i).copy_(data(r, SIZE + i)) for i in range(n)]
        for y in xs:
            dist.all_reduce(y)
        equal(on_host(xs), [total(n, SIZE + i) for i in range(n)])
        kept = xs.pop((r + rounds) % n)[:SIZE]  # in another region on each rank
        del xs, y
        dist.all_reduce(kept.fill_(1.0))
        equal(kept.cpu(), torch.full((SIZE,), float(n)))
        del kept
    with raises(pycomm.MismatchError, "All ranks must"):
        registered(SIZE + r)
    dist.all_reduce(x.fill_(1.0))
    equal(x.cpu(), torch.full((n * SIZE,), float(n)))


CASES = [
    every_operation,
    messages,
    coalescing,
    futures,
    host_runs_ahead,
    block_current_stream,
    both_devices,
    new_groups,
    data_parallel,
    traced,
    under_way,
]
CASES += [mismatch, wrong_arguments, allocate_tensor]


def in_processes(name, world_size):
    ranks(world_size, globals()[name])


def ctrl_c(wait):
    """In a call that blocks the host while the device waits for a peer. The peer is told."""

    def body(r, n):
        x = cuda(r, SIZE)
        dist.all_reduce(x)
        dist.barrier()
        if r == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            start = time.monotonic()
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            with raises(KeyboardInterrupt):
                if wait == "barrier":
                    dist.barrier()
                else:
                    dist.all_reduce(x, async_op=True).wait(datetime.timedelta(seconds=15))
            assert time.monotonic() - start < 8
        else:
            group = dist.group.WORLD._get_backend(torch.device("cuda")).communicator
            fake_cuda.wait_until(lambda: group.describe()["broken"])
        with raises(pycomm.AbortedError, "interrupted"):
            dist.all_reduce(x)

    ranks(2, body)


def killed():
    together = meeting(3)

    def body(r, n):
        x = cuda(r, SIZE)
        dist.all_reduce(x)
        dist.barrier()
        together.wait()
        if r == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with raises(pycomm.PeerError, "rank 2 died", rank=r, world_size=n, peer=2):
            work = dist.all_reduce(x, async_op=True)
            fake_cuda.wait_until(work.is_completed)
            work.wait()

    results = ranks(3, body, expect_deaths=[2])
    assert results[2] == DIED
