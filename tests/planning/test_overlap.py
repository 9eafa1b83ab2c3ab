"""What the machine's `overlap` hides: all of a collective beside a product at 1, nothing at 0."""

import pytest

from pycomm.parallel import Plan
from pycomm.parallel.planning import collectives, load_machine, named
from pycomm.parallel.planning.job import PYCOMM, Job
from pycomm.parallel.planning.time import spans_of, step_time

MODEL = named("gpt3-1.3b")


def job(text, overlap, microbatches=4):
    machine = load_machine("h100")
    machine = machine._replace(reached=machine.reached._replace(overlap=overlap))
    return Job(MODEL, machine, Plan.parse(text), 64, microbatches, "none", PYCOMM)


@pytest.mark.parametrize(("overlap", "expected"), [(0.0, 7.0), (0.5, 6.0), (1.0, 5.0)])
def test_two_things_beside_each_other(overlap, expected):
    reached = load_machine("h100").reached._replace(overlap=overlap)
    assert reached.both(5.0, 2.0) == reached.both(2.0, 5.0) == expected


def test_sums_of_gradients_are_waited_for():
    hidden, shown = step_time(job("dp=8", 1.0)), step_time(job("dp=8", 0.0))
    sums = collectives.all_reduce(spans_of(load_machine("h100"), Plan(dp=8))["data"], MODEL.parameters * 2)
    assert shown.gradients == pytest.approx(sums, rel=0.02)
    assert hidden.gradients < 0.2 * sums and shown.passes == hidden.passes


def test_zero_waits_for_every_unit():
    alone, shown = step_time(job("dp=8", 0.0)), step_time(job("dp=8,zero=3", 0.0))
    where = spans_of(load_machine("h100"), Plan(dp=8, zero=3))["data"]
    unit = collectives.all_gather(where, 2 * sum(MODEL.block_parameters()))
    assert shown.passes - alone.passes == pytest.approx(4 * MODEL.layers * 3 * unit, rel=1e-6)
    assert shown.inside == pytest.approx(4 * MODEL.layers * 3 * unit, rel=1e-6)
    assert step_time(job("dp=8,zero=3", 1.0)).passes < shown.passes


@pytest.mark.parametrize("text", ["pp=4", "pp=4,schedule=zb-h1", "ring=4", "dp=2,pp=2,zero=2"])
def test_less_overlap_is_never_faster(text):
    times = [step_time(job(text, overlap)).total for overlap in (1.0, 0.5, 0.0)]
    assert times == sorted(times) and times[0] < times[2]
