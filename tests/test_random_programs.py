"""Random programs of all ranks against what must come out (random_programs/): collectives, messages, groups,
threads, processes that are killed or stopped.

A failure names the command that runs its program again. How many programs there are is chosen so that they
take 20 s on two free cores (slow: two minutes); on a busy machine they take longer.
"""

import time

import pytest
from random_programs.program import draw
from random_programs.run import LIMIT, run
from random_programs.search import KINDS, command, keep_only, search, shrink
from tiers import tier

import pycomm

PROGRAMS = 80
FIRST_SLOW = 10_000
PROGRAMS_SLOW, PROGRAMS_DEEP = 80, 300  # for each kind of fault
pytestmark = pytest.mark.timeout(3 * LIMIT)


def check(totals):
    print(totals)
    text = "\n\n".join("\n".join([line, *failures])[:8000] for line, failures in totals.failed)
    assert not totals.failed, f"{totals}\n{text}"
    assert totals.operations > 10 * totals.programs, totals


@tier(quick=1 / 4, slow=1 / 3)
@pytest.mark.parametrize("first", range(0, PROGRAMS, 20))
def test_programs(first):
    """The same programs in every run."""
    check(search(first, 20))


@tier(slow=1 / 2)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", sorted(set(KINDS)))
def test_more_programs(fault, deep):
    """The same in every run, so that a failure is that of a change; others: python tests/random_programs."""
    first = FIRST_SLOW
    print(f"seeds {first} and following, e.g. {command(first, fault)}")
    check(search(first, PROGRAMS_DEEP if deep else PROGRAMS_SLOW, fault=fault, seconds=900))


@tier(slow=1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["none", "kill"])
def test_programs_over_hosts(fault):
    """On three simulated hosts, to which the processes are dealt out."""
    check(search(FIRST_SLOW, 20, fault=fault, seconds=300, hosts=3))


# --- that it would see a defect --------------------


def test_a_program_is_drawn_from_its_seed_alone():
    for seed in range(30):
        for fault in set(KINDS):
            assert draw(seed, fault) == draw(seed, fault) and draw(seed, fault) != draw(seed + 1, fault)


def wrong_now_and_then(method):
    def changed(self, x, *args, **options):
        result = method(self, x, *args, **options)
        if self.rank == 0 and not options.get("async_op") and x.numel():
            x.view(-1)[-1:].zero_()
        return result

    return changed


def fails(kind):
    """The first short program with this kind of operation that fails, and how."""
    for program in map(draw, range(100)):
        kinds = [op.kind for op in program.operations]
        if kind in kinds and len(kinds) < 25 and not program.torch and program.world_size > 1:
            outcome = run(program, 10.0, gdb=False)
            if outcome.failures:
                return program, outcome.failures
    raise AssertionError("nothing was found")


def test_a_wrong_value_is_found_and_its_program_shrunk(monkeypatch):
    change = wrong_now_and_then(pycomm.Communicator.broadcast)
    monkeypatch.setattr(pycomm.Communicator, "broadcast", change)
    program, failures = fails("broadcast")
    assert any("broadcast" in text and "elements, first at" in text for text in failures), failures
    numbers = shrink(program, tries=1, say=lambda text: None)
    assert [op.kind for op in keep_only(program, numbers).operations] == ["broadcast"]


def test_a_hang_is_found(monkeypatch):
    forever = lambda comm, *args, **options: time.sleep(1000)  # noqa: E731
    monkeypatch.setattr(pycomm.Communicator, "gather", forever)
    program = next(
        program
        for program in map(draw, range(100))
        if any(op.kind == "gather" for op in program.operations) and not program.torch
    )
    failures = run(program, 5.0, gdb=False).failures
    assert "not done at the limit of time" in failures[0] and "in gather" not in failures[0], failures
    assert "forever" in failures[0] or "lambda" in failures[0], failures
