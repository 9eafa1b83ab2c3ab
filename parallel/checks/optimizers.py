"""Does an optimizer take a number over all parameters? A rank that has some of them would take its own.

    whole     one step over all small tensors     p0 p1 p2 p3        Prodigy, D-Adaptation: a learning rate
    parts     two optimizers, each over some      p0    p2           LAMB of apex, a clip in step(): a norm
                                                     p1    p3
    equal     each parameter is updated by itself: Adam, Muon, LARS, schedule-free ones

A copy of the optimizer (copied.py), of its class and with its hyperparameters, takes STEPS on at least two
small tensors of each group, with as many dims as the parameters have. Their gradients come from where the
parameters are, so that a difference grows, and are of different sizes, so that a clip acts. Attributes that
hold parameters hold, in the parts, tensors that get no gradient, as on a rank that has other ones.

torch's own classes are known: they are not tried. Nothing is sent, so all ranks find the same. An optimizer
that cannot be copied, that raises for such tensors or draws random numbers is not tried.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from pycomm.parallel.checks.copied import copied_optimizer
from pycomm.parallel.ground.answers import Answer, State
from pycomm.parallel.ground.plan import Plan
from pycomm.parallel.models import drawn
from pycomm.parallel.parts import Parallelized
from pycomm.parallel.zero.kinds import kind_of

__all__ = ["note_optimizer", "sees_a_part", "try_optimizer"]

NAME = "optimizer"
ADVICE = (
    "par.verify does not take an optimizer: compare some steps with one process, or use a plan under which "
    "each rank has all parameters"
)
torch_optimizer = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides its own module
STEPS = 12
SIZES = (1.0, 1.0, 1e2, 1e-2, 1e4, 1.0)  # of the gradients, step by step
LARGE, MOST_GROUPS = 5, 16  # elements along a dim; groups that are tried
DIFFERENT = {torch.float64: 1e-7, torch.float32: 1e-3}  # relative, of what a parameter has moved by


class _Found(NamedTuple):
    of: str  # the hyperparameters
    answer: Answer


_found: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Found] = weakref.WeakKeyDictionary()


def sees_a_part(plan: Plan) -> bool:
    """Whether a rank's optimizer has some of the parameters only."""
    divided = bool(kind_of(plan).divided) and plan.dp * plan.ep * plan.ring * plan.ulysses > 1
    return divided or plan.pp * plan.ep > 1


def try_optimizer(opt: torch.optim.Optimizer, plan: Plan) -> Answer | None:
    """None where there is nothing to try. The optimizer and all random numbers stay as they are."""
    known = type(opt).__module__.startswith("torch.optim")
    if known or not sees_a_part(plan):
        return None
    now = repr([vars(opt).get("defaults"), *({**group, "params": ()} for group in opt.param_groups)])
    found = _found.get(opt)
    if found is None or found.of != now:  # a search for a plan asks for each
        _found[opt] = found = _Found(now, _try(opt))
    answer = found.answer
    return answer if answer.state is not State.BROKEN else answer._replace(why=_sentence(opt, plan, answer))


def note_optimizer(parts: Parallelized) -> None:
    """What was found of the optimizer, before the model was changed."""
    found = None if parts.opt is None else _found.get(parts.opt)
    if found is not None and sees_a_part(parts.plan):
        parts.checks.note(NAME, found.answer.state, found.answer.why, parts.mesh.world.rank, ADVICE)


def _sentence(opt: torch.optim.Optimizer, plan: Plan, answer: Answer) -> str:
    return (
        f"Plan({plan}): {type(opt).__name__} computes something from all parameters together (a norm, a "
        f"learning rate), and here each rank's optimizer has some of them only: {answer.why}. It works under "
        "plans where each rank has all parameters whole: dp, ring and ulysses with zero=0, and a single "
        "process. Use such a plan, or an optimizer that updates each parameter by itself; clip by the norm "
        "of all gradients with step(clip=...)"
    )


def _try(opt: torch.optim.Optimizer) -> Answer:
    groups = [group for group in opt.param_groups if group["params"]][:MOST_GROUPS]
    device = next((each.device for group in groups for each in group["params"]), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    why = "it has no parameters"
    for dtype in DIFFERENT if groups else ():
        cuda = [device] if device.type == "cuda" else []
        try:
            with drawn.kept(), torch.random.fork_rng(cuda), _without_hooks_of_all():
                return _compared(_Trial(opt, groups, device, dtype), lambda: drawn.drawn(device))
        except Exception as error:  # of the user's optimizer, which has no such copy or takes no such tensors
            why = f"a copy of {type(opt).__name__} raises {type(error).__name__}: {str(error)[:200]}"
    return Answer(State.NOT_TRIED, why)


def _compared(trial: _Trial, random_state: Callable[[], drawn.Drawn]) -> Answer:
    start = random_state()
    whole = trial.run((trial.places,))
    if not drawn.same(start, random_state()):
        return Answer(State.NOT_TRIED, "it draws random numbers")
    parts = trial.run((trial.places[0::2], trial.places[1::2]))
    for one, other, begin in zip(whole, parts, trial.values, strict=True):
        moved = max(float((one - begin).norm()), float((other - begin).norm()))
        off = float((one - other).norm())
        if not moved < torch.inf and one.isfinite().all() == other.isfinite().all():
            return Answer(State.NOT_TRIED, "it gives no numbers for small tensors")
        if not off <= DIFFERENT[trial.dtype] * moved:
            return Answer(
                State.BROKEN,
                f"on small tensors, {STEPS} steps over all of them and over each half differ by "
                f"{off / moved:.2g} of what a parameter has moved by",
            )
    if all(torch.equal(one, begin) for one, begin in zip(whole, trial.values, strict=True)):
        return Answer(State.NOT_TRIED, f"a copy of {type(trial.opt).__name__} changes no small tensor")
    return Answer(State.HELD)


class _Place(NamedTuple):
    """Of a small tensor."""

    number: int
    group: int


class _Trial:
    """The small tensors, and runs of copies over them."""

    def __init__(
        self,
        opt: torch.optim.Optimizer,
        groups: Sequence[dict[str, Any]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.opt, self.groups, self.dtype = opt, groups, dtype
        generator = torch.Generator().manual_seed(0)
        self.places: list[_Place] = []
        self.values: list[torch.Tensor] = []
        self.drifts: list[torch.Tensor] = []  # of the gradients
        for number, group in enumerate(groups):
            for shape in _shapes(group["params"]):
                at = len(self.values)
                for found in (self.values, self.drifts):
                    drawn_values = torch.randn(shape, generator=generator, dtype=torch.float64)
                    found.append((drawn_values * 10.0 ** (at % 3 - 1)).to(device, dtype))
                self.places.append(_Place(at, number))
        noise = [torch.randn(each.shape, generator=generator, dtype=dtype) for each in self.values * STEPS]
        self.noise = [each.to(device) for each in noise]

    def run(self, parts: Sequence[Sequence[_Place]]) -> list[torch.Tensor]:
        """The values after all steps, of one optimizer for each part."""
        params = [torch.nn.Parameter(value.clone()) for value in self.values]
        copies = [self._copy(part, params, is_whole=len(parts) == 1) for part in parts]
        for copied in copies:  # some want to be told that they train
            if callable(train := getattr(copied, "train", None)):
                train()
        for number in range(STEPS):
            for at, param in enumerate(params):
                noise = self.noise[number * len(params) + at]
                away = param.detach() - self.values[at]
                gradient = self.drifts[at] + away + noise * self.drifts[at].abs() * (at % 4) / 2
                param.grad = gradient * SIZES[number % len(SIZES)]
            for copied in copies:
                copied.step()
        return [param.detach() for param in params]

    def _copy(
        self, part: Sequence[_Place], params: Sequence[torch.nn.Parameter], is_whole: bool
    ) -> torch.optim.Optimizer:
        """is_whole: it stands for one process, whose optimizer may hold parameters elsewhere too."""
        stand_ins: dict[int, torch.Tensor] = {}
        for number, group in enumerate(self.groups):
            own = [place.number for place in self.places if place.group == number]
            for at, param in enumerate(group["params"]):
                small = params[own[at % len(own)]]
                stand_ins[id(param)] = small if is_whole else torch.nn.Parameter(small.detach().clone())
        groups = [
            {
                **copy.deepcopy({key: value for key, value in group.items() if key != "params"}),
                "params": [params[place.number] for place in part if place.group == number],
            }
            for number, group in enumerate(self.groups)
        ]
        return copied_optimizer(self.opt, groups, stand_ins)


def _shapes(params: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Of two small tensors for each number of dims that parameters of a group have, most often one or two."""
    by_dims = {param.dim(): tuple(min(size, LARGE) for size in param.shape) for param in params}
    return [shape for shape in by_dims.values() for _ in range(2)]


@contextlib.contextmanager
def _without_hooks_of_all() -> Iterator[None]:
    """Without those that the user has registered for every optimizer."""
    tables = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    held = [list(table.items()) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, items in zip(tables, held, strict=True):
            table.update(items)
