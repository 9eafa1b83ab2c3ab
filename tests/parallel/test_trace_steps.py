"""The trace of par.step: spans under several plans, and a rank that is slower than the others is found."""

import contextlib
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm import trace
from pycomm.trace import stragglers
from pycomm.trace.joined import load
from pycomm.trace.steps import part_of, say, steps_of

DELAY_S = 0.005
STEPS = 20


class Blocks(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def train(rank, world_size, folder, plan, options):
    steps, slow, microbatches = options
    torch.manual_seed(0)
    model = Blocks()
    if rank == slow:
        model.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(DELAY_S))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = par.parallelize(model, optimizer, par.Plan.parse(plan))
    batch = torch.randn(12, 16), torch.randn(12, 16)
    trace.begin(folder)
    for _ in range(steps):
        par.step(model, optimizer, batch, F.mse_loss, microbatches=microbatches, clip=1.0)
    trace.end()


@pytest.mark.parametrize(
    ("plan", "names", "axes"),
    [
        ("dp=2", {"step", "forward", "backward", "bucket", "update"}, {"dp"}),
        ("dp=2,zero=3,blocks=blocks", {"step", "forward", "gather blocks.0", "bucket"}, {"dp"}),
        ("pp=2,blocks=blocks", {"step", "forward", "backward", "update"}, {"pp"}),
    ],
    ids=["dp", "zero=3", "pp"],
)
def test_spans_of_a_step(tmp_path, plan, names, axes):
    spawn(2, train, str(tmp_path), plan, (3, None, 2))
    found = load(tmp_path)
    assert not found.notes
    assert axes <= set(found.axes)
    for row in found.rows:
        mine = {found.names[number] for number in row.spans["name"]}
        assert names <= mine, mine
        assert len(steps_of(found, row)) == 3
        forwards = {say(part_of(found, s)) for s in row.spans if found.names[s["name"]] == "forward"}
        stages = {"pp=2,blocks=blocks": [row.rank]}.get(plan, [0])
        assert forwards == {f"forward (stage {stage}, microbatch {m})" for stage in stages for m in range(2)}
        # every operation of the training lies in a step
        begin, end = steps_of(found, row)[0][0], steps_of(found, row)[-1][1]
        assert (row.operations["issued"] >= begin).all() and (row.operations["ended"] <= end).all()


def test_a_delay_of_5_ms_is_found_with_rank_and_place(tmp_path):
    """A busy machine may hold up another rank for longer: three attempts."""
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        spawn(3, train, str(folder), "dp=3", (STEPS, 1, 1))
        found = load(folder)
        worst = next(iter(stragglers.find(found)), None)
        with contextlib.suppress(AssertionError):
            check_straggler(found, worst)
            return
    check_straggler(found, worst)


def check_straggler(found, worst):
    assert worst is not None and (worst.rank, worst.axis, worst.steps) == (1, "dp", STEPS)
    assert worst.waited_ns > 0.5 * STEPS * DELAY_S * 1e9
    assert worst.slow_in == "forward (stage 0, microbatch 0)"
    assert worst.excess_ns > 0.5 * STEPS * DELAY_S * 1e9
    assert "Rank 1 came last in" in stragglers.sentence(worst)
