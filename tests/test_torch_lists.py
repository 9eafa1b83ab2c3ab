"""Calls on several tensors: lists whose tensors overlap, several tensors per rank, empty lists. The oracle is
Gloo, which runs the same calls.
"""

import pytest
import torch
import torch.distributed as dist
from torch_ranks import data, equal, spawn

Options = torch._C._distributed_c10d


def wait(work):
    work.wait()


# --- overlapping tensors: fn(rank, n, c, pg) -> tensors to compare ---------------------


def twice(r, n, c, pg):
    x = data(r, c)
    wait(pg.allreduce_coalesced([x, x]))
    return [x]


def head_and_whole(r, n, c, pg):
    x = data(r, c)
    wait(pg.allreduce_coalesced([x[: c // 2], x]))
    return [x]


def overlapping_halves(r, n, c, pg):
    x = data(r, 2 * c)
    wait(pg.allreduce_coalesced([x[: c + c // 2], data(r, 3), x[c // 2 :]]))
    return [x]


def columns_and_whole(r, n, c, pg):
    x = data(r, c, 4)
    wait(pg.allreduce_coalesced([x[:, 1:3], x, x.t()]))
    return [x]


def twice_through_dist(r, n, c, pg):
    x = data(r, c)
    dist.all_reduce_coalesced([x, data(r, 5), x])
    return [x]


def in_a_manager(r, n, c, pg):
    x = data(r, c)
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(x)
    return [x]


def one_output_for_all(r, n, c, pg):
    x = torch.zeros(c)
    dist.all_gather([x] * n, data(r, c))
    return [x]


def outputs_that_overlap(r, n, c, pg):
    x = torch.zeros(c + n)
    dist.all_gather([x[p : p + c] for p in range(n)], data(r, c))
    return [x]


def outputs_that_overlap_backwards(r, n, c, pg):
    x = torch.zeros(c + n)
    dist.all_gather([x[n - p : n - p + c] for p in range(n)], data(r, c))
    return [x]


def gathered_into_one(r, n, c, pg):
    x = torch.zeros(c)
    dist.gather(data(r, c), [x] * n if r == 0 else None, 0)
    return [x]


def all_to_all_into_one(r, n, c, pg):
    x = torch.zeros(c)
    dist.all_to_all([x] * n, [data(r * n + p, c) for p in range(n)])
    return [x]


def coalesced_gather_into_one(r, n, c, pg):
    x = torch.zeros(c)
    wait(pg.allgather_coalesced([[x, x] for _ in range(n)], [data(r, c), data(r + n, c)]))
    return [x]


def coalesced_gather_of_an_output(r, n, c, pg):
    x, lists = data(r, c), [[torch.zeros(c), torch.zeros(c)] for _ in range(n)]
    lists[0][0] = x
    wait(pg.allgather_coalesced(lists, [data(r + n, c), x]))
    return sum(lists, [])


LISTS = [
    *(twice, head_and_whole, overlapping_halves, columns_and_whole, twice_through_dist, in_a_manager),
    *(one_output_for_all, outputs_that_overlap, outputs_that_overlap_backwards, gathered_into_one),
    *(coalesced_gather_into_one, coalesced_gather_of_an_output),
]
SIZES = [6, 40_000]


def results(r, n, cases):
    pg = dist.group.WORLD
    return [[fn(r, n, c, pg) for c in SIZES] for fn in cases]


@pytest.mark.filterwarnings("ignore")
def test_overlapping_tensors_mean_what_they_mean_on_gloo():
    ours, gloos = (spawn(3, results, LISTS, backend=backend) for backend in ("pycomm", "gloo"))
    for rank in range(3):
        for fn, mine, expected in zip(LISTS, ours[rank], gloos[rank], strict=True):
            for c, a, e in zip(SIZES, mine, expected, strict=True):
                try:
                    equal(a, e)
                except AssertionError as error:
                    raise AssertionError(f"{fn.__name__}, {c} elements, rank {rank}: {error}") from None


# Where Gloo has no such call, or none with a definite result: inputs are taken first, the last one stays.


def check_overlaps_without_gloo(r, n):
    for c in SIZES:
        equal(all_to_all_into_one(r, n, c, None), [data((n - 1) * n + r, c)])
        x = data(r, n * c)
        ins, outs = [data(r + n, c), x[:c]], [x, torch.zeros(n * c)]
        wait(dist.group.WORLD.allgather_into_tensor_coalesced(outs, ins))
        equal(outs[0], torch.cat([data(p + n, c) for p in range(n)]))
        equal(outs[1], torch.cat([data(p, n * c)[:c] for p in range(n)]))
        x = data(r, n * c)
        ins, outs = [data(r + n, n * c), x], [x[:c], torch.zeros(c)]
        wait(dist.group.WORLD.reduce_scatter_tensor_coalesced(outs, ins))
        equal(outs[0], sum(data(p + n, n * c) for p in range(n)).view(n, c)[r])
        equal(outs[1], sum(data(p, n * c) for p in range(n)).view(n, c)[r])
        for dtype in (torch.bfloat16, torch.int32):
            x = data(r, c, dtype=dtype)
            wait(dist.group.WORLD.allreduce_coalesced([x, x[1:], x]))
            equal(x, sum(data(p, c, dtype=dtype) for p in range(n)))


def test_overlaps_without_gloo():
    spawn(3, check_overlaps_without_gloo)


# --- several tensors per rank ---------------------


def several(r, n):
    pg, out = dist.group.WORLD, []
    ops = dist.ReduceOp
    for op in (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX):
        options = Options.AllreduceOptions()
        options.reduceOp = op
        tensors = [data(2 * r + i, 3, 5) for i in range(2)]
        future = pg.allreduce(tensors, options).get_future()
        future.wait()
        assert all(v is t for v, t in zip(future.value(), tensors, strict=True))
        out += tensors
    for op in (ops.BAND, ops.BOR, ops.BXOR):
        options = Options.AllreduceOptions()
        options.reduceOp = op
        tensors = [data(3 * r + i, 40_000, dtype=torch.int32) for i in range(3)]
        pg.allreduce(tensors, options).wait()
        out += tensors
    inputs = [data(2 * r + i, 4) for i in range(2)]
    outputs = [[torch.zeros(4) for _ in range(2 * n)] for _ in range(2)]
    future = pg.allgather(outputs, inputs).get_future()
    future.wait()
    equal(future.value()[0], outputs[0])
    equal(future.value()[1], outputs[1])
    out += sum(outputs, [])
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(n)]
    future = dist.all_gather_coalesced(lists, [data(r, 2), data(r, 3)], async_op=True)
    for got, expected in zip(future.wait(), lists, strict=True):
        equal(got, expected)
    for root in range(n):
        for root_tensor in range(2):
            options = Options.BroadcastOptions()
            options.rootRank, options.rootTensor = root, root_tensor
            tensors = [data(2 * r + i, 40_000) for i in range(2)]
            pg.broadcast(tensors, options).wait()
            out += tensors
    return out


@pytest.mark.filterwarnings("ignore")
def test_several_tensors_per_rank_as_on_gloo():
    ours, gloos = (spawn(3, several, backend=backend) for backend in ("pycomm", "gloo"))
    for mine, expected in zip(ours, gloos, strict=True):
        equal(mine, expected)


def check_several(r, n):
    pg = dist.group.WORLD
    tensors = [torch.full((9,), 1.0, dtype=torch.bfloat16), torch.full((9,), 2**-8, dtype=torch.bfloat16)]
    pg.allreduce(tensors).wait()  # 16-bit floats are rounded once, at the end
    exact = torch.tensor(n * (1 + 2**-8)).to(torch.bfloat16).item()
    assert all(t.eq(exact).all() for t in tensors), (tensors, exact)
    options = Options.AllreduceOptions()
    options.reduceOp = dist._make_nccl_premul_sum(0.5)
    tensors = [data(2 * r + i, 7) for i in range(2)]
    pg.allreduce(tensors, options).wait()
    equal(tensors, [sum(data(p, 7) * 0.5 for p in range(2 * n))] * 2)
    strided = [data(2 * r + i, 3, 5).t() for i in range(2)]
    pg.allreduce(strided).wait()
    equal(strided, [sum(data(p, 3, 5) for p in range(2 * n)).t()] * 2)
    options.reduceOp = dist.ReduceOp.AVG
    x, y, z = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
    backend = pg._get_backend(torch.device("cpu"))
    broadcast = Options.BroadcastOptions()
    broadcast.rootTensor = 2
    reduce, gather, scatter = Options.ReduceOptions(), Options.GatherOptions(), Options.ScatterOptions()
    reduce.rootTensor = 1
    gather.rootRank = scatter.rootRank = (r + 1) % n
    wrong = [
        (lambda: pg.allreduce([x, y]), "alike"),
        (lambda: pg.allreduce([x, z]), "alike"),
        (lambda: pg.allreduce([x, x.clone()], options), "avg"),
        (lambda: pg.allgather([[x] * n], [x, x]), "outputs for 2 inputs"),
        (lambda: pg.allgather([[x] * n, [x] * n], [x, x]), "list of 3 outputs"),
        (lambda: pg.broadcast([x, x], broadcast), "rootTensor=2"),
        (lambda: pg.reduce([x], reduce), "rootTensor=1"),
        (lambda: pg.gather([[x] * n], [x], gather), f"list of {n} tensors, but rank {gather.rootRank} is"),
        (lambda: pg.scatter([x], [[x] * n], scatter), f"list of {n} tensors, but rank {gather.rootRank} is"),
        (lambda: backend.allreduce([]), "empty list"),
        (lambda: backend.allreduce_coalesced([]), "empty list"),
        (lambda: backend.broadcast([], Options.BroadcastOptions()), "list of 0"),
        (lambda: backend.allgather_coalesced([[]] * n, []), "empty list"),
    ]
    for call, text in wrong:
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.filterwarnings("ignore")
def test_several_tensors_per_rank():
    spawn(3, check_several)
