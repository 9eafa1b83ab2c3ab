"""Parameters of which a rank has less than one process, read beside their layer: refused in whatever step it
happens, as each rank would take its part for the whole. What does not look at their values passes, and sizes
are those of one process.
"""

import pytest
import torch
from against_one import check_equal, sgd
from odd_models import Plain, cross, tokens
from tiers import tier
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


LATER = {
    "data": lambda model: model.blocks[1].mlp[0].weight.data.norm(),
    "detach": lambda model: model.blocks[1].attn.c_proj.weight.detach().abs().mean(),
    "item": lambda model: model.tok.weight[3, 4].item(),
    "state": lambda model: sum(value.sum() for value in model.state_dict().values()),
    "like": lambda model: torch.ones_like(model.head.weight).sum(),
    "write": lambda model: model.head.weight.clamp_(-1, 1).shape[0],
}


def refused_later(rank, world_size):
    """In the second step, without a gradient, and in evaluate."""
    for read in LATER.values():
        now = []
        model, opt = par.parallelize(
            *_made(lambda read=read, now=now: Penalty(torch.no_grad()(lambda m: read(m) if now else 0.0))),
            par.Plan(tp=2),
        )
        par.step(model, opt, tokens(0), cross)
        now.append(True)
        for run in (par.step, lambda model, _, *rest: par.evaluate(model, *rest)):
            with pytest.raises(ValueError, match=r"reads '.*', of which this rank of tp"):
                run(model, opt, tokens(1), cross)
        now.clear()
        par.step(model, opt, tokens(1), cross)


def test_what_begins_later_or_has_no_gradient():
    spawn(2, refused_later)


def refused_in_a_hook(rank, world_size):
    model = Plain()
    model.blocks[0].mlp[0].register_forward_hook(lambda layer, x, y: y + layer.weight.norm())
    model, opt = par.parallelize(*_made(lambda: model), par.Plan(tp=2))
    with pytest.raises(ValueError, match="reads 'blocks.0.mlp.0.weight', of which"):
        par.step(model, opt, tokens(0), cross)


def test_a_hook_that_reads_them():
    spawn(2, refused_in_a_hook)


def norms(model):
    return sum(p.square().sum() for p in model.blocks[1].ln_1.parameters())


def refused_norms(rank, world_size):
    """Each rank of tp would add the whole penalty to a gradient that is summed over tp."""
    for read in (norms, lambda model: model.norm.weight.square().sum()):
        model, opt = par.parallelize(
            *_made(lambda read=read: Penalty(read)), par.Plan(tp=2, megatron_sp=True)
        )
        with pytest.raises(ValueError, match=r"norm.*|ln_1.*, whose gradients are summed over tp"):
            par.step(model, opt, tokens(0), cross)


def test_norms_under_megatron_sp():
    spawn(2, refused_norms)
    check_equal(lambda: Penalty(norms), "tp=2")


class Experts(Plain):
    def __init__(self):
        super().__init__()
        self.blocks[1].mlp = par.MoE(16, lambda: nn.Linear(16, 16), 4, aux_loss=0.0)


def refused_experts(rank, world_size):
    model, opt = par.parallelize(*_made(Experts), par.Plan(ep=2))
    par.step(model, opt, tokens(0), cross)

    def loss(out, y):
        return cross(out, y) + 0.01 * sum(p.norm() for p in model.parameters())

    with pytest.raises(ValueError, match=r"reads 'blocks.1.mlp.experts.*', an expert that this rank of ep"):
        par.step(model, opt, tokens(0), loss)


def test_experts_under_ep():
    spawn(2, refused_experts)
    check_equal(Experts, "ep=2")


def asking(model):
    weight = model.head.weight
    assert weight.dtype == torch.float64 and weight.requires_grad and weight.device.type == "cpu"
    assert (
        weight.shape == (29, 16) and weight.size(0) == len(weight) == 29 and weight.dim() == weight.ndim == 2
    )
    assert weight.new_zeros(3).dtype == torch.ones(1).to(weight).dtype == torch.float64
    whole = sum(p.square().mean() for p in model.norm.parameters())  # on every rank
    return whole + sum(p.numel() for p in model.parameters()) / 1e4


@tier(slow=1)
def test_what_is_whole_may_be_read():
    check_equal(lambda: Penalty(asking), "tp=2", "tp=2,checkpoint")
    check_equal(lambda: Penalty(asking), "tp=2,pp=2", "dp=2,tp=2,zero=3")
