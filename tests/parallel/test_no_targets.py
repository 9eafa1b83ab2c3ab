"""A rank, or a microbatch, of which no target counts: its backward goes where that of the others goes,
through what the loss uses and nothing else.
"""

import pytest
import torch
from against_one import check_equal
from halves import quick
from odd_models import Plain, cross, tokens
from torch import nn

import pycomm.parallel as par


class Extra(Plain):
    """Gives something that the loss does not use before what it uses, which comes from experts: ranks wait
    for each other in their backward.
    """

    def __init__(self):
        super().__init__()
        self.moe = par.MoE(16, lambda: nn.Linear(16, 16), 3, aux_loss=0.0)

    def forward(self, idx):
        x = self.tok(idx)
        early = x.square().mean()
        for block in self.blocks:
            x = block(x)
        return {"early": early, "logits": self.head(self.norm(x + self.moe(x)))}


def logits(output, targets):
    return cross(output["logits"], targets)


def strict(output, targets):
    """Does not take targets of which none counts."""
    if not (targets != -100).any():
        raise ZeroDivisionError("no targets")
    return cross(output["logits"], targets)


def batch(step):
    """Of 13 rows: those of the second of two ranks in the first microbatch count nothing."""
    x, y = tokens(step)
    y[3:7] = -100
    return x, y


CASES = {"ep=2": logits, "dp=2,zero=3": strict, "ep=2,zero=3": logits, "dp=2,ep=2,zero=2": logits}


@pytest.mark.parametrize("text", quick(CASES, "ep=2", "dp=2,zero=3"))
def test_equal_to_one_process(text):
    check_equal(Extra, text, batch=batch, loss_fn=CASES[text])


def test_no_gradient_is_nan():
    """The mean over no targets is NaN, and so are its gradients."""
    from pycomm.parallel.run.loss import _zero_of

    x = torch.randn(2, 3, 29, requires_grad=True)
    value = _zero_of({"logits": x}, torch.full((2, 3), -100), logits)
    value.backward()
    assert value.item() == 0 and x.grad is not None and not x.grad.any()
