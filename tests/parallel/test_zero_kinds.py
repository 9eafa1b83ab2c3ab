"""The kinds of buckets and shards alone, in one process: what each answers is the same, wherever it lies."""

import contextlib
import itertools
import re
import types
from pathlib import Path

import pytest
import torch

import pycomm.parallel as par
from pycomm.groups import ALONE
from pycomm.parallel.data.bucket import ParamInfo
from pycomm.parallel.data.replicated import LocalBucket, ReplicatedBucket
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.comm import Group
from pycomm.parallel.ground.layout import Layout, whole
from pycomm.parallel.zero.apply import master_options
from pycomm.parallel.zero.kinds import kind_of
from pycomm.parallel.zero.optimizer import step_optimizer
from pycomm.parallel.zero.shards import MasterOptions
from pycomm.parallel.zero.units import Phase, State, Unit, Units

SHAPES = (3, 4), (), (5,), (0, 2)
IN_PLACE, COPIES = MasterOptions(), MasterOptions(dtype=torch.float64)
PARALLEL = Path(par.__file__).parent


def make(zero, tied=False, masters=IN_PLACE, dtype=torch.float64):
    """(infos, bucket, shards) of parameters of these shapes."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in SHAPES]
    infos = [
        ParamInfo(f"p{i}", param, whole(param), ALONE, option=0, number=i, tied=tied)
        for i, param in enumerate(params)
    ]
    kind = kind_of(par.Plan(zero=zero))
    bucket = kind.make_bucket(infos)
    return infos, bucket, kind.shards(bucket, {p: p.detach().clone() for p in params}, masters)


def reduce(bucket, infos, dtype):
    """One step of the bucket with gradients()."""
    bucket.zero_grad()
    for info, grad in zip(infos, gradients(), strict=True):
        bucket.accumulate(info.param, grad.to(dtype, copy=True))
        if info.param.grad is not None:
            bucket.collect(info.param)
    bucket.launch()
    bucket.wait()


def gradients():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


@pytest.mark.parametrize("zero, tied", [(0, False), (0, True), (1, False), (2, False), (3, False)])
def test_a_bucket_gives_the_sum_of_its_gradients(zero, tied):
    infos, bucket, _ = make(zero, tied)
    if zero == 0:
        assert type(bucket) is (ReplicatedBucket if tied else LocalBucket)
    for _ in range(2):  # the second step finds nothing of the first
        reduce(bucket, infos, torch.float64)
        expected = torch.cat([grad.flatten() for grad in gradients()])
        found = torch.cat([bucket.elements(piece, bucket.gradient()) for piece in bucket.owned])
        assert torch.equal(found, expected)
        torch.testing.assert_close(bucket.norm_squared(), expected.square().sum())


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("zero", range(4))
def test_gradients_of_kv_heads_that_ranks_share_are_summed_over_them(zero, microbatches, monkeypatch):
    """Rank 1 of tp holds rows 2 to 4 of six, and the other one rows 0 to 2: once for each sum over dp."""
    tp, others = Group("tp", 2, 1, None), torch.zeros(6, 4, dtype=torch.float64)
    others[:3] = torch.arange(1.0, 13.0).view(3, 4)

    def all_reduce(tensor, group, *given, **options):
        if group is tp:
            tensor.add_(others)
            groups.append(group.name)
        return comm.Done() if options.get("async_op") else None

    monkeypatch.setattr(comm, "all_reduce", all_reduce)
    shared = Layout((6, 4), 0, ((2, 5),), ((3, 5),), overlap=True)
    params = [torch.nn.Parameter(torch.ones(3, 4, dtype=torch.float64)) for _ in range(2)]
    infos = [
        ParamInfo("shared", params[0], shared, ALONE, option=0, number=0, overlap=tp),
        ParamInfo("own", params[1], whole(params[1]), ALONE, option=0, number=1),
    ]
    bucket, groups, own = kind_of(par.Plan(zero=zero)).make_bucket(infos), [], torch.full((3, 4), 0.5)
    bucket.zero_grad()
    for number in range(microbatches):
        for info in infos:
            bucket.accumulate(info.param, own.double())
            if info.param.grad is not None:
                bucket.collect(info.param)
        if bucket.sums_each_microbatch or number == microbatches - 1:
            bucket.launch()
            bucket.wait()
    expected = [microbatches * own + len(groups) * others[2:5], microbatches * own]
    assert len(groups) == (microbatches if bucket.sums_each_microbatch else 1)
    for piece in bucket.owned:
        found = bucket.elements(piece, bucket.gradient())
        assert torch.equal(found, expected[piece.index].flatten()[: found.numel()].view_as(found)), piece


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("masters", [IN_PLACE, COPIES], ids=["in place", "copies"])
def test_shards_bring_new_values_to_the_parameters(zero, masters):
    infos, bucket, shards = make(zero, masters=masters, dtype=torch.float32)
    before = torch.cat([shard.param.detach().flatten() for shard in shards.owned])
    opt = torch.optim.SGD([shard.param for shard in shards.owned], lr=0.5)
    reduce(bucket, infos, torch.float32)
    step_optimizer(opt, [shards], torch.tensor(0.25))
    if zero == 3:
        assert all(info.param.numel() == 0 for info in infos)
        shards.start_gather()
        shards.finish_gather()
    expected = before - 0.125 * torch.cat([grad.flatten() for grad in gradients()])
    found = torch.cat([info.param.detach().flatten() for info in infos])
    torch.testing.assert_close(found, expected.float())
    assert [tuple(info.param.shape) for info in infos] == list(SHAPES)


@pytest.mark.parametrize(("zero", "tied"), [(0, False), (0, True), (1, False), (2, False)])
def test_what_stands_in_a_gradient_is_added_to(zero, tied):
    """In a loop of the user's own: a gradient that he has set, one that he has dropped, and what is left."""
    infos, bucket, _ = make(zero, tied)
    reduce(bucket, infos, torch.float64)
    first, _, third, _ = (grad.clone() for grad in gradients())
    if zero < 2:  # else what is set is refused
        infos[0].param.grad = torch.full(SHAPES[0], 7.0, dtype=torch.float64)
        first = infos[0].param.grad.clone()
    else:
        for info in infos:
            info.param.grad = torch.zeros_like(info.param)
    infos[1].param.grad = None
    for _ in range(2):
        bucket.put_aside()
        assert all(info.param.grad is None for info in infos)
        for info in infos:
            bucket.accumulate(info.param, torch.ones(info.shape, dtype=torch.float64))
            if info.param.grad is not None:
                bucket.collect(info.param)
        bucket.launch()
        bucket.wait()
        bucket.take_mean(2 if zero or tied else 1)
        part = 0.5 if zero or tied else 1.0
        first, third = first + part, third + part
        if zero == 2:
            for info in infos:
                info.param.grad = torch.zeros_like(info.param)
    expected = torch.cat([first.flatten(), torch.full((1,), 2 * part).double(), third.flatten()])
    torch.testing.assert_close(
        torch.cat([bucket.elements(p, bucket.gradient()) for p in bucket.owned]), expected
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_copies_in_fp32_are_made_where_they_are_asked_for(dtype):
    _, bucket, _ = make(1, dtype=dtype)
    for precision, offload in itertools.product((None, "bf16"), (None, "optimizer")):
        found = master_options(bucket, par.Plan(zero=1, precision=precision, offload=offload))
        wanted = torch.float32 if precision and dtype is torch.bfloat16 else None
        assert found == MasterOptions(dtype=wanted)  # what is on the CPU is not brought to the host
    assert master_options(bucket, par.Plan(zero=3, offload="parameters")).values_on_host


class Noting:
    """Shards of a unit that record their calls."""

    def __init__(self, name, log):
        self.name, self.log = name, log
        self.bucket = types.SimpleNamespace(infos=[])

    def start_gather(self):
        self.log.append(f"start {self.name}")

    def finish_gather(self):
        self.log.append(f"end {self.name}")

    def free(self):
        self.log.append(f"free {self.name}")


def units_of(names, always=""):
    log = []
    units = Units()
    units.opens, units.closes = (lambda: log.append("open")), (lambda: log.append("close"))
    for name in names:
        units.add(Unit(name, [Noting(name, log)]), always=name in always)
    return units, dict(zip(names, units.units, strict=True)), log


def run_pass(units, made, used, phase=Phase.FORWARD, stage=0):
    """Which units are fetched ahead after each use."""
    ahead = []
    units.begin(phase, stage)
    for name in used:
        units.use(made[name])
        ahead.append("".join(unit.name for unit in units.units if unit.state is State.GATHERING))
    units.end()
    return ahead


def test_the_next_unit_is_fetched_ahead_as_in_the_first_pass():
    """Each phase and each stage has its own first pass. A wrong guess is freed at the end."""
    units, made, log = units_of("abcd", always="d")
    uses = ["start d", "end d", *(f"{what} {name}" for name in "abc" for what in ("start", "end"))]
    for phase, stage in ((Phase.FORWARD, 0), (Phase.EVALUATE, 0), (Phase.FORWARD, 1)):
        for number in range(3):
            log.clear()
            ahead = run_pass(units, made, "aabc", phase, stage)
            assert ahead == (["b", "b", "c", ""] if number else [""] * 4)
            assert log == ["open", *uses, *(f"free {name}" for name in "abcd"), "close"]
            assert units.phase is Phase.IDLE and not any(unit.is_whole for unit in units.units)
    log.clear()
    assert run_pass(units, made, "a") == ["b"]
    assert [line for line in log if line.endswith("b")] == ["start b", "end b", "free b"]


def test_another_order_than_the_first_is_only_slower():
    units, made, log = units_of("abc")
    run_pass(units, made, "abc")
    for used in ("ac", "cba", "b", "acacb", ""):
        log.clear()
        run_pass(units, made, used)
        for name in "abc":
            mine = [line.split()[0] for line in log if line.endswith(f" {name}")]
            assert mine in ([], ["start", "end", "free"]) and (mine or name not in used)
    units.forget_orders()
    log.clear()
    run_pass(units, made, "b")
    run_pass(units, made, "b")
    assert [line for line in log if line.endswith(("a", "c"))] == []


def test_a_pass_that_ends_by_an_error_frees_all_and_raises_the_first():
    units, made, log = units_of("abc")

    def broken():
        raise ValueError("writes to a parameter")

    made["b"].shards[0].free = broken
    units.begin(Phase.FORWARD)
    for name in "abc":
        units.use(made[name])
    with pytest.raises(ValueError, match="writes to a parameter"):
        units.end()
    assert log[-3:] == ["free a", "free c", "close"] and not any(unit.is_whole for unit in units.units)


def test_parameters_are_the_users_again_after_each_pass():
    """Under zero=3 a read of them between calls is refused, whatever the call was, and how it ended."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero=3")
    x, y = torch.randn(5, 3), torch.randn(5, 1)

    def own_backward():
        loss = torch.nn.functional.mse_loss(model(x), y)
        refused()
        loss.backward()

    def refused():
        for parameter in model.parameters():
            with pytest.raises(ValueError, match="is sharded under zero=3"):
                parameter.sum()

    calls = [
        lambda: par.step(model, opt, (x, y), torch.nn.functional.mse_loss, update=False),
        lambda: par.step(model, opt, (x, y), torch.nn.functional.mse_loss),
        lambda: par.evaluate(model, (x, y), torch.nn.functional.mse_loss),
        own_backward,
        lambda: opt.step(),
        lambda: model(x[:, :2]),
    ]
    for call in calls:
        with contextlib.suppress(RuntimeError):
            call()
        refused()


def test_the_number_becomes_a_kind_in_one_place():
    """Nothing that trains asks which ZeRO it is, but zero/kinds.py; a planner chooses the number."""
    users = {
        str(path.relative_to(PARALLEL))
        for path in PARALLEL.rglob("*.py")
        if "planning" not in path.parts and re.search(r"plan\.zero\b(?!\.)", path.read_text())
    }
    assert users == {"zero/kinds.py"}
