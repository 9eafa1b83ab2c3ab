"""Order: operations against kernels on the same stream, on several streams, asynchronous ones, and CUDA
graphs.

torch.cuda._sleep keeps a stream busy. Where an operation did not wait for what the stream holds before it, it
would read old values.
"""

import time

import torch

from gpu.ranks import delay, differs, settle, stream, wait
from pycomm.benchmarks.common.device import capture

COUNT = 100_003
REPLAYS = 100


def streams(check):
    cases = [("asynchronous operations, waited for in reverse", _reverse)]
    if check.on == "cuda":
        cases += [
            ("an operation follows its stream, and what follows waits for it", _after_delay),
            ("enqueuing does not block the host", _host_is_free),
            ("a side stream", _side_stream),
            ("two streams on one group", _two_streams),
        ]
    for n, mode in ((4, "threads"), (2, "processes")):
        check.together(cases, n, mode=mode)
    if check.on == "cuda":
        check.each("300 operations back to back", 8, _back_to_back)


def _reverse(comm, check):
    n = comm.world_size
    x = [check.tensor(torch.full((COUNT // (i + 1),), float(comm.rank + i))) for i in range(16)]
    settle(check, comm)
    works = [comm.all_reduce(array, async_op=True) for array in x]
    results = [work.wait() for work in reversed(works)]
    wait(check)
    done = [work.done() for work in works]
    comm.barrier()
    if not all(done):
        return f"done() of {done.count(False)} operations is False after wait() and a synchronised stream"
    problems = [
        differs(array, float(n * (n - 1) / 2 + n * i), f"operation {i}")
        for i, array in enumerate(reversed(results))
    ]
    return "; ".join(filter(None, problems))


def _warm(comm, check, *arrays):
    """Loads every kernel of what comes, so that nothing is loaded while a rank waits."""
    for array in arrays:
        array.fill_(1.0)
        array.mul_(2.0)
    delay(check, 1e-4)
    settle(check, comm)
    for array in arrays:
        comm.all_reduce(array)
    settle(check, comm)


def _after_delay(comm, check):
    n, x, y = comm.world_size, check.tensor(torch.zeros(COUNT)), check.tensor(torch.zeros(COUNT))
    _warm(comm, check, x)
    y.copy_(x)
    settle(check, comm)
    delay(check, 0.1 * (comm.rank + 1))  # each rank is late by another time
    x.fill_(float(comm.rank + 1))
    comm.all_reduce(x)
    x.mul_(2.0)
    y.copy_(x)
    wait(check)
    comm.barrier()
    return differs(y, float(n * (n + 1)))


def _host_is_free(comm, check):
    x = check.tensor(torch.zeros(COUNT))
    _warm(comm, check, x)
    delay(check, 0.6)
    began = time.monotonic()
    work = comm.all_reduce(x, async_op=True)
    work.wait()
    comm.all_reduce(x)
    took = time.monotonic() - began
    wait(check)
    comm.barrier()
    return "" if took < 0.3 else f"two operations behind a kernel of 0.6 s took the host {took:.3f} s"


def _side_stream(comm, check):
    n, x, y = comm.world_size, check.tensor(torch.zeros(COUNT)), check.tensor(torch.zeros(COUNT))
    _warm(comm, check, x)
    y.copy_(x)
    settle(check, comm)
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        delay(check, 0.2)
        x.fill_(float(comm.rank + 1))
        comm.all_reduce(x)
    current.wait_stream(side)
    y.copy_(x)
    wait(check)
    comm.barrier()
    return differs(y, float(n * (n + 1) / 2))


def _two_streams(comm, check):
    """Both streams use the group without an order between them but that of the calls."""
    x = [check.tensor(torch.zeros(COUNT)) for _ in range(2)]
    _warm(comm, check, *x)
    both = [torch.cuda.Stream(), torch.cuda.Stream()]
    for array in x:
        array.fill_(1.0)
    settle(check, comm)
    for turn in range(6):
        with torch.cuda.stream(both[turn % 2]):
            if turn % 3 == comm.rank % 3:
                delay(check, 0.02)
            comm.all_reduce(x[turn % 2], "avg")
            x[turn % 2].mul_(2.0)
    for side in both:
        side.synchronize()
    comm.barrier()
    return "; ".join(filter(None, (differs(array, 8.0, f"stream {i}") for i, array in enumerate(x))))


def _back_to_back(comm, check):
    x = check.tensor(torch.full((1027,), float(comm.rank)))
    y = check.tensor(torch.full((COUNT,), float(comm.rank)))
    _warm(comm, check, x, y)
    settle(check, comm)
    x.fill_(float(comm.rank))
    y.fill_(float(comm.rank))
    for _ in range(150):
        comm.all_reduce(x, "max")
        comm.all_reduce(y, "min")
    wait(check)
    comm.barrier()
    return differs(x, float(comm.world_size - 1)) or differs(y, 0.0)


def graphs(check):
    if check.on != "cuda":
        check.record("graphs", None, "host tensors have none")
        return
    for n, mode in ((2, "threads"), (8, "threads"), (2, "processes")):
        for count in (2048, COUNT):
            check.each(f"{REPLAYS} replays with new inputs, {count} elements", n, _replays, count, mode=mode)
    for op in ("all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        check.each(f"replays of {op}", 4, _replays_of, op)
    check.each("replays and plain operations in turn", 4, _replays_and_plain)
    check.each("two graphs on two streams", 4, _two_graphs)


def _replays(comm, check, count):
    """Back to back: no barrier between replays, so ranks may run ahead of each other."""
    n, x = comm.world_size, check.tensor(torch.zeros(count))
    inputs = check.tensor(torch.arange(float(REPLAYS)).add(comm.rank).repeat_interleave(8).view(REPLAYS, 8))
    outputs = torch.zeros_like(inputs)
    _warm(comm, check, x)
    x[:8].copy_(inputs[0])
    outputs[0].copy_(x[-8:])
    x[-8:].copy_(inputs[0])
    settle(check, comm)
    graph = capture(lambda: comm.all_reduce(x), 1)
    comm.barrier()
    for i in range(REPLAYS):
        x[-8:].copy_(inputs[i])
        graph.replay()
        outputs[i].copy_(x[-8:])
    wait(check)
    comm.barrier()
    want = torch.arange(float(REPLAYS)).mul(n).add(n * (n - 1) / 2).repeat_interleave(8).view(REPLAYS, 8)
    return differs(outputs, want)


def _replays_of(comm, check, op):
    n, k = comm.world_size, 4099
    x = check.tensor(torch.zeros(n * k))
    out = check.tensor(torch.zeros(n * k))
    calls = {
        "all_gather": lambda: comm.all_gather(x[:k], out),
        "reduce_scatter": lambda: comm.reduce_scatter(x, out[:k]),
        "all_to_all": lambda: comm.all_to_all(x, out),
        "broadcast": lambda: comm.broadcast(x, 1),
    }
    _warm(comm, check, x)
    calls[op]()
    settle(check, comm)
    graph = capture(calls[op], 1)
    comm.barrier()
    for turn in range(5):
        x.copy_(torch.full((n * k,), float(10 * turn + comm.rank)))
        settle(check, comm)
        graph.replay()
        wait(check)
        comm.barrier()
        ranks = torch.arange(float(n)).add(10 * turn)
        got, want = {
            "all_gather": (out, ranks.repeat_interleave(k)),
            "reduce_scatter": (out[:k], float(ranks.sum())),
            "all_to_all": (out, ranks.repeat_interleave(k)),
            "broadcast": (x, 10.0 * turn + 1),
        }[op]
        if problem := differs(got, want, f"replay {turn}"):
            return problem
    return ""


def _replays_and_plain(comm, check):
    x, y = check.tensor(torch.zeros(1027)), check.tensor(torch.zeros(COUNT))
    _warm(comm, check, x, y)
    graph = capture(lambda: comm.all_reduce(x, "avg"), 3)
    x.fill_(float(comm.rank))
    y.fill_(float(comm.rank))
    settle(check, comm)
    for _ in range(20):
        graph.replay()
        comm.all_reduce(y, "max")
    wait(check)
    comm.barrier()
    return differs(x, (comm.world_size - 1) / 2) or differs(y, float(comm.world_size - 1))


def _two_graphs(comm, check):
    """Each replayed on a stream of its own; the streams wait for each other, since all ranks must run them in
    one order.
    """
    x = [check.tensor(torch.zeros(COUNT)) for _ in range(2)]
    _warm(comm, check, *x)
    found, both = [], []
    for i in range(2):
        with stream(check):
            both.append(torch.cuda.current_stream())
            found.append(capture(lambda i=i: comm.all_reduce(x[i], "avg"), 1))
    for array in x:
        array.fill_(1.0)
    settle(check, comm)
    for turn in range(20):
        with torch.cuda.stream(both[turn % 2]):
            both[turn % 2].wait_stream(both[1 - turn % 2])
            found[turn % 2].replay()
            x[turn % 2].mul_(2.0)
    for side in both:
        side.synchronize()
    comm.barrier()
    return "; ".join(filter(None, (differs(array, 1024.0, f"graph {i}") for i, array in enumerate(x))))
