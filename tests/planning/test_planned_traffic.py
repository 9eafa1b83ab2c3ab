"""What a step sends, by dry_run and in the run: every plan of the equality matrix, call by call and byte by
byte.

    python tests/planning/test_planned_traffic.py      all plans, all ranks (minutes)

Of a mixture of experts the bytes of all_to_all depend on which experts the tokens choose, and are left out.
"""

import sys
from pathlib import Path

import pytest
import torch
from tiers import tier

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "parallel")]

import equality  # noqa: E402
from torch_ranks import spawn  # noqa: E402

import pycomm.parallel as par  # noqa: E402
from pycomm.parallel.planning import dry_run  # noqa: E402

CASES = equality.ALONE + equality.HYBRIDS
QUICK = [
    ("gpt", "dp=2,zero=3"),
    ("gpt", "tp=3,megatron_sp"),
    ("gpt", "pp=2,schedule=zbv"),
    ("llama", "ulysses=2"),
    ("moe", "ep=2"),
]
OPTIONS = {"loss_fn": par.cross_entropy, "microbatches": equality.MICROBATCHES, "clip": equality.CLIP}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def ran(rank, world_size, kind, plan):
    model = equality.make_model(kind, torch.float64)
    model, opt = par.parallelize(model, adamw(model.parameters()), plan)
    (batch,) = equality.batches(1)
    par.step(model, opt, batch, **OPTIONS)
    with par.count_traffic() as traffic:
        par.step(model, opt, batch, **OPTIONS)
    return [tuple(call) for call in traffic.log]


def comparable(kind, calls):
    """In order of the groups: those of different groups may come in either order."""
    calls = [tuple(call) for call in calls]
    if kind == "moe":
        calls = [(op, group, None if op == "all_to_all" else nbytes) for op, group, nbytes in calls]
    groups = sorted({group for _, group, _ in calls})
    return {group: [(op, nbytes) for op, where, nbytes in calls if where == group] for group in groups}


def compare(kind, text, ranks=None):
    plan = par.Plan.parse(text)
    (batch,) = equality.batches(1)
    model = equality.make_model(kind, torch.float64)
    predicted = dry_run(model, adamw, batch, plan, ranks=ranks, **OPTIONS)
    counted = spawn(plan.world_size, ran, kind, plan)
    for run in predicted:
        assert run.calls, text
        assert comparable(kind, run.calls) == comparable(kind, counted[run.rank]), (text, run.rank)


def marks(case):
    """Of the cases that are not quick, every third is slow and the others are deep."""
    if case in QUICK:
        return []
    return [pytest.mark.deep if CASES.index(case) % 3 else pytest.mark.slow]


@tier(quick=1 / 5, slow=2 / 5)
@pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case), id=":".join(case)) for case in CASES])
def test_calls_and_bytes_are_those_of_the_run(case):
    world_size = par.Plan.parse(case[1]).world_size
    compare(*case, ranks=(0, world_size - 1) if world_size > 2 else None)


def test_a_difference_is_seen():
    counted = spawn(2, ran, "gpt", par.Plan(dp=2))
    (batch,) = equality.batches(1)
    other = dry_run(
        equality.make_model("gpt", torch.float64), adamw, batch, par.Plan(dp=2, zero=1), **OPTIONS
    )
    assert comparable("gpt", other[0].calls) != comparable("gpt", counted[0])


def test_what_the_plan_refuses_is_raised():
    (batch,) = equality.batches(1)
    with pytest.raises(Exception, match="5 pipeline stages for 4 blocks"):
        dry_run(equality.make_model("gpt", torch.float64), adamw, batch, par.Plan(pp=5), **OPTIONS)


def test_many_more_ranks_than_cores():
    """Rank 700 of 1024, of whose groups no other rank exists: 2 (n-1)/n P, padded to equal chunks."""
    model = torch.nn.Linear(64, 64)
    batch = torch.randn(1024, 64), torch.randn(1024, 64)
    found = dry_run(model, adamw, batch, par.Plan(dp=1024), ranks=[700], loss_fn=torch.nn.functional.mse_loss)
    sums, chunk = [call for call in found[0].calls if call.group == "dp"], -(-65 * 64 // 1024)
    assert [(call.op, call.nbytes) for call in sums] == [("all_reduce", 2 * 1023 * chunk * 4)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        try:
            compare(*case)
            print("equal", *case, flush=True)
        except AssertionError as error:
            print("DIFFERS", *case, str(error)[:2000], flush=True)
