"""The groups of a plan have the limit of torch's default group, and a rank that does not come is named on
all others, also on those that wait for one that waits for it.
"""

import time

import equality
import pytest
import torch
import torch.distributed as dist
from tiers import tier
from torch_ranks import meeting, spawn

import pycomm
import pycomm.parallel as par
from pycomm.parallel.parts import parts_of

LIMIT = 4.0  # seconds of an operation
LATE = 10 * 1.0  # behind it: ten times the second in which all are to know
SLEEPER = 3
PLANS = [
    ("gpt", "dp=2,tp=2"),
    ("gpt", "dp=2,pp=2"),
    ("gpt", "dp=4"),
    ("llama", "tp=4"),
    ("gpt", "pp=4"),
    ("gpt", "dp=4,zero=1"),
    ("gpt", "dp=4,zero=3"),
    ("gpt", "dp=2,tp=2,megatron_sp"),
    ("llama", "dp=2,ring=2"),
    ("llama", "dp=2,ulysses=2"),
    ("moe", "dp=2,ep=2"),
    ("gpt", "tp=2,pp=2,zero=3"),
]


def one_sleeps(rank, world_size, kind, plan, done):
    model = equality.make_model(kind, torch.float32)
    par.parallelize(model, opt := equality.make_optimizer(model, torch.float32), plan)
    limits = [pg._get_backend(torch.device("cpu")).options._timeout for pg in parts_of(model).mesh._made]
    batches = list(equality.batches(3))
    for batch in batches[:2]:
        par.step(model, opt, batch)
    started, told = time.monotonic(), ("", 0.0)
    if rank != SLEEPER:
        with pytest.raises((pycomm.CommTimeoutError, pycomm.PeerError)) as caught:
            par.step(model, opt, batches[2])
        told = str(caught.value), time.monotonic() - started
    done.wait()
    return told, [limit.total_seconds() for limit in limits]


@tier(quick=1 / 6)
@pytest.mark.parametrize(("kind", "plan"), PLANS, ids=lambda each: each)
def test_a_rank_that_does_not_come_is_named(kind, plan):
    found = spawn(4, one_sleeps, kind, plan, meeting(4), timeout=LIMIT)
    for rank, ((text, seconds), limits) in enumerate(found):
        assert set(limits) <= {LIMIT}
        if rank != SLEEPER:
            # the rank itself where the group is the whole, else its number in the plan
            assert f"rank {SLEEPER} " in text or f"In the plan it is rank {SLEEPER}." in text, (rank, text)
            assert LIMIT - 0.5 < seconds < LIMIT + LATE


def limits_of_a_run(rank, world_size):
    model = equality.make_model("gpt", torch.float32)
    run = par.resilient(model, equality.make_optimizer(model, torch.float32), "dp=2,tp=2", timeout=7.5)
    batches = list(equality.batches(2))
    found = []
    for number in run.steps(2):
        if number == 1 and rank == 0:
            dist.group.WORLD.abort()  # all leave their groups, and make new ones
        run.step(batches[number])
        groups = (dist.group.WORLD, *parts_of(model).mesh._made)
        found += [pg._get_backend(torch.device("cpu")).options._timeout.total_seconds() for pg in groups]
    return found, run.recoveries


def test_a_run_that_goes_on_has_its_own_limit():
    for limits, recoveries in spawn(4, limits_of_a_run):
        assert set(limits) == {7.5} and recoveries == 1
