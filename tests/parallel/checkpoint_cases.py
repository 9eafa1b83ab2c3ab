"""Models, optimizers and comparisons for the tests of checkpoints."""

import logging

import pytest
import torch

# Every optimizer imports it, which takes seconds: here once, and not in every forked rank.
import torch._dynamo
from models import Llama
from torch import nn

from pycomm.parallel import MoE, Plan, cross_entropy, parallelize, step
from pycomm.parallel.checkpoint.holdings import holdings
from pycomm.parallel.parts import parts_of

SIZES = {"vocab": 11, "dim": 12, "heads": 6, "kv_heads": 2, "layers": 4, "hidden": 7}


@pytest.fixture(autouse=True)
def quiet():
    """torch.distributed.checkpoint logs every key, which costs more than the rest of these tests when pytest
    listens.
    """
    logging.disable(logging.DEBUG)
    yield
    logging.disable(logging.NOTSET)


def dense(seed, dtype=torch.float64):
    """Tied, with kv heads fewer than tp=3, a frozen parameter and buffers of both kinds; small, as each key
    costs a millisecond to read.
    """
    torch.manual_seed(seed)
    model = Llama(**SIZES, mlp=lambda: nn.Linear(12, 12, bias=False))
    model.lm_head.weight = model.embed.weight
    model.layers[1].norm1.weight.requires_grad_(False)
    for layer in model.layers:
        layer.register_buffer("mark", torch.randn(3))
    model.register_buffer("count", torch.tensor(seed, dtype=torch.int64))
    model.register_buffer("local", torch.randn(2), persistent=False)
    return model.to(dtype)


def mixture(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    return Llama(
        **SIZES,
        mlp=lambda: MoE(12, lambda: nn.Sequential(nn.Linear(12, 5), nn.SiLU(), nn.Linear(5, 12)), 3, top_k=2),
    ).to(dtype)


def two_groups(model, make=torch.optim.SGD, options=None):
    """Matrices and vectors in different parameter groups."""
    groups = [[p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False)]
    options = {"momentum": 0.9} if options is None else options
    return make([{"params": groups[0]}, {"params": groups[1], "lr": 0.02}], **{"lr": 0.01, **options})


def batch(number):
    generator = torch.Generator().manual_seed(100 + number)
    idx = torch.randint(0, SIZES["vocab"], (9, 5), generator=generator)
    return idx, idx.roll(-1, 1)


def train(model, opt, numbers):
    for number in numbers:
        step(model, opt, batch(number), cross_entropy, microbatches=2, clip=0.5)


def make(plan, seed, build=dense, optimizer=two_groups, dtype=torch.float64):
    model = build(seed, dtype)
    opt = optimizer(model)
    return parallelize(model, opt, Plan.parse(plan) if isinstance(plan, str) else plan)


def held(model, opt):
    """[(name, layout, start, stop, values, state)] of this rank; counted or not."""
    found = []
    for h in holdings(parts_of(model)):
        state = opt.state.get(h.part, {}) if h.part is not None else {}
        copied = {
            key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()
        }
        found.append((h.info.name, h.info.layout, h.start, h.stop, h.values.clone(), copied))
    return found


def reference_of(model, opt):
    """{name: (values, state)} of a single process."""
    return {name: (p.detach().clone(), dict(opt.state.get(p, {}))) for name, p in model.named_parameters()}


def same(actual, expected):
    assert (
        actual.dtype == expected.dtype and actual.shape == expected.shape and torch.equal(actual, expected)
    ), f"{actual} {expected}"


def compare(found, reference, where):
    """Bit for bit: what a rank holds, against the single process."""
    for name, layout, start, stop, values, state in found:
        full, full_state = reference[name]

        def cut(tensor, layout=layout, start=start, stop=stop, shape=values.shape):
            return layout.take(tensor).reshape(-1)[start:stop].reshape(shape)

        assert state.keys() == full_state.keys(), (where, name, state.keys(), full_state.keys())
        same(values, cut(full))
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                same(value, cut(full_state[key]) if full_state[key].shape == full.shape else full_state[key])
            else:
                assert value == full_state[key], (where, name, key)


def folder_of(plan):
    return plan.replace(",", "+") or "single"
