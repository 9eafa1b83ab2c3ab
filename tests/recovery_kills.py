"""Trainings whose ranks are killed or stopped at random moments, and end with the parameters of one that is
left alone.

    python tests/recovery_kills.py 1 --runs 200      seeds 1 to 200; prints each, and what recoveries cost
    python tests/recovery_kills.py 17                that one again
    python tests/recovery_kills.py 1 --hosts         over simulated hosts, of which one may die as a whole
    ... --forked      each rank has a forked child that holds all its descriptors, as DataLoader workers do
    ... --save        ranks die around an asynchronous par.save
    ... --stops       ranks are stopped (SIGSTOP), some for good; others wake up, lost or not yet
    python tests/recovery_launched.py 1 --runs 20    under python -m pycomm.run

A seed draws the plan, the interval of snapshots, whether dead ranks are replaced, and 1 to n - 1 victims.
Each victim strikes itself a random time after a random event: a step, a piece of a snapshot, an agreement
(shrink), the making of the model anew, what the writer of a save does. So deaths come in steps, snapshots and
recoveries, alone and together. Over hosts a piece may also be one of a copy, at the sender or the receiver.
The options change what a seed draws, each in its own way.

What must hold: every run ends; every rank that lives has the parameters, the last loss and the average loss
of one process, fp64, to 1e-12, under a scheduler; all of them are in one group; a rank that was stopped and
wakes up is one of them, or raises; no recovery repeats more than the interval and the step in which a
snapshot is written; every error that blames a rank blames a victim; the checkpoint on the disk is whole; no
process and no memory is left.
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from adopted import adopting
from recovery_cases import (
    RANKS,
    SAVING,
    STEPS,
    Case,
    Victim,
    draw,
    draw_over_hosts,
    with_children,
    with_save,
    with_stops,
)
from recovery_witness import DEATH, SILENCE, Board, Recovery, Times, Witness, judge

import pycomm
import pycomm.parallel as par
from pycomm import env
from pycomm.parallel.checkpoint import files, saving
from pycomm.parallel.recovery import Resilient
from pycomm.parallel.recovery.crew import Crew
from pycomm.parallel.recovery.memory import CopyMemory, OwnMemory
from pycomm.testing.processes import Outcome, RankProcesses

sys.path.insert(0, str(Path(__file__).parent / "parallel"))
from models import GPT  # noqa: E402

ROWS, LENGTH, VOCAB = 8, 8, 23
LIMIT = 120.0  # seconds of a run; never reached where the code is right and the machine is not overloaded
GRACE = 5.0  # for the others when one has failed
SILENT = 10.0  # seconds of an operation where ranks are stopped; PYCOMM_HOST_TIMEOUT is as long
NOTICED = 8.0  # a death is not taken for a silence
TOLERANCE = 1e-12


def batch(number):
    generator = torch.Generator().manual_seed(number + 1)
    rows = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def make():
    torch.manual_seed(0)
    model = GPT(vocab=VOCAB, dim=12, heads=2, layers=2, hidden=20, length=LENGTH).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


class Beside:
    """What a program does after each step: a scheduler, and an average of the losses."""

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step / 3))
        self.average = 0.0

    def step(self, loss: torch.Tensor) -> None:
        self.average += 0.3 * (loss.item() - self.average)
        self.scheduler.step()

    def state_dict(self) -> dict:
        return {"scheduler": self.scheduler.state_dict(), "average": self.average}

    def load_state_dict(self, state: dict) -> None:
        self.scheduler.load_state_dict(state["scheduler"])
        self.average = state["average"]


class Ended(NamedTuple):
    """A run's last values."""

    parameters: dict
    loss: float
    average: float


def alone(is_scheduled: bool = True, steps: int = STEPS) -> Ended:
    """A run that nobody disturbs. is_scheduled: with Beside."""
    model, opt = par.parallelize(*make())
    beside, loss = Beside(opt), torch.zeros(())
    for number in range(steps):
        loss = par.step(model, opt, batch(number), clip=1.0, microbatches=2)
        if is_scheduled:
            beside.step(loss)
    return Ended(par.full_state_dict(model), loss.item(), beside.average)


@functools.cache
def after(step: int) -> dict:
    """The parameters of one process after this step."""
    return alone(steps=step).parameters


# --- in a rank --------------------


def arm(victim: Victim, strike: Callable[[], None]) -> None:
    """From now on the event strikes this process."""
    left = [victim.count]

    def strike_later() -> None:
        time.sleep(victim.delay)
        strike()

    def happened(*_: object) -> None:
        left[0] -= 1
        if left[0] == 0 and victim.delay == 0:
            strike()
        elif left[0] == 0:
            threading.Thread(target=strike_later, daemon=True).start()

    moments = {
        "step": [(Resilient, "step")],
        "piece": [(OwnMemory, "_put"), (CopyMemory, "put"), (OwnMemory, "bytes_at")],
        "shrink": [(Crew, "shrink")],
        "rebuild": [(Resilient, "_rebuild")],
        "group": [(Crew, "make_group")],
        "begun": [(saving._Writer, "write")],
        "write": [(saving.dcp.FileSystemWriter, "write_data")],
        "rename": [(saving, "put_in_place")],
        "remove": [(files.shutil, "rmtree")],
    }
    for owner, name in moments[victim.event]:
        before_each(owner, name, happened)


def before_each(owner: Any, name: str, happened: Callable[..., None]) -> None:
    method = getattr(owner, name)

    def changed(*args: object, **kwargs: object) -> object:
        happened(args[0])
        return method(*args, **kwargs)

    setattr(owner, name, changed)


class Result(NamedTuple):
    """state, last (loss and average), members (the slots of the last group): None where the rank had no part
    in the end, or another died in it.
    """

    state: dict | None
    last: tuple | None
    members: list | None
    witness: tuple  # its losses, its recoveries, the steps repeated in one at most


def train(slot: int, case: Case, board: Board, folder: str, **options: object) -> Result:
    """options: of par.resilient."""
    witness = Witness(slot, board)
    model, opt = make()
    plan = par.Plan.parse(case.plan)
    run = par.resilient(model, opt, plan, snapshot_every=case.every, wait=case.wait, **options)
    run.keep("beside", beside := Beside(opt))
    if case.save and slot < RANKS:
        par.save(model, opt, f"{folder}/saved", extra=0)
    if case.save:
        before_each(saving.dcp.FileSystemWriter, "write_data", lambda _: time.sleep(case.pause))
    if case.forked:
        fork = multiprocessing.get_context("fork").Process
        child = fork(target=time.sleep, args=(2 * LIMIT,), daemon=True)
        child.start()
        board.note("child", slot, child.pid)
    if slot in case.victims:
        blow = signal.SIGSTOP if case.victims[slot].stops else signal.SIGKILL

        def strike() -> None:
            board.note("struck", slot, time.monotonic())
            os.kill(os.getpid(), blow)

        arm(case.victims[slot], strike)
    loss = save = None
    for number in run.steps(STEPS):
        if case.lingers and number == STEPS - 1:
            await_woken(slot, case, board, 0.8 * SILENT)
        time.sleep(case.pace)
        with witness.watch(run):
            loss = run.step(batch(number), clip=1.0, microbatches=2)
        if loss is not None:
            beside.step(loss)
        if number + 1 == case.save and run.active and not run.repeats:
            with contextlib.suppress(dist.DistError):  # another has written it, and died already
                save = par.save(model, opt, f"{folder}/saved", extra=case.save, asynchronous=True)
    if save is not None:
        with contextlib.suppress(Exception):  # said by the recovery, too
            save.wait()
    try:
        return Result(
            *at_the_end(slot, run, loss, beside), (witness.losses, witness.recoveries, witness.most_repeated)
        )
    finally:
        await_woken(slot, case, board, 3 * SILENT)


def at_the_end(slot: int, run: Resilient, loss: torch.Tensor | None, beside: Beside) -> tuple:
    """The first three of a Result."""
    if not run.active:
        return None, None, None
    members = [None] * dist.get_world_size()
    try:
        state = {name: value.numpy() for name, value in par.full_state_dict(run.model).items()}
        dist.all_gather_object(members, slot)
    except dist.DistError:  # one was struck after the last step: there is nobody to be equal with
        return None, None, None
    return state, None if loss is None else (loss.item(), beside.average), members


def await_woken(slot: int, case: Case, board: Board, limit: float) -> None:
    """Those that are lost and wake up later: whoever is left must be there to tell them."""
    end, struck = time.monotonic() + limit, board.those("struck")
    late = [other for other in struck if (case.victims[other].wake or 0) > NOTICED]
    while (
        slot not in struck and not all(board.get("over", other) for other in late) and time.monotonic() < end
    ):
        time.sleep(0.01)


def crew_limit(case: Case) -> float:
    """Over hosts a rank whose leader is stopped comes to shrink() late, and those that wait are patient."""
    return 3 * SILENT if case.hosts else SILENT


def rank_main(rank: int, link: object, case: Case, folder: str, replaces: bool) -> Result:
    slot = rank + RANKS * replaces
    board = Board(Path(folder) / "board")
    if case.hosts:
        env.simulate_host(f"host{case.hosts[rank]}")
    if case.stops:
        os.environ["PYCOMM_TIMEOUT"] = str(crew_limit(case))
    store = dist.FileStore(f"{folder}/replacements", -1)
    options = {"store": store if case.replaced else None, "replaces": replaces}
    if not replaces:
        first = dist.FileStore(f"{folder}/first", RANKS)
        dist.init_process_group("pycomm", store=first, rank=rank, world_size=RANKS)
    try:
        return train(slot, case, board, folder, timeout=SILENT if case.stops else LIMIT, **options)
    finally:
        board.note("over", slot, time.monotonic())


# --- beside the ranks --------------------


def play(case: Case, board: Board, folder: str) -> dict[int, Outcome]:
    """Runs it. Returns the outcomes of the slots that ended; a Result where they went well."""
    ranks = RankProcesses(RANKS, rank_main, case, folder, False, limit=LIMIT)
    others, found = {}, {}
    try:
        deadline, woken, ever = time.monotonic() + LIMIT, set(), set()
        while time.monotonic() < deadline and any(
            p.exitcode is None for r, p in ranks.processes.items() if r not in ever
        ):
            if any(p.exitcode == 1 and r not in woken for r, p in ranks.processes.items()):
                deadline = min(deadline, time.monotonic() + GRACE)
            for rank, process in ranks.processes.items():
                if case.replaced and process.exitcode == -signal.SIGKILL and rank not in others:
                    others[rank] = RankProcesses([rank], rank_main, case, folder, True, limit=LIMIT)
            for rank, struck in board.those("struck").items():
                wake = case.victims[rank].wake
                if case.victims[rank].stops and wake is None:
                    ever.add(rank)
                elif case.victims[rank].stops and rank not in woken and time.monotonic() >= struck + wake:
                    woken.add(rank)
                    ranks.kill(rank, signal.SIGCONT)
            time.sleep(0.005)
        for rank in ever:
            ranks.kill(rank)
        found = ranks.outcomes(1.0)
        for rank, other in others.items():  # one that was not taken in waits for ever
            (outcome,) = other.outcomes(0.0).values()
            if outcome.ok:
                found[rank + RANKS] = outcome
    finally:
        for processes in (ranks, *others.values()):
            processes.close()
    return found


def check(case: Case, reference: Ended, times: Times | None = None) -> dict[int, str]:
    """times: what it took is added. Returns what became of the victims that were struck: DEATH or SILENCE.
    Raises AssertionError.
    """
    with tempfile.TemporaryDirectory(prefix="pycomm-") as folder:
        board = Board(Path(folder) / "board")
        with adopting(lambda: board.those("child").values()):
            found = play(case, board, folder)
        kinds = {slot: SILENCE if case.victims[slot].stops else DEATH for slot in board.those("struck")}
        results = {slot: one.value for slot, one in found.items() if went_well(slot, one, case, kinds)}
        assert results, "nobody is left"
        check_results(case, results, reference)
        check_witnesses(case, results, board, kinds, times or Times())
        if case.save:
            check_saved(case, board, Path(folder) / "saved")
    return kinds


def went_well(slot: int, outcome: Outcome, case: Case, kinds: dict[int, str]) -> bool:
    """Whether there is a Result. Raises AssertionError where there should be one."""
    error = outcome.value
    if isinstance(error, ChildProcessError) and "signal 9" in str(error) and slot in kinds:
        return False
    if isinstance(error, pycomm.AbortedError) and kinds.get(slot) == SILENCE and "has to end" in str(error):
        return False
    assert outcome.ok, f"rank {slot}: {error!r} {getattr(error, '__notes__', '')}"
    return True


def check_results(case: Case, results: dict[int, Result], reference: Ended) -> None:
    ends = {slot: result for slot, result in results.items() if result.state is not None}
    late = any(victim.delay or victim.event in SAVING for victim in case.victims.values())
    assert ends or late, "nobody has the parameters"
    for result in ends.values():
        for name, value in reference.parameters.items():
            difference = (torch.as_tensor(result.state[name]) - value).abs().max().item()
            assert difference <= TOLERANCE, f"{name} differs by {difference:.1e}"
        last = (reference.loss, reference.average)
        apart = [abs(one - other) for one, other in zip(result.last or last, last, strict=True)]
        assert max(apart) <= TOLERANCE, f"last loss and average {result.last}, alone {last}"
    groups = {slot: result.members for slot, result in ends.items()}
    assert len(set(map(tuple, groups.values()))) <= 1, f"several groups have gone on: {groups}"


def check_witnesses(
    case: Case, results: dict[int, Result], board: Board, kinds: dict[int, str], times: Times
) -> None:
    for slot, result in results.items():
        losses, recoveries, most = result.witness
        assert most <= case.every + 1, f"{most} steps repeated, snapshots every {case.every}"
        if slot in kinds:  # woken: what it has missed it takes for the others' silence
            continue
        judge(losses, board)
        for recovery in recoveries:
            times.add(recovery, board, kinds)
            check_noticed(case, recovery, board, kinds)
    short = [case.victims[slot].wake for slot in kinds]
    if all(wake is not None and wake < NOTICED for wake in short):
        lost = {slot: result.witness[0] for slot, result in results.items() if result.witness[0]}
        assert not lost, f"nobody was lost, and stopped were some for {short} s: {lost}"


def check_noticed(case: Case, recovery: Recovery, board: Board, kinds: dict[int, str]) -> None:
    """A death is no silence; one silence after the other is waited for."""
    for loss in recovery.losses:
        took = loss.when - board.get("struck", loss.blamed) if loss.blamed is not None else 0.0
        if SILENCE not in kinds.values():
            assert took <= NOTICED, f"{took:.1f} s after a death: {loss}"
        elif len(kinds) == 1:
            assert took <= crew_limit(case) + 0.5 * NOTICED, f"{took:.1f} s after a silence: {loss}"


def check_saved(case: Case, board: Board, path: Path) -> None:
    """What is on the disk is whole, the one before or the new one, and the next one takes its place."""
    struck = [case.victims[slot] for slot in board.those("struck")]
    killed = {victim.event for victim in struck if not victim.delay and not victim.stops}
    steps = {0, case.save}
    if not struck or "remove" in killed:
        steps = {case.save}
    elif killed & {"begun", "write", "rename"}:
        steps = {0}
    model, opt = par.parallelize(*make())
    step = par.load(model, opt, path)
    assert step in steps, f"the checkpoint is that of step {step}, not of one of {steps}"
    for _ in range(2):
        for name, value in par.full_state_dict(model).items():
            difference = (value - after(step)[name]).abs().max().item()
            assert difference <= TOLERANCE, (
                f"{name} of the checkpoint of step {step} differs by {difference:.1e}"
            )
        par.save(model, opt, path, extra=step)
        par.load(model, opt, path)
    assert [each.name for each in path.parent.glob("saved*")] == ["saved"]


def repeat(
    draws: Callable[[int], Case], play_one: Callable[..., dict[int, str]], options: argparse.Namespace
) -> int:
    """Plays a case of each seed and says what came of it. Returns the status of the process."""
    times, failed, victims, end = Times(), [], [], time.monotonic() + options.within
    for seed in range(options.seed, options.seed + options.runs):
        if time.monotonic() >= end:
            break
        last = seed
        case, began = draws(seed), time.monotonic()
        print(f"seed {seed}: {case}", flush=True)
        try:
            kinds = play_one(case, times)
        except AssertionError as error:
            failed.append(seed)
            print(f"  FAILED: {error}", flush=True)
            continue
        victims += kinds.values()
        load = os.getloadavg()[0]
        print(f"  equal after {time.monotonic() - began:.1f} s; struck {kinds}; load {load:.1f}", flush=True)
    for line in times.lines():
        print(line)
    counts = f"{victims.count(DEATH)} kills, {victims.count(SILENCE)} stops"
    print(f"seeds {options.seed} to {last}: {counts}, failed: {failed or 'none'}")
    return 1 if failed else 0


def arguments(text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("seed", type=int)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a run, default %(default)s")
    parser.add_argument("--within", type=float, default=1e9, help="no run begins after so many seconds")
    return parser


def main() -> int:
    global LIMIT
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--hosts", action="store_true", help="over simulated hosts")
    parser.add_argument("--forked", action="store_true", help="each rank has a forked child")
    parser.add_argument("--save", action="store_true", help="an asynchronous save is under way")
    parser.add_argument("--stops", action="store_true", help="ranks are stopped, too")
    options = parser.parse_args()
    LIMIT = options.limit  # ranks are forked, and see it
    torch.set_num_threads(1)

    def one(seed: int) -> Case:
        case = (draw_over_hosts if options.hosts else draw)(seed)
        case = with_save(case, seed) if options.save else case
        case = with_stops(case, seed) if options.stops else case
        return with_children(case, seed) if options.forked else case

    reference = alone()
    return repeat(one, lambda case, times: check(case, reference, times), options)


if __name__ == "__main__":
    sys.exit(main())
