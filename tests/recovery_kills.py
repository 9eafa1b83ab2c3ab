"""Trainings whose ranks are killed at random moments, and end with the parameters of one that is left alone.

    python tests/recovery_kills.py 1 --runs 200      seeds 1 to 200; prints each, and what recoveries cost
    python tests/recovery_kills.py 17                that one again
    python tests/recovery_kills.py 1 --hosts         over two simulated hosts, of which one may die as a whole

A seed draws the plan, the interval of snapshots, whether dead ranks are replaced, and 1 to n - 1 victims.
Each victim kills itself (SIGKILL) a random time after a random event: a step, a piece of a snapshot, an
agreement (shrink), the making of the model anew. So deaths come in steps, snapshots and recoveries, alone and
together. Over hosts a piece may also be one of a copy, at the sender or the receiver.

What must hold: every run ends; every rank that lives has the parameters, the last loss and the average loss
of one process, fp64, to 1e-12, under a scheduler; no recovery repeats more than the interval and the step in
which a snapshot is written; no process and no memory is left.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import pycomm.parallel as par
from pycomm import env
from pycomm.parallel.recovery import Resilient
from pycomm.parallel.recovery.crew import Crew
from pycomm.parallel.recovery.memory import CopyMemory, OwnMemory
from pycomm.testing.processes import RankProcesses

sys.path.insert(0, str(Path(__file__).parent / "parallel"))
from models import GPT  # noqa: E402

RANKS, STEPS, ROWS, LENGTH, VOCAB = 4, 9, 8, 8, 23
LIMIT = 120.0  # seconds of a run; never reached where the code is right and the machine is not overloaded
GRACE = 5.0  # for the others when one has failed
TOLERANCE = 1e-12
PLANS = ("dp=4", "dp=4,zero=1", "dp=4,zero=2", "dp=4,zero=3", "dp=2,tp=2", "dp=2,pp=2")
EVENTS = ("step", "piece", "shrink", "rebuild")
PLACES = ("0011", "0101", "0001", "0122")  # the host of each rank


class Victim(NamedTuple):
    event: str
    count: int  # the how many-th of these events
    delay: float  # seconds after it


class Case(NamedTuple):
    plan: str
    every: int
    replaced: bool
    wait: float
    victims: dict  # rank -> Victim
    hosts: str = ""  # of each rank; "": all are on this one


def draw(seed):
    draws = random.Random(seed)
    victims = {}
    for rank in draws.sample(range(RANKS), draws.randint(1, RANKS - 1)):
        event = draws.choice(EVENTS) if victims else draws.choice(EVENTS[:2])  # the first brings the others
        count = {"step": draws.randrange(1, STEPS), "piece": draws.randrange(1, 90)}.get(event, 1)
        victims[rank] = Victim(event, count, draws.choice([0, draws.uniform(0, 0.05), draws.uniform(0, 0.5)]))
    replaced = draws.random() < 0.5
    wait = draws.choice([0.0, 20.0]) if replaced else 0.0
    return Case(draws.choice(PLANS), draws.randint(1, 4), replaced, wait, victims)


def draw_over_hosts(seed):
    """The same, and in every second run a whole host. With three hosts the one that follows it lives."""
    case, draws = draw(seed), random.Random(-seed)
    hosts, victims = draws.choice(PLACES), case.victims
    if draws.random() < 0.5 or len(set(hosts)) > 2:
        host = draws.choice(sorted(set(hosts)))
        victim = Victim(*next(iter(victims.values()))[:2], draws.choice([0.0, draws.uniform(0, 0.2)]))
        victims = {rank: victim for rank in range(RANKS) if hosts[rank] == host}
    plan = draws.choice([plan for plan in PLANS if "pp" not in plan])
    return case._replace(plan=plan, victims=victims, hosts=hosts, replaced=False, wait=0.0)


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


def alone(is_scheduled: bool = True) -> Ended:
    """A run that nobody disturbs. is_scheduled: with Beside."""
    model, opt = par.parallelize(*make())
    beside = Beside(opt)
    for number in range(STEPS):
        loss = par.step(model, opt, batch(number), clip=1.0, microbatches=2)
        if is_scheduled:
            beside.step(loss)
    return Ended(par.full_state_dict(model), loss.item(), beside.average)


def arm(victim):
    """From now on the event kills this process."""
    left = [victim.count]

    def happened(*_):
        left[0] -= 1
        if left[0] == 0:
            if victim.delay == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Thread(target=die_after, args=(victim.delay,), daemon=True).start()

    moments = {
        "step": [(Resilient, "step")],
        "piece": [(OwnMemory, "_put"), (CopyMemory, "put"), (OwnMemory, "bytes_at")],
        "shrink": [(Crew, "shrink")],
        "rebuild": [(Resilient, "_rebuild")],
    }
    for owner, name in moments[victim.event]:
        before_each(owner, name, happened)


def before_each(owner, name, happened):
    method = getattr(owner, name)

    def changed(*args, **kwargs):
        happened(args[0])
        return method(*args, **kwargs)

    setattr(owner, name, changed)


def die_after(seconds):
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def rank_main(rank, link, case, folder, replaces):
    if case.hosts:
        env.simulate_host(f"host{case.hosts[rank]}")
    store = dist.FileStore(f"{folder}/replacements", -1)
    if not replaces:
        first = dist.FileStore(f"{folder}/first", RANKS)
        dist.init_process_group("pycomm", store=first, rank=rank, world_size=RANKS)
    lost = []  # (when, step)
    before_each(Resilient, "_lose", lambda run: lost.append((time.perf_counter(), run.repeated)))
    model, opt = make()
    run = par.resilient(
        model,
        opt,
        par.Plan.parse(case.plan),
        snapshot_every=case.every,
        store=store if case.replaced else None,
        replaces=replaces,
        wait=case.wait,
        timeout=LIMIT,
    )
    run.keep("beside", beside := Beside(opt))
    if rank in case.victims and not replaces:
        arm(case.victims[rank])
    took, most, loss = [], 0, None
    for number in run.steps(STEPS):
        seen, repeated = len(lost), run.repeated
        loss = run.step(batch(number), clip=1.0, microbatches=2)
        if loss is not None:
            beside.step(loss)
        if len(lost) > seen:
            took.append(time.perf_counter() - lost[seen][0])
            most = max(most, (run.repeated - repeated) / (len(lost) - seen))
    loss = None if loss is None else (loss.item(), beside.average)
    if not run.active:
        return None, None, took, most
    try:
        state = {name: value.numpy() for name, value in par.full_state_dict(model).items()}
    except dist.DistError:  # killed after the last step: there is nobody to be equal with
        return None, None, took, most
    return state, loss, took, most


def play(case):
    """Runs it. Returns [(state, (loss, average), seconds of recoveries, steps repeated)] of the ranks that
    ended.
    """
    with tempfile.TemporaryDirectory(prefix="pycomm-") as folder:
        ranks = RankProcesses(RANKS, rank_main, case, folder, False, limit=LIMIT)
        others = []
        try:
            deadline, replaced = time.monotonic() + LIMIT, set()
            while time.monotonic() < deadline and any(p.exitcode is None for p in ranks.processes.values()):
                if any(p.exitcode == 1 for p in ranks.processes.values()):
                    deadline = min(deadline, time.monotonic() + GRACE)
                for rank, process in ranks.processes.items():
                    if case.replaced and process.exitcode == -signal.SIGKILL and rank not in replaced:
                        replaced.add(rank)
                        others.append(RankProcesses([rank], rank_main, case, folder, True, limit=LIMIT))
                time.sleep(0.005)
            found = [*ranks.outcomes(1.0).values()]
            for other in others:  # one that was not taken in waits for ever
                found += [outcome for outcome in other.outcomes(0.0).values() if outcome.ok]
        finally:
            for processes in (ranks, *others):
                processes.close()
    return found


def check(case, reference):
    """Returns the seconds of its recoveries. Raises AssertionError."""
    parameters, last = reference.parameters, (reference.loss, reference.average)
    found, took, equal = play(case), [], 0
    for outcome in found:
        if isinstance(outcome.value, ChildProcessError) and "signal 9" in str(outcome.value):
            continue
        assert outcome.ok, f"{outcome.value!r} {getattr(outcome.value, '__notes__', '')}"
        state, loss, recoveries, most = outcome.value
        took += recoveries
        assert most <= case.every + 1, f"{most} steps repeated, snapshots every {case.every}"
        if state is None:
            continue
        equal += 1
        for name, value in parameters.items():
            difference = (torch.as_tensor(state[name]) - value).abs().max().item()
            assert difference <= TOLERANCE, f"{name} differs by {difference:.1e}"
        apart = [abs(one - other) for one, other in zip(loss or last, last, strict=True)]
        assert max(apart) <= TOLERANCE, f"last loss and average {loss}, alone {last}"
    assert len(found) - sum(not outcome.ok for outcome in found) >= 1, "nobody is left"
    assert equal or any(victim.delay for victim in case.victims.values()), "nobody has the parameters"
    assert not memories_of_others(), "memory of snapshots is left"
    return took


def memories_of_others():
    """Descriptors of snapshots in processes that this one has started, or that were left by them."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            parent = int((link.parents[1] / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and "pycomm snapshots" in os.readlink(link):
                found.append(str(link))
        except OSError:
            continue
    return found


def main():
    global LIMIT
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a run, default %(default)s")
    parser.add_argument("--hosts", action="store_true", help="over simulated hosts")
    options = parser.parse_args()
    LIMIT = options.limit  # ranks are forked, and see it
    torch.set_num_threads(1)
    reference, took, failed = alone(), [], []
    for seed in range(options.seed, options.seed + options.runs):
        case, began = (draw_over_hosts if options.hosts else draw)(seed), time.monotonic()
        print(f"seed {seed}: {case}", flush=True)
        try:
            times = check(case, reference)
        except AssertionError as error:
            failed.append(seed)
            print(f"  FAILED: {error}", flush=True)
            continue
        took += times
        said = f"; slowest survivor went on after {max(times):.2f} s" if times else ""
        print(f"  equal after {time.monotonic() - began:.1f} s{said}", flush=True)
    if took:
        took.sort()
        print(
            f"{len(took)} recoveries of a rank: median {statistics.median(took):.2f} s, "
            f"95% {took[int(0.95 * (len(took) - 1))]:.2f} s, longest {took[-1]:.2f} s"
        )
    print(f"{options.runs} runs, failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
