"""Averages of a model's values over its updates (EMA, SWA), of which each rank keeps its part.

    ema = par.ema(model, 0.999)
    for batch in batches:
        par.step(model, opt, batch)
        ema.update()
    with ema.applied():
        par.evaluate(model, batch)

    plan                a rank keeps the average of            update() sends   applied() sends
    zero=0              its parameters                         nothing          nothing
    zero=1, 2           its chunk                              nothing          one all_gather per bucket
    zero=3              its chunk                              nothing          nothing
    precision="bf16"    the fp32 master copies of the above    nothing          the same

applied() also compares how often the ranks have updated, in one small collective. The arithmetic is the same
as in torch's AveragedModel with get_ema_multi_avg_fn, element by element, so that any cut of the parameters
gives the average of one process. par.save writes averages as whole tensors by name, as everything else, and
par.load reads them under any plan.

Memory: one copy of what the optimizer updates, and of frozen parameters. applied() takes none: values and
averages change places.

What lost: a second model (AveragedModel), which needs memory for all values under zero=1 and 2 and a second
set of groups; an update inside of par.step, which could not leave out the first steps, nor every second one.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from pycomm.parallel.checkpoint.agree import exchange
from pycomm.parallel.checkpoint.averages import (
    agree_on_updates,
    aligned,
    averaged,
    gather_shadows,
    publish,
    shadows_of,
    swap,
    values_of_buffers,
)
from pycomm.parallel.ground.averages import Average
from pycomm.parallel.parts import parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from pycomm.parallel.parts import Parallelized

    Decay: TypeAlias = float | Callable[[int], float] | None

__all__ = ["Ema", "ema"]


def ema(
    model: nn.Module, decay: Decay = 0.999, *, buffers: bool = False, frozen: bool = True, name: str = "ema"
) -> Ema:
    """An average of the model's values over its updates. Collective over all ranks.

    Args:
        model: as parallelize() returned it.
        decay: average = decay * average + (1 - decay) * value at each update(). A function gets the number of
            updates so far, 1 or more (for a warm-up: lambda n: min(0.999, (1 + n) / (10 + n))). None: the
            mean of the values at all updates (SWA).
        buffers: whether buffers are averaged too, as with AveragedModel(use_buffers=True). If not, applied()
            leaves the model's own.
        frozen: False leaves out the parameters that are frozen now, and saves the memory for them, as a
            constant is its own average. They must stay as they are: once one of them is trained, update() and
            applied() raise ValueError.
        name: of the average in checkpoints, where a model has several.

    The first update() copies the values, as AveragedModel does; call it before the first step
    for an average that begins with the initial values. Call par.ema before par.load, which reads the average
    of a checkpoint. Returns an Ema. Raises ValueError on all ranks for other arguments, or arguments that
    differ between ranks, and for a model of par.resilient.
    """
    parts = parts_of(model)
    here = {info.name for info in parts.infos if not frozen and not info.param.requires_grad}
    given = {"name": name, "decay": "a function" if callable(decay) else decay}
    told = exchange(parts, ({**given, "buffers": buffers, "frozen": frozen}, here))
    _check(parts, decay, name)
    for rank, (other, _) in enumerate(told):
        if other != told[0][0]:
            raise ValueError(
                f"ema: rank 0 has called it with {told[0][0]}, and rank {rank} with {other}: give all ranks "
                "the same"
            )
    with torch.inference_mode(False), torch.no_grad():
        values = values_of_buffers(parts) if buffers else None
        copies = None if values is None else {key: value.clone() for key, value in values.items()}
        average = Average(name, copies, frozenset(key for _, keys in told for key in keys))
        average.shadows = shadows_of(averaged(parts, average))
    parts.averages.all[name] = average
    parts.trained.before_cut = functools.partial(gather_shadows, parts.averages)
    return Ema(model, average, decay)


def _check(parts: Parallelized, decay: Decay, name: str) -> None:
    averages = parts.averages
    averages.refuse_applied("ema")
    if averages.refusal is not None:
        raise ValueError(f"ema: {averages.refusal}")
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"ema(name={name!r}): give it a name without '/'")
    if name in averages.all:
        raise ValueError(
            f"ema: this model has an average {name!r} already: use that one, end it with its remove(), or "
            "give this one another name="
        )
    if name in averages.unread:
        raise ValueError(
            f"ema: {averages.unread[name]} was loaded without its average {name!r}: call par.ema before "
            "par.load, which then reads it; or give a new average another name="
        )
    if not callable(decay):
        _checked(decay)


def _checked(decay: float | None) -> float | None:
    if decay is not None and not (isinstance(decay, (int, float)) and 0.0 <= decay <= 1.0):
        raise ValueError(
            f"ema: decay is {decay!r}: give a number from 0 to 1, or a function that returns one"
        )
    return decay


class Ema:
    """What ema() returns.

    Attributes:
        decay: as given; it may be set anew, on all ranks.
    """

    def __init__(self, model: nn.Module, average: Average, decay: Decay) -> None:
        self.model, self._average, self.decay = model, average, decay

    def __repr__(self) -> str:
        return f"Ema({self._average.name!r}, decay={self.decay}, updates={self.updates})"

    @property
    def updates(self) -> int:
        """How often update() was called; after par.load(), the number in the checkpoint."""
        return self._average.updates

    def _parts(self) -> Parallelized:
        parts = parts_of(self.model)
        if parts.averages.all.get(self._average.name) is not self._average:
            raise ValueError(
                f"ema: the average {self._average.name!r} does not belong to this model any more: it was "
                "removed, or the model went through parallelize again. Make another with par.ema"
            )
        return parts

    @torch.no_grad()
    def update(self) -> None:
        """Averages the values of now in: call it after each par.step that updates, on all ranks. No
        communication.
        """
        parts, average = self._parts(), self._average
        parts.averages.refuse_applied("ema.update")
        held = aligned(parts, average)
        decay = self._decay()
        pairs = [(shadow.values, h.values) for shadow, h in zip(average.shadows, held, strict=True)]
        if average.buffers is not None:
            now = values_of_buffers(parts)
            pairs += [(values, now[name]) for name, values in average.buffers.items() if name in now]
        _blend(pairs, decay, average.updates)
        average.updates += 1
        average.decays += decay or 0.0

    def _decay(self) -> float | None:
        updates = self._average.updates
        if callable(self.decay):
            return _checked(self.decay(updates)) if updates else 0.0
        return _checked(self.decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A block in which the model has the averaged values, for par.evaluate, predict, generate,
        full_state_dict, save(model, None, path). Collective over all ranks.

        At its end, also by an error, the model has its own values again, bit for bit, and the buffers that it
        had at the beginning. What is written to parameters inside is written to the average. Inside, step,
        update, load, and save with the optimizer raise ValueError. Blocks of several averages may be nested;
        one inside of itself changes nothing.
        """
        parts, average = self._parts(), self._average
        applied = parts.averages.applied
        if average in applied:
            if applied[-1] is not average:
                raise ValueError(
                    f"ema: {average.name!r} is applied already, and inside of it {applied[-1].name!r}: leave "
                    "that block first"
                )
            yield
            return
        agree_on_updates(parts)
        aligned(parts, average)  # raises before anything changes
        kept = _Kept(self.model, parts)
        applied.append(average)
        try:
            self._exchange(parts)
            if average.buffers is not None:
                kept.write(average.buffers)
            yield
        except BaseException:
            with contextlib.suppress(dist.DistError):  # a rank is lost: what was raised tells more
                self._leave(parts, kept)
            raise
        self._leave(parts, kept)

    def _leave(self, parts: Parallelized, kept: _Kept) -> None:
        parts.averages.applied.remove(self._average)
        kept.put_back()
        self._exchange(parts)

    @torch.no_grad()
    def _exchange(self, parts: Parallelized) -> None:
        swap(aligned(parts, self._average), self._average)
        publish(parts)

    def remove(self) -> None:
        """Ends the average: checkpoints do not contain it any more. Memory is freed with this object.
        Call it on all ranks.
        """
        parts = self._parts()
        parts.averages.refuse_applied("ema.remove")
        del parts.averages.all[self._average.name]


def _blend(pairs: list[tuple[torch.Tensor, torch.Tensor]], decay: float | None, updates: int) -> None:
    """The arithmetic of torch's AveragedModel, also for whole numbers. pairs: (average, value)."""
    kinds: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for average, value in pairs:
        averages, values = kinds.setdefault((value.device, value.dtype), ([], []))
        averages.append(average)
        values.append(value)
    for (_, dtype), (averages, values) in kinds.items():
        if not updates:
            torch._foreach_copy_(averages, values)
        elif dtype.is_floating_point or dtype.is_complex:
            torch._foreach_lerp_(averages, values, 1 / (updates + 1) if decay is None else 1 - decay)
        else:
            for average, value in zip(averages, values, strict=True):
                if decay is None:
                    average.copy_(average + (value - average) / (updates + 1))
                else:
                    average.copy_(average * decay + value * (1 - decay))


class _Kept:
    """The buffers of a model as they are now. Until put_back() the user's steps of its optimizer are
    refused.
    """

    def __init__(self, model: nn.Module, parts: Parallelized) -> None:
        opt, averages, self.hook = parts.opt, parts.averages, None
        if opt is not None and hasattr(opt, "register_step_pre_hook"):  # a wrapper may have less
            self.hook = opt.register_step_pre_hook(lambda *_: averages.refuse_applied("opt.step"))
        self.named = [
            (module, key, buffer, buffer.detach().clone(), f"{prefix}.{key}" if prefix else key)
            for prefix, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]

    @torch.no_grad()
    def write(self, values: dict[str, torch.Tensor]) -> None:
        for _, _, buffer, _, name in self.named:
            if name in values:
                buffer.copy_(values[name])

    @torch.no_grad()
    def put_back(self) -> None:
        if self.hook is not None:
            self.hook.remove()
        for module, key, buffer, values, _ in self.named:
            module._buffers[key] = buffer
            buffer.copy_(values)
