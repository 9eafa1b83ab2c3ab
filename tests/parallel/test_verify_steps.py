"""par.verify over several steps: equal where plans are, and the step and module named where a fault begins
later than in the first.
"""

import pytest
import torch
import torch.distributed as dist
from odd_models import cross, tokens
from tiers import tier
from torch import nn
from torch_ranks import spawn
from verify_cases import ROWS, error_of, make, verify

import pycomm.parallel as par

PLANS = [  # model, plan, microbatches
    ("gpt", "dp=2,zero=2", 2),
    ("llama", "dp=2,zero=3", 1),
    ("gpt", "tp=2,megatron_sp", 1),
    ("gpt", "pp=2,schedule=zbv", 2),
    ("tied", "pp=2", 2),
    ("normed", "dp=2", 2),
    ("moe", "ep=2", 1),
]


@tier(quick=1 / 8, slow=2 / 3)
@pytest.mark.parametrize(("kind", "plan", "microbatches"), PLANS)
def test_three_steps_are_equal(kind, plan, microbatches):
    one, _ = spawn(2, verify, kind, plan, microbatches)
    results = spawn(2, three, kind, plan, microbatches)
    assert len(set(results)) == 1
    found = results[0]
    assert found.equal and (found.step, found.steps) == (3, 3) and found.largest < 1e-11, str(found)
    assert "equal to one process in 3 steps. Loss" in str(found)
    assert found.loss == pytest.approx(found.loss_alone, rel=1e-11) and found.loss < one.loss


def three(rank, world_size, kind, plan, microbatches):
    return verify(rank, world_size, kind, plan, microbatches, steps=3)


class Late(nn.Module):
    """Off by 1e-3 on rank 1, from its third pass over a part of the batch on."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, x):
        part = dist.is_initialized() and x.shape[0] < ROWS
        self.passes += part
        return x + 1e-3 * (self.passes > 2 and dist.get_rank() == 1)


def late(rank, world_size, plan, steps):
    model = make("gpt")
    model.norm = Late()
    return par.verify(model, tokens(0), plan, cross, steps=steps, show=False)


def test_a_fault_that_begins_in_the_third_step():
    for found in spawn(2, late, par.Plan(dp=2), 2):
        assert found.equal
    for found in spawn(2, late, par.Plan(dp=2), 5):
        assert not found.equal and (found.step, found.steps) == (3, 5)
        assert (found.module.name, found.module.rank) == ("norm", 1)
        assert "NOT equal to one process in step 3 of 5" in str(found)


def wrong_second_update(rank, world_size):
    """An optimizer's second step that goes wrong on one rank."""
    step, calls = torch.optim.SGD.step, []

    def stepped(self, *args):
        calls.append(1)
        return None if rank == 1 and len(calls) == 2 else step(self, *args)

    torch.optim.SGD.step = stepped
    return verify(rank, world_size, "gpt", "dp=2,zero=1", 1, steps=4)


def test_an_update_that_goes_wrong_in_the_second_step():
    for found in spawn(2, wrong_second_update):
        assert found.step == 2 and found.module is None and found.parameter.what == "value after the step"


@pytest.mark.parametrize("steps", [0, -1, 1.5, None])
def test_how_many_steps(steps):
    kind, words = error_of(par.verify, make("gpt"), tokens(0), par.Plan(), cross, steps=steps)
    assert kind == "ValueError" and f"verify(steps={steps!r})" in words
