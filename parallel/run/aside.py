"""A run of a few rows aside from the training, through the plan's own passes, which leaves no trace: what
modules hold (checks/kept.py), what their code writes beside itself, random numbers.

The model runs in its mode, without gradients. BatchNorms take their running averages, or are passed over, and
parallel.MoE has no balance: they compute over the rows of all data ranks. Random numbers are the same in each
run: those that the next pass will draw, and others in a repetition.

Through the stages of a pipeline:

    all ranks of pp    one all_reduce: whether each stage knows what it will be handed for such rows
    stage by stage     a number (whether the stages before have run), then what they hand on

The model may raise for such rows, in one stage: those behind it are told and raise, too, those before it have
gone on. So nobody waits for what does not come. Without a pipeline the model is called, and nothing is sent.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from pycomm.parallel.checks.agree import Elsewhere
from pycomm.parallel.checks.kept import kept
from pycomm.parallel.checks.runs import Ran
from pycomm.parallel.data.gather_rows import gathering
from pycomm.parallel.expert import MoE
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.batch import Microbatch
from pycomm.parallel.models import drawn
from pycomm.parallel.models.modes import eager
from pycomm.parallel.models.shared_state import SharedState
from pycomm.parallel.parts import Parallelized
from pycomm.parallel.run.passes import (
    Handed,
    Tensors,
    agree,
    find_input,
    forward_pass,
    handed_on,
    run_stage,
    shape_of_input,
)
from pycomm.parallel.zero.units import Phase

if TYPE_CHECKING:
    from pycomm.parallel.checks.measures import Measure
    from pycomm.parallel.given import Tree
    from pycomm.parallel.run.router_loss import Loss

__all__ = ["Aside"]

T = TypeVar("T")
_FOREIGN = {"c10d", "_c10d_functional"}  # where torch has its collectives


class Aside:
    """Runs (checks/runs.py) of a Parallelized. losses: that `take` calls; their state is kept, too."""

    def __init__(self, parts: Parallelized, *losses: Loss | Measure | None) -> None:
        self.parts, self.losses = parts, losses
        self.shared: SharedState | None = None

    def __call__(
        self,
        inputs: Tree,
        take: Callable[[Tree], object],
        number: int,
        failed: bool = False,
        in_eval: bool = False,
        graph: bool = False,
    ) -> Ran:
        """take: of the model's output, inside of the pass of the last stage. number: random numbers to pass
        over; the run is watched, if there are some. failed: the run before has raised here, so this one only
        tells the other stages. in_eval: all modules are in eval mode. graph: gradients are recorded.
        Collective where forwards are, and over pp.
        """
        parts, watch = self.parts, bool(number)
        if failed:
            _some_stage(parts, True)
            return Ran(error=Elsewhere(), all_know=True)
        self.shared = self.shared or SharedState(parts.model.modules())
        seen = _Seen(parts, take, number, watch)
        try:
            with (
                _kept_stages(parts),
                self.shared.kept(),
                kept(parts.model, *self.losses),
                parts.streams.kept(),
                parts.streams.recomputation(),
                drawn.kept(),
                eager(),
                gathering(parts.mesh.data, is_check=True),
                torch.set_grad_enabled(graph),
            ):
                _stand_aside(parts.model, in_eval)
                _run_stages(parts, Microbatch(inputs, None), seen.around)
        except dist.DistError:
            raise
        except Exception as error:  # of the model, or of a loss, which does not take such rows
            if not isinstance(error, Elsewhere):
                parts.last_words.leave(error)  # for who waits for this rank; cleared by agreed()
            if parts.units is not None:
                parts.units.forget_orders()
            return Ran(error=error, all_know=parts.plan.pp == 1 or getattr(error, "all_know", False))
        return seen.ran()


class _Seen:
    """What is noted around the forwards of this rank's stages."""

    def __init__(self, parts: Parallelized, take: Callable[[Tree], object], number: int, watch: bool) -> None:
        self.parts, self.take, self.number, self.watches = parts, take, number, watch
        self.result: object = None
        self.before: list[torch.Tensor | tuple[object, ...]] = []  # see drawn.drawn()
        self.after: list[torch.Tensor | tuple[object, ...]] = []
        self.given: list[Tree] = []
        self.sends, self.work, self.loss_draws = False, 0, False

    def around(self, forward: Callable[[], Tree], is_last: bool) -> Tree:
        device, watch = self.parts.device, _Watch() if self.watches else None
        with comm.count_traffic() as own, watch or contextlib.nullcontext():
            drawn.pass_over(self.number, device)
            self.before += drawn.drawn(device)
            output = forward()
        if watch is not None:
            self.sends |= watch.calls > own.calls()
            self.work = hash((self.work, watch.work))
        self.given.append(output)
        state = drawn.drawn(device)
        if is_last:
            self.result = self.take(output)
        self.after += drawn.drawn(device)
        self.loss_draws = not drawn.same(state, drawn.drawn(device))
        return output

    def ran(self) -> Ran:
        draws = not drawn.same(self.before, self.after)
        return Ran(
            self.result,
            None,
            tuple(self.after),
            draws,
            self.sends,
            self.loss_draws,
            tuple(self.given),
            self.work,
        )


class _Watch(TorchDispatchMode):
    """Counts what is sent through torch, and marks the operations with the shapes they have."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.work = 0, 0

    def __torch_dispatch__(
        self,
        func: Callable[..., T],
        types: Sequence[type[torch.Tensor]],
        args: tuple[Tree, ...] = (),
        kwargs: dict[str, Tree] | None = None,
    ) -> T:
        self.calls += getattr(func, "namespace", "") in _FOREIGN and "recv" not in str(func)  # as comm counts
        shapes = tuple(tuple(each.shape) for each in args if isinstance(each, torch.Tensor))
        self.work = hash((self.work, str(func), shapes))
        return func(*args, **(kwargs or {}))


def _stand_aside(model: torch.nn.Module, in_eval: bool) -> None:
    """No statistics, no balance over ranks."""
    for module in model.modules():
        if in_eval or isinstance(module, (_BatchNorm, MoE)):
            module.training = False
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            vars(module)["forward"] = _passed_over


def _passed_over(input: torch.Tensor) -> torch.Tensor:
    return input


# Stages ------------------------------------------------------------------------------


def _run_stages(
    parts: Parallelized, microbatch: Microbatch, around: Callable[[Callable[[], Tree], bool], Tree]
) -> None:
    """The forwards of this rank's stages. around: (forward, whether it gives the model's output) -> what it
    gives, called inside of the pass of each stage. Raises what the model raises. Collective where forwards
    are, and over pp.
    """
    if parts.stage_model is None:
        with forward_pass(parts, Phase.EVALUATE, ("rows", 0), 0):
            around(functools.partial(microbatch.call, parts.model), True)
        return
    if parts.plan.pp == 1:
        with forward_pass(parts, Phase.EVALUATE, ("rows", 0), 0):
            around(functools.partial(run_stage, parts, 0, microbatch), True)
        return
    likes = _likes(parts, microbatch)
    stages, pp = parts.stages, parts.mesh.group("pp")
    handed: Tensors | None = None
    error: Exception | None = None
    for stage in stages.mine:
        if stage > 0 and stage - 1 not in stages.mine:
            handed = _receive(likes[stage], stages.placement[stage - 1], pp, parts.device)
            error = error or (Elsewhere() if handed is None else None)
        if error is None:
            try:
                with forward_pass(parts, Phase.EVALUATE, ("rows", stage), 0):
                    run = functools.partial(run_stage, parts, stage, microbatch, handed)
                    handed = around(run, stage == stages.last)
                    handed = handed if stage == stages.last else handed_on(parts, handed)
            except dist.DistError:
                raise
            except Exception as raised:  # of the model, which does not take such rows
                error = raised
        if stage < stages.last and stage + 1 not in stages.mine:
            _send(None if error else handed, stages.placement[stage + 1], pp, parts.device)
    if error is not None:
        raise error


def _likes(parts: Parallelized, microbatch: Microbatch) -> dict[int, list[Handed]]:
    """{stage of this rank: what it is handed}. Raises on all ranks alike."""
    mine = [stage for stage in parts.stages.mine if stage > 0]
    try:
        for stage in mine:
            find_input(parts, stage, microbatch)
        fails = False
    except dist.DistError:
        raise
    except Exception:  # of the model
        fails = True
    if _some_stage(parts, fails):
        raise Elsewhere(all_know=True)
    agree(parts, [microbatch])
    return {stage: shape_of_input(parts, stage, microbatch) for stage in mine}


def _some_stage(parts: Parallelized, flag: bool) -> bool:
    """Whether it is true on a rank of pp. Collective over these."""
    told = torch.tensor([flag], dtype=torch.float64, device=parts.device)
    comm.all_reduce(told, parts.mesh.group("pp"), dist.ReduceOp.MAX)
    return bool(told)


def _receive(likes: Sequence[Handed], src: int, pp: comm.Group, device: torch.device) -> Tensors | None:
    """The tensors, or None where the stage before has none."""
    runs = torch.empty(1, device=device)
    comm.irecv(runs, src, pp, 0).wait()
    if not runs:
        return None
    tensors = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in likes)
    for work in [comm.irecv(tensor, src, pp, 1 + number) for number, tensor in enumerate(tensors)]:
        work.wait()
    return tensors


def _send(tensors: Sequence[torch.Tensor] | None, dst: int, pp: comm.Group, device: torch.device) -> None:
    sent = [torch.full((1,), float(tensors is not None), device=device)]
    sent += [tensor.contiguous() for tensor in tensors or ()]
    for work in [comm.isend(tensor, dst, pp, number) for number, tensor in enumerate(sent)]:
        work.wait()


@contextlib.contextmanager
def _kept_stages(parts: Parallelized) -> Iterator[None]:
    """What stages note of each other in their passes is afterwards as it was before."""
    if parts.stage_model is None:
        yield
        return
    with parts.stage_model.assumptions.kept():
        yield
