"""par.resilient with a rank that lives and does not come back: it hangs, its script has left the training, or
it fails by itself in a recovery. The others end within the limit that the user has set, or go on at once.
"""

import functools
import os
import signal
import time

import pytest
import recovery_kills as kills
import torch
import torch.distributed as dist
from tiers import tier

import pycomm
import pycomm.parallel as par
from pycomm.parallel.recovery import Resilient
from pycomm.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
LIMIT = 200.0
SHORT, LONG = 3.0, 150.0  # seconds of an operation
GIVES_UP = 4  # at this step
alone = functools.cache(lambda: kills.alone(False))


def begin(timeout, saves=None):
    model, opt = kills.make()
    run = par.resilient(model, opt, par.Plan(dp=3), snapshot_every=2, timeout=timeout)
    if saves is not None:
        par.save(model, opt, saves)
    return run


def step(run, number):
    return run.step(kills.batch(number), clip=1.0, microbatches=2)


def train(run, at_step=lambda number: None):
    """(parameters, loss) of a run to its end."""
    for number in run.steps(kills.STEPS):
        at_step(number)
        loss = step(run, number)
    return {name: value.numpy() for name, value in par.full_state_dict(run.model).items()}, loss.item()


def wait_for(folder, names):
    """Lives on, with what it holds, until the others have ended."""
    until = time.monotonic() + LIMIT
    while not all((folder / name).exists() for name in names) and time.monotonic() < until:
        time.sleep(0.01)


def play(rank_main, **options):
    given = {"mode": "processes", "backend": "pycomm", "fail": False, "timeout": LIMIT}
    return run_ranks(3, rank_main, **(given | options))


def check(ended):
    """ended: of train(). As one process."""
    assert not isinstance(ended, BaseException), ended
    parameters, last, _ = alone()
    state, loss = ended
    assert abs(loss - last) <= kills.TOLERANCE
    for name, value in parameters.items():
        assert (torch.as_tensor(state[name]) - value).abs().max() <= kills.TOLERANCE, name


def test_a_rank_that_does_not_come_is_named_within_the_limit(tmp_path):
    """Its operation ends after `timeout`, and so does the agreement; PYCOMM_TIMEOUT is 300 s."""

    def rank_main(rank):
        run = begin(SHORT, tmp_path / "saved")
        for number in range(GIVES_UP):
            step(run, number)
        if rank == 1:
            return wait_for(tmp_path, ("0", "2"))
        began = time.monotonic()
        with pytest.raises(pycomm.CommTimeoutError) as found:
            step(run, GIVES_UP)
        (tmp_path / str(rank)).write_text("")
        return str(found.value), time.monotonic() - began

    for ended in play(rank_main)[::2]:
        assert not isinstance(ended, BaseException), ended
        text, took = ended
        assert f"rank 1 lives and did not come within the timeout of {SHORT:g} s. It hangs" in text
        assert "more seconds. Go back to the last checkpoint" in text and str(tmp_path / "saved") in text
        assert took < 20 * SHORT, took


@pytest.mark.parametrize("hosts", [None, "001"])
def test_the_others_go_on_at_once_without_a_rank_that_leaves(hosts, tmp_path):
    """It leaves while they wait for it, with a limit longer than the test."""

    def fail(number):
        if number == GIVES_UP:
            raise KeyError("a row that the loader has not")

    def rank_main(rank):
        run = begin(LONG)
        if rank != 2:
            ended = train(run)
            (tmp_path / str(rank)).write_text("")
            return ended
        with pytest.raises(KeyError):
            train(run, fail)
        run.leave()
        run.leave()
        run.close()
        with pytest.raises(dist.DistError):
            step(run, GIVES_UP)
        return wait_for(tmp_path, ("0", "1"))

    began = time.monotonic()
    *others, left = play(rank_main, hosts=hosts)
    assert left is None, left
    assert time.monotonic() - began < LONG
    for ended in others:
        check(ended)


def test_a_rank_that_cannot_recover_leaves(tmp_path, monkeypatch):
    """An error of its own in a recovery: it raises, its process lives on, and the others do not wait."""
    read = Resilient._read

    def rank_main(rank):
        run = begin(LONG)

        def lose(number):
            if number == GIVES_UP and rank == 0:
                dist.group.WORLD.abort()

        def fail(run, source):
            raise MemoryError("no memory for the model")

        if rank != 2:
            ended = train(run, lose)
            (tmp_path / str(rank)).write_text("")
            return ended
        monkeypatch.setattr(Resilient, "_read", fail)
        with pytest.raises(RuntimeError, match="cannot be recovered: no memory for the model"):
            train(run)
        monkeypatch.setattr(Resilient, "_read", read)
        return wait_for(tmp_path, ("0", "1"))

    began = time.monotonic()
    *others, failed = play(rank_main)
    assert failed is None, failed
    assert time.monotonic() - began < LONG
    for ended in others:
        check(ended)


@tier(slow=1)
def test_a_silent_host_is_left_out_with_a_short_limit(tmp_path):
    """Silence takes PYCOMM_HOST_TIMEOUT, which is longer than the limit of an operation here."""

    def stop(number):
        if number == GIVES_UP:
            (tmp_path / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    def rank_main(rank):
        os.environ["PYCOMM_HOST_TIMEOUT"] = "6"
        run = begin(SHORT)
        ended = train(run, stop if rank == 2 else lambda number: None)
        (tmp_path / str(rank)).write_text("")
        if rank == 0:
            wait_for(tmp_path, ("1",))
            os.kill(int((tmp_path / "stopped").read_text()), signal.SIGKILL)
        return ended

    for ended in play(rank_main, hosts="001", operation_timeout=SHORT)[:2]:
        check(ended)
