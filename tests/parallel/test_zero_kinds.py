"""The kinds of buckets and shards alone, in one process: what each answers is the same, wherever it lies."""

import re
from pathlib import Path

import pytest
import torch

import pycomm.parallel as par
from pycomm.groups import ALONE
from pycomm.parallel.data.bucket import ParamInfo
from pycomm.parallel.data.replicated import LocalBucket, ReplicatedBucket
from pycomm.parallel.ground.layout import whole
from pycomm.parallel.zero.kinds import kind_of
from pycomm.parallel.zero.optimizer import step_optimizer
from pycomm.parallel.zero.shards import MasterOptions

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


def test_the_number_becomes_a_kind_in_one_place():
    """Nothing that trains asks which ZeRO it is, but zero/kinds.py; a planner chooses the number."""
    users = {
        str(path.relative_to(PARALLEL))
        for path in PARALLEL.rglob("*.py")
        if "planning" not in path.parts and re.search(r"plan\.zero\b(?!\.)", path.read_text())
    }
    assert users == {"zero/kinds.py"}
