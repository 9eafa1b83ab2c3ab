"""The user's optimizer over what this rank owns: its parameters are replaced once, its steps are taken here,
also the steps of the user's own loop (run/own_loop.py).

Under precision="bf16" the sum of gradients is in bf16 and the optimizer steps in fp32. torch's element-wise
optimizers get fp32 gradients of one bucket at a time, all others, and those with hooks of the user, of all
buckets at once: they may look at any.

A shard of a parameter is enough for optimizers that treat each element by itself. Others (Muon, Adafactor,
anything unknown) get whole parameters: the bucket is then cut at parameter boundaries (FlatSpec, whole).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from pycomm import trace

if TYPE_CHECKING:
    from pycomm.parallel.zero.shards import Shard, Shards

__all__ = [
    "Owner",
    "check_fresh",
    "guard",
    "is_elementwise",
    "is_stepping",
    "replace_parameters",
    "step_optimizer",
]

ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"),
)


P = ParamSpec("P")
ResultT = TypeVar("ResultT")


def is_elementwise(opt: torch.optim.Optimizer) -> bool:
    """Whether the update of an element depends on nothing but that element's gradients."""
    return any(type(opt) is getattr(torch.optim, name) for name in ELEMENTWISE)


def check_fresh(opt: torch.optim.Optimizer) -> None:
    """Raises ValueError when the optimizer has state of steps: its tensors have the shapes of whole
    parameters.

    Adagrad makes its state when it is made.
    """
    if opt.state and not (
        type(opt) is torch.optim.Adagrad and not any(state["step"] for state in opt.state.values())
    ):
        raise ValueError(
            "the optimizer has taken steps already: parallelize before the first one; parallel.load brings "
            "older state in"
        )


class Owner:
    """Gives the optimizer what this rank owns."""

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt = opt
        self.start = next(iter(opt.state.values()), None)  # Adagrad's: it has state before the first step

    def add(self, all_shards: Iterable[Shards]) -> None:
        """Each shard joins the parameter group that its parameter was given in."""
        for shards in all_shards:
            for shard in shards.updated:
                self.add_one(shard)

    def add_one(self, shard: Shard) -> None:
        assert shard.info.option is not None  # updated
        group = self.opt.param_groups[shard.info.option]
        group["params"].append(shard.param)
        if self.start is not None:
            total = torch.full_like(shard.param, group["initial_accumulator_value"], requires_grad=False)
            was = self.start["step"]
            step = torch.zeros_like(was, device="cpu" if was.is_meta else None)
            self.opt.state[shard.param] = {"step": step, "sum": total}


def replace_parameters(opt: torch.optim.Optimizer, all_shards: Iterable[Shards]) -> Owner:
    """Puts the shards in the place of the model's parameters in opt.param_groups; parameters that are not
    trained leave. From now on only step_optimizer takes steps. The Owner brings in what is trained later.
    """
    _refuse_other_steps(opt)
    owner = Owner(opt)
    opt.state.clear()
    for group in opt.param_groups:
        group["params"] = []
    owner.add(all_shards)
    return owner


class OwnLoop(Protocol):
    """What takes the user's calls: run/own_loop.py."""

    def zero_grad(self, set_to_none: bool) -> None:
        """Drops gradients that wait for a step, wherever these lie."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None: ...


def guard(
    opt: torch.optim.Optimizer,
    own: OwnLoop,
    regroup: Callable[[Sequence[torch.Tensor], int], None],
) -> None:
    """What else the user may call. An optimizer that was parallelized before (a recovery) keeps its step, as
    schedulers may have wrapped it. regroup(): parameters join the group with this number, which is new and
    empty; ValueError for what cannot.
    """
    if "_own_loop" not in opt.__dict__:
        _replace(opt, "step", types.MethodType(_through(opt.step), opt))
    opt.__dict__["_own_loop"] = own
    ours = getattr(opt.__dict__.get("zero_grad"), "func", None) is _zero_grad
    if hasattr(opt, "zero_grad") and not ours:  # a wrapper of an optimizer may have less
        _replace(opt, "zero_grad", functools.partial(_zero_grad, opt, opt.zero_grad))
    if hasattr(opt, "add_param_group"):
        _replace(opt, "add_param_group", functools.partial(_add_group, opt, opt.add_param_group, regroup))


def _replace(opt: torch.optim.Optimizer, name: str, method: Callable[P, ResultT]) -> None:
    """On this object alone."""
    setattr(opt, name, method)


def _zero_grad(
    opt: torch.optim.Optimizer, zero_grad: Callable[P, ResultT], *args: P.args, **kwargs: P.kwargs
) -> None:
    own: OwnLoop = opt.__dict__["_own_loop"]
    own.zero_grad(bool(kwargs.get("set_to_none", args[0] if args else True)))
    zero_grad(*args, **kwargs)


def _through(step: Callable[..., float | None]) -> Callable[..., float | None]:
    """A step of the user's goes to the OwnLoop, which calls step_optimizer. A function, as torch's schedulers
    take the one of a bound method to wrap it.
    """

    @functools.wraps(step)
    def stepped(
        opt: torch.optim.Optimizer, closure: Callable[[], float] | None = None, **options: object
    ) -> float | None:
        if is_stepping():
            return step() if closure is None else step(closure, **options)
        own: OwnLoop = opt.__dict__["_own_loop"]
        if options:
            raise ValueError(f"opt.step({', '.join(options)}): under a plan it takes a closure alone")
        return own.step(closure)

    vars(stepped)["_goes_to_own_loop"] = True
    return stepped


def is_stepping() -> bool:
    """Whether step_optimizer() works, in this thread."""
    return getattr(_under_way, "step", False)


def _add_group(
    opt: torch.optim.Optimizer,
    add: Callable[[dict[str, Any]], None],
    regroup: Callable[[Sequence[torch.Tensor], int], None],
    param_group: dict[str, Any],
) -> None:
    """Of the model's parameters; the optimizer gets this rank's shards of them."""
    add(param_group)
    group = opt.param_groups[-1]
    params, group["params"] = group["params"], []
    try:
        regroup(params, len(opt.param_groups) - 1)
    except ValueError:
        opt.param_groups.pop()
        raise


_under_way = threading.local()  # .step: whether a step is taken here, by this thread


def _refuse_other_steps(opt: torch.optim.Optimizer) -> None:
    """A wrapper of an optimizer, which is none for torch, has no hooks."""
    try:
        opt.register_step_pre_hook(_check_under_way)
    except AttributeError:
        _replace(opt, "step", functools.partial(_checked_step, opt.step))


def _checked_step(step: Callable[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
    _check_under_way()
    return step(*args, **kwargs)


def _check_under_way(*_: object) -> None:
    if not is_stepping():
        raise ValueError(
            "this optimizer belongs to a model under a plan, whose step is taken on all ranks: call opt.step "
            "of the object that parallelize returned, not of its class, nor of an optimizer inside"
        )


def step_optimizer(
    opt: torch.optim.Optimizer,
    all_shards: Iterable[Shards],
    scale: torch.Tensor | None = None,
    unused: Container[str] = (),
) -> None:
    """One step of the user's optimizer over all shards, gradients times `scale`; it does not see parameters
    named in `unused`.

    opt.step() is called once, also where this rank owns nothing, so that all that counts steps (schedulers,
    hooks, the optimizer itself) counts alike on all ranks. Where it raises, what it has updated before holds
    on all ranks, as in one process.
    """
    all_shards = [shards for shards in all_shards if shards.is_updated]
    _under_way.step = True
    try:
        with trace.span("update"):
            _step(opt, all_shards, scale, unused)
    except dist.DistError:
        raise  # a rank is lost, and there is nothing to wait for
    except Exception:
        _wait(all_shards)
        raise
    finally:
        _under_way.step = False
    _wait(all_shards)


def _step(
    opt: torch.optim.Optimizer,
    all_shards: Sequence[Shards],
    scale: torch.Tensor | None,
    unused: Container[str],
) -> None:
    plain = _plain_step_of(opt) if any(shards.casts_gradients for shards in all_shards) else None
    if plain is not None:
        _BucketByBucket(opt, all_shards, scale, unused).run(plain)
        return
    for shards in all_shards:
        shards.attach_gradients(scale, unused)
    with _publishing(all_shards):
        opt.step()


@contextlib.contextmanager
def _publishing(all_shards: Sequence[Shards]) -> Iterator[None]:
    """Around what updates them: their new values go to where the model computes, also where it raises."""
    try:
        yield
    except dist.DistError:
        raise  # a rank is lost
    except Exception:
        _publish(all_shards)
        raise
    _publish(all_shards)


def _wait(all_shards: Iterable[Shards]) -> None:
    for shards in all_shards:
        shards.wait()


def _publish(all_shards: Iterable[Shards]) -> None:
    for shards in all_shards:
        shards.detach_gradients()
        shards.publish()


def _plain_step_of(opt: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], object] | None:
    """The step of an element-wise optimizer without what torch has put around it (hooks, profiler); None
    where someone looks at all gradients: in a hook, or a step of the user's.
    """
    if not is_elementwise(opt):
        return None
    step = type(opt).step
    plain = getattr(step, "__wrapped__", None)
    is_torch = getattr(step, "__globals__", {}).get("__name__") == "torch.optim.optimizer"
    own = vars(opt).get("step", step)
    while hasattr(own, "_wrapped_by_lr_sched") or hasattr(own, "_goes_to_own_loop"):
        own = own.__wrapped__  # a scheduler's counts calls, and looks at nothing
    is_own = getattr(own, "__func__", own) is not step
    if plain is None or not is_torch or is_own:
        return None
    hooks = [
        *opt._optimizer_step_pre_hooks.values(),
        *opt._optimizer_step_post_hooks.values(),
        *_global_optimizer_pre_hooks.values(),
        *_global_optimizer_post_hooks.values(),
    ]
    ours = all(getattr(hook, "__module__", "").split(".")[0] == "pycomm" for hook in hooks)
    return plain if ours else None


class _BucketByBucket:
    """One step in which gradients in fp32 exist for one bucket only.

    opt.step()   hooks before it, then in a last one that is there for this step:
                     bucket 0: attach, plain step, publish; bucket 1: ...; attach the last bucket
                 its own step, of the last bucket
    """

    def __init__(
        self,
        opt: torch.optim.Optimizer,
        all_shards: Sequence[Shards],
        scale: torch.Tensor | None,
        unused: Container[str],
    ) -> None:
        self.opt, self.all_shards, self.scale, self.unused = opt, all_shards, scale, unused

    def run(self, plain: Callable[[torch.optim.Optimizer], object]) -> None:
        """plain: of _plain_step_of()."""
        *others, last = self.all_shards
        waiting = list(self.all_shards)  # whose new values are not published yet
        everything = [group["params"] for group in self.opt.param_groups]

        def before(*_: object) -> None:
            for shards in others:
                self._attach(shards)
                plain(self.opt)
                waiting.remove(shards)
                _publish([shards])
            self._attach(last)

        hook = self.opt.register_step_pre_hook(before)
        try:
            with _publishing(waiting):
                self.opt.step()
        finally:
            hook.remove()
            for group, params in zip(self.opt.param_groups, everything, strict=True):
                group["params"] = params

    def _attach(self, shards: Shards) -> None:
        shards.attach_gradients(self.scale, self.unused)
        for group in self.opt.param_groups:
            group["params"] = []
        for shard in shards.updated:
            assert shard.info.option is not None  # updated
            self.opt.param_groups[shard.info.option]["params"].append(shard.param)
