"""A training that goes on when ranks die: resilient().

    step            1    2    3    4    5         4    5    6
    rank 0   S0     .    S2   .    S4   .  PeerError  shrink, rebuild from S4 ->  5    6    rank 0
    rank 1   S0     .    S2   .    S4   killed
    rank 2   S0     .    S2   .    S4   .  PeerError  shrink, rebuild from S4 ->  5    6    rank 1

Sn: a snapshot after step n (snapshot.py, program.py) in memory that outlives its rank (memory.py). What
happens after a death, on every rank that lives:

    leave      torch's groups are aborted, so that nobody waits for this rank
    shrink     the crew agrees on who lives                                               crew.py
    plan       for as many ranks, the same on all                                         smaller.py
    rebuild    the model as it was before parallelize(), and through it again             pristine.py
    choose     the last snapshot of which every part is somewhere, and who has it         holdings.py
    read       values and optimizer from it                                               checkpoint/loading
    snapshot   the same number, by the ranks of now, into new memory; copies on the next host, neighbours.py
    meet       all have it: the memory of the former ranks is let go of
    repeat     the steps after the snapshot, from the batches that this rank has kept

A death in any of these lets all begin again with "leave". The memory of both generations is held until "meet"
has been passed by one rank, which then knows that the new snapshot is whole; the others find that, too, as
they tell each other what they hold. So every rank chooses the same generation and number.

Ranks may be a step apart when one dies, as some have the sums of the last step and others have not. Each has
the batches since the last snapshot but one, and repeats up to the call that it is in: all call the same steps
in the same order, whoever takes them from the list and whoever from the caller. So the caller sees nothing.

A step is written down before it begins: its batch, hyperparameters (schedulers change them) and arguments. A
snapshot after step n is begun by the call of step n + 1, so that it has what the caller did in between.
Cost: the batches of 2 * snapshot_every steps; per snapshot an 8-byte all_reduce and the writing of the values
(each written by one rank), beside the forward and backward of the next step: the optimizer waits for it.
Over hosts each host also sends what it has written to the next one, for which only the next snapshot waits.

What lost: restarting all ranks from a checkpoint (torchrun, Elastic Horovod keeps a copy in each process and
loses sharded state); a quorum per step with spare replicas (torchft), which is for replicas alone.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from pycomm import AbortedError, CommError, MismatchError
from pycomm.groups import replacement_store
from pycomm.parallel.api import step as take_step
from pycomm.parallel.building import parallelize, parallelize_again
from pycomm.parallel.checkpoint.loading import load_from
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.answers import Answers
from pycomm.parallel.ground.plan import AXES, Plan
from pycomm.parallel.parts import Parallelized, parts_of
from pycomm.parallel.recovery.checkpoints import Checkpoints
from pycomm.parallel.recovery.crew import Crew
from pycomm.parallel.recovery.holdings import Holdings, Writer
from pycomm.parallel.recovery.pristine import Pristine
from pycomm.parallel.recovery.program import (
    Call,
    Followers,
    Kept,
    ProgramState,
    Stateful,
    StepOptions,
    hyperparameters,
    set_hyperparameters,
)
from pycomm.parallel.recovery.smaller import Plans, check_kept, checked_plan, first_plan
from pycomm.parallel.recovery.snapshot import Dealer, own_at, own_of, part_of, set_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from typing_extensions import Unpack

    from pycomm.parallel.building.filling import Folder
    from pycomm.parallel.given import Batch, LossFunction, Tree
    from pycomm.parallel.recovery.snapshot import Source

__all__ = ["Resilient", "resilient"]

T = TypeVar("T")
Word: TypeAlias = Literal["grow", "end"]

LOG = logging.getLogger("pycomm.parallel")


def resilient(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    plan: Plans | str | None = None,
    *,
    snapshot_every: int = 10,
    store: dist.Store | None = None,
    replaces: bool | None = None,
    wait: float = 0.0,
    weights: Folder | None = None,
    timeout: float | None = None,
) -> Resilient:
    """parallelize(), for a training that goes on when ranks die. Collective over all ranks.

        run = par.resilient(model, opt, "dp=4,zero=1", snapshot_every=10)
        for number in run.steps(1000):
            loss = run.step(batch_of(number), loss_fn, clip=1.0)

    Args:
        model, opt, weights: as for parallelize(); opt is needed.
        plan: Plan of all ranks, or its text; or a function from a number of ranks to a Plan, or its text, for
            as many at most. After deaths a Plan keeps its cut of the model, with fewer dp, as long as there
            are ranks for it.
        snapshot_every: in steps: at most so many are repeated.
        store: a torch.distributed Store in which replacements ask to be taken in; None: that of `python -m
            pycomm.run`, if it has started this process.
        replaces: whether this process takes the place of a dead one; None: as pycomm.run says. Then the same
            call waits until the others take it in.
        wait: seconds for which the others wait for replacements before they take a smaller plan. Whoever
            comes later is taken in at the next snapshot.
        timeout: seconds of an operation of the default group and of all groups of the plan, now and after a
            death, and of the wait for a rank that lives; None: that of the default group as it is.

    Ranks may be on several hosts, and whole hosts may be lost, as long as the host that follows a lost one
    (in the order of their lowest ranks, the first behind the last) is not lost at the same time.

    Returns a Resilient. Raises ValueError for what parallelize() refuses, groups of another backend,
    compression that remembers its errors, and models that cannot be copied.
    """
    if opt is None or not isinstance(snapshot_every, int) or snapshot_every < 1 or not wait >= 0:
        raise ValueError(
            f"resilient(opt={'None' if opt is None else 'given'}, snapshot_every={snapshot_every!r}, "
            f"wait={wait!r}): needs an optimizer, snapshot_every of 1 or more steps, wait of 0 or more s"
        )
    if not callable(plan):
        plan = Plan.of(plan)
        check_kept(plan)
    if store is None:
        found, store = replacement_store()
        replaces = found if replaces is None else replaces
    if replaces and store is None:
        raise ValueError("resilient(replaces=True): pass the store in which the others look for replacements")
    joining = _Joining(bool(replaces), store, timeout)
    return Resilient(model, opt, plan, _Options(snapshot_every, wait, weights), joining)


class _Options(NamedTuple):
    snapshot_every: int
    wait: float
    weights: Folder | None


class _Joining(NamedTuple):
    """How this process comes to the others."""

    replaces: bool
    store: dist.Store | None
    timeout: float | None


class Resilient:
    """What resilient() returns.

    Attributes:
        model, opt: the objects that were given; for parallel.save, evaluate and the like. Modules inside of
            the model are others after a recovery.
        plan: the Plan of now.
        done: number of steps that were taken.
        active: whether the plan has a part for this rank. If not, it waits in step(), which returns None, in
            case others die; parallel.save and the like are for active ranks only.
        recoveries: how often the ranks have gone on after deaths or with replacements.
        repeated: how many steps were taken again, in all recoveries: in each snapshot_every at most, and one
            where a rank died while it wrote a snapshot.
        repeats: whether the others had left the last step already: no parallel.save or evaluate after it.
    """

    def __init__(
        self, model: nn.Module, opt: torch.optim.Optimizer, plan: Plans, options: _Options, joining: _Joining
    ) -> None:
        self.model, self.opt, self.done, self.active, self.recoveries = model, opt, 0, True, 0
        self.repeated, self._ahead = 0, -1  # steps that some had left before the last recovery
        self._options, self._wanted, self._position = options, plan, 0
        self._crew: Crew  # until the end
        self._dealer: Dealer  # of a rank with a part
        self._log: dict[int, Call] = {}  # number of a step -> how it was asked for
        self._holdings, self._writing, self._ended, self._is_open = Holdings(), Writer(), False, True
        self._last: int | None = None  # number of the last snapshot that was begun
        self._loss: torch.Tensor | None = None  # of the last step that was taken here
        self._loss_of: int | None = None  # its number
        self._joining = joining.replaces  # until this process has a part for the first time
        self._kept, self._followers = Kept(opt), Followers()
        self._between: ProgramState | None = None  # from steps() until the call of the step
        self._writing.before_updates(opt)  # before Pristine notes the hooks that are to stay
        self._pristine, self._checkpoints = Pristine(model, opt), Checkpoints()
        if joining.replaces:
            self._crew = Crew.joined(joining.store, joining.timeout)
            self._attempt(lambda: None, rebuild=True)
        else:
            self._begin(joining)

    def _begin(self, joining: _Joining) -> None:
        """All ranks together, at first."""
        self._crew = Crew.of_all(joining.store, joining.timeout)
        try:
            self.plan = first_plan(self._wanted, self._crew.size)
            parallelize(self.model, self.opt, self.plan, weights=self._options.weights)
            self._pristine.note_hooks()
            self._crew.look()
            self._keep(0, None)
        except BaseException:
            self._crew.comm.close()
            raise

    @property
    def repeats(self) -> bool:
        return self.done <= self._ahead

    # --- steps --------------------

    def steps(self, stop: int) -> Iterator[int]:
        """The numbers of the steps from `done` to stop - 1, and then close(). In a process that takes the
        place of another they begin where the others are.
        """
        while self.done < stop and not self._ended:
            self._between = self._state_if_due()  # the next batch is not drawn yet
            yield self.done
        self.close()

    def step(
        self, batch: Batch, loss_fn: LossFunction | None = None, **options: Unpack[StepOptions]
    ) -> torch.Tensor | None:
        """parallel.step(), and snapshots. Returns the loss; None on a rank that had no part in it."""
        number, scaler = self.done + 1, options.get("scaler")
        self._kept.use_scaler(scaler)
        program, self._between = self._between or self._state_if_due(), None
        asked = hyperparameters(self.opt, scaler, self.model)
        self._log[number] = Call(tree_map(_copied, batch), loss_fn, options, asked, program)
        try:
            loss = self._attempt(lambda: self._advance(number))
        except Exception:
            self._log.pop(number, None)
            raise
        self.done = max(self._position, number)
        return loss

    def keep(self, name: str, thing: Stateful) -> None:
        """thing, with state_dict() and load_state_dict(), is in each snapshot, as it is when steps() gives
        the next number: a scheduler, an average, a data loader. In a process that takes the place of another
        it gets that one's state now: call it before the first step, with the same names on all ranks.

        Raises ValueError for a name that is there already, and for what has not these two methods.
        """
        self._kept.add(name, thing)

    def restart(self, done: int | None = None) -> None:
        """After values were changed by something else than step(), such as parallel.load(): what is there now
        is the state after `done` steps, None: after as many as before. Collective over active ranks, on which
        nothing may fail meanwhile.
        """
        self.done = self._position = self.done if done is None else done
        self._ahead = -1
        self._log.clear()
        self._snapshot(self._kept.state())
        self._writing.wait()
        _meet(parts_of(self.model))

    def close(self) -> None:
        """The end: waits for all ranks, goes on once more where one dies meanwhile, and lets those without a
        part go. Snapshots are no more. Collective.
        """
        if self._is_open:
            self._attempt(self._finish)

    def _finish(self) -> None:
        while not self._ended:
            if not self.active:
                self._hear()
                continue
            self._advance(self.done)  # what is lost if a rank has died meanwhile
            self._writing.wait()
            self._holdings.end()
            _meet(parts_of(self.model))
            self._hear("end" if self._crew.rank == 0 else None)
        self._end()

    def leave(self) -> None:
        """This rank gives up while its process lives on: the others learn so at once, and go on without it.
        Not collective. Call it, for example, after an error that the script catches outside of its loop.
        """
        if self._is_open:
            self._crew.leave_groups(at_once=False)
            self._end()

    def _end(self) -> None:
        self._crew.comm.close()
        self._holdings.join()
        self._is_open, self._holdings = False, Holdings()
        del self._crew

    def _attempt(self, action: Callable[[], T], rebuild: bool = False) -> T:
        """action(), after a recovery for each loss of a rank. rebuild: begin with that."""
        while True:
            try:
                if rebuild:
                    with self._checkpoints.after(self._position + 1, self.leave):
                        self._rebuild(self.recoveries > 0)
                    rebuild = False
                return action()
            except MismatchError:
                raise
            except dist.DistError as error:
                self._lose(error)
                rebuild = True

    def _advance(self, number: int) -> torch.Tensor | None:
        """Takes the steps up to this one. Returns its loss; None where this rank had no part in it."""
        while self._position < number and not self._ended:
            if not self.active:
                self._hear()
                continue
            call = self._log[self._position + 1]
            if self._is_due():
                self._snapshot(call.program or self._kept.state())
                continue
            parts, own = parts_of(self.model), call.hyperparameters
            own = self._followers.agreed(parts, self._position + 1, own, self._kept.objects)
            set_hyperparameters(self.opt, own, call.options.get("scaler"), self.model)
            self._loss = take_step(self.model, self.opt, call.batch, call.loss_fn, **call.options)
            self._position = self._loss_of = self._position + 1
        return self._loss if self._loss_of == number else None

    def _is_due(self) -> bool:
        """Whether the first thing in the call of the next step is a snapshot of the state of now."""
        is_time = self._last is not None and self._position >= self._last + self._options.snapshot_every
        return self.active and is_time and parts_of(self.model).window.is_empty

    def _state_if_due(self) -> ProgramState | None:
        return self._kept.state() if self._is_due() and self._position == self.done else None

    def _hear(self, word: Word | None = None) -> None:
        """A word of rank 0 to all: "grow", "end". Ranks without a part wait here."""
        word = self._crew.tell(word, forever=not self.active)
        if word == "end":
            self._ended = True
        elif self._crew.grow(1):
            self._regroup()

    # --- snapshots --------------------

    def _snapshot(self, program: ProgramState | None) -> None:
        """Begins to write one. When all have met, all have the one before; see [Note: whole snapshots]."""
        parts, number = parts_of(self.model), self._position
        self._writing.wait()
        pieces, changed = self._dealer.pieces()
        first = parts.mesh.world.rank == 0
        flags = torch.tensor([int(changed), self._crew.waiting() if first else 0], device=parts.device)
        comm.all_reduce(flags, parts.mesh.world, dist.ReduceOp.MAX)
        deals, waiting = flags.tolist()
        if deals:
            self._dealer.deal(pieces)
        whole, self._last = self._last or 0, number  # on all ranks
        self._log = {n: call for n, call in self._log.items() if n > whole}
        own = own_of(parts, program)
        self._writing.start(self._holdings.last, number, own, self._dealer.to_write(pieces))
        if not hasattr(self.opt, "register_step_pre_hook"):
            self._writing.wait_written()
        if waiting:
            self._writing.wait()
            _meet(parts_of(self.model))
            self._hear("grow" if self._crew.rank == 0 else None)

    def _keep(self, number: int, program: ProgramState | None) -> None:
        """The ranks of the plan make memory that all of the crew hold, and the snapshot with this number in
        it; then the former memory is let go of. Collective over the crew.
        """
        generation = self._holdings.make(self._crew, self.active)
        if self.active:
            self._dealer, self._last = Dealer(parts_of(self.model)), None
            pieces, _ = self._dealer.pieces()
            self._dealer.deal(pieces)
            own = own_of(parts_of(self.model), program)
            self._writing.start(generation, number, own, self._dealer.to_write(pieces))
            self._writing.wait()
        self._last = number
        self._crew.comm.barrier()
        self._holdings.let_go()

    # --- losses --------------------

    def _lose(self, error: Exception) -> None:
        """Leaves all groups. Raises what says that this rank cannot go on."""
        if not self._is_open or self._ended:
            raise error
        LOG.warning("step %d: %s", self._position + 1, error)
        self.recoveries += 1
        self._crew.interrupt()
        with contextlib.suppress(Exception):
            self._writing.wait()
        self._holdings.join()
        self._crew.leave_groups()
        try:
            self._crew.shrink()
        except AbortedError as left:
            _add(left, ". The others go on without this rank, which has to end")
            raise
        except CommError as failed:
            _add(failed, f". {self._checkpoints.note(self.model)}")
            raise
        self._checkpoints.note(self.model)  # may take long, so the others must not wait for it in shrink()

    def _regroup(self) -> None:
        """The crew has grown: all begin from the last snapshot, which is that of now."""
        self.recoveries += 1
        self._holdings.join()
        self._checkpoints.note(self.model)
        self._crew.leave_groups()
        with self._checkpoints.after(self._position + 1, self.leave):
            self._rebuild(False)

    def _rebuild(self, lost: bool) -> None:
        """From the snapshots to a model under the plan for this crew. Collective over it. lost: a rank is."""
        started, crew = time.perf_counter(), self._crew
        if lost and isinstance(self._wanted, Plan):
            crew.grow_to(self._wanted.world_size, self._options.wait)
        self._checkpoints.last = crew.tell(self._checkpoints.last if crew.rank == 0 else None)
        crew.look()
        self._ahead = max(crew.exchange(self.done))
        source = self._holdings.choose(crew)
        self.plan = checked_plan(self._wanted, crew.size)
        self.active = crew.rank < self.plan.world_size
        crew.make_group(self.plan.world_size)
        self._keep(source.number, self._read(source) if self.active else None)
        gc.collect()  # the former model's buffers, which are in circles
        _say(crew, source.number + 1, self.plan, 1e3 * (time.perf_counter() - started))

    def _read(self, source: Source) -> ProgramState | None:
        """The model anew, with the values of the snapshot. Returns the ProgramState of this rank's place."""
        drawn, before = torch.get_rng_state(), self.model.__dict__.get("_parallel")
        former = before and part_of(before)
        before = before and (before.plan, before.checks)  # the rest is large
        self._pristine.reset()
        parallelize_again(self.model, self.opt, self.plan, self._options.weights)
        self._pristine.note_hooks()
        parts = parts_of(self.model)
        _take_over_answers(parts, before)
        parts.mesh.store = self._crew.group_store  # as long as the model is there, groups can be made
        load_from(parts, self.opt, source)
        set_streams(parts, source)
        torch.set_rng_state(drawn)  # the program goes on with its own numbers
        own = own_at(parts, source)
        if self._joining or source.number > self.done:  # it had no part in the steps meanwhile
            self._followers.follows |= source.number > 0
            self._kept.begin_from(own.program)
        elif former != part_of(parts):
            self._kept.note_other_part()
        self._joining = False
        self._followers.choose(parts)
        self.repeated += max(0, self._position - source.number)
        self._position, self.done = source.number, max(self.done, source.number)
        return own.program


def _say(crew: Crew, step: int, plan: Plan, took: float) -> None:
    """took: in ms."""
    level = logging.WARNING if crew.rank == 0 else logging.INFO
    LOG.log(level, "step %d: %d ranks go on under Plan(%s) after %.0f ms", step, crew.size, plan, took)


def _meet(parts: Parallelized) -> None:
    """Collective over the ranks of the plan."""
    comm.all_reduce(torch.zeros(1, device=parts.device), parts.mesh.world)


def _take_over_answers(parts: Parallelized, before: tuple[Plan, Answers] | None) -> None:
    """What the checks have found of the same model under the same axes stays, if all ranks have it: not where
    one has joined. Collective over all ranks.
    """
    known = before is not None and all(
        (getattr(before[0], a) > 1) == (getattr(parts.plan, a) > 1) for a in AXES
    )
    missing = torch.tensor(float(not known), device=parts.device)
    comm.all_reduce(missing, parts.mesh.world)
    if before is not None and not missing:
        parts.checks.take_over(before[1])


def _add(error: Exception, text: str) -> None:
    error.args = (f"{error}{text}", *error.args[1:])


def _copied(value: Tree) -> Tree:
    """A batch that stays what it is when the caller fills its tensors anew."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
