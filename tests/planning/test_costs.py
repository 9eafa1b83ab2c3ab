"""The closed forms of costs.py against dry_run: what one more block adds, in calls and bytes."""

import sys
from pathlib import Path

import pytest
import torch
from tiers import tier

sys.path[:0] = [str(Path(__file__).parents[1] / "parallel")]

from models import GPT  # noqa: E402

import pycomm.parallel as par  # noqa: E402
from pycomm.parallel.planning import dry_run, load_machine, named, trace_model  # noqa: E402
from pycomm.parallel.planning.costs import sent, table  # noqa: E402
from pycomm.parallel.planning.job import PYCOMM, Job  # noqa: E402
from pycomm.parallel.planning.search import Request  # noqa: E402
from pycomm.parallel.planning.time import step_time  # noqa: E402

ROWS, LENGTH, MICROBATCHES = 4, 8, 2


def of_layers(text, layers):
    """({group: (calls, bytes)} by dry_run, {axis: the same} by costs.sent)"""
    torch.manual_seed(0)
    model, plan = GPT(heads=4, layers=layers, tied=False), par.Plan.parse(text)
    tokens = torch.randint(0, 37, (ROWS, LENGTH))
    batch = tokens, tokens
    (run,) = dry_run(model, torch.optim.SGD, batch, plan, ranks=[0], microbatches=MICROBATCHES)
    seen = {}
    for call in run.calls:
        if call.op == "all_reduce" and not text.startswith(("dp", "tp")):
            continue  # gradients are summed over the same group
        calls, nbytes = seen.get(call.group, (0, 0))
        seen[call.group] = calls + 1, nbytes + call.nbytes
    software = PYCOMM._replace(gradient=4, summed=4)
    described = trace_model(model, batch)
    job = Job(described, load_machine("cpu"), plan, ROWS, MICROBATCHES, "none", software)
    return seen, sent(job)


@tier(slow=1 / 3)
@pytest.mark.parametrize("text", ["tp=2", "ulysses=2", "ring=2"])
def test_what_a_block_adds(text):
    axis = text.partition("=")[0]
    (few, few_sent), (many, many_sent) = of_layers(text, 3), of_layers(text, 4)
    added = [b - a for a, b in zip(few[axis], many[axis], strict=True)]
    assert added == [b - a for a, b in zip(few_sent[axis], many_sent[axis], strict=True)]


@tier(slow=1 / 2)
@pytest.mark.parametrize("text", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"])
def test_what_data_parallelism_sends(text):
    seen, expected = of_layers(text, 4)
    assert seen["dp"][1] == pytest.approx(expected["data"][1], rel=0.01)


def test_the_table_has_every_strategy():
    lines = table(Request(named("gpt3-1.3b"), load_machine("h100"), 8, 16))
    assert len(lines) == 2 + 13 and all(line.startswith("| ") or line.startswith("|-") for line in lines)


@tier(slow=1 / 2)
@pytest.mark.parametrize(
    "text", ["pp=2", "dp=2,pp=2", "dp=2,pp=2,zero=1", "pp=2,schedule=zbv", "pp=2,schedule=zb-h1"]
)
def test_a_tied_table_is_exchanged(text):
    """What a tie adds to a step: the message that dry_run sends more, and the seconds of one of its bytes."""
    plan, tokens = par.Plan.parse(text), torch.randint(0, 29, (ROWS, LENGTH))

    def messages(tied):
        torch.manual_seed(0)
        model = GPT(layers=4, tied=tied)
        (run,) = dry_run(model, torch.optim.SGD, (tokens, tokens), plan, ranks=[0], microbatches=MICROBATCHES)
        return sum(call.nbytes for call in run.calls if call.group == "pp"), trace_model(
            model, (tokens, tokens)
        )

    (with_tie, model), (without, _) = messages(True), messages(False)
    software, machine = PYCOMM._replace(gradient=4, summed=4), load_machine("cpu")
    job = Job(model, machine, plan, ROWS, MICROBATCHES, "none", software)
    tied, untied = (
        step_time(job._replace(model=model._replace(head=head))).gradients
        for head in (0, model.vocab * model.hidden)
    )
    link = machine.links[0]
    expected = link.latency + (with_tie - without) / link.bandwidth if with_tie > without else 0.0
    own = tied - untied
    if plan.dp == 1:  # the sums over data ranks differ by the parameters of the head, too
        assert own == pytest.approx(expected, rel=1e-6)
    assert (with_tie > without) == (plan.schedule != "zbv") and own >= 0.0
