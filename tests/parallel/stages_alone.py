"""The stages of a pipeline in one process, one after the other: what leaves a stage enters the next one."""

import torch

from pycomm.parallel.models.trunk import find_trunk, owners
from pycomm.parallel.pipeline.absent_modules import AbsentModules
from pycomm.parallel.pipeline.placement import Stages, cut_blocks
from pycomm.parallel.pipeline.stage import StageModel


class Alone:
    """make: gives the same model each time. placement: stage -> rank. sizes: blocks of each stage."""

    def __init__(self, make, placement, sizes=None):
        self.placement, self.last = placement, len(placement) - 1
        self.models = [make() for _ in range(1 + max(placement))]
        self.stage_models = [self._stages_of(rank, model, sizes) for rank, model in enumerate(self.models)]

    def _stages_of(self, rank, model, sizes):
        trunk = find_trunk(model, None)
        mine = tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)
        bounds = tuple(cut_blocks(len(trunk.blocks), len(self.placement), sizes))
        stages = Stages(bounds, tuple(self.placement), mine)
        absent = AbsentModules(model, trunk, stages, owners(model, trunk))
        return StageModel(model, absent, None, lambda: None)

    def train(self, mode):
        for model in self.models:
            model.train(mode)

    def forward(self, *inputs):
        """The model's output; backward() follows."""
        self.pairs, handed = [], None  # (what a stage was given, what it gives)
        for stage, rank in enumerate(self.placement):
            stages, model = self.stage_models[rank], self.models[rank]
            if stage:
                wanted = self.wanted(stage, inputs)
                found = [(tuple(each.shape), each.dtype) for each in handed]
                assert found == [(each.shape, each.dtype) for each in wanted], (stage, found, wanted)
            places = [] if stage == self.last else [place for place, *_ in self.wanted(stage + 1, inputs)]
            out = stages.run(stage, lambda m=model: m(*inputs), handed, lambda p=places: p)
            self.pairs.append((handed, out))
            if stage < self.last:
                handed = tuple(each.detach().clone().requires_grad_(each.is_floating_point()) for each in out)
            stages.end_pass()
        return out

    def wanted(self, stage, inputs):
        rank = self.placement[stage]
        return self.stage_models[rank].shape_of_input(stage, lambda: self.models[rank](*inputs))

    def backward(self, loss):
        """From a loss of the output of the last forward."""
        ends, gradients = (loss,), (None,)
        for stage in reversed(range(self.last + 1)):
            pairs = [pair for pair in zip(ends, gradients, strict=True) if pair[0].requires_grad]
            if pairs:
                torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
            if stage:
                given, ends = self.pairs[stage][0], self.pairs[stage - 1][1]
                gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in given]
