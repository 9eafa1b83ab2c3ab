"""What the modules compute under the plan, compared with one process while they run, so that nothing but
numbers is kept.

A forward hook at each module sees its result. Recomputations and runs for shapes are not passes, and are not
looked at.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

from pycomm.parallel.models.modes import without_modes
from pycomm.parallel.pipeline.absent import is_absent
from pycomm.parallel.run.passes import StagePasses
from pycomm.parallel.verification.pieces import part_like
from pycomm.parallel.verification.report import both, off

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from pycomm.parallel.given import Tree
    from pycomm.parallel.ground.batch import Microbatch
    from pycomm.parallel.ground.layout import Layout
    from pycomm.parallel.parts import Parallelized
    from pycomm.parallel.run.router_loss import Loss
    from pycomm.parallel.run.updates import Updates
    from pycomm.parallel.verification.alone import Reference
    from pycomm.parallel.verification.pieces import Rows
    from pycomm.parallel.verification.report import Off

__all__ = ["Watch", "WatchedPasses"]


class Watch:
    """Gives hooks to the model of `parts`. begin() before each step."""

    def __init__(self, parts: Parallelized) -> None:
        self.parts = parts
        self.reference: Reference | None = None  # of the step
        self.rows: Sequence[Rows] = ()  # of each microbatch of this rank
        self.found: dict[str, Off] = {}  # name of a module -> the largest of its calls in the step
        self.error: Exception | None = None  # in here: a hook must not raise on one rank alone
        self.running: Rows | None = None  # of the pass that runs
        self.calls: dict[str, int] = {}  # name -> how often it was called in this pass
        for name, module in parts.model.named_modules():
            module.register_forward_hook(functools.partial(self._hook, name))

    def begin(self, reference: Reference, rows: Sequence[Rows]) -> None:
        self.reference, self.rows, self.found = reference, rows, {}

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    @contextlib.contextmanager
    def during(self, microbatch: int) -> Iterator[None]:
        """Around the forward of a microbatch."""
        self.running, self.calls = self.rows[microbatch], {}
        try:
            yield
        finally:
            self.running = None

    def _hook(self, name: str, module: nn.Module, args: tuple[Tree, ...], output: Tree) -> None:
        self._see(name, output)

    def _see(self, name: str, output: Tree) -> None:
        if self.running is None or not self.running.size:
            return
        call = self.calls[name] = self.calls.get(name, -1) + 1
        try:
            with torch.no_grad(), without_modes():
                self._compare(self.running, name, call, output)
        except Exception as error:
            self.error = self.error or error

    def _compare(self, running: Rows, name: str, call: int, output: Tree) -> None:
        chunks = self.reference.outputs.get(name, []) if self.reference is not None else []
        calls = chunks[running.chunk] if running.chunk < len(chunks) else []
        if call >= len(calls):
            return
        layout = self._layout(name)
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        for found, whole in zip(leaves, calls[call], strict=False):
            if is_absent(found) or not (found.is_floating_point() and whole.is_floating_point()):
                continue
            part = part_like(whole, found, running, self.parts.split, layout)
            if part is not None:
                one = off(found, part)
                self.found[name] = both(self.found.get(name, one), one)

    def _layout(self, name: str) -> Layout | None:
        weight = f"{name}.weight" if name else "weight"
        return self.parts.tensor.layouts.get(self.parts.original.first_name.get(weight, ""))


class WatchedPasses(StagePasses):
    """The passes of a step, each of them watched. What is wrong with a loss, or rows that are mixed, is shown
    there, not refused.
    """

    def __init__(
        self,
        watch: Watch,
        parts: Parallelized,
        microbatches: Sequence[Microbatch],
        loss_fn: Loss,
        updates: Updates,
    ) -> None:
        super().__init__(parts, microbatches, loss_fn, updates)
        self.watch = watch

    def forward(
        self, stage: int, microbatch: int, x: tuple[torch.Tensor, ...] | None
    ) -> tuple[torch.Tensor, ...] | None:
        with self.watch.during(microbatch):
            return super().forward(stage, microbatch, x)
