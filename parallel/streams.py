"""Random numbers of a model on many ranks (dropout): which ranks draw the same ones.

    stream    ranks of one tp group     drawn from
    shared    the same numbers          where they hold the same activations: outside of cut regions
    own       different numbers         inside a cut region (other heads), and under megatron_sp from block 0 on (other tokens)

Ranks that differ in another axis have different streams of both kinds. The user's stream, from which every rank draws the same batches, is
left as it was.

[Note: two streams] Drawing everything from one stream that is equal on tp is not enough where shares are uneven: 2 heads draw more numbers
than 1, and from then on the ranks' hidden states would differ without anyone noticing. So a rank changes streams at the edge of a region:
after its column layers and before its row layer.

Recomputation of activations starts with the state that the generator had at the block, which torch keeps; the state of the other stream and
which one was in use is kept by recomputation(). Cost: a copy of the state (5 KB on CPU) per change, only while training with tp > 1.
"""

import contextlib

import torch

from pycomm.parallel.plan import AXES
from pycomm.parallel.tensor.apply import WholeSequence
from pycomm.parallel.tensor.attention import MultiheadForward
from pycomm.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear

__all__ = ["OWN", "RandomStreams"]

SHARED, OWN = "shared", "own"


class RandomStreams:
    """The two streams of this rank. seed: a whole number, equal on all ranks."""

    def __init__(self, mesh, seed, device):
        self.device = device
        self.cut = mesh.group("tp").size > 1
        place = 0
        for axis in AXES[:-1]:
            place = place * getattr(mesh.plan, axis) + mesh.coordinate(axis)
        first = seed + place * (mesh.plan.tp + 1)
        self.states = {SHARED: self._seeded(first), OWN: self._seeded(first + 1 + mesh.coordinate("tp"))}
        self.current = None  # outside of a forward

    def _seeded(self, seed):
        here = torch.Generator(self.device).manual_seed(seed).get_state() if self.device.type == "cuda" else None
        return torch.Generator().manual_seed(seed).get_state(), here

    def _get(self):
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    def _set(self, state):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.device)

    @contextlib.contextmanager
    def kept(self):
        """Whatever is drawn inside, the generator is afterwards as it was."""
        before = self._get()
        try:
            yield
        finally:
            self._set(before)

    @contextlib.contextmanager
    def active(self):
        """Around a forward: draws from the shared stream until switch()."""
        with self.kept():
            self._set(self.states[SHARED])
            self.current = SHARED
            try:
                yield
            finally:
                self.states[self.current] = self._get()
                self.current = None

    def switch(self, name):
        if self.current is not None and self.current != name:
            self.states[self.current] = self._get()
            self._set(self.states[name])
            self.current = name

    def recomputation(self):
        """To be made in forward and entered around the recomputation of the same."""
        return self._again(self.current, dict(self.states))

    @contextlib.contextmanager
    def _again(self, current, states):
        before = self.current, self.states
        self.current, self.states = current, dict(states)
        try:
            yield
        finally:
            self.current, self.states = before

    def watch(self, model, megatron):
        """Hooks that change streams at the edges of regions that tensor parallelism has cut. megatron: activations in the trunk differ."""
        if not self.cut:
            return
        for module in model.modules():
            forward = getattr(module, "forward", None)
            if megatron:
                if isinstance(forward, WholeSequence):
                    self._around(module, SHARED, OWN)
            elif isinstance(forward, MultiheadForward):
                self._around(module, OWN, SHARED)
            elif isinstance(module, ColumnParallelLinear) and not module.gather_output:
                module.register_forward_hook(lambda *_: self.switch(OWN))
            elif isinstance(module, RowParallelLinear) and module.input_is_parallel:
                module.register_forward_pre_hook(lambda *_: self.switch(SHARED))

    def _around(self, module, inside, outside):
        module.register_forward_pre_hook(lambda *_: self.switch(inside))
        module.register_forward_hook(lambda *_: self.switch(outside))
