"""Recoveries with one rank: an error in a step starts one, which rebuilds all state from the snapshot. The
caller sees the same results as in an undisturbed run.
"""

import gc
import os
import random
import re
import sys
import threading
from pathlib import Path

import numpy
import pytest
import torch
from odd_models import cross

import pycomm
import pycomm.parallel as par
from pycomm.parallel.recovery import training
from pycomm.parallel.recovery.memory import Memory, OwnMemory

sys.path.insert(0, str(Path(__file__).parents[1]))
import recovery_kills as kills  # noqa: E402

pytestmark = pytest.mark.timeout(120)
STEPS = 8


@pytest.fixture
def break_at(monkeypatch):
    """break_at(2, 5): the second and the fifth call of par.step from now on raise."""
    taken, plain = [0], training.take_step

    def set_calls(*numbers):
        taken[0] = 0

        def take(*args, **options):
            taken[0] += 1
            if taken[0] in numbers:
                raise pycomm.PeerError("rank 1 died", peer=1)
            return plain(*args, **options)

        monkeypatch.setattr(training, "take_step", take)

    return set_calls


class Odd(torch.nn.Module):
    """Has a buffer that a forward changes, and a part that is not trained."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(kills.VOCAB, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.quiet = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(8))
        self.head = torch.nn.Linear(6, kills.VOCAB)
        self.quiet[0].bias.requires_grad_(False)

    def forward(self, x):
        x = self.norm(self.table(x).transpose(1, 2)).transpose(1, 2)
        return self.head(x + self.quiet(x))


def odd():
    torch.manual_seed(0)
    model = Odd().double()
    groups = [{"params": [*model.table.parameters(), *model.quiet.parameters()]}]
    groups += [{"params": [*model.norm.parameters(), *model.head.parameters()], "lr": 0.02}]
    return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def played(every):
    """All that a program can see of a run, step by step."""
    model, opt = odd()
    run = par.resilient(model, opt, snapshot_every=every)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    x, y = torch.empty(8, 8, dtype=torch.int64), torch.empty(8, 8, dtype=torch.int64)
    random.seed(1), numpy.random.seed(2)
    seen = []
    for number in run.steps(STEPS):
        x.copy_(torch.randint(kills.VOCAB, x.shape)), y.copy_(x.roll(1, 1))  # the same tensors again
        x[numpy.random.randint(8)] = random.randrange(kills.VOCAB)
        if number == 3:
            model.quiet.eval()
            model.head.bias.requires_grad_(False)
        if number == 6:
            model.head.bias.requires_grad_(True)
        is_last = number % 2 == 1
        loss = run.step((x, y), cross, microbatches=2, clip=1.0 if is_last else None, update=is_last)
        schedule.step()
        seen.append((run.done, loss.item(), [group["lr"] for group in opt.param_groups]))
    modes = {name: module.training for name, module in model.named_modules()}
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    numbers = torch.rand(2).tolist(), random.random(), numpy.random.rand()
    return seen, modes, trained, numbers, par.full_state_dict(model), run


@pytest.mark.parametrize(
    ("every", "breaks", "repeated"),
    [(1, (2, 6), [1, 1]), (3, (4, 6), [3, 1]), (100, (8,), [7]), (2, (1, 2), [0, 0])],
    ids=str,
)
def test_a_caller_sees_nothing(every, breaks, repeated, break_at):
    """Two errors, in repeated steps too; in the middle of calls whose gradients wait for an update no
    snapshot is due.
    """
    break_at()
    *expected, quiet = played(every)
    assert (quiet.recoveries, quiet.repeated, quiet.repeats) == (0, 0, False)
    break_at(*breaks)
    *found, run = played(every)
    state, right = found.pop(), expected.pop()
    assert found == expected
    for name, value in right.items():
        assert torch.equal(state[name], value), name
    assert (run.recoveries, run.done) == (len(breaks), STEPS)
    assert run.repeated <= sum(repeated) + len(breaks) and run.repeated >= sum(repeated) - len(breaks)


def test_nothing_is_left_of_former_generations(break_at, caplog):
    """Memories, descriptors, hooks of the optimizer: after the first recovery as many as after the third."""
    model, opt = kills.make()
    run = par.resilient(model, opt, snapshot_every=1)
    break_at(2, 4, 6)
    held = []
    for number in range(5):
        run.step(kills.batch(number))
        hooks = sum(map(len, (opt._optimizer_step_pre_hooks, opt._optimizer_state_dict_post_hooks)))
        descriptors = len(os.listdir("/proc/self/fd"))
        held.append((run.recoveries, len(run._holdings.generations), len(run._log) <= 2, hooks, descriptors))
    assert [one[0] for one in held] == [0, 1, 2, 3, 3]
    assert {one[1:4] for one in held[1:]} == {held[0][1:4]} and held[0][1:3] == (1, True)
    assert held[-1][4] == held[1][4]
    said = [message for message in caplog.messages if message.startswith("step ")]
    for step, (lost, goes_on) in zip((2, 3, 4), zip(said[::2], said[1::2], strict=True), strict=True):
        assert lost == f"step {step}: rank 1 died"
        words = rf"step {step}: 1 ranks go on under Plan\(single process\) after \d+ ms"
        assert re.fullmatch(words, goes_on), goes_on
    address = run._holdings.last.own.address
    Memory.open(address).close()
    run.close()
    run.close()
    gc.collect()
    with pytest.raises((OSError, pycomm.PeerError)):
        Memory.open(address)


def test_an_update_waits_for_the_snapshot_before_and_after_a_recovery(break_at, monkeypatch):
    """The last values written still belong to the step of the snapshot."""
    model, opt = kills.make()
    run = par.resilient(model, opt, snapshot_every=1)
    updates, plain, seen, updated = [0], OwnMemory._put, [], threading.Event()

    def count(*_):
        updates[0] += 1
        updated.set()

    def put(memory, value, place):
        if not seen:
            updated.clear()
            updated.wait(0.1)  # an update that does not wait comes now
        seen.append(updates[0])
        return plain(memory, value, place)

    opt.register_step_post_hook(count)
    monkeypatch.setattr(OwnMemory, "_put", put)
    break_at(4)
    for number in range(6):
        seen.clear()
        before = updates[0]
        run.step(kills.batch(number))
        run._writing.wait()
        if number != 3:  # in which everything is made anew
            assert set(seen) <= {before}, number
    assert run.recoveries == 1
    run.close()


def test_after_restart_no_step_is_repeated(break_at, tmp_path):
    """All go back: what was done before it is not done again, and counts as new."""
    model, opt = kills.make()
    run = par.resilient(model, opt, snapshot_every=100)
    par.save(model, opt, tmp_path / "saved")
    break_at(4)
    losses = [run.step(kills.batch(number)).item() for number in range(4)]
    assert (run.recoveries, run.repeated, run.done) == (1, 3, 4)
    par.load(model, opt, tmp_path / "saved")
    run.restart(0)
    assert (run.done, run.repeats) == (0, False)
    break_at(3)
    assert [run.step(kills.batch(number)).item() for number in range(4)] == losses
    assert (run.recoveries, run.repeated, run.done) == (2, 5, 4)
    run.restart()
    assert run.done == 4
    run.close()


def test_an_error_of_the_backend_names_the_checkpoint(break_at, tmp_path):
    """Where no snapshot is whole: the last that was saved or loaded, or that there is none."""
    for saved in (False, True):
        model, opt = kills.make()
        run = par.resilient(model, opt, snapshot_every=2)
        for name in "ab" * saved:
            par.save(model, opt, tmp_path / name)
        break_at(2)
        run.step(kills.batch(0))
        for memory in run._holdings.last.held.values():
            memory.numbers = dict
        with pytest.raises(
            RuntimeError, match="what was lost at step 2 cannot be recovered: no snap"
        ) as told:
            run.step(kills.batch(1))
        end = f"'{tmp_path}/b')" if saved else "no parallel.save of this run has ended"
        assert str(told.value).endswith(end), told.value


def test_an_error_of_a_mismatch_is_raised(break_at, monkeypatch):
    """It is of the program, so nothing is lost, and the same step can be asked for again."""
    model, opt = kills.make()
    run = par.resilient(model, opt, snapshot_every=2)
    plain = training.take_step

    def take(*args, **options):
        raise pycomm.MismatchError("all_reduce and all_gather")

    monkeypatch.setattr(training, "take_step", take)
    for _ in range(2):
        with pytest.raises(pycomm.MismatchError):
            run.step(kills.batch(0))
    monkeypatch.setattr(training, "take_step", plain)
    loss = run.step(kills.batch(0))
    assert (run.recoveries, run.done) == (0, 1) and loss > 0
    run.close()
