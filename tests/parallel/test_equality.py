"""The equality matrix (equality.py), and that all pipeline schedules give the same bits."""

import re

import equality
import pytest
import torch
from models import GPT
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par

CASES = equality.ALONE + equality.HYBRIDS


# Every plan in fp64, which shows errors a million times smaller, in few steps. One in fp32; the others are
# slow, and have all steps.
QUICK_FP32 = ("gpt", "dp=2")


@tier(quick=1 / 30, slow=1 / 18)
@pytest.mark.parametrize(
    "case, dtype",
    [
        pytest.param(
            case,
            dtype,
            marks=[pytest.mark.slow] * (case != QUICK_FP32 and dtype == torch.float32),
            id=f"{case[0]}:{case[1]}-{str(dtype)[6:]}",
        )
        for case in CASES
        for dtype in equality.LIMITS
    ],
)
def test_plan_equals_single_process(case, dtype):
    steps = equality.FEW_STEPS if dtype == torch.float64 else equality.STEPS
    errors = equality.compare(*case, dtype, steps)
    assert max(errors) <= equality.LIMITS[dtype], errors


def test_the_matrix_is_what_it_says():
    assert len(equality.HYBRIDS) >= 25 and len(set(CASES)) == len(CASES)
    assert {par.Plan.parse(text).world_size for _, text in CASES} >= {2, 3, 4, 6, 8}


def test_the_table_is_of_these_plans():
    text = (equality.ROOT / "docs" / "equality.md").read_text()
    rows = re.findall(r"^\| (?:alone|hybrid) \| (\w+) \| `(.*?)` \|", text, re.M)
    assert rows == CASES, "run python tests/parallel/equality.py"


def test_a_wrong_plan_is_seen(monkeypatch):
    """The comparison is not blind: one gradient that is wrong by 1e-5 in one element on one rank exceeds the
    limit.
    """
    plain = par.full_gradients

    def wrong(model):
        gradients = plain(model)
        largest = gradients["blocks.1.ln_2.weight"].abs().argmax()
        gradients["blocks.1.ln_2.weight"][largest] *= 1 + 1e-5
        return gradients

    monkeypatch.setattr(par, "full_gradients", wrong)
    assert equality.compare("gpt", "dp=2", torch.float32).gradients > equality.LIMITS[torch.float32]


SCHEDULES = ["schedule=gpipe", "schedule=1f1b", "schedule=zb-h1", "schedule=interleaved", "schedule=zbv"]


def train_with_bits(rank, world_size, microbatches, zero):
    """Losses and parameters after three steps under each schedule, in one process group."""
    found = []
    for schedule in SCHEDULES:
        torch.manual_seed(0)
        model = GPT(layers=8)
        opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        model, opt = par.parallelize(model, opt, par.Plan.parse(f"pp={world_size},{schedule},zero={zero}"))
        generator, losses = torch.Generator().manual_seed(1), []
        for _ in range(3):
            batch = (
                torch.randint(0, 37, (9, 7), generator=generator),
                torch.randint(0, 37, (9, 7), generator=generator),
            )
            losses.append(par.step(model, opt, batch, microbatches=microbatches, clip=0.5).item())
        found.append((losses, par.full_state_dict(model)))
    first_losses, first = found[0]
    for schedule, (losses, parameters) in zip(SCHEDULES, found, strict=True):
        assert losses == first_losses, schedule
        for name, value in parameters.items():
            assert torch.equal(value, first[name]), (
                f"{schedule}: {name} differs by {(value - first[name]).abs().max()}"
            )


@tier(slow=1 / 4)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_schedules_give_the_same_bits(stages, microbatches):
    spawn(stages, train_with_bits, microbatches, 0)
