"""The user's optimizer over what this rank owns: its parameters are replaced once, its steps are taken here.
A step that the user takes would find no gradients, so it is refused.

A shard of a parameter is enough for optimizers that treat each element by itself. Others (Muon, Adafactor,
anything unknown) get whole parameters: the bucket is then cut at parameter boundaries (FlatSpec, whole).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

import torch

from pycomm import trace

if TYPE_CHECKING:
    from pycomm.parallel.zero.shards import Shards

__all__ = ["check_fresh", "guard", "is_elementwise", "replace_parameters", "step_optimizer"]

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


def replace_parameters(opt: torch.optim.Optimizer, all_shards: Iterable[Shards]) -> None:
    """Puts the shards in the place of the model's parameters in opt.param_groups; parameters that are in no
    bucket (frozen) leave. From now on only step_optimizer takes steps.
    """
    _refuse_other_steps(opt)
    start = next(iter(opt.state.values()), None)
    opt.state.clear()
    by_option: dict[int | None, list[torch.nn.Parameter]] = {}
    for shards in all_shards:
        for shard in shards.owned:
            by_option.setdefault(shard.info.option, []).append(shard.param)
    for number, group in enumerate(opt.param_groups):
        group["params"] = by_option.get(number, [])
        if start is not None:  # Adagrad
            for param in group["params"]:
                total = torch.full_like(param, group["initial_accumulator_value"], requires_grad=False)
                step = torch.zeros_like(start["step"], device="cpu" if start["step"].is_meta else None)
                opt.state[param] = {"step": step, "sum": total}


def guard(opt: torch.optim.Optimizer, discard: Callable[[], None]) -> None:
    """What else the user may call. discard(): drops gradients that wait for a step; opt.zero_grad() does it
    under every plan, wherever these lie.
    """
    if hasattr(opt, "zero_grad"):  # a wrapper of an optimizer may have less
        _replace(opt, "zero_grad", functools.partial(_zero_grad, opt.zero_grad, discard))
    _replace(opt, "add_param_group", _refuse_group)


def _replace(opt: torch.optim.Optimizer, name: str, method: Callable[P, ResultT]) -> None:
    """On this object alone."""
    setattr(opt, name, method)


def _zero_grad(
    zero_grad: Callable[P, ResultT], discard: Callable[[], None], *args: P.args, **kwargs: P.kwargs
) -> None:
    discard()
    zero_grad(*args, **kwargs)


def _refuse_group(*_: object, **__: object) -> NoReturn:
    raise ValueError(
        "add_param_group: the optimizer of a model under a plan has this rank's shards, and no buckets for "
        "more parameters. Give it all groups before parallelize (lr=0 for those that are to wait)"
    )


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
    if not getattr(_under_way, "step", False):
        raise ValueError(
            "this optimizer belongs to a model under a plan, whose gradients are summed over the ranks and "
            "kept apart from `.grad`: loss.backward() and opt.step() would leave the parameters wrong or "
            "unchanged. Call parallel.step(model, opt, batch, loss_fn), which does all of it"
        )


def step_optimizer(
    opt: torch.optim.Optimizer,
    all_shards: Iterable[Shards],
    scale: torch.Tensor | None = None,
    unused: Container[str] = (),
) -> None:
    """One step of the user's optimizer over all shards, gradients times `scale`; it does not see parameters
    named in `unused`.

    With master copies in fp32 the gradients are cast bucket by bucket, and the optimizer steps over one
    bucket at a time, so that fp32 gradients exist for one bucket only.
    """
    all_shards = [shards for shards in all_shards if shards.is_updated]
    _under_way.step = True
    try:
        with trace.span("update"):
            _step(opt, all_shards, scale, unused)
    finally:
        _under_way.step = False
    for shards in all_shards:
        shards.wait()


def _step(
    opt: torch.optim.Optimizer,
    all_shards: Sequence[Shards],
    scale: torch.Tensor | None,
    unused: Container[str],
) -> None:
    if any(shards.casts_gradients for shards in all_shards):
        _step_one_by_one(opt, all_shards, scale, unused)
    else:
        for shards in all_shards:
            shards.attach_gradients(scale, unused)
        opt.step()
        for shards in all_shards:
            shards.detach_gradients()
            shards.publish()


def _step_one_by_one(
    opt: torch.optim.Optimizer,
    all_shards: Sequence[Shards],
    scale: torch.Tensor | None,
    unused: Container[str],
) -> None:
    everything = [group["params"] for group in opt.param_groups]
    try:
        for shards in all_shards:
            shards.attach_gradients(scale, unused)
            for group in opt.param_groups:
                group["params"] = []
            option = shards.bucket.infos[0].option
            assert option is not None  # is_updated
            opt.param_groups[option]["params"] = [shard.param for shard in shards.owned]
            opt.step()
            shards.detach_gradients()
            shards.publish()
    finally:
        for group, params in zip(opt.param_groups, everything, strict=True):
            group["params"] = params
