"""What belongs to the program of a rank and not to the plan: its generators of random numbers, what it keeps
(run.keep), the hyperparameters that it gives to the optimizer, which parameters it trains, its GradScaler.

    caller       run.step(b12)  scheduler.step()          next(loader)  run.step(b13)  scheduler.step()
                                                 ^ steps() gives 12     ^
    snapshot 12                   kept objects, generators              values: the first thing in the call

So a snapshot has what the caller has done after its step, and nothing of the next one. Who begins from it
goes on with the next step. (Without steps() all is as in the call, when the batch is drawn already.)

    survivors       keep what they have: their caller is in a later step, and repeats none of its own work
    a replacement   gets generators and kept objects of the rank whose place it takes, when it gives them to
                    run.keep(): before its first batch is drawn
    a rank that had no part in the steps meanwhile: the same

[Note: followers] These two have no past of their own, so their schedulers may begin anew. Once there is one
of them, the optimizers of all ranks take the hyperparameters of a leader: the lowest rank that has been there
all the time, or a follower whose own have never been others. One exchange of them for each step, small.

[Note: scaler] The state of a GradScaler (scale, growth tracker, factors) is handled as a hyperparameter. A
call records the state that the scaler has when the caller asks for the step. Before each try of the step, the
first or a repetition, this state is loaded into the scaler. So a repeated step skips the optimizer exactly if
the first try did. A replacement has a new scaler; it loads the state in the snapshot before its first step.

[Note: requires_grad] The same holds for what requires_grad_() has frozen or unfrozen since parallelize(), and
for which modules are in eval mode: a step is repeated in the modes in which it was asked for.

A rank that has another part of the model after a loss (of tp, pp, ep, ring or ulysses) keeps what it has. A
scheduler is right so; an average of parameters is that of the former part, and a WARNING says so.
"""

from __future__ import annotations

import io
import logging
import random
import sys
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypedDict, TypeVar, cast

import torch
from torch.utils._pytree import tree_leaves

from pycomm.parallel.checkpoint.agree import exchange
from pycomm.parallel.parts import Parallelized, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pycomm.parallel.checks.choice import Count
    from pycomm.parallel.given import Batch, LossFunction, Tree

__all__ = [
    "Call",
    "Followers",
    "Kept",
    "ProgramState",
    "Stateful",
    "StepOptions",
    "hyperparameters",
    "set_hyperparameters",
]

LOG = logging.getLogger("pycomm.parallel")
# By parameter group; then which modules are in training mode and which parameters are trained, by name, both
# empty where that is not known; then the state of a GradScaler, empty without an enabled one.
Hyperparameters: TypeAlias = "list[dict[str, Setting]]"
Setting: TypeAlias = "float | str | torch.Tensor | tuple[float, ...] | None"
T = TypeVar("T")


class Stateful(Protocol):
    """What run.keep() takes."""

    def state_dict(self) -> Tree: ...

    def load_state_dict(self, state: Tree, /) -> object: ...


class Generators(NamedTuple):
    """Their states."""

    on_cpu: torch.Tensor
    on_device: torch.Tensor | None  # torch's current one; None: it was not used
    python: tuple[object, ...]  # of random
    numpy: dict[str, object] | tuple[object, ...] | None  # None: it was not used


class StepOptions(TypedDict, total=False):
    """What step() takes beside a batch and a loss."""

    microbatches: int
    clip: float | None
    count: Count | None
    sharded: bool
    update: bool
    scaler: torch.amp.GradScaler | None


class ProgramState(NamedTuple):
    """Between two steps."""

    generators: Generators
    hyperparameters: Hyperparameters
    kept: dict[str, bytes]  # what state_dict() gave, pickled


class Call(NamedTuple):
    """A step as it was asked for."""

    batch: Batch
    loss_fn: LossFunction | None
    options: StepOptions
    hyperparameters: Hyperparameters
    program: ProgramState | None  # where a snapshot of the step before is due


class Kept:
    """The objects that a program keeps in snapshots, by name. opt: the optimizer, whose hyperparameters a
    scheduler sets when it is made, and not when it is loaded.
    """

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt = opt
        self.scaler: torch.amp.GradScaler | None = None  # of the last step
        self.objects: dict[str, Stateful] = {}
        self._arrived: dict[str, bytes] = {}  # in the snapshot from which this process has begun
        self._hyperparameters: Hyperparameters = []  # the same
        self._scaler_state: dict[str, Setting] = {}  # the same, until a step has a scaler

    def add(self, name: str, thing: Stateful) -> None:
        if name in self.objects:
            raise ValueError(f"run.keep({name!r}): there is one of this name already ({_kind(name, self)})")
        if not all(callable(getattr(thing, each, None)) for each in ("state_dict", "load_state_dict")):
            raise ValueError(
                f"run.keep({name!r}, {type(thing).__name__}): it needs state_dict() and load_state_dict()"
            )
        if name in self._arrived:
            thing.load_state_dict(_unpickled(self._arrived.pop(name)))
            set_hyperparameters(self.opt, self._hyperparameters)
        self.objects[name] = thing

    def use_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """The caller asks for a step with this scaler, or None."""
        self.scaler = scaler
        if scaler is not None and self._scaler_state and hyperparameters(self.opt, scaler)[-1]:
            scaler.load_state_dict(self._scaler_state)
            self._scaler_state = {}

    def state(self) -> ProgramState:
        kept = {name: _pickled(thing.state_dict()) for name, thing in self.objects.items()}
        return ProgramState(_generators(), hyperparameters(self.opt, self.scaler), kept)

    def begin_from(self, state: ProgramState | None) -> None:
        """All is as in the snapshot, as for a process that has just come. None: that of the beginning."""
        if state is None:
            return
        _set_generators(state.generators)
        self._arrived, self._hyperparameters = dict(state.kept), state.hyperparameters
        self._scaler_state = state.hyperparameters[-1]
        for name in self.objects.keys() & self._arrived.keys():
            self.objects[name].load_state_dict(_unpickled(self._arrived.pop(name)))
        set_hyperparameters(self.opt, state.hyperparameters)

    def note_other_part(self) -> None:
        """This rank has another part of the model than before."""
        leaves = {name: tree_leaves(thing.state_dict()) for name, thing in self.objects.items()}
        found = [
            name
            for name, values in leaves.items()
            if any(isinstance(each, torch.Tensor) and each.numel() > 1 for each in values)
        ]
        if found:
            LOG.warning(
                "this rank has another part of the model now: the tensors in %s, which it keeps, are still "
                "what they were. If they belong to parameters (an average), make them anew",
                ", ".join(map(repr, found)),
            )


class _Difference(NamedTuple):
    """Words for a warning."""

    owner: str
    mine: str
    leader: int
    theirs: str


class Followers:
    """See [Note: followers]. leader: rank of the plan whose hyperparameters count; None: everybody's own."""

    def __init__(self) -> None:
        self.leader: int | None = None
        self.follows, self.strays = False, False

    def choose(self, parts: Parallelized) -> None:
        """After a recovery. Collective over the ranks of the plan. RuntimeError: no rank knows."""
        told = exchange(parts, (self.follows, self.strays))
        followers = [rank for rank, (follows, _) in enumerate(told) if follows]
        leaders = [rank for rank in range(len(told)) if rank not in followers]
        leaders += [rank for rank in followers if not told[rank][1]]
        if not leaders:
            raise RuntimeError(
                "no rank is left that has the hyperparameters of this training: those of all that took the "
                'place of others were different. Give run.keep("scheduler", scheduler) to all'
            )
        self.leader = leaders[0] if followers else None

    def agreed(
        self, parts: Parallelized, number: int, own: Hyperparameters, names: Iterable[str]
    ) -> Hyperparameters:
        """The hyperparameters of a step. names: of what this rank keeps. Collective over the ranks of the
        plan. Raises ValueError on all where these are others.
        """
        if self.leader is None:
            return own
        rank = parts.mesh.world.rank
        told = exchange(parts, (sorted(names), own if rank == self.leader else None))
        right = told[self.leader][0]
        for other, (found, _) in enumerate(told):
            if found != right:
                raise ValueError(
                    f"[rank {rank}] step {number}: rank {self.leader} keeps {right} and rank {other} keeps "
                    f"{found}. A process that takes the place of another must call run.keep() for the same "
                    "names before its first step"
                )
        values = told[self.leader][1] or own  # the leader has told them
        if not self.strays and not _same(own, values):
            self.strays = True
            LOG.warning(
                "step %d: this rank came later, and its %s has %s, where rank %d has %s. Those are "
                "used. A scheduler that counts steps begins anew in a replacement: give it to "
                'run.keep("scheduler", scheduler)',
                *(number, *_first_difference(own, values, self.leader)),
            )
        return values


def hyperparameters(
    opt: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
    model: torch.nn.Module | None = None,
) -> Hyperparameters:
    """Copies. scaler: as step() was given it, right or not. model: of which it is known what is trained."""
    parts: Parallelized | None = None if model is None else model.__dict__.get("_parallel")
    groups: Hyperparameters = [
        {key: _copied(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in opt.param_groups
    ]
    trained: dict[str, Setting] = {} if parts is None else {**parts.trained.now()}
    named = () if model is None else model.named_modules()
    modes: dict[str, Setting] = {name: module.training for name, module in named}
    state = scaler.state_dict() if isinstance(scaler, torch.amp.GradScaler) else {}
    return [*groups, modes, trained, state]


def set_hyperparameters(
    opt: torch.optim.Optimizer,
    values: Hyperparameters,
    scaler: torch.amp.GradScaler | None = None,
    model: torch.nn.Module | None = None,
) -> None:
    """scaler: gets its state, if `values` has one. model: its parameters are frozen, or not, and its modules
    in training or eval mode, as they were.
    """
    *groups, modes, trained, state = values
    if trained and model is not None:
        parts_of(model).trained.set({name: bool(flag) for name, flag in trained.items()})
    for name, module in () if model is None else model.named_modules():
        module.training = bool(modes.get(name, module.training))
    if state and isinstance(scaler, torch.amp.GradScaler):
        scaler.load_state_dict(state)
    for group, those in zip(opt.param_groups, groups, strict=True):
        for key, value in those.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def _copied(value: T) -> T:
    return cast(T, value.detach().clone()) if isinstance(value, torch.Tensor) else value


def _same(one: Hyperparameters, other: Hyperparameters) -> bool:
    return not any(_differing(*pair) for pair in zip(one, other, strict=True))


def _differing(one: Mapping[str, Setting], other: Mapping[str, Setting]) -> list[str]:
    """The keys of which both have another value."""
    return [key for key in one if key in other and not _equal(one[key], other[key])]


def _equal(one: Setting, other: Setting) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        one, other = (torch.as_tensor(each).cpu() for each in (one, other))
        return one.shape == other.shape and bool((one == other).all())
    return one == other


def _first_difference(own: Hyperparameters, right: Hyperparameters, leader: int) -> _Difference:
    for mine, theirs in zip(own, right, strict=True):
        for key in _differing(mine, theirs):
            others = {-1: ("GradScaler", key), -2: ("model", f"requires_grad of {key!r}")}
            others[-3] = ("model", f"training of {key!r}")
            place = next((at for at in others if mine is own[at]), None)
            owner, what = ("optimizer", key) if place is None else others[place]
            return _Difference(owner, f"{what}={mine[key]}", leader, f"{what}={theirs[key]}")
    return _Difference("optimizer", "others", leader, "its own")


def _kind(name: str, kept: Kept) -> str:
    return type(kept.objects[name]).__name__


def _pickled(value: Tree) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def _unpickled(data: bytes) -> Tree:
    return torch.load(io.BytesIO(data), weights_only=False)


def _generators() -> Generators:
    numpy = sys.modules.get("numpy")
    return Generators(
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
        random.getstate(),
        numpy.random.get_state() if numpy is not None else None,
    )


def _set_generators(states: Generators) -> None:
    on_cpu, on_device, python, numpy = states
    torch.set_rng_state(on_cpu)
    if on_device is not None:
        torch.cuda.set_rng_state(on_device)
    random.setstate(python)
    if numpy is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(numpy)
