"""ZeRO-3: parameters that exist whole only while a unit of the model computes with them.

A unit is one block of the trunk, or outside the trunk one module with parameters of its own; parameters that two modules share are one
unit with two places. Life of a unit's values (n ranks, P bytes), three transfers of (n-1)/n P per microbatch:

    forward     all_gather | compute | free          the next unit's all_gather starts before the compute
    backward    all_gather | compute | free          starts when the gradient of the unit's output arrives; the unit before is fetched ahead
                             reduce_scatter          as in data/bucket.py

The order in which units are used is recorded in the first pass, and a later pass fetches ahead by that record; a wrong guess costs memory
and is dropped at the end of the pass. The guess must be the same on all ranks of the group (ranks that take different branches in forward
would wait for each other; the collective's error then names the operation).

In backward a unit is freed when the next one begins: autograd runs a later block's nodes before an earlier block's. Shared units, and
those of parameters that lie directly in a module that contains the trunk, stay until the pass ends.
"""

import contextlib
import functools

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["Unit", "Units"]


class Unit:
    """Buckets that are gathered and freed together. sticky: kept to the end of a backward pass."""

    def __init__(self, name, shards, sticky=False):
        self.name, self.shards, self.sticky = name, shards, sticky
        self.state = "sharded"  # then "gathering", "gathered"

    def start(self):
        if self.state == "sharded":
            for shard in self.shards:
                shard.start_gather()
            self.state = "gathering"

    def gather(self):
        self.start()
        if self.state == "gathering":
            for shard in self.shards:
                shard.finish_gather()
            self.state = "gathered"

    def free(self):
        if self.state == "gathering":
            self.gather()
        if self.state == "gathered":
            for shard in self.shards:
                shard.free()
            self.state = "sharded"


class Units:
    """All units of a rank. begin(phase, stage) starts the forward or backward of one microbatch, end() frees what is left."""

    def __init__(self):
        self.units = []
        self.always = []  # needed from the beginning of every pass
        self.phase = "idle"
        self.orders = {}  # (phase, stage) -> the units in order of use
        self.order, self.position, self.recording = [], 0, False
        self.active = None

    def add(self, unit, modules=(), always=False):
        """modules: those whose forward uses the unit."""
        self.units.append(unit)
        if always:
            self.always.append(unit)
        for module in modules:
            module.forward = functools.partial(self._call, unit, module.forward)

    def begin(self, phase, stage=0):
        self.phase, self.active = phase, None
        self.recording = (phase, stage) not in self.orders
        self.order = self.orders.setdefault((phase, stage), [])
        self.position = 0
        for unit in self.always:
            unit.gather()

    def end(self):
        self.phase = "idle"
        for unit in self.units:
            unit.free()

    @contextlib.contextmanager
    def stand_ins(self):
        """Between passes, for a forward that is run for shapes: parameters around the trunk are zeros that take no memory."""
        infos = [info for unit in self.always for shard in unit.shards for info in shard.bucket.infos]
        before = [info.param.data for info in infos]
        for info in infos:
            info.param.data = info.param.data.new_zeros(()).expand(info.shape)
        try:
            yield
        finally:
            for info, data in zip(infos, before, strict=True):
                info.param.data = data

    def use(self, unit):
        unit.gather()
        if self.recording:
            if not self.order or self.order[-1] is not unit:
                self.order.append(unit)
            return
        if unit in self.order[self.position :]:
            self.position = self.order.index(unit, self.position) + 1
            if self.position < len(self.order):
                self.order[self.position].start()

    def _call(self, unit, forward, *args, **kwargs):
        if self.phase == "idle":
            raise RuntimeError("parameters are sharded (zero=3): call the model through parallel.step or parallel.evaluate")
        inside_backward = self.phase == "backward"  # recomputation of activations
        self.use(unit)
        out = forward(*args, **kwargs)
        if inside_backward:
            return out
        if torch.is_grad_enabled():
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(functools.partial(self._before_backward, unit))
        if unit not in self.always:
            unit.free()
        return out

    def _before_backward(self, unit, grad):
        if self.active is not unit:
            if self.active is not None and not self.active.sticky and self.active not in self.always:
                self.active.free()
            self.active = unit
            self.use(unit)
