"""What does not fit together in a model, an optimizer and a plan, by what is registered: refused, or not."""

import pytest
import torch
from torch import nn

import pycomm.parallel as par
from pycomm.parallel.checks.before import check


class Blocks(nn.Module):
    def __init__(self, *around, bad=None):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
        self.around = nn.ModuleList(around)
        if bad is not None:
            self.blocks[1].append(bad)


def hooked(register):
    model = Blocks()
    getattr(model.blocks[1], register)(lambda *given: None)
    return model


def shared(inside):
    layer = nn.Linear(2, 2)
    model = Blocks(bad=layer)
    if inside:
        model.blocks[0].append(layer)
    else:
        model.around.append(layer)
    return model


class Own(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x)


BEFORE = [
    (lambda: hooked("register_full_backward_hook"), "pp=2", "'blocks.1' has a backward hook"),
    (lambda: hooked("register_full_backward_pre_hook"), "pp=2", "'blocks.1' has a backward hook"),
    (lambda: hooked("register_full_backward_hook"), "dp=2", None),
    (lambda: hooked("register_forward_hook"), "pp=2", None),
    (lambda: shared(True), "pp=2", "of block 0 of 'blocks', in pipeline stage 0, and of block 1"),
    (lambda: shared(False), "pp=2", "of block 1 of 'blocks', in pipeline stage 1, and of 'around.0'"),
    (lambda: shared(True), "dp=2,zero=3", None),
    (lambda: Blocks(Own(2)), "dp=2", "'around.0' is a BatchNorm with a forward of its own (Own)"),
    (lambda: Blocks(Own(2)), "ep=2", "'around.0' is a BatchNorm with a forward of its own (Own)"),
    (lambda: Blocks(Own(2)), "tp=2", None),
    (lambda: Blocks(nn.BatchNorm1d(2)), "ring=2", "ring cuts the sequence"),
    (lambda: Blocks(nn.BatchNorm1d(2)), "ulysses=2", "ulysses cuts the sequence"),
    (lambda: Blocks(nn.BatchNorm1d(2)), "tp=2,megatron_sp", "megatron_sp cuts the sequence"),
    (lambda: Blocks(bad=nn.BatchNorm1d(2)), "checkpoint", "'blocks.1.1' is a BatchNorm inside a block"),
    (lambda: Blocks(nn.BatchNorm1d(2)), "checkpoint", None),
    (lambda: Blocks(nn.Embedding(3, 2, scale_grad_by_freq=True)), "dp=2", "scale_grad_by_freq"),
    (lambda: Blocks(nn.EmbeddingBag(3, 2, scale_grad_by_freq=True)), "ep=2", "scale_grad_by_freq"),
    (lambda: Blocks(nn.Embedding(3, 2, scale_grad_by_freq=True)), "pp=2", None),
    (lambda: Blocks(nn.EmbeddingBag(3, 2, max_norm=1.0)), "dp=2", "max_norm"),
    (lambda: Blocks(nn.Embedding(3, 2, max_norm=1.0)), "precision=bf16", "max_norm"),
    (lambda: Blocks(nn.Embedding(3, 2, max_norm=1.0)), "pp=2", None),
    (lambda: nn.Linear(2, 2), "pp=2", "cut at its blocks (pp), but Linear has no list"),
    (lambda: nn.Linear(2, 2), "ring=2", "cut at its blocks (ring)"),
    (lambda: nn.Linear(2, 2), "checkpoint", "cut at its blocks (checkpoint)"),
    (lambda: nn.Linear(2, 2), "dp=2,zero=3", None),
]  # fmt: skip


def test_models_that_do_not_fit_a_plan():
    for number, (make, text, words) in enumerate(BEFORE):
        model = make()
        before = list(model.named_modules())
        if words is None:
            check(model, None, par.Plan.parse(text))
        else:
            with pytest.raises(ValueError) as raised:
                check(model, None, par.Plan.parse(text))
            assert words in str(raised.value), (number, str(raised.value))
        assert before == list(model.named_modules())


@pytest.mark.parametrize("text", ["", "tp=2", "pp=2", "dp=2,zero=1"])
def test_optimizers_that_do_not_fit(text):
    plan, model = par.Plan.parse(text), Blocks()
    check(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    with pytest.raises(ValueError, match="2 parameters of the optimizer are not the model's"):
        check(model, torch.optim.SGD([*model.parameters(), *nn.Linear(1, 1).parameters()], lr=0.1), plan)
    with pytest.raises(ValueError, match="LBFGS calls the model from its step"):
        check(model, torch.optim.LBFGS(model.parameters()), plan)
    if plan.tp > 1:
        with pytest.raises(ValueError, match=r"Plan\(tp=2\): Adafactor looks at whole parameters"):
            check(model, torch.optim.Adafactor(model.parameters()), plan)
