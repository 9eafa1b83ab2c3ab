"""par.resilient with a GradScaler: ranks die around steps whose gradients are inf, and every rank that lives
ends with the scale, the growth tracker and the parameters of one undisturbed process.
"""

import functools
import logging
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import recovery_kills as kills
import torch
import torch.distributed as dist
from odd_models import cross
from recovery_witness import Board, Witness
from tiers import tier

import pycomm.parallel as par
from pycomm.parallel.recovery.program import hyperparameters, set_hyperparameters
from pycomm.testing import run_ranks

pytestmark = pytest.mark.timeout(300)
LIMIT = 120.0
BAD = (1, 4, 5, 7)  # steps whose gradients are not finite
CHANGED = 6  # from this step on, growth_interval is another one, where a test asks for it


class Exploding(torch.autograd.Function):
    """The gradient of the last row, which one data rank has, becomes inf."""

    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[-1] = torch.inf
        return grad


def loss_of(number):
    return (lambda out, y: cross(Exploding.apply(out), y)) if number in BAD else cross


def new_scaler():
    return torch.amp.GradScaler("cpu", growth_interval=2)


def state_of(scaler):
    state = scaler.state_dict()
    return {f"scaler {name}": torch.tensor(state[name]) for name in ("scale", "_growth_tracker")}


@functools.cache
def alone(is_changed=False):
    """Ended of plain torch in one process."""
    model, opt = kills.make()
    scaler = new_scaler()
    for number in range(kills.STEPS):
        if is_changed and number == CHANGED:
            scaler.set_growth_interval(1)
        x, y = kills.batch(number)
        opt.zero_grad()
        loss = loss_of(number)(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
    values = {name: value.detach() for name, value in model.named_parameters()}
    return kills.Ended(values | state_of(scaler), loss.item(), 0.0)


class Asked(NamedTuple):
    """keeps: run.keep("scaler", scaler). change: a folder for warnings; the ranks of the beginning change
    growth_interval at step CHANGED, and replacements do not.
    """

    keeps: bool = False
    change: Path | None = None


def rank_main(asked, rank, link, case, folder, replaces):
    """As in recovery_kills."""
    change, slot = asked.change, rank + kills.RANKS * replaces
    board = Board(Path(folder) / "board")
    witness = Witness(slot, board)
    store = dist.FileStore(f"{folder}/replacements", -1)
    if not replaces:
        first = dist.FileStore(f"{folder}/first", kills.RANKS)
        dist.init_process_group("pycomm", store=first, rank=rank, world_size=kills.RANKS)
    if change is not None:
        logging.getLogger("pycomm.parallel").addHandler(logging.FileHandler(change / f"{rank} {replaces}"))
    model, opt = kills.make()
    run = par.resilient(
        model,
        opt,
        par.Plan.parse(case.plan),
        snapshot_every=case.every,
        store=store if case.replaced else None,
        replaces=replaces,
        wait=case.wait,
        timeout=kills.LIMIT,
    )
    scaler, loss = new_scaler(), None
    if asked.keeps:
        run.keep("scaler", scaler)
    if rank in case.victims and not replaces:

        def strike():
            board.note("struck", slot, time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

        kills.arm(case.victims[rank], strike)
    for number in run.steps(kills.STEPS):
        if change is not None and number == CHANGED and not replaces:
            scaler.set_growth_interval(1)
        with witness.watch(run):
            loss = run.step(kills.batch(number), loss_of(number), clip=1.0, microbatches=2, scaler=scaler)
    state, last, members = kills.at_the_end(slot, run, loss, kills.Ended({}, 0.0, 0.0))
    if state is not None:
        state |= {name: value.numpy() for name, value in state_of(scaler).items()}
    return kills.Result(state, last, members, (witness.losses, witness.recoveries, witness.most_repeated))


def play(monkeypatch, case, **options):
    asked = Asked(**options)
    monkeypatch.setattr(kills, "rank_main", functools.partial(rank_main, asked))
    kills.check(case, alone(asked.change is not None))


def victims(event, **of_rank):
    """{rank: Victim}; of_rank: r0=the how many-th event of rank 0."""
    return {int(rank[1:]): kills.Victim(event, count, 0.0) for rank, count in of_rank.items()}


CASES = {
    "in the step": kills.Case("dp=4", 2, False, 0.0, victims("piece", r1=70, r2=50)),
    "after a bad step": kills.Case("dp=4", 3, False, 0.0, victims("step", r1=6)),
    "before one, zero": kills.Case("dp=4,zero=3", 2, False, 0.0, victims("step", r0=5, r3=8)),
    "tensor": kills.Case("dp=2,tp=2", 4, False, 0.0, victims("step", r2=7)),
    "pipeline": kills.Case("dp=2,pp=2", 2, False, 0.0, victims("step", r0=6, r1=9)),
    "twice": kills.Case("dp=4,zero=1", 4, False, 0.0, victims("step", r3=7) | victims("shrink", r0=1)),
}


@tier(quick=1 / 6)
@pytest.mark.parametrize("name", CASES)
def test_a_killed_rank_changes_no_scale(name, monkeypatch):
    play(monkeypatch, CASES[name])


def test_the_steps_are_those_that_a_scaler_skips():
    """The oracle: four steps are left out, the scale has grown once, and a good step counts at the end."""
    state = alone().parameters
    assert state["scaler scale"] == 65536 * 2 / 2 ** len(BAD) and state["scaler _growth_tracker"] == 1


@tier(quick=1 / 2)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_replacement_has_the_scale(keeps, monkeypatch):
    """Its scaler is a new one: with and without run.keep() it gets the state of the others."""
    case = kills.Case("dp=4,zero=2", 2, True, 60.0, victims("step", r0=6))
    play(monkeypatch, case, keeps=keeps)


@tier(slow=1)
def test_a_rank_that_had_no_part_goes_on_alone(monkeypatch):
    """Rank 3 has no part after the first death and one after the second; after the third it is alone."""
    deaths = victims("step", r0=3, r1=6, r2=9)
    play(monkeypatch, kills.Case("dp=2,tp=2", 2, False, 0.0, deaths))


@tier(slow=1)
def test_a_scaler_that_is_changed_by_hand(monkeypatch, tmp_path):
    """The state of those who were there all the time counts, with one WARNING of the replacement."""
    case = kills.Case("dp=2,tp=2", 2, True, 60.0, victims("step", r0=5))
    play(monkeypatch, case, change=tmp_path)
    said = {path.name: path.read_text().count("its GradScaler has") for path in tmp_path.iterdir()}
    assert said == {"0 False": 0, "0 True": 1, "1 False": 0, "2 False": 0, "3 False": 0}
    text = (tmp_path / "0 True").read_text()
    assert "GradScaler has growth_interval=2, where rank" in text and "has growth_interval=1. Those" in text


def test_ranks_without_a_scaler_get_the_error_of_step():
    """No rank waits for another, and all go on together afterwards. A disabled scaler is as none."""

    def rank_main(rank):
        run = par.resilient(*kills.make(), par.Plan(dp=2), snapshot_every=2)
        with pytest.raises(ValueError, match="the scaler of this rank has the scale"):
            run.step(kills.batch(0), clip=1.0, scaler=new_scaler() if rank else None)
        with pytest.raises(ValueError, match=r"takes a torch.amp.GradScaler, not a float"):
            run.step(kills.batch(0), clip=1.0, scaler=2.0)
        off = torch.amp.GradScaler("cpu", enabled=False)
        losses = [run.step(kills.batch(n), clip=1.0, scaler=off if n else None).item() for n in run.steps(3)]
        return losses, run.recoveries

    def plain_main(rank):
        model, opt = par.parallelize(*kills.make(), par.Plan(dp=2))
        return [par.step(model, opt, kills.batch(number), clip=1.0).item() for number in range(3)], 0

    options = {"mode": "processes", "backend": "pycomm", "timeout": LIMIT}
    assert run_ranks(2, rank_main, **options) == run_ranks(2, plain_main, **options)


def test_the_state_of_a_scaler_that_has_none_yet():
    """GradScaler makes its state in the first scale(): before that it is read and loaded all the same."""
    _, opt = kills.make()
    fresh, used, other = new_scaler(), new_scaler(), new_scaler()
    used.scale(torch.ones(()))
    used.update(512.0)
    set_hyperparameters(opt, hyperparameters(opt, used), fresh)
    assert fresh.state_dict() == used.state_dict() and fresh.scale(torch.ones(())).item() == 512.0
    set_hyperparameters(opt, hyperparameters(opt, other), used)
    assert used.state_dict() == other.state_dict() and used.scale(torch.ones(())).item() == 65536.0


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False), 2.0])
def test_what_is_no_scaler_has_no_state(scaler):
    _, opt = kills.make()
    found, used = hyperparameters(opt, scaler), new_scaler()
    assert found[-1] == {}
    set_hyperparameters(opt, found, used)
    assert used.state_dict() == new_scaler().state_dict()
    set_hyperparameters(opt, hyperparameters(opt, used), scaler)
