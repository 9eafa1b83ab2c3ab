"""The native API in tests/test_cuda_python.py: each function runs in a process of its own, on CUDA tensors of
tests/fake_cuda.py.
"""

import contextlib
import os
import signal

import fake_cuda
import torch
from torch_ranks import data, equal, meeting

import pycomm
from pycomm import _C
from pycomm.testing import run_ranks

COUNTS = (0, 1, 7, 4099)


def place(rank, devices):
    return rank % devices


class Ranks:
    """What the body of a rank needs: tensors on its device, calls in one of two forms."""

    def __init__(self, comm, device, async_op):
        self.comm, self.device, self.async_op = comm, f"cuda:{device}", async_op
        self.rank, self.world_size = comm.rank, comm.world_size

    def data(self, rank, *shape, dtype=torch.float32):
        return data(rank, *shape, dtype=dtype).to(self.device)

    def empty(self, *shape, dtype=torch.float32):
        return torch.full(shape, 77, dtype=dtype, device=self.device)

    def call(self, function, *args, **options):
        if not self.async_op:
            return function(*args, **options)
        work = function(*args, async_op=True, **options)
        return work.wait()


# --- the operations: fn(ranks, n, r, c) -> (result, expected); n = world_size, r = rank, c = a count


def all_reduce(o, n, r, c):
    x = o.data(r, c)
    o.call(o.comm.all_reduce, x)
    return x, sum(data(p, c) for p in range(n))


def all_reduce_integers(o, n, r, c):
    x = o.data(r, c, dtype=torch.int32)
    o.call(o.comm.all_reduce, x)
    return x, sum(data(p, c, dtype=torch.int32) for p in range(n))


def all_reduce_average(o, n, r, c):
    out = o.empty(c)
    return o.call(o.comm.all_reduce, o.data(r, c) * n, "avg", out=out), sum(data(p, c) for p in range(n))


def all_reduce_strided(o, n, r, c):
    x, out = o.data(r, 3, c).t(), o.empty(3, c).t()
    o.call(o.comm.all_reduce, x, "max", out=out)
    equal(x.cpu(), data(r, 3, c).t())
    return out, torch.stack([data(p, 3, c).t() for p in range(n)]).amax(0)


def all_reduce_overlapping(o, n, r, c):
    base = o.data(r, c + 1)
    o.call(o.comm.all_reduce, base[:c], out=base[1:])
    return base, torch.cat([data(r, c + 1)[:1], sum(data(p, c + 1)[:c] for p in range(n))])


def reduce(o, n, r, c):
    x, root = o.data(r, c), n - 1
    o.call(o.comm.reduce, x, root)
    return x, sum(data(p, c) for p in range(n)) if r == root else data(r, c)


def broadcast(o, n, r, c):
    x = o.data(r, c, 2).t()
    o.call(o.comm.broadcast, x, n - 1)
    return x, data(n - 1, c, 2).t()


def all_gather(o, n, r, c):
    return o.call(o.comm.all_gather, o.data(r, c, 2)), torch.stack([data(p, c, 2) for p in range(n)])


def all_gather_list(o, n, r, c):
    out = [o.empty(2, c + p).t() for p in range(n)]
    o.call(o.comm.all_gather, o.data(r, c + r, 2), out)
    return out, [data(p, c + p, 2) for p in range(n)]


def reduce_scatter(o, n, r, c):
    return o.call(o.comm.reduce_scatter, o.data(r, n * c)), sum(data(p, n * c) for p in range(n))[
        r * c : (r + 1) * c
    ]


def reduce_scatter_list(o, n, r, c):
    parts = [o.data(100 * r + p, c + p) for p in range(n)]
    return o.call(o.comm.reduce_scatter, parts, o.empty(c + r)), sum(
        data(100 * p + r, c + r) for p in range(n)
    )


def all_to_all(o, n, r, c):
    expected = torch.cat([data(p, n * c)[r * c : (r + 1) * c] for p in range(n)])
    return o.call(o.comm.all_to_all, o.data(r, n * c)), expected


def all_to_all_uneven(o, n, r, c):
    splits = [[c + p + q for q in range(n)] for p in range(n)]  # rows from p to q
    mine, theirs = splits[r], [row[r] for row in splits]
    out = o.call(o.comm.all_to_all, o.data(r, sum(mine), 2), in_splits=mine, out_splits=theirs)
    return out, torch.cat([data(p, sum(splits[p]), 2).split(splits[p])[r] for p in range(n)])


def all_to_all_list(o, n, r, c):
    out = [o.empty(c + p) for p in range(n)]
    o.call(o.comm.all_to_all, [o.data(10 * r + q, c + r) for q in range(n)], out)
    return out, [data(10 * p + r, c + p) for p in range(n)]


def all_to_all_overlapping(o, n, r, c):
    base = o.data(r, n * c + 1)
    o.call(o.comm.all_to_all, base[: n * c], base[1:])
    return base[1:], torch.cat([data(p, n * c + 1)[r * c : (r + 1) * c] for p in range(n)])


def gather(o, n, r, c):
    out = o.call(o.comm.gather, o.data(r, c), root=n - 1)
    return ([out], [torch.stack([data(p, c) for p in range(n)])]) if r == n - 1 else ([], [])


def scatter(o, n, r, c):
    parts = [o.data(p, c, 2).t() for p in range(n)] if r == 0 else None
    return o.call(o.comm.scatter, parts, o.empty(2, c)), data(r, c, 2).t()


def messages(o, n, r, c):
    """Around a ring, out of a strided tensor into a strided one; a rank alone sends nothing."""
    if n == 1:
        return [], []
    out, left, right = o.empty(2, c).t(), (r - 1) % n, (r + 1) % n
    sent = o.comm.send(o.data(r, 2, c).t(), right, tag=5, async_op=True)
    if o.async_op:
        received = o.comm.recv(out, left, tag=5, async_op=True)
        received.wait()
        assert received.source() == left
    else:
        assert o.comm.recv(out, left, tag=5) == left
    sent.wait()
    return out, data(left, 2, c).t()


OPERATIONS = [
    all_reduce,
    all_reduce_integers,
    all_reduce_average,
    all_reduce_strided,
    all_reduce_overlapping,
    reduce,
    broadcast,
]
OPERATIONS += [
    all_gather,
    all_gather_list,
    reduce_scatter,
    reduce_scatter_list,
    all_to_all,
    all_to_all_uneven,
    all_to_all_list,
]
OPERATIONS += [all_to_all_overlapping, gather, scatter, messages]


def every_operation(comm, device, protocol):
    for async_op in (False, True):
        ranks = Ranks(comm, device, async_op)
        for operation in OPERATIONS:
            for count in COUNTS:
                result, expected = operation(ranks, comm.world_size, comm.rank, count)
                result = [x.cpu() for x in result] if isinstance(result, list) else result.cpu()
                try:
                    equal(result, expected)
                except AssertionError as error:
                    raise AssertionError(
                        f"{operation.__name__} count={count} async_op={async_op}: {error}"
                    ) from error
    comm.barrier()
    facts = comm.describe()["cuda"]
    assert (facts["protocol"], facts["device"]) == (protocol, f"cuda:{device}"), facts
    threads_here = facts["topology"].startswith(f"{comm.world_size} ranks, 1 process, 1 device")
    assert _C.ranks_are_threads(device) == threads_here


# --- groups of ranks


def threads(world_size, body, *args, devices=1, **options):
    """body(comm, device, *args) in threads, each with a stream of its own."""

    def rank(comm):
        device = place(comm.rank, devices)
        fake_cuda.driver.set_device(device)
        with fake_cuda.stream(device):
            return body(comm, device, *args)

    results = run_ranks(world_size, rank, timeout=options.pop("timeout", 20.0), **options)
    fake_cuda.check_nothing_left()
    return results


def processes(world_size, body, *args, devices=1, **options):
    """The same in forked processes. Each checks that it leaves nothing."""

    def rank(comm):
        device = place(comm.rank, devices)
        fake_cuda.driver.set_device(device)
        with fake_cuda.stream(device):
            result = body(comm, device, *args)
        comm.close()
        fake_cuda.check_nothing_left()
        return result

    return run_ranks(world_size, rank, mode="processes", timeout=options.pop("timeout", 20.0), **options)


def operations_in_threads(world_size, devices, protocol):
    threads(world_size, every_operation, protocol, devices=devices)


def operations_in_processes(world_size, devices, protocol):
    processes(world_size, every_operation, protocol, devices=devices)


# --- streams


def host_runs_ahead(comm, device):
    """Neither an operation nor the wait for one holds up the host; what comes after it in the stream does
    wait.
    """
    r, n = comm.rank, comm.world_size
    x, y = data(r, 100).to("cuda"), data(r, 50).to("cuda")
    comm.all_reduce(x.clone())  # sets up
    fake_cuda.synchronize()
    gate = fake_cuda.gate()
    comm.all_reduce(x)
    work = comm.all_reduce(y, async_op=True)
    assert not work.done()
    assert work.wait() is y
    copy = y.clone()
    assert not work.done() and not fake_cuda.idle()
    gate.open()
    equal(x.cpu(), sum(data(p, 100) for p in range(n)))
    equal(copy.cpu(), sum(data(p, 50) for p in range(n)))
    fake_cuda.wait_until(work.done)


def wait_holds_the_stream(comm, device):
    """An operation of another stream ends late; the stream in which wait() was called reads its result."""
    r, n = comm.rank, comm.world_size
    x = data(r, 100).to("cuda")
    fake_cuda.synchronize()
    with fake_cuda.stream() as other:
        gate = fake_cuda.gate()
        work = comm.all_reduce(x, async_op=True)
        inside = fake_cuda.driver.exchange_stream(0, 0)
        work.wait()
        copy = torch.empty(100, device="cuda")
        copy.copy_(x)
        fake_cuda.driver.exchange_stream(inside, 0)
        assert inside == other
        gate.open()
    fake_cuda.driver.synchronize(0, 0)
    equal(copy.cpu(), sum(data(p, 100) for p in range(n)))


def dropped_tensors(comm, device):
    """Tensors whose last reference goes while operations on them are under way, and whose memory is spoilt
    when it is given back.
    """
    n = comm.world_size
    results = []
    for i in range(20):
        x, out = torch.full((3, 700), float(i), device="cuda"), torch.zeros(700, 3, device="cuda")
        work = comm.all_reduce(x.t(), out=out.t().contiguous().t(), async_op=True)
        del x
        results.append((i, work, out))
        y = torch.full((n * 300,), float(i), device="cuda")
        part = comm.reduce_scatter(y[: n * 300])
        del y
        results.append((i, None, part))
    for i, work, out in results:
        if work:
            out = work.wait()
        assert (out.cpu() == i * n).all(), (i, out)


def dropped_messages(comm, device):
    """The same for sends and receives: no operation writes into memory that was freed."""
    r, n = comm.rank, comm.world_size
    left, right, outs = (r - 1) % n, (r + 1) % n, []
    comm.all_reduce(torch.ones(1, device="cuda"))
    for i in range(5):
        gate = fake_cuda.gate()
        x, out = torch.full((3, 700), float(i + r), device="cuda"), torch.zeros(700, 3, device="cuda")
        sent = comm.send(x.t(), right, tag=i, async_op=True)
        work = comm.recv(out.t() if i % 2 else out, left, tag=i, async_op=True)
        del x, sent
        if i < 2:  # the target has been freed
            del out
        other = torch.full((700, 3), -1.0, device="cuda")  # what is free is used again
        gate.open()
        work.wait()
        fake_cuda.synchronize()
        assert (other.cpu() == -1).all(), i
        if i >= 2:
            outs.append((out, i + left))
    for out, value in outs:
        assert (out.cpu() == value).all(), value


def two_streams(comm, device):
    r, n = comm.rank, comm.world_size
    here = data(r, 400).to("cuda")
    fake_cuda.synchronize()
    with fake_cuda.stream():
        there = data(r + 10, 400).to("cuda")
        comm.all_reduce(there)
    comm.all_reduce(here)
    with fake_cuda.stream():
        comm.broadcast(there, 0)
    equal(here.cpu(), sum(data(p, 400) for p in range(n)))
    equal(there.cpu(), sum(data(p + 10, 400) for p in range(n)))


def both_devices(comm, device):
    """CPU and CUDA operations of one group alternate."""
    r, n = comm.rank, comm.world_size
    total = sum(data(p, 300) for p in range(n))
    for _ in range(5):
        host, cuda = data(r, 300), data(r, 300).to("cuda")
        work = comm.all_reduce(cuda, async_op=True)
        comm.all_reduce(host)
        comm.barrier()
        equal(host, total)
        equal(work.wait().cpu(), total)
        comm.barrier(async_op=True).wait()


def registered(comm, device):
    r, n = comm.rank, comm.world_size
    x = comm.empty((4, 50), device="cuda")
    y = comm.empty(200, torch.int32, device=f"cuda:{device}")
    assert x.shape == (4, 50) and x.device == torch.device("cuda", device) and y.dtype == torch.int32
    assert not x.cpu().any() and not y.cpu().any()
    x.copy_(data(r, 4, 50))
    equal(comm.all_reduce(x).cpu(), sum(data(p, 4, 50) for p in range(n)))
    out = comm.empty((n, 200), torch.int32, device="cuda")
    y.copy_(data(r, 200, dtype=torch.int32))
    equal(comm.all_gather(y, out).cpu(), torch.stack([data(p, 200, dtype=torch.int32) for p in range(n)]))
    del y, out
    comm.barrier()
    x.zero_()
    comm.close()
    assert not x.cpu().any()  # it outlives the group


STREAMS = [
    host_runs_ahead,
    wait_holds_the_stream,
    dropped_tensors,
    dropped_messages,
    two_streams,
    both_devices,
    registered,
]


# --- errors


@contextlib.contextmanager
def raises(kind, *texts, **attributes):
    try:
        yield
    except kind as error:
        assert type(error) is kind, repr(error)
        for text in texts:
            assert text in str(error), error
        for name, value in attributes.items():
            assert getattr(error, name) == value, (name, getattr(error, name), error)
    else:
        raise AssertionError(f"no {kind.__name__}")


def in_threads(name):
    threads(2, globals()[name])


def in_processes(name):
    processes(2, globals()[name])


def killed(protocol):
    together = meeting(3)

    def rank(comm):
        with fake_cuda.stream():
            comm.all_reduce(torch.ones(8, device="cuda"))
            comm.barrier()
            together.wait()
            assert comm.describe()["cuda"]["protocol"] == protocol
            if comm.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            with raises(pycomm.PeerError, "rank 2 died", rank=comm.rank, world_size=3, peer=2):
                comm.all_reduce(torch.ones(8, device="cuda"), async_op=True).wait(10.0)
            with raises(pycomm.PeerError, peer=2):
                comm.broadcast(torch.ones(8, device="cuda"))
        comm.close()
        fake_cuda.check_nothing_left()
        return "told"

    results = run_ranks(3, rank, mode="processes", timeout=20.0, fail=False)
    assert results[:2] == ["told"] * 2 and isinstance(results[2], ChildProcessError), results
