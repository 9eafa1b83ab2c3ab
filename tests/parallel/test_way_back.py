"""Where a loss cannot be made good from snapshots: the error names the checkpoint to go back to. And
restart(), which makes what was loaded or written by hand the state to go back to.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch_ranks import meeting

import pycomm
import pycomm.parallel as par
from pycomm.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1]))
import recovery_kills as kills  # noqa: E402

pytestmark = pytest.mark.timeout(240)
LIMIT = 100.0


def on_ranks(world_size, rank_main, *arguments, **options):
    return run_ranks(
        world_size, rank_main, *arguments, mode="processes", backend="pycomm", timeout=LIMIT, **options
    )


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def only_for_all(ranks):
    return par.Plan(dp=3) if ranks == 3 else par.Plan(dp=5)


def spoil(run):
    for memory in run._holdings.last.held.values():
        memory.numbers = dict


@pytest.mark.parametrize(
    ("case", "saved"),
    [
        ("no plan", "loaded"),
        ("no snapshot", None),
        pytest.param("no plan", "saved", marks=pytest.mark.slow),
        pytest.param("no snapshot", "asynchronously", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_recovered(case, saved, tmp_path):
    """On each rank that lives."""

    def rank_main(rank):
        run = par.resilient(
            *kills.make(), only_for_all if case == "no plan" else par.Plan(dp=3), snapshot_every=2
        )
        run.step(kills.batch(0))
        if saved:
            save = par.save(run.model, run.opt, tmp_path / "ckpt", asynchronous=saved == "asynchronously")
        if saved == "asynchronously":
            save.wait()
        if saved == "loaded":
            if rank == 0:
                (tmp_path / "other").symlink_to("ckpt")
            torch.distributed.barrier()
            par.load(run.model, run.opt, tmp_path / "other")
        run.step(kills.batch(1))
        if rank == 1:
            die()
        if case == "no snapshot":
            spoil(run)
        run.step(kills.batch(2))

    results = on_ranks(3, rank_main, fail=False)
    reason = "gave .* for 2 ranks" if case == "no plan" else "no snapshot is whole"
    name = "other" if saved == "loaded" else "ckpt"
    way = rf"Go back to the last checkpoint: parallel.load\(model, opt, '{tmp_path}/{name}'\)"
    for error in (results[0], results[2]):
        with pytest.raises(RuntimeError, match=f"was lost at step 3 cannot be recovered: .*{reason}") as told:
            raise error
        told.match(way if saved else "no checkpoint to go back to: no parallel.save of this run")


def test_a_survivor_that_does_not_come(tmp_path):
    def rank_main(rank):
        os.environ["PYCOMM_TIMEOUT"] = "3"
        run = par.resilient(*kills.make(), par.Plan(dp=3), snapshot_every=2)
        par.save(run.model, run.opt, tmp_path / "ckpt")
        if rank == 1:
            die()
        if rank == 0:
            try:
                run.step(kills.batch(0))
            finally:
                (tmp_path / "over").touch()
        until = time.monotonic() + LIMIT
        while not (tmp_path / "over").exists() and time.monotonic() < until:
            time.sleep(0.01)

    error = on_ranks(3, rank_main, fail=False)[0]
    assert isinstance(error, pycomm.CommTimeoutError), error
    assert "rank 2" in str(error) and f"parallel.load(model, opt, '{tmp_path}/ckpt')" in str(error)


def test_a_plan_that_nothing_recovers_names_the_checkpoint(tmp_path):
    """Of a plan that resilient() refuses the error of the step is all there is."""
    together = meeting(2)

    def rank_main(rank):
        model, opt = par.parallelize(*kills.make(), par.Plan(dp=2, compression="int8"))
        par.save(model, opt, tmp_path / "ckpt", asynchronous=True).wait()
        torch.distributed.barrier()
        together.wait()
        if rank == 1:
            die()
        with pytest.raises(pycomm.PeerError) as lost:
            par.step(model, opt, kills.batch(0))
        return str(lost.value)

    said = on_ranks(2, rank_main, fail=False)[0]
    assert said.endswith(f"The last checkpoint is {tmp_path}/ckpt."), said


def halve(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


@pytest.mark.parametrize("how", ["loaded", pytest.param("by hand", marks=pytest.mark.slow)])
def test_restart(how, tmp_path):
    """What was loaded or written by hand is what the ranks go back to, and nothing before it is repeated."""

    def rank_main(rank):
        run = par.resilient(*kills.make(), par.Plan(dp=3), snapshot_every=100)
        to_change = 4
        for number in run.steps(kills.STEPS):
            if number == 2 and to_change:
                par.save(run.model, run.opt, tmp_path / "ckpt")
            if number == to_change:
                to_change = None
                if how == "loaded":
                    par.load(run.model, run.opt, tmp_path / "ckpt")
                    run.restart(2)
                    continue
                halve(run.model)
                run.restart()
            if rank == 1 and number == 6:
                die()
            loss = run.step(kills.batch(number), clip=1.0, microbatches=2)
        return par.full_state_dict(run.model), loss.item(), run.repeated

    found = on_ranks(3, rank_main, fail=False)
    model, opt = par.parallelize(*kills.make())
    for number in range(kills.STEPS):
        if how == "by hand" and number == 4:
            halve(model)
        loss = par.step(model, opt, kills.batch(number), clip=1.0, microbatches=2)
    parameters = par.full_state_dict(model)
    for state, last, repeated in (found[0], found[2]):
        assert repeated in ((4, 5) if how == "loaded" else (2, 3))  # of steps 3 to 6, or 5 to 6, and one more
        assert abs(last - loss.item()) <= kills.TOLERANCE
        for name, value in parameters.items():
            assert (state[name] - value).abs().max() <= kills.TOLERANCE
