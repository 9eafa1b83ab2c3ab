"""A rank, or a microbatch, of which no target counts: its backward goes where that of the others goes,
through what the loss uses and nothing else.
"""

import pytest
import torch
from against_one import check_equal
from halves import quick
from odd_models import Plain, cross


class Extra(Plain):
    """Gives something that the loss does not use before what it uses."""

    def forward(self, idx):
        x = self.tok(idx)
        early = x.square().mean()
        for block in self.blocks:
            x = block(x)
        return {"early": early, "logits": self.head(self.norm(x))}


def logits(output, targets):
    return cross(output["logits"], targets)


def strict(output, targets):
    """Does not take targets of which none counts."""
    if not (targets != -100).any():
        raise ZeroDivisionError("no targets")
    return cross(output["logits"], targets)


CASES = {"dp=2,zero=3": logits, "dp=2,zero=2": strict, "tp=2,zero=3": logits, "dp=2,tp=2,zero=3": logits}


@pytest.mark.parametrize("text", quick(CASES, "dp=2,zero=3", "dp=2,zero=2"))
def test_equal_to_one_process(text):
    check_equal(Extra, text, loss_fn=CASES[text])


def test_no_gradient_is_nan():
    """The mean over no targets is NaN, and so are its gradients."""
    from pycomm.parallel.run.loss import _zero_of

    x = torch.randn(2, 3, 29, requires_grad=True)
    value = _zero_of({"logits": x}, torch.full((2, 3), -100), logits)
    value.backward()
    assert value.item() == 0 and x.grad is not None and not x.grad.any()
