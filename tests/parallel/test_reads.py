"""Parameters that tensor parallelism has cut, read beside their layer: refused, as each rank would take its
part for the whole. What does not look at their values, or goes through no gradient, passes.
"""

import pytest
import torch
from against_one import check_equal, sgd
from odd_models import Plain, cross, tokens
from torch import nn
from torch_ranks import spawn

import pycomm.parallel as par


class Penalty(Plain):
    """Reads what it is told of its parameters."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, idx):
        return super().forward(idx) * (1 + self.read(self))


READS = {
    "squares": lambda model: sum(p.square().mean() for p in model.blocks[1].parameters()),
    "norm": lambda model: nn.utils.parameters_to_vector(model.blocks[0].parameters()).norm(),
    "norms": lambda model: sum(torch._foreach_norm(list(model.blocks[0].parameters()))),
    "product": lambda model: nn.functional.linear(torch.ones(16).double(), model.head.weight).mean(),
}


def refused(rank, world_size, read):
    model, opt = par.parallelize(*_made(lambda: Penalty(read)), par.Plan(tp=2))
    with pytest.raises(ValueError, match=r"reads '.*weight', of which this rank of tp has a part only"):
        par.step(model, opt, tokens(0), cross)


def _made(make):
    model = make().double()
    return model, sgd(model)


@pytest.mark.parametrize("name", READS)
def test_cut_parameters_that_a_model_reads(name):
    spawn(2, refused, READS[name])


def loss_of_weights(rank, world_size):
    model, opt = par.parallelize(*_made(Plain), par.Plan(tp=2))

    def loss(out, y):
        return cross(out, y) + 0.01 * sum(p.norm() for p in model.parameters())

    with pytest.raises(ValueError, match="the model or the loss reads"):
        par.step(model, opt, tokens(0), loss)


def test_a_loss_that_reads_them():
    spawn(2, loss_of_weights)


def asking(model):
    weight = model.head.weight
    assert weight.dtype == torch.float64 and weight.dim() == 2 and weight.requires_grad
    return sum(p.square().mean() for p in model.norm.parameters())  # whole on every rank


def test_what_is_whole_may_be_read():
    check_equal(lambda: Penalty(asking), "tp=2", "tp=2,checkpoint")
    check_equal(lambda: Penalty(asking), "tp=2,pp=2", "dp=2,tp=2,zero=3")
