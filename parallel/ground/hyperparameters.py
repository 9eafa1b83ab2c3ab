"""Whether the ranks' optimizers have the same hyperparameters in a step.

A scheduler that is given another number on each rank (ReduceLROnPlateau and the rank's own loss) changes lr
on some ranks only. So a mark of all plain values in param_groups rides in the sum that a step sends anyway
(same_batch.py). The mark is made anew only where a value has changed. Where the marks differ, all ranks know
it from the sum, and exchange the values to name the one that differs.

Tensors on a device are not compared here: to read one means to wait for the device. parallelize() compares
them once (building/alike.py).
"""

import zlib
from collections.abc import Callable
from typing import TypeAlias

import torch

from pycomm.parallel.ground.plain import SIMPLE, text_of

__all__ = ["Hyperparameters", "hyperparameters_of", "shortened"]

SKIPPED = ("params", "param_names")
Texts: TypeAlias = dict[str, str]  # "lr of group 0" -> text of its value


def hyperparameters_of(opt: torch.optim.Optimizer, on_device: bool = False) -> Texts:
    """Those of all groups, see text_of()."""
    return {
        f"{key} of group {number}": text_of(value, on_device)
        for number, group in enumerate(opt.param_groups)
        for key, value in sorted(group.items(), key=lambda item: str(item[0]))
        if key not in SKIPPED
    }


class Hyperparameters:
    """Those of one optimizer, None for a model without. ask: this rank's -> those of all ranks."""

    def __init__(self, opt: torch.optim.Optimizer | None, ask: Callable[[Texts], list[Texts]]) -> None:
        self.opt, self.ask = opt, ask
        self._values: list[object] = []  # of the groups, when they were last looked at
        self._texts: Texts = {}  # of these values
        self._set: Texts = {}  # the text of each value that was set from outside of the optimizer
        self._mark = 0  # of `_set`

    def mark(self) -> int:
        """A number below 2^20, which as a rule differs where a value does that was set from outside."""
        values = self._now()
        if values != self._values:
            texts, before = self._texts_now(), self._texts
            self._set = {
                key: text if text != before.get(key) else self._set[key]
                for key, text in texts.items()
                if text != before.get(key) or key in self._set
            }
            self._values, self._texts = values, texts
            self._mark = zlib.crc32(repr(sorted(self._set.items())).encode()) % (1 << 20)
        return self._mark

    def note(self) -> None:
        """After a step. What the optimizer itself has written is not compared: a count of steps stands still
        on a rank that owns no parameter of the group.
        """
        values = self._now()
        if values != self._values:
            self._values, self._texts = values, self._texts_now()

    def _texts_now(self) -> Texts:
        return {} if self.opt is None else hyperparameters_of(self.opt)

    def _now(self) -> list[object]:
        """Keys and values of all groups, as they can be compared with later ones."""
        return [
            value if type(value) in SIMPLE else _steady(value)
            for group in (self.opt.param_groups if self.opt is not None else ())
            for pair in group.items()
            if pair[0] not in SKIPPED
            for value in pair
        ]

    def refuse(self, rank: int) -> None:
        """Raises ValueError, which names what differs. Collective over all ranks; rank: this one."""
        told = self.ask(self._set)
        other = next((number for number, each in enumerate(told) if each != told[0]), 0)
        other = other if told[rank] == told[0] else 0
        here, there = told[rank], told[other]
        key = next((key for key in {**here, **there} if here.get(key) != there.get(key)), None)
        what = "the optimizer's hyperparameters differ between ranks"
        if key is not None:
            values = f"{shortened(here.get(key))} here, {shortened(there.get(key))} on rank {other}"
            what = f"the optimizer's {key} differs between ranks: {values}"
        raise ValueError(
            f"[rank {rank}] step: {what}. Change hyperparameters alike on all ranks: give a scheduler such "
            "as ReduceLROnPlateau the loss that step or evaluate returns, which is equal on all ranks; no "
            "parameter was changed"
        )


def shortened(text: str | None) -> str:
    """A text_of() for an error; None: there is none."""
    if text is None:
        return "missing"
    return text if len(text) <= 100 else f"{text[:60]}...{text[-37:]}"


def _steady(value: object) -> object:
    """The value itself, where it cannot change in place, else its text of now."""
    is_steady = type(value) is tuple and all(type(each) in SIMPLE for each in value)
    return value if is_steady else text_of(value)
