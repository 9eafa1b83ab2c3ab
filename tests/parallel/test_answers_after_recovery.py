"""What the checks have answered stays answered after a recovery, if the model and the axes are the same and
every rank has the answers: no run aside, the same table in describe(). If not, all ranks ask again.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
from odd_models import cross
from tiers import tier

import pycomm.parallel as par
from pycomm.parallel.recovery import Resilient
from pycomm.parallel.run.aside import Aside
from pycomm.testing.processes import RankProcesses

sys.path.insert(0, str(Path(__file__).parents[1]))
import recovery_kills as kills  # noqa: E402

pytestmark = pytest.mark.timeout(300)
LIMIT = 120.0
STEPS, BREAKS_AT = 7, 4


class Seen(NamedTuple):
    """Of one step with what follows it."""

    is_after: bool  # a recovery
    asides: int
    checks: dict[str, str]


def watched(run: Resilient, evaluates: bool) -> Seen:
    """A step, and an evaluation in eval mode. The batch is always the same: others may show more."""
    with counted_asides() as asides:
        run.step(kills.batch(0), cross, microbatches=2)
        if evaluates:
            run.model.eval()
            par.evaluate(run.model, kills.batch(0), cross, microbatches=2)
            run.model.train()
    return Seen(run.recoveries > 0, len(asides), par.describe(run.model).checks)


class counted_asides:
    """A list that grows with each run aside on this rank."""

    def __enter__(self) -> list:
        asides, self.original = [], Aside.__call__

        def call(aside: Aside, *args: object, **options: object) -> object:
            asides.append(1)
            return self.original(aside, *args, **options)

        Aside.__call__ = call
        return asides

    def __exit__(self, *_: object) -> None:
        Aside.__call__ = self.original


def joined(rank: int, link: object, text: str, folder: str, dies: int | None) -> list[Seen]:
    """dies: the rank that ends; None: nobody does, but rank 0 breaks the group, and all begin anew."""
    world_size = par.Plan.parse(text).world_size
    store = dist.FileStore(f"{folder}/first", world_size)
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=world_size)
    run = par.resilient(*kills.make(), text, snapshot_every=2, timeout=LIMIT)
    found = []
    for number in run.steps(STEPS):
        if number == BREAKS_AT and rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == BREAKS_AT and dies is None and rank == 0:
            dist.group.WORLD.abort()
        found.append(watched(run, evaluates=True))
    return found


def outcomes(ranks: int, main: object, *args: object, died: int | None = None) -> list:
    """What the ranks that lived have returned."""
    with RankProcesses(ranks, main, *args, limit=LIMIT) as processes:
        found = processes.outcomes(LIMIT)
    for rank, outcome in found.items():
        assert outcome.ok or rank == died, (rank, outcome.value)
    return [outcome.value for rank, outcome in found.items() if rank != died]


@tier(quick=1 / 9, slow=1 / 4)
@pytest.mark.parametrize(
    ("text", "dies"),
    [
        ("dp=3", 2),
        ("dp=3,zero=3", 0),
        ("dp=2", None),
        ("dp=2,zero=3", None),
        ("tp=2", None),
        ("tp=2,megatron_sp", None),
        ("pp=2", None),
        ("ring=2", None),
        ("ulysses=2", None),
    ],
)
def test_what_was_answered_stays_answered(tmp_path, text, dies):
    for found in outcomes(par.Plan.parse(text).world_size, joined, text, str(tmp_path), dies, died=dies):
        before = [seen for seen in found if not seen.is_after]
        after = [seen for seen in found if seen.is_after]
        assert len(before) == BREAKS_AT and len(after) == STEPS - BREAKS_AT
        assert before[0].asides >= 2 * 5, "each mode asks"
        assert [seen.asides for seen in (*before[1:], *after)] == [0] * (STEPS - 1)
        assert [seen.checks for seen in after] == [before[-1].checks] * len(after)
        said = [before[-1].checks[name] for name in ("rows", "loss")]
        assert said == ["held", "held: a mean over targets"]


@tier(slow=1)
def test_other_axes_are_asked_again(tmp_path):
    """dp=2 had two parts of a batch, one rank that is left has two microbatches: no answer of the former."""
    (found,) = outcomes(2, joined, "dp=2", str(tmp_path), 1, died=1)
    after = [seen for seen in found if seen.is_after]
    assert [seen.asides > 0 for seen in after] == [True, False, False]
    assert after[0].checks == found[0].checks


def grown(rank: int, link: object, folder: str) -> list[Seen]:
    """Ranks 0 and 1 begin; rank 2, which knows nothing, comes in at a step."""
    if rank < 2:
        first = dist.FileStore(f"{folder}/first", 2)
        dist.init_process_group("pycomm", store=first, rank=rank, world_size=2)
    store = dist.FileStore(f"{folder}/others", -1)
    run = par.resilient(
        *kills.make(), "dp={}".format, snapshot_every=1, store=store, replaces=rank == 2, timeout=LIMIT
    )
    found, until = [], time.monotonic() + LIMIT / 2
    for _ in run.steps(100_000):
        seen = watched(run, evaluates=False)  # at the beginning of the step the third comes in
        found.append(seen._replace(is_after=run.plan.dp == 3))
        if sum(seen.is_after for seen in found) == 3 or time.monotonic() > until:
            break
    run.close()
    return found


@tier(slow=1)
def test_all_ask_again_where_one_has_joined(tmp_path):
    by_rank = outcomes(3, grown, str(tmp_path))
    for found in by_rank:
        assert [seen.asides > 0 for seen in found if seen.is_after] == [True, False, False]
        assert found[-1].checks["rows"] == "held"
