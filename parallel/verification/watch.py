"""What the modules compute under the plan, compared with one process while they run, so that nothing but
numbers is kept.

A forward hook at each module sees its result. Recomputations and runs for shapes are not passes, and are not
looked at.
"""

import contextlib
import functools

import torch
from torch.utils._pytree import tree_leaves

from pycomm.parallel.models.modes import without_modes
from pycomm.parallel.pipeline.absent import is_absent
from pycomm.parallel.run.passes import StagePasses
from pycomm.parallel.verification.pieces import part_like
from pycomm.parallel.verification.report import both, off

__all__ = ["Watch", "WatchedPasses"]


class Watch:
    """parts: Parallelized, whose model is given hooks. begin() before each step.

    `found`: name of a module -> Off, the largest of its calls in the step. `error`: what went wrong in here,
    for a hook must not raise on one rank alone.
    """

    def __init__(self, parts):
        self.parts = parts
        self.reference, self.rows = None, ()
        self.found, self.error = {}, None
        self.running = None  # Rows of the pass that runs
        self.calls = {}  # name -> how often it was called in this pass
        for name, module in parts.model.named_modules():
            module.register_forward_hook(functools.partial(self._hook, name))

    def begin(self, reference, rows):
        """reference: Reference of the step. rows: Rows of each microbatch of this rank."""
        self.reference, self.rows, self.found = reference, rows, {}

    def raise_error(self):
        if self.error is not None:
            raise self.error

    @contextlib.contextmanager
    def during(self, microbatch):
        """Around the forward of a microbatch."""
        self.running, self.calls = self.rows[microbatch], {}
        try:
            yield
        finally:
            self.running = None

    def _hook(self, name, module, args, output):
        self._see(name, output)

    def _see(self, name, output):
        if self.running is None:
            return
        call = self.calls[name] = self.calls.get(name, -1) + 1
        try:
            with torch.no_grad(), without_modes():
                self._compare(name, call, output)
        except Exception as error:
            self.error = self.error or error

    def _compare(self, name, call, output):
        chunks = self.reference.outputs.get(name, ())
        calls = chunks[self.running.chunk] if self.running.chunk < len(chunks) else ()
        if call >= len(calls):
            return
        layout = self._layout(name)
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        for found, whole in zip(leaves, calls[call], strict=False):
            if is_absent(found) or not (found.is_floating_point() and whole.is_floating_point()):
                continue
            part = part_like(whole, found, self.running, self.parts.split, layout)
            if part is not None:
                one = off(found, part)
                self.found[name] = both(self.found.get(name, one), one)

    def _layout(self, name):
        weight = f"{name}.weight" if name else "weight"
        return self.parts.tensor.layouts.get(self.parts.original.first_name.get(weight))


class WatchedPasses(StagePasses):
    """The passes of a step, each of them watched. What is wrong with a loss, or rows that are mixed, is shown
    there, not refused.
    """

    def __init__(self, watch, *args):
        super().__init__(*args)
        self.watch = watch

    def forward(self, stage, microbatch, x):
        with self.watch.during(microbatch):
            return super().forward(stage, microbatch, x)
