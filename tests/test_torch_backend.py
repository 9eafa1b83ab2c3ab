"""pycomm as a backend of torch.distributed: every dist.* operation against a one-line oracle; works, groups,
traces, errors.
"""

import contextlib
import functools
import json
import os
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from tiers import tier
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir
from torch_ranks import data, equal, spawn

import pycomm

# --- the operations: fn(rank, n, count, call) -> (result, expected) --------------------
# call(f, *args) runs it synchronously or not.


def all_reduce(r, n, c, call):
    x = data(r, c)
    call(dist.all_reduce, x)
    return x, sum(data(p, c) for p in range(n))


def all_reduce_strided(r, n, c, call):
    x = data(r, 3, c).t()
    call(dist.all_reduce, x, op=dist.ReduceOp.MAX)
    return x, torch.stack([data(p, 3, c).t() for p in range(n)]).amax(0)


def reduce(r, n, c, call):
    x = data(r, c)
    call(dist.reduce, x, n - 1)
    return x, sum(data(p, c) for p in range(n)) if r == n - 1 else x


def broadcast(r, n, c, call):
    x = data(r, c)
    call(dist.broadcast, x, n - 1)
    return x, data(n - 1, c)


def all_gather(r, n, c, call):
    out = [torch.empty(c) for _ in range(n)]
    call(dist.all_gather, out, data(r, c))
    return out, [data(p, c) for p in range(n)]


def all_gather_uneven(r, n, c, call):
    out = [torch.empty(c + p) for p in range(n)]
    call(dist.all_gather, out, data(r, c + r))
    return out, [data(p, c + p) for p in range(n)]


def all_gather_tensor(r, n, c, call):
    out = torch.empty(n * c)
    call(dist.all_gather_into_tensor, out, data(r, c))
    return out, torch.cat([data(p, c) for p in range(n)])


def gather(r, n, c, call):
    out = [torch.empty(c) for _ in range(n)] if r == 0 else None
    call(dist.gather, data(r, c), out, 0)
    return out or [], [data(p, c) for p in range(n)] if r == 0 else []


def scatter(r, n, c, call):
    out = torch.empty(c)
    call(dist.scatter, out, list(data(7, n, c)) if r == n - 1 else None, n - 1)
    return out, data(7, n, c)[r]


def reduce_scatter(r, n, c, call):
    out = torch.empty(c)
    call(dist.reduce_scatter, out, list(data(r, n, c)))
    return out, sum(data(p, n, c)[r] for p in range(n))


def reduce_scatter_uneven(r, n, c, call):
    parts = [c + p for p in range(n)]
    out = torch.empty(c + r)
    call(dist.reduce_scatter, out, list(data(r, sum(parts)).split(parts)))
    return out, sum(data(p, sum(parts)).split(parts)[r] for p in range(n))


def reduce_scatter_tensor(r, n, c, call):
    out = torch.empty(c)
    call(dist.reduce_scatter_tensor, out, data(r, n * c), op=dist.ReduceOp.MIN)
    return out, torch.stack([data(p, n * c) for p in range(n)]).amin(0).view(n, c)[r]


def all_to_all(r, n, c, call):
    out = [torch.empty(c + p) for p in range(n)]
    call(dist.all_to_all, out, [data(r * n + p, c + r) for p in range(n)])
    return out, [data(p * n + r, c + p) for p in range(n)]


def all_to_all_single(r, n, c, call):
    out = torch.empty(n, c)
    call(dist.all_to_all_single, out, data(r, n, c))
    return out, torch.stack([data(p, n, c)[r] for p in range(n)])


def all_to_all_splits(r, n, c, call):
    out = torch.empty(sum(c + p for p in range(n)), 2)
    call(dist.all_to_all_single, out, data(r, n * (c + r), 2), [c + p for p in range(n)], [c + r] * n)
    return out, torch.cat([data(p, n * (c + p), 2).view(n, c + p, 2)[r] for p in range(n)])


def ring(r, n, c, call):
    out = torch.empty(c)
    work = dist.isend(data(r, c), (r + 1) % n, tag=3)
    call(dist.irecv, out, (r - 1) % n, tag=3)
    work.wait()
    return out, data((r - 1) % n, c)


OPERATIONS = [
    *(
        all_reduce,
        all_reduce_strided,
        reduce,
        broadcast,
        all_gather,
        all_gather_uneven,
        all_gather_tensor,
        gather,
        scatter,
        reduce_scatter,
    ),
    *(reduce_scatter_uneven, reduce_scatter_tensor, all_to_all, all_to_all_single, all_to_all_splits, ring),
]


def check_operation(r, n, operation):
    def call_async(style, function, *args, **options):
        work = function(*args, **options, **({} if function is dist.irecv else {"async_op": True}))
        if style == "poll":
            while not work.is_completed():
                pass
            assert work.is_success()
        elif style == "future":
            work.get_future().wait()
        work.wait()

    def call_sync(function, *args, **options):
        work = function(*args, **options)
        if work is not None:
            work.wait()

    for c in [0, 1, n - 1, n, n + 1, 257, 20_001, 300_007]:
        equal(*operation(r, n, c, call_sync))
    for style, c in [("wait", 3), ("poll", 5), ("future", 7), ("wait", 100_003), ("future", 300_001)]:
        equal(*operation(r, n, c, functools.partial(call_async, style)))


@tier(quick=1 / 24)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
def test_operation(operation, world_size):
    spawn(world_size, check_operation, operation)


def check_one_rank(r, n):
    for operation in OPERATIONS:
        if operation is not ring:
            check_operation(r, n, operation)
    dist.barrier()
    objects = [None]
    dist.all_gather_object(objects, {"a": 1})
    assert objects == [{"a": 1}]


def test_one_rank():
    spawn(1, check_one_rank)


def check_reductions(r, n):
    ops, premul = dist.ReduceOp, dist._make_nccl_premul_sum
    floats, ints = (
        [torch.float64, torch.float32, torch.float16, torch.bfloat16],
        [torch.int8, torch.uint8, torch.int32, torch.int64],
    )
    table = [
        (ops.SUM, floats + ints, lambda xs: sum(xs)),
        (ops.AVG, floats, lambda xs: (sum(x.double() for x in xs) / n).to(xs[0].dtype)),
        (ops.PRODUCT, floats + ints, lambda xs: torch.stack(xs).prod(0, dtype=xs[0].dtype)),
        (ops.MIN, floats + ints, lambda xs: torch.stack(xs).amin(0)),
        (ops.MAX, floats + ints, lambda xs: torch.stack(xs).amax(0)),
        (ops.BAND, ints, lambda xs: xs[0] & xs[1] & xs[2]),
        (ops.BOR, ints, lambda xs: xs[0] | xs[1] | xs[2]),
        (ops.BXOR, ints, lambda xs: xs[0] ^ xs[1] ^ xs[2]),
        (premul(0.5), floats, lambda xs: sum(x * 0.5 for x in xs)),
        (premul(torch.tensor([2.0])), floats, lambda xs: sum(x * 2 for x in xs)),
    ]
    for op, dtypes, oracle in table:
        for dtype in dtypes:
            for c in (5, 40_001):
                x = data(r, c, dtype=dtype)
                dist.all_reduce(x, op=op)
                equal(x, oracle([data(p, c, dtype=dtype) for p in range(n)]))
    for dtype in (torch.complex64, torch.complex128):
        x = torch.complex(data(r, 9, dtype=torch.float64), data(r + 5, 9, dtype=torch.float64)).to(dtype)
        dist.all_reduce(x)
        equal(
            x,
            sum(
                torch.complex(data(p, 9, dtype=torch.float64), data(p + 5, 9, dtype=torch.float64)).to(dtype)
                for p in range(n)
            ),
        )
    x = data(r, 11) > 3
    dist.all_reduce(x, op=ops.BOR)
    equal(x, torch.stack([data(p, 11) > 3 for p in range(n)]).any(0))
    x = data(r, 6).to(torch.float8_e4m3fn)
    dist.broadcast(x, 1)
    equal(x.float(), data(1, 6))


def test_reductions():
    spawn(3, check_reductions)


# --- works, coalescing, groups --------------------


def check_works(r, n):
    works = [(x := data(r, c), c, dist.all_reduce(x, async_op=True)) for c in (1, 200_000, 3, 70_000, 0)]
    for x, c, work in reversed(works):
        work.wait()
        equal(x, sum(data(p, c) for p in range(n)))
        equal(work.result(), [x])
    done = threading.Event()
    x = data(r, 5)
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda f: (done.set(), f.value()[0] * 2)[1])
    assert done.wait(10), "nobody completed the work that only a future waits for"
    equal(future.wait(), sum(data(p, 5) for p in range(n)) * 2)

    def again(future):  # a callback that waits for an operation that it issues
        return dist.all_reduce(future.value()[0] * 2, async_op=True).get_future().wait()[0]

    equal(
        dist.all_reduce(torch.ones(2), async_op=True)
        .get_future()
        .then(again)
        .then(lambda f: f.value() + 1)
        .wait(),
        torch.ones(2) * 2 * n * n + 1,
    )
    assert dist.barrier(async_op=True).get_future().wait() == []
    for nbytes in (8, 4 << 20):  # a work outlives its handle, and its tensor's other references
        dist.all_reduce(torch.ones(nbytes // 4), async_op=True)
    dist.barrier()
    if r == 0:  # any source, tags out of order
        x, seen = torch.zeros(1), set()
        for _ in range(n - 1):
            seen.add((dist.recv(x, tag=9), x.item()))
        assert seen == {(p, float(p)) for p in range(1, n)}
        for tag in (2, 1):
            dist.recv(x, 1, tag=tag)
            assert x.item() == tag
    else:
        dist.send(torch.tensor([float(r)]), 0, tag=9)
        if r == 1:
            for work in [dist.isend(torch.tensor([float(tag)]), 0, tag=tag) for tag in (1, 2)]:
                work.wait()


def test_works():
    spawn(3, check_works)


def check_coalescing(r, n):
    sizes = [3, 0, 70_001]
    for device, async_ops in [
        (None, False),
        (None, True),
        (torch.device("cpu"), False),
        (torch.device("cpu"), True),
    ]:
        xs = [data(r, c) for c in sizes]
        with _coalescing_manager(device=device, async_ops=async_ops) as manager:
            for x in xs:
                dist.all_reduce(x)
        if async_ops:
            manager.wait()
        equal(xs, [sum(data(p, c) for p in range(n)) for c in sizes])
    outs, parts = [torch.empty(n * c) for c in sizes], [torch.empty(c) for c in sizes]
    with _coalescing_manager():
        for c, out in zip(sizes, outs, strict=True):
            dist.all_gather_into_tensor(out, data(r, c))
    equal(outs, [torch.cat([data(p, c) for p in range(n)]) for c in sizes])
    with _coalescing_manager():
        for c, out in zip(sizes, parts, strict=True):
            dist.reduce_scatter_tensor(out, data(r, n * c))
    equal(parts, [sum(data(p, n * c) for p in range(n)).view(n, c)[r] for c in sizes])
    for c in (4, 500_000):
        ins = {p: torch.empty(c) for p in range(n) if p != r}
        sends = [dist.P2POp(dist.isend, data(r, c), p) for p in ins]
        works = dist.batch_isend_irecv(sends + [dist.P2POp(dist.irecv, x, p) for p, x in ins.items()])
        assert len(works) == 1
        works[0].wait()
        equal(list(ins.values()), [data(p, c) for p in ins])
    with contextlib.suppress(ZeroDivisionError), _coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(torch.ones(1), 0)
        raise ZeroDivisionError
    dist.distributed_c10d._world.pg_coalesce_state.clear()  # which torch forgets
    x = data(r, 5)
    with _coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(x, 1)
    equal(x, data(1, 5))
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(n)]
    dist.all_gather_coalesced(lists, [data(r, 2), data(r, 3)])
    equal(sum(lists, []), sum([[data(p, 2), data(p, 3)] for p in range(n)], []))


@pytest.mark.filterwarnings("ignore")
def test_coalescing():
    spawn(3, check_coalescing)


def check_objects(r, n):
    everything = [None] * n
    dist.all_gather_object(everything, {"rank": r, "text": "x" * 1000 * r})
    assert [o["rank"] for o in everything] == list(range(n))
    items = ["a", {"b": 2}] if r == 1 else [None, None]
    dist.broadcast_object_list(items, src=1)
    assert items == ["a", {"b": 2}]
    gathered = [None] * n if r == 0 else None
    dist.gather_object((r,), gathered, dst=0)
    assert gathered is None or gathered == [(p,) for p in range(n)]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {p}" for p in range(n)] if r == 0 else None, src=0)
    assert mine == [f"for {r}"]
    if r < 2:
        objects = ["hello"] if r == 0 else [None]
        (dist.send_object_list(objects, dst=1) if r == 0 else dist.recv_object_list(objects, src=0))
        assert objects == ["hello"]


def test_objects():
    spawn(3, check_objects)


def check_groups(r, n):
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2, 3], [0, 3], [2])]
    for ranks, group in zip(([0, 1], [1, 2, 3], [0, 3], [2]), groups, strict=True):
        if r in ranks:
            x = data(r, 1000)
            dist.all_reduce(x, group=group)
            equal(x, sum(data(p, 1000) for p in ranks))
            assert dist.get_backend(group) == "pycomm"
    for _ in range(20):
        group = dist.new_group([3, 1])
        if r in (1, 3):
            dist.barrier(group)
            dist.destroy_process_group(group)
    half, _ = dist.new_subgroups(2)
    x = torch.ones(1)
    dist.all_reduce(x, group=half)
    assert x.item() == 2
    child = dist.group.WORLD.split_group([0, 2], group_name="split")
    if r in (0, 2):
        x = torch.tensor([float(r)])
        child.allreduce([x]).wait()
        assert x.item() == 2
    dist.destroy_process_group()


def test_groups():
    spawn(4, check_groups)


def check_facts(r, n):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.name() == "pycomm" and backend.options.backend == "pycomm" and backend.supports_coalescing
    assert backend.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    seen = []
    dist.group.WORLD._register_on_completion_hook(seen.append)
    dist.group.WORLD._enable_collectives_timing()
    dist.all_reduce(torch.ones(3))
    work = dist.all_reduce(torch.ones(3), async_op=True)
    dist.group.WORLD._wait_for_pending_works()
    assert work._get_duration() > 0 and [info.op_type.name for info in seen] == ["ALLREDUCE"] * 2
    assert backend._get_sequence_number_for_group() == 2
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(3), 0, async_op=True).wait()
    assert {"pycomm:all_reduce", "pycomm:broadcast"} <= {event.name for event in profile.events()}


@pytest.mark.filterwarnings("ignore")
def test_facts():
    spawn(2, check_facts)


def ends_before_it_is_seen(r, n):
    dist.group.WORLD._enable_collectives_timing()
    x = torch.ones(1 << 15)  # the worker's
    for _ in range(200):
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            pass
        assert work._get_duration() > 0  # set where the profiler's event ends


def test_who_has_waited_may_stop_the_profiler():
    """An event that ended later wrote into memory that the profiler had freed."""
    spawn(2, ends_before_it_is_seen)


def check_trace(r, n, folder):
    group = dist.new_group([1, 0], group_desc="a pair")
    dist.all_reduce(torch.ones(3, 2), group=group)
    dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), async_op=True).wait()
    dist.send(torch.ones(5), 1) if r == 0 else dist.recv(torch.ones(5), 0)
    with pytest.raises(pycomm.MismatchError):
        dist.broadcast(torch.ones(7 + r), 0)
    trace = torch._C._distributed_c10d._dump_fr_trace()
    entries = pickle.loads(trace)["entries"]
    assert [(e["profiling_name"], e["state"]) for e in entries[-4:]] == [
        ("gloo:all_reduce", "completed"),
        ("gloo:_all_gather_base", "completed"),
        (["gloo:send 0->1", "gloo:recv 1<-0"][r], "completed"),
        ("gloo:broadcast", "started"),
    ]
    assert [e["input_sizes"] for e in entries[-4:]] == [[[3, 2]], [[4]], [[5]] if r == 0 else [], [[7 + r]]]
    assert entries[-4]["process_group"][1] == "a pair" and entries[-3]["output_dtypes"] == ["Float"]
    assert len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]) == len(entries)
    with open(os.path.join(folder, f"trace_{r}"), "wb") as file:
        file.write(trace)


def test_torchs_trace_analyzer_finds_the_mismatch(tmp_path, capsys):
    spawn(2, check_trace, str(tmp_path))
    args = JobConfig().parse_args([str(tmp_path), "-p", "trace_"])
    database = build_db(*read_dir(args)[:1], args, "2.10")
    broken = [collective for collective in database.collectives if not collective.pass_check]
    assert [collective.collective_name for collective in broken] == ["gloo:broadcast"]
    assert len(database.collectives) >= 3
