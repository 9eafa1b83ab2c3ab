"""Trainings that lose ranks and go on (parallel/recovery/). The 200 random kills: tests/recovery_kills.py."""

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiers import tier

import pycomm
import pycomm.parallel as par
from pycomm.parallel.recovery.memory import Memory, OwnMemory, common
from pycomm.parallel.recovery.smaller import plan_for
from pycomm.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1]))
import recovery_kills as kills  # noqa: E402

pytestmark = pytest.mark.timeout(300)
LIMIT = 200.0
alone = functools.cache(kills.alone)


def victims(**of_rank):
    return {int(rank[1:]): kills.Victim(*victim) for rank, victim in of_rank.items()}


@tier(quick=1 / 4)
@pytest.mark.parametrize(
    "case",
    [
        kills.Case("dp=4,zero=3", 2, False, 0.0, victims(r0=("piece", 70, 0.0), r3=("shrink", 1, 0.0))),
        kills.Case("dp=2,tp=2", 4, False, 0.0, victims(r2=("step", 6, 0.01))),
        kills.Case(
            "dp=2,pp=2",
            2,
            False,
            0.0,
            victims(r0=("step", 4, 0.0), r1=("rebuild", 1, 0.1), r2=("shrink", 1, 0.0)),
        ),
        kills.Case("dp=4", 2, True, 60.0, victims(r0=("step", 3, 0.0))),
    ],
    ids=lambda case: f"{case.plan}-{'replaced' if case.replaced else len(case.victims)}",
)
def test_a_killed_rank_changes_nothing(case):
    """Parameters and loss of one process, on every rank that lives, and nothing left."""
    kills.check(case, alone())


@tier(slow=1)
def test_a_replacement_saves_no_step_that_the_others_have_left() -> None:
    """It comes in the fourth step, and repeats those from the first on; all have saved the second."""
    kills.check(kills.Case("dp=4", 4, True, 60.0, victims(r1=("step", 4, 0.0)), save=2), alone())


@tier(slow=1)
def test_a_death_while_a_replacement_joins() -> None:
    """It is in the crew, and has no part yet: it looks for the next replacement with the others."""
    dies = victims(r1=("step", 4, 0.0), r2=("group", 1, 0.0))
    kills.check(kills.Case("dp=4", 2, True, 60.0, dies), alone())


@tier(slow=1)
def test_who_goes_back_to_a_checkpoint_repeats_nothing() -> None:
    """After a recovery. No rank has left these steps, as all have gone back."""

    def rank_main(rank: int) -> list[bool]:
        model, opt = kills.make()
        run, found = par.resilient(model, opt, par.Plan(dp=2), snapshot_every=2), []
        for number in range(4):
            if number == 3 and rank == 0:
                dist.group.WORLD.abort()
            run.step(kills.batch(number))
            found.append(run.repeats)
        assert run.recoveries == 1
        run.restart(1)
        found.append(run.repeats)
        run.close()
        return found

    assert run_ranks(2, rank_main, mode="processes", backend="pycomm", timeout=LIMIT) == [[False] * 5] * 2


@tier(slow=1)
@pytest.mark.parametrize(
    "case",
    [
        kills.Case("dp=4", 2, False, 0.0, victims(r1=("step", 4, 0.0), r2=("rebuild", 1, 0.0, True))),
    ],
    ids=lambda case: f"{case.plan}-{case.victims}",
)
def test_a_rank_that_stops_while_the_others_recover(case: kills.Case) -> None:
    """In the middle of what all do together: it is lost after a time limit, as in a step."""
    kills.check(case, alone())


@tier(quick=1 / 2)
@pytest.mark.parametrize(
    ("said", "again"),
    [("rank 0 did not", True), ("rank 0 lives. Call shrink() again", False)],
    ids=["while it is made", "nobody comes"],
)
def test_an_agreement_that_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch, said: str, again: bool) -> None:
    """It is tried again where a rank was stopped between its word and the group, as all raise it; not where
    one lives and does not come.
    """
    shrink, tries = pycomm.Communicator.shrink, []

    def shrink_late(comm: pycomm.Communicator, timeout: float) -> pycomm.Communicator:
        tries.append(comm.world_size)
        if len(tries) == 1:
            raise pycomm.CommTimeoutError(said)
        return shrink(comm, timeout=timeout)

    def rank_main(rank: int) -> list[int]:
        monkeypatch.setattr(pycomm.Communicator, "shrink", shrink_late)
        model, opt = kills.make()
        run = par.resilient(model, opt, par.Plan(dp=3), snapshot_every=2)
        for number in run.steps(4):
            if number == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(kills.batch(number))
        return tries

    results = run_ranks(3, rank_main, mode="processes", backend="pycomm", fail=False, timeout=LIMIT)
    for result in results[::2]:
        assert result == [3, 3] if again else isinstance(result, pycomm.CommTimeoutError), results


@tier(slow=1 / 6)
@pytest.mark.parametrize("seed", range(9001, 9007))
def test_random_kills(seed):
    kills.check(kills.draw(seed), alone())


@tier(slow=2 / 9)
@pytest.mark.parametrize("seed", [1000, 1015, 1018])
@pytest.mark.parametrize("change", [kills.with_children, kills.with_save, kills.with_stops])
def test_random_kills_that_are_more_than_kills(change: Callable, seed: int) -> None:
    """Beside forked children, in asynchronous saves, and where some are stopped."""
    kills.check(change(kills.draw(seed), seed), alone())


def train(rank, folder, at_last, at_step=None, **options):
    """(state, loss) after the steps of a run; at_last(folder) before the last one, at_step(rank, number)."""
    model, opt = kills.make()
    run = par.resilient(model, opt, par.Plan(dp=3), snapshot_every=2, **options)
    beside = kills.Beside(opt)
    for number in run.steps(kills.STEPS):
        if at_step is not None:
            at_step(rank, number)
        if number == kills.STEPS - 1 and rank == 0:
            at_last(folder)
        loss = run.step(kills.batch(number), clip=1.0, microbatches=2)
        beside.step(loss)
    return {name: value.numpy() for name, value in par.full_state_dict(model).items()}, loss.item()


def test_a_stopped_rank_is_left_out(tmp_path):
    """It wakes up while the others still train, and is told; they end as if it had never been."""

    def stop(rank, number):
        if rank == 2 and number == 4:
            (tmp_path / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            (tmp_path / "woken").write_text("")

    def wake(folder):
        os.kill(int((folder / "stopped").read_text()), signal.SIGCONT)
        until = time.monotonic() + LIMIT
        while not (folder / "over").exists() and time.monotonic() < until:
            time.sleep(0.01)

    def rank_main(rank):
        try:
            return train(rank, tmp_path, wake, stop)
        finally:
            if (tmp_path / "woken").exists():
                (tmp_path / "over").write_text("")

    results = run_ranks(
        3, rank_main, mode="processes", backend="pycomm", fail=False, timeout=LIMIT, operation_timeout=10.0
    )
    assert isinstance(results[2], pycomm.AbortedError), results[2]
    assert "left out" in str(results[2]) and "has to end" in str(results[2])
    parameters, last, _ = alone()
    for state, loss in results[:2]:
        assert abs(loss - last) <= kills.TOLERANCE
        for name, value in parameters.items():
            assert (torch.as_tensor(state[name]) - value).abs().max() <= kills.TOLERANCE


def test_dropout_and_schedulers_go_on():
    """With a replacement's plan or a smaller one, hyperparameters are repeated as they were; where the plan
    stays (nobody dies, all leave their groups), random numbers are, too.
    """

    def rank_main(rank, break_at):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
        ).double()
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        run = par.resilient(model, opt, par.Plan(dp=2), snapshot_every=3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.7)
        losses = []
        for number in run.steps(8):
            x = torch.rand(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
            if number == break_at and rank == 0:
                dist.group.WORLD.abort()
            losses.append(run.step((x, x[:, :3]), torch.nn.functional.mse_loss).item())
            schedule.step()
        return losses, run.recoveries > 0

    disturbed = run_ranks(2, rank_main, 5, mode="processes", backend="pycomm", timeout=LIMIT)
    quiet = run_ranks(2, rank_main, None, mode="processes", backend="pycomm", timeout=LIMIT)
    assert [losses for losses, _ in disturbed] == [losses for losses, _ in quiet]
    assert [again for _, again in disturbed + quiet] == [True, True, False, False]


def test_an_error_of_the_caller_is_no_loss():
    def rank_main(rank):
        run = par.resilient(*kills.make(), par.Plan(dp=2), snapshot_every=2)
        with pytest.raises(ValueError, match="largest norm"):
            run.step(kills.batch(0), clip=-1)
        run.step(kills.batch(0))
        run.close()
        return run.done, run.recoveries

    assert run_ranks(2, rank_main, mode="processes", backend="pycomm", timeout=LIMIT) == [(1, 0)] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"snapshot_every": 0}, "snapshot_every of 1 or more"),
        ({"wait": -1}, "wait of 0 or more"),
        (
            {"plan": par.Plan(dp=2, compression="int8")},
            "compressed sums on each rank, which is in no snapshot",
        ),
        ({"plan": par.Plan(pp=2, schedule="pipedream")}, "go back to a checkpoint of parallel.save"),
        ({"replaces": True}, "pass the store"),
        ({"plan": par.Plan(dp=2)}, "the plan is for 2 ranks"),
        ({"plan": lambda ranks: par.Plan(dp=ranks + 1)}, "for 1 ranks"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    model, opt = kills.make()
    with pytest.raises(ValueError, match=words):
        par.resilient(model, opt, **options)
    assert "_parallel" not in model.__dict__


def test_a_group_of_another_backend_is_refused():
    def rank_main(rank):
        with pytest.raises(ValueError, match="runs on 'gloo', whose groups cannot go on"):
            par.resilient(*kills.make(), par.Plan(dp=2))

    run_ranks(2, rank_main, mode="processes", backend="gloo", timeout=LIMIT)


def test_one_rank():
    """Nothing to lose to; the same code."""
    model, opt = kills.make()
    run = par.resilient(model, opt, snapshot_every=2)
    losses = [run.step(kills.batch(n), clip=1.0, microbatches=2).item() for n in run.steps(kills.STEPS)]
    assert abs(losses[-1] - alone(False).loss) <= kills.TOLERANCE


@pytest.mark.parametrize(
    ("plan", "ranks", "expected"),
    [
        ("dp=4,zero=2", 4, "dp=4,zero=2"),
        ("dp=4,zero=2", 3, "dp=3,zero=2"),
        ("dp=4", 1, ""),
        ("dp=2,tp=2", 3, "tp=2"),
        ("dp=2,tp=2", 1, ""),
        ("dp=2,tp=4", 3, "tp=2"),
        ("tp=2,pp=2", 3, "pp=2"),
        ("dp=3,tp=2,pp=2,schedule=zbv", 5, "tp=2,pp=2,schedule=zbv"),
        ("dp=2,pp=2,stages=3:1", 1, ""),
        ("dp=2,pp=4,schedule=interleaved,chunks=2", 3, "pp=2,schedule=interleaved,chunks=2"),
        ("pp=5", 4, ""),
        ("tp=3,zero=1", 2, "zero=1"),
        ("dp=2,tp=3", 5, "tp=3"),
        ("dp=2,tp=3", 2, "dp=2"),
        ("dp=6,tp=2", 7, "dp=3,tp=2"),
        ("dp=3,pp=4,stages=1:2:3:4", 9, "dp=2,pp=4,stages=1:2:3:4"),
    ],
)
def test_smaller_plans(plan, ranks, expected):
    found = plan_for(par.Plan.parse(plan), ranks)
    assert str(found) == str(par.Plan.parse(expected)) and found.world_size <= ranks


def write(memory, number, fail_at=None):
    values = torch.full((7,), float(number), dtype=torch.float64)

    def items():
        for place in range(3):
            if place == fail_at:
                raise KeyboardInterrupt
            yield place, values

    memory.write(number, f"about {number}", items())


@pytest.mark.parametrize("fail_at", [None, 0, 1, 2])
def test_a_snapshot_is_whole_or_is_not(fail_at):
    """An end in the middle of writing leaves the one before."""
    memory = OwnMemory()
    write(memory, 0)
    write(memory, 10)
    if fail_at is None:
        write(memory, 20)
    else:
        with pytest.raises(KeyboardInterrupt):
            write(memory, 20, fail_at)
    last, other = (20, 10) if fail_at is None else (10, None)
    assert set(memory.numbers()) == {last, other} - {None}
    seen = Memory.open(memory.address)
    about, written = seen.catalog(last)
    assert about == f"about {last}" and [key for key, _ in written] == [0, 1, 2]
    for _, place in written:
        assert seen.tensor_at(place, (7,), torch.float64).tolist() == [float(last)] * 7


def test_the_number_that_all_have():
    memories = [OwnMemory() for _ in range(3)]
    assert common(memories) is None
    for memory in memories:
        write(memory, 0)
    write(memories[1], 5)
    assert common(memories) == 0
    write(memories[0], 5)
    write(memories[2], 5)
    write(memories[2], 10)
    assert common(memories) == 5


def test_other_memory_is_not_taken():
    memory, other = OwnMemory(), OwnMemory()
    with pytest.raises(OSError, match="other memory"):
        Memory.open(memory.address._replace(fd=other.fd))
