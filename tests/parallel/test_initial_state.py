"""The state with which an optimizer begins, against what torch's optimizers make before they compute."""

import importlib

import pytest
import torch

from pycomm.parallel.checkpoint.initial_state import initial_state
from pycomm.parallel.zero.optimizer import ELEMENTWISE

RATE = 0.37
MORE = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True}, {"lr": torch.tensor(RATE)}],
    "RMSprop": [{}, {"momentum": 0.5}, {"centered": True}, {"momentum": 0.5, "centered": True}],
    "ASGD": [{}, {"lr": 0.01}],
    "Rprop": [{}, {"lr": 0.01}],
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_as_torch_begins(name, monkeypatch):
    kind, computes = getattr(torch.optim, name), "adam" if name == "AdamW" else name.lower()
    module = importlib.import_module(f"torch.optim.{computes}")
    monkeypatch.setattr(module, computes, lambda *args, **options: None)
    for options in MORE.get(name, [{}]):
        param = torch.nn.Parameter(torch.randn(2, 3))
        opt = kind([param], **{"lr": RATE, **options})
        param.grad = torch.ones(2, 3)
        kind.step(opt)
        group = opt.param_groups[0]
        state = dict(opt.state[param])
        if not group.get("momentum"):
            state.pop("momentum_buffer", None)  # of SGD: None
        starts = initial_state(opt, group)
        if name == "Adagrad":  # it has state from the beginning
            assert starts == {}
            continue
        assert starts.keys() == state.keys(), options
        for key, start in starts.items():
            value = state[key]
            if value is None:  # made by the first step, from a gradient: as of zeros
                assert start == (True, 0.0)
                continue
            assert value.shape == (param.shape if start.like else ()) and value.dtype == torch.float32
            assert torch.equal(value, torch.full_like(value, start.value)), (options, key)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, momentum=0.9, dampening=0.1),
        lambda params: type("Mine", (torch.optim.SGD,), {})(params, lr=0.1),
        lambda params: torch.optim.LBFGS(params),
    ],
)
def test_what_is_not_known_is_refused(make):
    opt = make([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=rf"this {type(opt).__name__} has not taken a step.*par.save"):
        initial_state(opt, opt.param_groups[0])
