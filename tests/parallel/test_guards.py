"""Tensors that stand for what is not whole here: parameters that the user's own loop reads outside of the
forward, gradients that lie in parts. What would use their values is refused, all else is answered.
"""

import pytest
import torch
from torch import nn

from pycomm.parallel.ground.elsewhere import Elsewhere, StandIn, guarded, plain, stand_in
from pycomm.parallel.ground.outside_reads import OutsideReads, Read

READS = {
    "sum": lambda p: p.sum(),
    "square": lambda p: p**2,
    "add": lambda p: p + 1,
    "on the right": lambda p: 2 * p,
    "T": lambda p: p.T,
    "mT": lambda p: p.mT,
    "H": lambda p: p.H,
    "mH": lambda p: p.mH,
    "real": lambda p: p.real,
    "row": lambda p: p[0],
    "view": lambda p: p.view(-1),
    "linear": lambda p: nn.functional.linear(torch.ones(1, 3), p),
    "keyword": lambda p: torch.matmul(input=torch.ones(1, 4), other=p),
    "list": lambda p: torch.stack([torch.zeros(4, 3), p]),
    "norms": lambda p: torch._foreach_norm([p]),
    "to": lambda p: p.to(torch.float64),
    "clone": lambda p: p.clone(),
}
ASKS = {
    "shape": lambda p: tuple(p.shape) == (4, 3) and p.size(1) == 3 and len(p) == 4 and p.numel() == 12,
    "kind": lambda p: p.dtype == torch.float32 and p.device.type == "cpu" and p.is_floating_point(),
    "grad": lambda p: p.grad is None and p.is_leaf and p.requires_grad,
    "like": lambda p: torch.zeros_like(p).shape == p.shape and p.new_zeros(2).sum() == 0,
    "detach": lambda p: p.detach().sum() == p.data.sum(),
    "text": lambda p: "4" in repr(tuple(p.size())) and f"{p}" is not None,
    "hash": lambda p: p in {p},
    "numpy": lambda p: p.detach().numpy().shape == (4, 3),
}


def outside(numel=None, frozen=False):
    parameters = [nn.Parameter(torch.randn(4, 3), not frozen), nn.Parameter(torch.randn(5))]
    reads = [Read(p, f"w{n}", "of which a part is here", numel) for n, p in enumerate(parameters)]
    return OutsideReads(reads), parameters


@pytest.mark.parametrize("name", READS)
def test_a_read_for_a_gradient_is_refused(name):
    guard, (w, _) = outside()
    guard.refuse()
    READS[name](w)  # the user's own loop is not at work
    guard.is_used = True
    for _ in range(2):
        guard.refuse()
        with pytest.raises(ValueError, match=r"reads the parameter 'w0', of which a part is here, outside"):
            READS[name](w)
        with torch.no_grad():
            READS[name](w)
        guard.allow()
        READS[name](w)
        assert type(w) is nn.Parameter


@pytest.mark.parametrize("name", ASKS)
def test_what_asks_for_no_value_is_answered(name):
    guard, (w, _) = outside()
    guard.is_used = True
    guard.refuse()
    assert ASKS[name](w)


def test_what_is_whole_or_frozen_or_of_another_class_may_be_read():
    for guard, (w, b) in (outside(numel=12), outside(frozen=True)):
        guard.is_used = True
        guard.refuse()
        assert w.sum().requires_grad == w.requires_grad
        with pytest.raises(ValueError, match="the parameter 'w1'"):
            torch.cat([w.detach().flatten(), b])
    guard, (w, b) = outside()
    w.__class__ = type("Mine", (nn.Parameter,), {})
    guard.is_used = True
    guard.refuse()
    assert type(w).__name__ == "Mine" and w.sum() == w.detach().sum()
    guard.allow()
    assert type(w).__name__ == "Mine" and type(b) is nn.Parameter


# --- gradients -----------------------------------------------------------------------------------

SCALED = {"mul_": lambda g: g.mul_(0.5), "div_": lambda g: g.div_(2), "*=": lambda g: g.__imul__(0.5)}
CLEARED = {"zero_": lambda g: g.zero_(), "foreach": lambda g: torch._foreach_zero_([g])}
VALUES = {
    "norm": lambda g: g.norm(),
    "list": lambda g: torch._foreach_norm([torch.ones(2), g]),
    "times a tensor": lambda g: g.mul_(torch.ones(2)),
    "add": lambda g: g.add_(1.0),
    "item": lambda g: g[0].item(),
    "copy": lambda g: g.copy_(torch.ones(2)),
    "out": lambda g: torch.add(torch.ones(2), 1, out=g),
}


@pytest.mark.parametrize("name", [*VALUES, *SCALED, *CLEARED])
def test_parts_of_gradients(name):
    """A number may scale a part, which is memory of the plan's; nothing may scale what has no memory."""
    memory = torch.tensor([2.0, 4.0])
    part = guarded(guarded(memory))
    empty = stand_in(nn.Parameter(torch.zeros(2)))
    assert type(part) is Elsewhere and type(empty) is StandIn and plain(memory) is memory
    assert plain(part).data_ptr() == memory.data_ptr() and type(plain(part)) is torch.Tensor
    call = {**VALUES, **SCALED, **CLEARED}[name]
    for grad in (part, empty):
        allowed = grad is part and name not in VALUES
        if allowed:
            call(grad)
        else:
            with pytest.raises(ValueError, match=r"of a parameter's .grad: .*parallel.clip_grad_norm_"):
                call(grad)
        assert grad.shape == (2,) and grad.numel() == 2 and grad.dtype == torch.float32
        assert not grad.requires_grad and "not whole on this rank" in f"{grad!r} {grad}"
    assert memory.tolist() == (
        [0.0, 0.0] if name in CLEARED else [1.0, 2.0] if name in SCALED else [2.0, 4.0]
    )
