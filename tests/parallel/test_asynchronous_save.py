"""parallel.save(asynchronous=True): written beside the training; whatever happens, a whole checkpoint is in
its place.
"""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiers import tier

import pycomm
import pycomm.parallel as par
from pycomm.parallel.checkpoint import files, saving
from pycomm.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1]))
import recovery_kills as kills  # noqa: E402

pytestmark = pytest.mark.timeout(240)
LIMIT = 200.0


def start(plan):
    model, opt = par.parallelize(*kills.make(), plan)
    par.step(model, opt, kills.batch(0), microbatches=2)
    return model, opt


def values_of(model):
    return {name: value.clone() for name, value in par.full_state_dict(model).items()}


def on_ranks(world_size, rank_main, **options):
    return run_ranks(world_size, rank_main, mode="processes", backend="pycomm", timeout=LIMIT, **options)


def equal(one, other):
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


class Held:
    """Writers of this process wait until they are let go."""

    def __init__(self):
        self.go, self.writing = threading.Event(), threading.Event()
        write = saving.dcp.FileSystemWriter.write_data

        def held(*args, **kwargs):
            self.writing.set()
            assert self.go.wait(LIMIT)
            return write(*args, **kwargs)

        saving.dcp.FileSystemWriter.write_data = held


@pytest.mark.parametrize(
    "plan",
    [
        par.Plan(dp=2, zero=1),
        pytest.param(par.Plan(tp=2), marks=pytest.mark.slow),
        pytest.param(par.Plan(pp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_values_are_those_of_the_call(plan, tmp_path):
    """Training goes on while the writer is held; what is read are the values and the extra of the call."""

    def rank_main(rank):
        model, opt = start(plan)
        held, extra = Held(), {"step": 1}
        before = values_of(model)
        save = par.save(model, opt, tmp_path / "ckpt", extra=extra, asynchronous=True)
        extra["step"] = 2
        assert held.writing.wait(LIMIT)
        for number in range(1, 4):
            par.step(model, opt, kills.batch(number), microbatches=2)
        under_way = not save.done(), (tmp_path / "ckpt").exists()
        dist.barrier()
        held.go.set()
        save.wait()
        saved = par.load(model, opt, tmp_path / "ckpt")
        return under_way, saved, equal(values_of(model), before), sorted(p.name for p in tmp_path.iterdir())

    assert on_ranks(2, rank_main) == [((True, False), {"step": 1}, True, ["ckpt"])] * 2


def test_the_next_one_waits_and_replaces(tmp_path):
    def rank_main(rank):
        model, opt = start(par.Plan(dp=2))
        for number in range(1, 4):
            par.save(model, opt, tmp_path / "ckpt", extra=number, asynchronous=True)
            par.step(model, opt, kills.batch(number))
        return par.load(model, opt, tmp_path / "ckpt")

    assert on_ranks(2, rank_main) == [3, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


@pytest.mark.parametrize(
    "moment",
    ["writing", *(pytest.param(moment, marks=pytest.mark.slow) for moment in ("renaming", "removing"))],
)
def test_a_crash_leaves_a_whole_checkpoint(moment, tmp_path):
    """All ranks are killed; the former one is there, or, once the names are exchanged, the new one."""

    def rank_main(rank):
        model, opt = start(par.Plan(dp=2))
        par.save(model, opt, tmp_path / "ckpt", extra="former")
        dist.barrier()

        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        if moment == "writing":
            saving.dcp.FileSystemWriter.write_data = die
        elif moment == "renaming":
            saving.put_in_place = die
        else:
            files.shutil.rmtree = die
        par.save(model, opt, tmp_path / "ckpt", extra="new", asynchronous=True).wait()

    results = on_ranks(2, rank_main, fail=False)
    assert any(isinstance(result, ChildProcessError) for result in results), results
    model, opt = start(par.Plan())
    assert par.load(model, opt, tmp_path / "ckpt") == ("new" if moment == "removing" else "former")
    par.save(model, opt, tmp_path / "ckpt", extra="next")  # what was left is no hindrance
    assert par.load(model, opt, tmp_path / "ckpt") == "next"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def test_file_systems_that_cannot_exchange_names(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_exchange_names", lambda one, other: False)
    model, opt = start(par.Plan())
    for number in range(2):
        par.save(model, opt, tmp_path / "ckpt", extra=number)
    assert par.load(model, opt, tmp_path / "ckpt") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def test_a_full_disk_is_raised_by_the_next_call(tmp_path):
    """On all ranks, once; the former checkpoint is whole, and the training as it was."""

    def rank_main(rank):
        model, opt = start(par.Plan(dp=2))
        par.save(model, opt, tmp_path / "ckpt", extra="former", asynchronous=True).wait()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        save = par.save(model, opt, tmp_path / "ckpt", asynchronous=True)
        par.step(model, opt, kills.batch(1))
        with pytest.raises(RuntimeError, match="save failed at .*rank 1: "):
            save.wait()
        save.wait()  # it has been raised
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        par.step(model, opt, kills.batch(2))
        return par.load(model, opt, tmp_path / "ckpt")

    assert on_ranks(2, rank_main) == ["former"] * 2


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    model, opt = start(par.Plan())
    for path in (tmp_path / "file" / "ckpt", tmp_path / "file"):
        with pytest.raises((ValueError, RuntimeError, OSError), match="file"):
            par.save(model, opt, path, asynchronous=True).wait()


@tier(slow=1)
def test_the_end_of_the_interpreter_waits(tmp_path):
    script = f"""
import sys, time
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}
import test_asynchronous_save as t, recovery_kills as kills
import pycomm.parallel as par
model, opt = t.start(par.Plan())
write = t.saving.dcp.FileSystemWriter.write_data
t.saving.dcp.FileSystemWriter.write_data = lambda *a: (time.sleep(0.5), write(*a))[1]
par.save(model, opt, {str(tmp_path / "ckpt")!r}, extra="end", asynchronous=True)
print("end")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and done.stdout == "end\n", done.stderr
    model, opt = start(par.Plan())
    assert par.load(model, opt, tmp_path / "ckpt") == "end"


def test_it_goes_on_when_a_rank_dies_beside_it(tmp_path):
    """resilient: the save under way fails or is made, the training goes on, the next save is made."""

    def rank_main(rank):
        model, opt = kills.make()
        run = par.resilient(model, opt, par.Plan(dp=3), snapshot_every=2)
        for number in run.steps(6):
            if number == 2:
                run.step(kills.batch(number))
                par.save(model, opt, tmp_path / "ckpt", extra=number, asynchronous=True)
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                continue
            run.step(kills.batch(number))
        par.save(model, opt, tmp_path / "ckpt", extra="last", asynchronous=True).wait()
        return run.recoveries, par.load(model, opt, tmp_path / "ckpt")

    results = on_ranks(3, rank_main, fail=False)
    assert results[0] == results[2] == (1, "last") and isinstance(results[1], ChildProcessError), results


@tier(slow=1)
def test_a_rank_that_wakes_up_puts_nothing_in_its_place(tmp_path: Path) -> None:
    """The first rank is stopped before it renames, and left out; it goes on while the others write the next
    checkpoint.
    """
    stopped, woken = tmp_path / "stopped", tmp_path / "woken"

    def until(path: Path) -> None:
        end = time.monotonic() + LIMIT
        while not path.exists():
            assert time.monotonic() < end
            time.sleep(0.01)

    def rename_late(path: Path, scratch: Path, rename: Callable = saving.put_in_place) -> None:
        stopped.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            rename(path, scratch)
        finally:
            woken.write_text("")

    def rank_main(rank: int) -> str:
        model, opt = kills.make()
        run = par.resilient(model, opt, par.Plan(dp=3), snapshot_every=2)
        par.save(model, opt, tmp_path / "ckpt", extra="former")
        if rank == 0:
            saving.put_in_place = rename_late
        save = par.save(model, opt, tmp_path / "ckpt", extra="lost", asynchronous=True)
        until(stopped)
        for number in run.steps(3):
            if number == 2:
                held = Held()
                save = par.save(model, opt, tmp_path / "ckpt", extra="new", asynchronous=True)
                assert held.writing.wait(LIMIT)
                dist.barrier()
                os.kill(int(stopped.read_text()), signal.SIGCONT)
                until(woken)
                held.go.set()
                save.wait()
            run.step(kills.batch(number))
        return par.load(model, opt, tmp_path / "ckpt")

    results = on_ranks(3, rank_main, fail=False, operation_timeout=5.0)
    assert isinstance(results[0], pycomm.AbortedError) and results[1:] == ["new", "new"], results
    assert sorted(path.name for path in tmp_path.glob("ckpt*")) == ["ckpt"]
