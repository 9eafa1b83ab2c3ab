"""A loop of the user's own, under plans without a pipeline and with whole sequences:

    out = model(x)          a pass of the plan is opened around the forward: passes.py
    loss = f(out, y)        rows of this data rank, as under torch's DistributedDataParallel
    loss.backward()         gradients of complete buckets are summed meanwhile; then .grad is the mean over
                            the n data ranks, and earlier ones are added: each backward has its own sum
    opt.step()              one all_reduce of who used which parameter, of buffers that were written and of
                            hyperparameters; then the optimizer, on what this rank owns
    opt.zero_grad()         drops them all

What lies in .grad meanwhile: own_gradients.py.

A backward begins, for us, when the first gradient of a parameter arrives, whatever it came through: a part of
the model that was called by itself, a penalty, the loss of another model (a GAN's generator). So no gradient
reaches the optimizer unsummed. What was there before is put aside then, in a hook that runs before autograd
adds to it. Under zero=3 values are gathered from the first gradient of an output on. It ends with a callback
that autograd runs when it is done.

What can go wrong: a rank whose loss does not depend on the model does not wait, and the others wait for it
(as under DistributedDataParallel). A backward that raises leaves half of its gradients: opt.step() is refused
until opt.zero_grad(). A .grad that the user sets (of torch.autograd.grad) has no sum: it must be equal on all
ranks, which the all_reduce of opt.step() says.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves, tree_map

from pycomm.parallel.checks.gradient_hooks import late_hook, problem_of_hooks
from pycomm.parallel.data.gather_rows import gathering
from pycomm.parallel.data.reducer import weak_hook
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.outside_reads import OutsideReads, Read
from pycomm.parallel.ground.same_batch import Call, SameBatch, differ, mark_of, powers
from pycomm.parallel.models.modes import uncompiled
from pycomm.parallel.parts import parts_of
from pycomm.parallel.run.own_gradients import OwnGradients
from pycomm.parallel.run.passes import forward_pass
from pycomm.parallel.run.replicas import compare_replicas
from pycomm.parallel.run.step import compares_now
from pycomm.parallel.run.written_buffers import WrittenBuffers
from pycomm.parallel.zero.optimizer import step_optimizer
from pycomm.parallel.zero.units import Phase

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from pycomm.parallel.given import Tree
    from pycomm.parallel.parts import Parallelized

__all__ = ["OwnLoop", "clip_grad_norm_"]

OWN = "own loop"  # the stage of its passes


class OwnLoop:
    """Of one parallelized model. Making it takes the calls of the model."""

    def __init__(self, parts: Parallelized) -> None:
        self.parts, self.passes = parts, parts.passes
        self.gradients = OwnGradients(parts)
        self.task: int | None = None  # autograd's number of the backward that runs; None: none runs
        self.is_open = False  # this backward has reached a parameter
        self.failed = False  # the last backward raised, and left some gradients
        self.problem: str | None = None  # of a gradient hook, in a backward since zero_grad()
        self.buffers: WrittenBuffers | None = None  # since the first forward after an update
        self.hooks: dict[int, RemovableHandle] = {}  # that open, by the id of a parameter
        self.opens = weak_hook(self._before_gradient)
        plan, self.refusal = parts.plan, None  # what stands against calls of the model
        if plan.pp > 1:
            self.refusal = "a stage has a part of the model's blocks"
        elif plan.ring * plan.ulysses > 1:
            self.refusal = "each rank has a part of the positions"
        self.passes.drop = self._drop
        self.passes.outside = OutsideReads(_reads_of(parts))
        for reducer in parts.reducers.values():
            reducer.stray = self._stray
        if parts.units is not None:
            parts.units.begins = self._begin
        _take_calls(parts.model, self)

    # Forward -------------------------------------------------------------------------

    def call(self, forward: Callable[..., Tree], args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> Tree:
        """A call of the model that no pass of the plan has begun."""
        parts, graph = self.parts, torch.is_grad_enabled()
        if self.refusal is not None:
            raise ValueError(
                f"the model is called by itself under Plan({parts.plan}), where {self.refusal}: train "
                "with parallel.step(model, opt, batch, loss_fn), and ask with parallel.evaluate or "
                "parallel.predict"
            )
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "the model is called in a backward (torch.utils.checkpoint around all of it, or a hook): let "
                "Plan(checkpoint=True) recompute its blocks"
            )
        self._notice_failure()
        self._compare((args, kwargs))
        if graph:
            parts.averages.refuse_applied("forward")
            self._prepare()
            self.passes.outside.is_used = True
        phase = Phase.FORWARD if graph else Phase.EVALUATE
        refused = "gather_rows: a loop of your own has the rows of its rank alone. Use parallel.step"
        with (
            parts.writes.inside("forward"),
            forward_pass(parts, phase, OWN, 0),
            gathering(parts.mesh.data, refused if self.gradients.ranks > 1 else None),
            self._balanced(),
        ):
            out = self._run(forward, _cast(args, parts.compute_dtype), _cast(kwargs, parts.compute_dtype))
        if parts.compute_dtype is not None:
            out = tree_map(lambda leaf: _precise(leaf, parts.compute_dtype), out)
        if graph:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(self._before_output)
        return out

    def _compare(self, inputs: Tree) -> None:
        """The ranks of tp work on the same rows. Collective over tp."""
        tp = self.parts.mesh.group("tp")
        if tp.size == 1:
            return
        numbers = torch.tensor(powers(mark_of(inputs)), dtype=torch.float64, device=self.parts.device)
        comm.all_reduce(numbers, tp)
        total, squares = numbers.tolist()
        if differ(total, squares, tp.size):
            raise ValueError(
                f"[rank {self.parts.mesh.world.rank}] the model is called with other inputs than on other "
                f"ranks of tp, with which this rank works on the same rows under Plan({self.parts.plan}). "
                "Give them the same: parallel.sampler(model, dataset) deals rows over the data ranks alone"
            )

    def _run(self, forward: Callable[..., Tree], args: Tree, kwargs: Tree) -> Tree:
        parts = self.parts
        if parts.split is not None:
            parts.split.note_inputs((args, kwargs))
        if parts.stage_model is None:
            return forward(*args, **kwargs)
        return parts.stage_model.run(0, lambda: forward(*args, **kwargs))

    @contextlib.contextmanager
    def _balanced(self) -> Iterator[None]:
        """The load-balance loss of parallel.MoE is over all data ranks; its gradients are divided by their
        number with the others.
        """
        before = [moe.aux_scale for moe in self.parts.moes]
        for moe in self.parts.moes:
            moe.aux_scale *= self.gradients.ranks
        try:
            yield
        finally:
            for moe, scale in zip(self.parts.moes, before, strict=True):
                moe.aux_scale = scale

    def _prepare(self) -> None:
        """Before a forward whose gradients are recorded."""
        late = late_hook(self.parts)
        if late is not None:
            raise ValueError(f"[rank {self.parts.mesh.world.rank}] forward: {late}")
        self._look()
        if self.buffers is None and self.parts.model.training:
            self.buffers = WrittenBuffers(self.parts)
        self._hook()

    def _look(self) -> None:
        """requires_grad_() of the user's is noticed before each forward and backward."""
        self.parts.trained.look(not self.passes.own)

    def _hook(self) -> None:
        """What earlier backwards have left must be put aside before autograd adds to it."""
        for reducer in self.parts.reducers.values():
            for param in reducer.params:
                handle = self.hooks.get(id(param))  # a check that ran aside may have put hooks back
                is_hooked = handle is not None and handle.id in (param._backward_hooks or ())
                if not is_hooked and param.requires_grad:
                    self.hooks[id(param)] = param.register_hook(self.opens)

    # Backward ------------------------------------------------------------------------

    def _before_output(self, grad: torch.Tensor) -> None:
        """A gradient reaches an output of the model."""
        if not self.passes.in_step:
            self._begin()

    def _before_gradient(self, grad: torch.Tensor) -> None:
        """A gradient reaches a parameter; hooks of tensors run before accumulation."""
        if not self.passes.in_step and not self.is_open:
            self._open()

    def _begin(self) -> None:
        self.passes.outside.allow()
        if self.task is None:
            self.task = torch._C._current_graph_task_id()
            Variable._execution_engine.queue_callback(self._end)
            if self.parts.units is not None:
                self.parts.units.begin(Phase.BACKWARD, OWN)

    def _stray(self) -> None:
        """A gradient has reached a parameter that has no hook: before the model was called by the user."""
        if self.passes.in_step or self.is_open:
            return
        if self.passes.left:
            raise ValueError(
                "backward: gradients of the last parallel.step are still there. Call opt.zero_grad() before"
            )
        self._open(is_first=True)

    def _open(self, is_first: bool = False) -> None:
        """The first gradient of a parameter in a backward. is_first: no backward has left any yet."""
        if self.refusal is not None or not self.parts.window.is_empty:
            why = "gradients of parallel.step(update=False) wait" if self.refusal is None else self.refusal
            raise ValueError(f"backward under Plan({self.parts.plan}): {why}. Train with parallel.step alone")
        if torch.is_grad_enabled():
            raise ValueError(
                "backward(create_graph=True): the gradients of parameters are summed over ranks, and the sum "
                "has no derivative. Take the gradient that is to be differentiated with respect to inputs or "
                "activations: torch.autograd.grad(..., create_graph=True)"
            )
        self._begin()
        self.is_open = True
        if self.passes.left:
            self._clear(set_to_none=True)
        self._look()
        if not is_first:
            self.gradients.put_aside()
        for reducer in self.parts.reducers.values():
            reducer.begin_microbatch(True)

    def _end(self) -> None:
        """After a backward."""
        self.task = None
        if self.parts.units is not None:
            self.parts.units.end()
        if not self.is_open:
            return
        for reducer in self.parts.reducers.values():
            reducer.finish_microbatch(True)
            reducer.wait()
        if self.parts.trained.has_new:
            with self.parts.writes.inside("backward"):
                self.parts.trained.refuse(self.parts.mesh.world.rank)  # first: the ranks may have unlike ones
                self.parts.trained.take_in(True)
        self.gradients.take_mean()
        self.problem = self.problem or problem_of_hooks(self.parts, False)
        self.is_open, self.passes.own = False, True
        self._hook()
        self.passes.outside.refuse()
        self.gradients.show()

    def _notice_failure(self) -> None:
        """A backward that raised has not called _end()."""
        if self.task is None or torch._C._current_graph_task_id() != -1:
            return
        self.task = None
        self.failed = self.is_open
        self.is_open = False
        for reducer in self.parts.reducers.values():
            reducer.missing = {}
            for bucket in reducer.buckets:
                bucket.wait()
        if self.parts.units is not None:
            self.parts.units.end()
            self.parts.units.forget_orders()

    # The optimizer's calls -----------------------------------------------------------

    def zero_grad(self, set_to_none: bool) -> None:
        self._notice_failure()
        self.parts.window.discard()
        self._clear(set_to_none or self.failed)
        self.failed = False

    def _drop(self) -> None:
        self._notice_failure()
        if self.passes.own or self.failed:
            self._clear(set_to_none=True)
            self.failed = False

    def _clear(self, set_to_none: bool) -> None:
        self.gradients.clear(set_to_none)
        self.passes.left, self.problem = False, None
        self.passes.own &= not set_to_none

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """opt.step(). Collective over all ranks where gradients wait."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.look()
        with self.parts.writes.inside("opt.step"), self.parts.last_words.told(), torch.no_grad():
            self._step()
        return loss

    def look(self) -> None:
        """Raises ValueError where a backward has left only a part of its gradients."""
        self._notice_failure()
        if self.failed:
            raise ValueError(
                "opt.step: the last backward raised and left some of its gradients. Call opt.zero_grad() and "
                "compute them again"
            )
        if self.refusal is not None:
            raise ValueError(
                f"opt.step: this optimizer belongs to a model under a plan, Plan({self.parts.plan}), where "
                f"{self.refusal}. Call parallel.step(model, opt, batch, loss_fn), which does all of it"
            )
        if self.passes.left or not self.parts.window.is_empty:
            raise ValueError(
                "opt.step: this optimizer belongs to a model under a plan, and there are no gradients but "
                "those of parallel.step, which takes the optimizer's step itself (with update=True). Take "
                "out the call, or compute gradients with loss.backward() after opt.zero_grad()"
            )

    def _step(self) -> None:
        parts = self.parts
        if compares_now(parts):
            compare_replicas(parts)
        used = self.gradients.used()
        buffers = self.buffers if self.buffers is not None else WrittenBuffers(parts)
        self._look()
        call = Call(True, 1.0, parts.hyperparameters, parts.trained, parts.writes, self.problem)
        same = SameBatch(None, parts.mesh.world, parts.device, call)
        pieces = [used, self.gradients.numbers(), buffers.numbers(), same.numbers]
        numbers = torch.cat(pieces)
        comm.all_reduce(numbers, parts.mesh.world)
        used, marks, written, alike = numbers.split([len(piece) for piece in pieces])
        same.check(alike)
        buffers.check(written)
        self.gradients.look(*marks.tolist())
        names = zip(parts.original.names, used.tolist(), strict=True)
        self.gradients.unshow()
        self.passes.outside.allow()
        assert parts.opt is not None
        step_optimizer(parts.opt, parts.all_shards, None, {name for name, users in names if not users})
        self.gradients.show()
        self.buffers = None
        self.passes.outside.refuse()
        parts.hyperparameters.note()
        parts.last_step.updates += 1


def _reads_of(parts: Parallelized) -> list[Read]:
    """The parameters that must not be read outside of a forward."""
    if parts.units is not None:
        return [
            Read(info.param, info.name, "which zero=3 has sharded", info.numel or None)
            for info in parts.infos
        ]
    if parts.reads is None:
        return []
    notes = parts.reads.notes
    return [Read(p, notes[id(p)].name, notes[id(p)].why, None) for p in parts.reads.guarded]


def _cast(given: Tree, dtype: torch.dtype | None) -> Tree:
    """Floating inputs in the dtype in which the model computes, as parallel.step gives them."""
    if dtype is None:
        return given
    return tree_map(lambda leaf: leaf.to(dtype) if _is_floating(leaf) else leaf, given)


def _is_floating(leaf: Tree) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _precise(leaf: Tree, dtype: torch.dtype | None) -> Tree:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == dtype else leaf


def _take_calls(model: nn.Module, own: OwnLoop) -> None:
    """Calls of the model that no pass has begun go to `own`. Not its forward: what looks at that sees the
    user's.
    """
    known = "_own_loop" in model.__dict__
    model.__dict__["_own_loop"] = own
    if known:  # it was parallelized before
        return
    name = "_call_impl" if model._compiled_call_impl is None else "_compiled_call_impl"
    forward = getattr(model, name)
    outside = uncompiled(functools.partial(_call, model, forward))

    def call(*args: Tree, **kwargs: Tree) -> Tree:
        running = model.__dict__["_own_loop"].passes.running
        return forward(*args, **kwargs) if running else outside(args, kwargs)

    model.__dict__[name] = call


def _call(model: nn.Module, forward: Callable[..., Tree], args: Tree, kwargs: Tree) -> Tree:
    own: OwnLoop = model.__dict__["_own_loop"]
    return own.call(forward, args, kwargs)


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """In a loop of your own, between loss.backward() and opt.step(): scales the gradients so that the L2 norm
    of the whole model's gradient is at most max_norm, as torch.nn.utils.clip_grad_norm_ does in one process,
    under every plan without a pipeline and with whole sequences. Collective over all ranks.

    Returns the norm before, a float64 tensor without dimensions. Raises ValueError for a negative max_norm.
    """
    parts_of(model)  # raises for a model that is none of ours
    own: OwnLoop = model.__dict__["_own_loop"]
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_(max_norm={max_norm!r}): the largest norm, 0 or more")
    with own.parts.writes.inside("clip_grad_norm_"), torch.no_grad():
        own.look()
        norm = own.gradients.clip(max_norm)
    own.parts.last_step.note(norm)
    return norm
