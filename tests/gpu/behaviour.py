"""Registered buffers, messages, uneven exchanges, the barrier, many groups, arrays of other libraries."""

import time

import torch

from gpu.ranks import delay, differs, settle, wait

COUNT = 100_003
LEAK_BYTES = 64 << 20  # free GPU memory may shrink by this much over many groups: torch's own caches


def registered(check):
    algorithms = (None, "one_shot", "two_shot", "ring", "multimem") if check.on == "cuda" else (None,)
    cases = [
        (f"all_reduce {algorithm or 'automatic'} on comm.empty", _registered_sum, algorithm)
        for algorithm in algorithms
    ]
    cases.append(("all_gather, reduce_scatter, all_to_all on comm.empty", _registered_parts))
    for n, mode in ((4, "threads"), (2, "processes"), (4, "processes")):
        check.together(cases, n, mode=mode)


def _empty(comm, check, shape):
    return (
        comm.empty(shape, torch.float32, device="cuda")
        if check.on == "cuda"
        else comm.empty(shape, torch.float32)
    )


def _registered_sum(comm, check, algorithm):
    n, x = comm.world_size, _empty(comm, check, COUNT)
    count = 1024 if algorithm == "one_shot" else COUNT - 1
    for part in (x[:count], x[1 : 1 + count]):  # the second is misaligned
        x.copy_(torch.full((COUNT,), float(comm.rank + 1)))
        settle(check, comm)
        try:
            comm.all_reduce(part, algorithm=algorithm)
        except ValueError as error:
            if algorithm in ("multimem", "one_shot"):
                return ""  # needs NVSwitch, or a size
            raise error
        wait(check)
        comm.barrier()
        if problem := differs(part, n * (n + 1) / 2, f"{algorithm}"):
            return problem
    return ""


def _registered_parts(comm, check):
    n, x, y = comm.world_size, _empty(comm, check, 4 * 1001), _empty(comm, check, 4 * 1001)
    small, whole = x[:1001], y[: n * 1001]
    small.copy_(torch.full((1001,), float(comm.rank)))
    settle(check, comm)
    comm.all_gather(small, whole)
    settle(check, comm)
    ranks = torch.arange(float(n)).repeat_interleave(1001)
    if problem := differs(whole, ranks, "all_gather"):
        return problem
    settle(check, comm)
    comm.reduce_scatter(whole, small)
    settle(check, comm)
    if problem := differs(small, float(n * comm.rank), "reduce_scatter"):
        return problem
    whole.copy_(torch.full((n * 1001,), float(comm.rank)))
    settle(check, comm)
    comm.all_to_all(whole, x[: n * 1001])
    settle(check, comm)
    return differs(x[: n * 1001], ranks, "all_to_all")


def messages(check):
    cases = [
        ("ring of send and recv", _ring),
        ("batch: 8 tags in each direction", _batch),
        ("all_to_all with splits", _splits),
        ("all_to_all and all_gather with lists of uneven arrays", _lists),
    ]
    for n, mode in ((2, "threads"), (4, "threads"), (2, "processes"), (4, "processes")):
        check.together(cases, n, mode=mode)


def _ring(comm, check):
    n, rank = comm.world_size, comm.rank
    for count in (0, 1, 1027, 3_000_001):
        x, y = check.tensor(torch.full((count,), float(rank))), check.tensor(torch.zeros(count))
        settle(check, comm)
        work = comm.send(x, (rank + 1) % n, async_op=True)
        comm.recv(y, (rank - 1) % n)
        work.wait()
        wait(check)
        comm.barrier()
        if problem := differs(y, float((rank - 1) % n), f"{count} elements"):
            return problem
    return ""


def _batch(comm, check):
    partner = comm.rank ^ 1
    x = [check.tensor(torch.full((997 * (tag + 1),), float(100 * comm.rank + tag))) for tag in range(8)]
    y = [torch.zeros_like(part) for part in x]
    settle(check, comm)
    works = []
    for tag in range(8):
        works.append(comm.send(x[tag], partner, tag=tag, async_op=True))
        works.append(comm.recv(y[tag], partner, tag=tag, async_op=True))
    for work in works:
        work.wait()
    wait(check)
    comm.barrier()
    return "; ".join(
        filter(None, (differs(y[tag], float(100 * partner + tag), f"tag {tag}") for tag in range(8)))
    )


def _splits(comm, check):
    n, rank = comm.world_size, comm.rank
    rows = [(rank * n + to) % 5 for to in range(n)]  # some are 0
    come = [(source * n + rank) % 5 for source in range(n)]
    x = check.tensor(torch.full((sum(rows), 33), float(rank)))
    y = check.tensor(torch.full((sum(come), 33), -1.0))
    settle(check, comm)
    comm.all_to_all(x, y, in_splits=rows, out_splits=come)
    wait(check)
    comm.barrier()
    return differs(y, torch.cat([torch.full((k, 33), float(source)) for source, k in enumerate(come)]))


def _lists(comm, check):
    n, rank = comm.world_size, comm.rank
    x = [check.tensor(torch.full((7 * (rank + to) + 1,), float(10 * rank + to))) for to in range(n)]
    y = [check.tensor(torch.zeros(7 * (rank + source) + 1)) for source in range(n)]
    mine = check.tensor(torch.full((11 * rank + 3,), float(rank)))
    everyone = [check.tensor(torch.zeros(11 * source + 3)) for source in range(n)]
    settle(check, comm)
    comm.all_to_all(x, y)
    comm.all_gather(mine, everyone)
    wait(check)
    comm.barrier()
    problems = [differs(y[source], float(10 * source + rank), f"from {source}") for source in range(n)]
    problems += [differs(everyone[source], float(source), f"gathered from {source}") for source in range(n)]
    return "; ".join(filter(None, problems))


def barrier(check):
    check.each("barrier waits for the last rank", 4, _late_rank)
    check.each("barrier waits for the last rank", 2, _late_rank, mode="processes")
    if check.on == "cuda":
        check.each("barrier blocks the host until earlier operations are done", 4, _barrier_waits_for_stream)


def _late_rank(comm, check):
    comm.barrier()
    began = time.monotonic()
    if comm.rank == 1:
        time.sleep(0.3)
    comm.barrier()
    took = time.monotonic() - began
    return "" if took >= 0.28 else f"returned after {took:.3f} s, rank 1 came after 0.3 s"


def _barrier_waits_for_stream(comm, check):
    x = check.tensor(torch.ones(1000))
    delay(check, 1e-4)  # loads the kernel while no rank waits
    settle(check, comm)
    comm.all_reduce(x)  # the first one sets things up
    settle(check, comm)
    delay(check, 0.3)
    comm.all_reduce(x)
    done = torch.cuda.Event()
    done.record()
    comm.barrier()
    return "" if done.query() else "an all_reduce enqueued before the barrier was not done after it"


def groups(check):
    check.each("20 groups at once, interleaved", 4, _many_groups)
    check.each("6 groups at once, interleaved", 2, _many_groups, 6, mode="processes")
    check.each("split into halves", 4, _halves)
    if check.on == "cuda" and check.now == "threads":
        free = []
        for _ in range(4):
            check.run(4, _many_groups, 5)
            free.append(torch.cuda.mem_get_info()[0])
        lost = free[0] - free[-1]
        check.record(
            "memory after groups are closed",
            lost <= LEAK_BYTES,
            f"{lost >> 20} MiB less free after 15 more groups of 4 ranks",
        )


def _many_groups(comm, check, count=20):
    n = comm.world_size
    parts = [comm.split(0) for _ in range(count)]
    x = [check.tensor(torch.full((101 + i,), float(i + comm.rank))) for i in range(count)]
    settle(check, comm)
    for _ in range(2):
        for part, array in zip(parts, x, strict=True):
            part.all_reduce(array, "max")
    wait(check)
    comm.barrier()
    problems = [differs(array, float(i + n - 1), f"group {i}") for i, array in enumerate(x)]
    comm.barrier()
    for part in parts:
        part.close()
    return "; ".join(filter(None, problems))


def _halves(comm, check):
    half = comm.split(comm.rank % 2)
    x = check.tensor(torch.full((1027,), float(comm.rank)))
    settle(check, comm)
    half.all_reduce(x)
    wait(check)
    comm.barrier()
    problem = differs(x, 2.0 if comm.rank % 2 == 0 else 4.0)
    half.close()
    return problem


def arrays(check):
    """CuPy and other arrays by DLPack."""
    check.each("an array with __dlpack__ alone", 2, _dlpack)
    if check.on != "cuda" or check.now != "threads":
        return
    try:
        import cupy
    except ImportError as error:
        check.record("CuPy", None, f"not installed ({error})")
        return
    check.record("CuPy is there", True, cupy.__version__)
    check.each("CuPy arrays", 2, _cupy)


class OnlyDlpack:
    """Hides everything of a tensor but the protocol."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def _dlpack(comm, check):
    x = check.tensor(torch.full((1027,), float(comm.rank + 1)))
    settle(check, comm)
    comm.all_reduce(OnlyDlpack(x))
    wait(check)
    comm.barrier()
    return differs(x, 3.0)


def _cupy(comm, check):
    import cupy

    current = torch.cuda.current_stream()
    with cupy.cuda.ExternalStream(current.cuda_stream):
        x = cupy.full(1027, float(comm.rank + 1), dtype=cupy.float32)
        settle(check, comm)
        comm.all_reduce(x)
        wait(check)
        comm.barrier()
        got = cupy.asnumpy(x)
        wrong = int((got != 3.0).sum())
        if wrong:
            return f"{wrong} elements wrong, e.g. {got[0]}"
        parts = comm.all_gather(x)
        wait(check)
        comm.barrier()
        kind = type(parts).__module__
    return (
        ""
        if kind.startswith("cupy")
        else f"all_gather of a CuPy array returned {kind}.{type(parts).__name__}"
    )
