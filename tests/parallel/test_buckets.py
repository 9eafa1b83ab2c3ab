"""Where gradients lie and when they are summed, in one process: places in flat buffers, cuts into buckets,
who counts what in the norm, the order of a Reducer.
"""

import itertools
import math
import random

import pytest
import torch

from pycomm.groups import ALONE, Group
from pycomm.parallel.data.bucket import Bucket, ParamInfo, SumUnderWay, cut_into_buckets
from pycomm.parallel.data.flat import FlatSpec
from pycomm.parallel.data.reducer import Reducer
from pycomm.parallel.data.replicated import ReplicatedBucket
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.layout import Layout, whole
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.zero.kinds import kind_of

SHAPES = [(), (7,), (3, 5), (0, 4), (2, 3, 4), (1,), (16,), (0,), (5, 5)]
LISTS = [SHAPES, SHAPES[::-1], [(1,)], [(0,)], [(2,)] * 5, [(40,), *SHAPES], []]
TWO = Group("two", 2, 0, None)


# --- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes", [SHAPES, SHAPES[::-1], [(1,)], [(0,)], [(2,)] * 5, [(40,), *SHAPES], []], ids=str
)
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
def test_every_element_has_one_place_in_one_chunk(shapes, cut):
    for parts in (1, 2, 3, 7):
        spec = FlatSpec(shapes, parts, whole=not cut)
        total = sum(math.prod(shape) for shape in shapes)
        assert spec.numel == parts * spec.chunk >= total
        assert not cut or spec.numel < total + parts
        seen = torch.zeros(spec.numel, dtype=torch.int64)
        for view in spec.views(seen):
            view += 1
        assert seen.max(dim=0, keepdim=True).values.le(1).all() if spec.numel else True
        assert int(seen.sum()) == total and [tuple(v.shape) for v in spec.views(seen)] == list(shapes)
        found = [piece for part in range(parts) for piece in spec.pieces(part)]
        whole_ones = spec.pieces()
        assert [(p.index, p.start, p.stop) for p in whole_ones] == [
            (i, 0, math.prod(shape)) for i, shape in enumerate(shapes)
        ]
        for index, shape in enumerate(shapes):
            mine = sorted((p.start, p.stop) for p in found if p.index == index)
            ends = [0, *(stop for _, stop in mine)]
            assert mine and [start for start, _ in mine] == ends[:-1] and ends[-1] == math.prod(shape)
            assert cut or len(mine) == 1 or not total
        for part in range(parts):
            for piece in spec.pieces(part):
                first = piece.offset + piece.stop - piece.start
                assert part * spec.chunk <= piece.offset and first <= (part + 1) * spec.chunk
                assert piece.offset == spec.offsets[piece.index] + piece.start


def test_whole_parameters_are_dealt_evenly():
    """The largest first, to the emptiest chunk: none is larger than the mean and the largest together."""
    draw = random.Random(0)
    for _ in range(50):
        sizes = [(draw.randrange(40),) for _ in range(draw.randrange(1, 30))]
        for parts in (1, 2, 5):
            spec = FlatSpec(sizes, parts, whole=True)
            total, largest = sum(size for (size,) in sizes), max(size for (size,) in sizes)
            assert spec.chunk <= total / parts + largest


# --- buckets -------------------------------------------------------------------------------------


def info(number, shape=(3,), group=ALONE, dtype=torch.float32, **more):
    param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    more.setdefault("layout", whole(param))
    return ParamInfo(f"p{number}", param, group=group, number=number, **more)


def test_a_bucket_has_one_kind_and_a_limit():
    kinds = [{}, {"group": TWO}, {"replicas": TWO}, {"option": 1}, {"tied": True}, {"dtype": torch.bfloat16}]
    infos = [info(n, (2 + n % 5,), **kinds[n * 7 % 6]) for n in range(40)]
    infos[11].param.requires_grad_(False)
    for limit, least in ((1e9, 1), (24, 1), (1, 1), (1e9, 3), (64, 2)):
        cut = cut_into_buckets(infos, limit, least)
        assert sorted(i.number for some in cut for i in some) == list(range(40))
        for some in cut:
            assert len({i.key() for i in some}) == 1
            assert [i.number for i in some] == sorted(i.number for i in some)
            most = min(limit, sum(i.nbytes for i in infos if i.ranks == some[0].ranks) / least)
            size = sum(i.nbytes for i in some)
            assert len(some) == 1 or size <= most
            after = [i for i in infos if i.key() == some[0].key() and i.number > some[-1].number]
            assert not after or size + after[0].nbytes > most  # it did not fit in
    tied = [info(n, tied=True) for n in range(3)]
    assert len(cut_into_buckets(tied, 1e9)) == 3  # one for each, as another stage has it too


def norms(kind, shapes, size, replicas, dtype, make_layout):
    """Of each rank, of gradients 1, 2, 3, ... in every parameter."""
    found = []
    for rank, copy in itertools.product(range(size), range(replicas)):
        groups = {"group": Group("g", size, rank, None), "replicas": Group("r", replicas, copy, None)}
        infos = [
            info(n, shape, dtype=dtype, layout=make_layout(shape, rank), **groups)
            for n, shape in enumerate(shapes)
        ]
        bucket = kind(infos)
        flat = torch.zeros(bucket.spec.numel, dtype=dtype)
        for number, view in enumerate(bucket.spec.views(flat)):
            view.copy_(torch.arange(1, view.numel() + 1).view(view.shape) * (number + 1))
        bucket.gradient = lambda bucket=bucket, flat=flat: bucket.own(flat)
        found.append((bucket.norm_squared(), bucket.not_finite()))
        flat[bucket.spec.offsets[1]] = math.nan
        found[-1] += (bucket.not_finite(),)
    return found


class Sharded(Bucket):
    is_sharded = True


@pytest.fixture
def ordinary_memory(monkeypatch):
    """Groups of several ranks without a process group."""
    monkeypatch.setattr(
        "pycomm.parallel.ground.comm.empty",
        lambda count, dtype, group, device: torch.zeros(count, dtype=dtype),
    )


@pytest.mark.parametrize("kind", [Sharded, ReplicatedBucket])
@pytest.mark.parametrize(("size", "replicas"), [(1, 1), (3, 1), (2, 2), (1, 3), (4, 3)])
def test_the_ranks_count_each_element_once(kind, size, replicas, ordinary_memory):
    shapes = [(2, 3), (5,), (), (4,), (0, 2)]
    expected = sum(
        float(((n + 1) * torch.arange(1, math.prod(shape) + 1)).double().square().sum())
        for n, shape in enumerate(shapes)
    )
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = norms(kind, shapes, size, replicas, dtype, lambda shape, rank: whole(torch.empty(shape)))
        assert sum(norm for norm, _, _ in found).item() == pytest.approx(expected, rel=1e-6)
        assert sum(int(bad) for _, bad, _ in found) == 0
        assert sum(int(bad) for _, _, bad in found) == 1 and {norm.dtype for norm, *_ in found} == {
            torch.float64
        }


# what a rank of tp holds of 6 rows, or of 3, with gradients 1, 2, 3 -> squares of what it counts
COUNTED = [
    (Layout((6, 1), 0, ((0, 3),), ()), 0.0),
    (Layout((6, 1), 0, ((0, 3),), ((1, 3),)), 13.0),
    (Layout((6, 1), 0, ((2, 3), (4, 6)), ((2, 3), (4, 6))), 14.0),
    (Layout((6, 1), 0, ((2, 3), (4, 6)), ((4, 5),)), 4.0),
    (Layout((3, 1), None, (), ()), 0.0),
    (Layout((3, 1), None, (), (), partial=True), 14.0),
]


def test_what_another_rank_counts_is_left_out(ordinary_memory):
    """Also a second copy of a tied parameter."""
    for (layout, expected), kind, counted in itertools.product(COUNTED, (Sharded, ReplicatedBucket), (1, 0)):
        bucket = kind([info(0, (3, 1), layout=layout, counted=bool(counted))])
        bucket.gradient = lambda: torch.tensor([1.0, 2.0, 3.0])
        assert bucket.norm_squared().item() == pytest.approx(expected * counted), (layout, counted)


def test_squares_of_several_parameters_beyond_the_range_of_one():
    for dtype, value in ((torch.float32, 1.8e19), (torch.bfloat16, 1.75 * 2.0**63)):
        infos = [info(n, (1,), ALONE, dtype) for n in range(4)]
        bucket = ReplicatedBucket(infos)
        bucket.flat.fill_(value)
        assert bucket.norm_squared().sqrt().item() == pytest.approx(2 * value, rel=1e-6)


@pytest.mark.parametrize("zero", [1, 2])
def test_the_sum_inside_of_hosts_ends_before_the_one_across(zero, ordinary_memory, monkeypatch):
    log = []

    class Work:
        def __init__(self, what):
            self.what = what
            log.append(f"start {what}")

        def wait(self):
            log.append(f"end {self.what}")

    def reduce_scatter(output, tensor, group, async_op=False):
        output.copy_(tensor[: output.numel()])
        return Work(group.name)

    monkeypatch.setattr(comm, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(comm, "all_reduce", lambda tensor, group, async_op=False: Work(group.name))
    groups = {"group": Group("inside", 2, 0, None), "replicas": Group("across", 2, 1, None)}
    infos = [info(number, (5,), **groups) for number in range(2)]
    bucket = kind_of(Plan(zero=zero)).make_bucket(infos)
    for _ in range(2):
        bucket.zero_grad()
        for each in infos:
            bucket.accumulate(each.param, torch.ones(5))
            bucket.collect(each.param)
        bucket.launch()
        bucket.launch_across()
        assert log == ["start inside", "end inside", "start across"]
        bucket.wait()
        bucket.wait()
        assert log == ["start inside", "end inside", "start across", "end across"]
        assert bucket.gradient().tolist() == [1.0] * 5
        log.clear()


# --- the order of a Reducer ----------------------------------------------------------------------


class Noting(Bucket):
    """Records its calls. A sum ends when it is waited for."""

    def __init__(self, infos, log, each_microbatch=False):
        super().__init__(infos)
        self.log, self.sums_each_microbatch = log, each_microbatch
        self.crossing = 0

    def zero_grad(self):
        for each in self.infos:
            each.param.grad = None

    def launch(self):
        self.log.append(("launch", self.infos[0].number))
        self.in_flight.append(SumUnderWay(None, None, None))

    def launch_across(self):
        self.wait()
        self.log.append(("across", self.infos[0].number))

    def wait(self):
        if self.in_flight:
            self.log.append(("wait", self.infos[0].number))
        self.in_flight.clear()

    @property
    def under_way(self):
        return len(self.in_flight)


def reducer_of(each_microbatch=False, eager=True, groups=(ALONE,) * 4):
    """Buckets of two parameters each: 0 and 1, 2 and 3, ..."""
    log = []
    buckets = [
        Noting([info(2 * n, group=group), info(2 * n + 1, group=group)], log, each_microbatch)
        for n, group in enumerate(groups)
    ]
    return Reducer(buckets, eager), [i.param for bucket in buckets for i in bucket.infos], log


def backward(params, order):
    for number in order:
        (params[number].sum() * 2).backward()


def launches(log):
    return [number for what, number in log if what == "launch"]


ORDERS = [range(8), range(7, -1, -1), [6, 7, 4, 0, 2, 1, 3, 5], [0, 3, 5, 7], []]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("each_microbatch", [True, False])
@pytest.mark.parametrize("eager", [True, False])
def test_buckets_start_in_one_order_and_once(order, each_microbatch, eager):
    reducer, params, log = reducer_of(each_microbatch, eager)
    for step in range(2):
        reducer.zero_grad()
        assert not reducer.used and all(param.grad is None for param in params)
        for sync in (False, True):
            log.clear()
            reducer.begin_microbatch(sync)
            backward(params, order)
            assert launches(log) == [0, 2, 4, 6][: len(launches(log))]
            assert sync or each_microbatch or not log
            if list(order) == list(range(8)):
                assert launches(log) == ([0, 2, 4, 6] if eager and (sync or each_microbatch) else [])
            reducer.finish_microbatch(sync)
            assert launches(log) == ([0, 2, 4, 6] if sync or each_microbatch else [])
            assert [n for what, n in log if what == "across"] == ([0, 2, 4] if sync else [])
            # one, and what the microbatch before has left
            assert sum(bucket.under_way for bucket in reducer.buckets) <= 1 + sync and not reducer.missing
        reducer.wait()
        assert [n for what, n in log if what == "across"] == [0, 2, 4, 6], step
        assert not any(bucket.under_way for bucket in reducer.buckets)
        assert reducer.used == {id(params[number]) for number in order}


def test_groups_do_not_wait_for_each_other():
    other = Group("other", 1, 0, None)
    reducer, params, log = reducer_of(groups=(ALONE, other, ALONE, other))
    reducer.begin_microbatch(True)
    backward(params, (7, 6, 3, 2, 5, 4))
    assert launches(log) == [2, 6]
    backward(params, (0, 1))
    assert launches(log) == [2, 6, 0, 4]
    with pytest.raises(
        ValueError, match=r"p7 got a gradient after its bucket had been summed.*use_reentrant"
    ):
        backward(params, (7,))


def test_what_is_frozen_is_not_waited_for_and_what_comes_later_is_kept_apart():
    reducer, params, log = reducer_of()
    params[3].requires_grad_(False)
    late = info(9)
    reducer.note_trained()
    reducer.expect(late.param)
    assert reducer.has(late.param) and reducer.has(params[3])
    reducer.begin_microbatch(True)
    for _ in range(2):
        late.param.sum().mul(3).backward()
    assert late.param.grad is None and reducer.apart[id(late.param)].tolist() == [6.0] * 3
    backward(params, (0, 1, 2))
    assert launches(log) == [0, 2]
    backward(params, range(4, 8))
    reducer.finish_microbatch(True)
    added = Noting([late], log)
    reducer.add([added])
    assert late.param.grad.tolist() == [6.0] * 3 and not reducer.apart
    log.clear()
    reducer.catch_up([added], sync=True)
    assert log == [("launch", 9), ("wait", 9), ("across", 9)]
    log.clear()
    reducer.catch_up([added], sync=False)
    assert log == []
    params[3].requires_grad_(True)
    reducer.note_trained()
    reducer.zero_grad()
    reducer.begin_microbatch(True)
    backward(params, (0, 1, 2))
    assert launches(log) == [0]
    backward(params, (3,))
    assert launches(log) == [0, 2]
