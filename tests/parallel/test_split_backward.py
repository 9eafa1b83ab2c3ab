"""The split backward against the plain one: every kind of call bit for bit, ties, checkpointing, autocast,
freed weights, callbacks.
"""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from pycomm.parallel.pipeline import DeferWeights, WeightStore


class Conv1D(nn.Module):
    """Weight of shape (in, out), as HF transformers has it."""

    def __init__(self, a, b):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(a, b) / 4), nn.Parameter(torch.randn(b))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Matmul(nn.Module):
    def __init__(self, a, b, call):
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.randn(a, b) / 4), call

    def forward(self, x):
        return self.call(x, self.weight)


class Tied(nn.Module):
    """One weight as embedding, as head, and in a bias-free layer in between."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8, padding_idx=3), nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)

    def forward(self, indices):
        x = self.norm(self.embedding(indices))
        x = self.mix(torch.tanh(self.mix(x)))
        return F.linear(x, self.embedding.weight)


class Checkpointed(nn.Module):
    """store: set for the split run, whose recomputation must run under the mode too."""

    def __init__(self):
        super().__init__()
        self.first, self.store = nn.Linear(6, 8), None
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8))

    def forward(self, x):
        more = {} if self.store is None else {"context_fn": self.store.checkpoint_contexts}
        return checkpoint(self.inner, self.first(x), use_reentrant=False, **more)


def floats(*shape):
    return lambda: torch.randn(*shape).double().requires_grad_()


def indices(*shape):
    return lambda: torch.randint(0, 11, shape)


# name -> (module, input, parameters that are left to autograd)
CASES = {
    "linear": (lambda: nn.Linear(6, 5), floats(7, 6), set()),
    "linear 3d": (lambda: nn.Linear(6, 5), floats(2, 3, 6), set()),
    "linear 4d without bias": (lambda: nn.Linear(6, 5, bias=False), floats(2, 1, 3, 6), set()),
    "linear of one row": (lambda: nn.Linear(6, 5), floats(1, 6), set()),
    "linear of no rows": (lambda: nn.Linear(6, 5), floats(0, 6), set()),
    "linear of a vector": (lambda: nn.Linear(6, 5), floats(6), {"weight", "bias"}),
    "strided input": (
        lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(6, 5)),
        lambda: torch.randn(6, 3, 2).double().permute(2, 1, 0).requires_grad_(),
        set(),
    ),
    "frozen bias": (lambda: freeze(nn.Linear(6, 5), "bias"), floats(4, 6), set()),
    "frozen weight": (lambda: freeze(nn.Linear(6, 5), "weight"), floats(4, 6), {"bias"}),
    "conv1d": (lambda: Conv1D(6, 5), floats(2, 3, 6), set()),
    "matmul": (lambda: Matmul(6, 5, torch.matmul), floats(2, 3, 6), set()),
    "at": (lambda: Matmul(6, 5, lambda x, w: x @ w), floats(4, 6), set()),
    "mm": (lambda: Matmul(6, 5, torch.mm), floats(4, 6), set()),
    "method": (lambda: Matmul(6, 5, lambda x, w: x.matmul(w)), floats(4, 6), set()),
    "through a view": (lambda: Matmul(5, 6, lambda x, w: x @ w.t()), floats(4, 6), {"weight"}),
    "keywords": (lambda: Matmul(6, 5, lambda x, w: torch.matmul(input=x, other=w)), floats(4, 6), set()),
    "addmm with beta": (
        lambda: Matmul(6, 5, lambda x, w: torch.addmm(w[:1], x, w, beta=2)),
        floats(4, 6),
        {"weight"},
    ),
    "embedding": (lambda: nn.Embedding(11, 4, padding_idx=-2), indices(3, 5), set()),
    "embedding, padding from the end": (
        lambda: Matmul(11, 4, lambda x, w: F.embedding(x, w, -1)),
        lambda: torch.tensor([[10, 1, 10], [0, 9, 10]]),
        set(),
    ),
    "embedding by frequency": (
        lambda: nn.Embedding(11, 4, scale_grad_by_freq=True),
        indices(3, 5),
        {"weight"},
    ),
    "norm": (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)), floats(4, 6), {"1.weight", "1.bias"}),
    "tied": (Tied, indices(2, 5), {"norm.weight", "norm.bias"}),
    "checkpointed": (Checkpointed, floats(3, 6), set()),
}


def freeze(module, name):
    getattr(module, name).requires_grad_(False)
    return module


def backward_of(module, x, microbatches, split=None):
    """Gradients of the input per microbatch; with `split`, W of all microbatches only after the B of all."""
    outputs, inputs = [], []
    for microbatch in range(microbatches):
        torch.manual_seed(microbatch)
        inputs.append(x.detach().clone().requires_grad_(x.requires_grad))
        if split is None:
            outputs.append(module(inputs[-1]))
        else:
            with DeferWeights(split, microbatch):
                outputs.append(module(inputs[-1]))
    for microbatch, y in enumerate(outputs):
        y.backward(torch.sin(y.detach() + microbatch))
    return [x.grad for x in inputs]


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_the_plain_backward(name):
    make, make_input, left_to_autograd = CASES[name]
    torch.manual_seed(1)
    plain, x = make().double(), make_input()
    module, called, done = copy.deepcopy(plain), [], []
    expected = backward_of(plain, x, 3)
    store = WeightStore(on_grad=lambda param: called.append(param))
    if name == "checkpointed":
        module.store = store
    got = backward_of(module, x, 3, store)
    names = {param: key for key, param in module.named_parameters()}
    before = {key for param, key in names.items() if param.grad is not None}
    assert before == left_to_autograd
    for microbatch in range(3):
        store.flush(microbatch)
        deferred = {key for param, key in names.items() if param.requires_grad} - left_to_autograd
        assert {names[param] for param in called} == deferred and len(called) == len(deferred)  # once each
        done.append(called[:])
        called.clear()
    assert all([id(param) for param in order] == [id(param) for param in done[0]] for order in done)
    assert not store.pending and store.mode is None
    for a, b in zip(got, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    for key, param in plain.named_parameters():
        mine = module.get_parameter(key).grad
        assert mine is None or not mine.requires_grad
        assert (mine is None) == (param.grad is None) and (mine is None or torch.equal(mine, param.grad)), key


def test_accumulates_in_place_and_in_order_of_backward():
    module, order = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), []
    flat = torch.ones(sum(param.numel() for param in module.parameters()))
    offset = 0
    for param in module.parameters():
        param.grad = flat[offset : offset + param.numel()].view_as(param)
        offset += param.numel()
    store = WeightStore(on_grad=order.append)
    with DeferWeights(store, 0):
        y = module(torch.randn(5, 3))
    y.sum().backward()
    assert torch.equal(flat, torch.ones_like(flat))
    store.flush(0)
    assert torch.equal(flat[-2:], torch.tensor([6.0, 6.0]))
    assert [id(param) for param in order] == [
        id(param) for param in (module[1].weight, module[1].bias, module[0].weight, module[0].bias)
    ]
    store.flush(7)  # nothing is pending: a stage without weights


def test_weight_may_be_freed_and_gathered_again():
    """As ZeRO-3 does: no data between forward and backward, none at W; the gradient goes to the reducer."""
    layer, got = nn.Linear(3, 4), {}
    x, full = torch.randn(5, 3, requires_grad=True), layer.weight.detach().clone()
    expected = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])
    store = WeightStore(accumulate=lambda param, grad: got.update({param: grad}))
    layer.weight.data = full.clone()
    with DeferWeights(store, 0):
        y = layer(x)
    loss = y.square().sum()
    layer.weight.data = torch.empty(0)
    layer.weight.data = full.clone()
    loss.backward()
    layer.weight.data = torch.empty(0)
    store.flush(0)
    assert (
        torch.equal(x.grad, expected[0])
        and torch.equal(got[layer.weight], expected[1])
        and layer.weight.grad is None
    )


def test_an_update_between_forward_and_backward_is_noticed():
    layer, store = nn.Linear(3, 4), WeightStore()
    with DeferWeights(store, 0):
        y = layer(torch.randn(2, 3, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nothing_is_kept_without_gradients():
    layer, store = nn.Linear(3, 4), WeightStore()
    x = torch.randn(2, 3)
    with DeferWeights(store, 0), torch.no_grad():
        assert torch.equal(layer(x), layer(x)) and not layer(x).requires_grad
    with DeferWeights(store, 0), DeferWeights(store, 1):
        assert store.mode.microbatch == 1
        layer(x).sum().backward()
    assert list(store.pending) == [1] and store.mode is None


def test_autocast():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
    module, store, x = copy.deepcopy(plain), WeightStore(), torch.randn(6, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)
        with DeferWeights(store, 0):
            y = module(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    wanted = torch.autograd.grad(expected.float().square().sum(), [x, *plain.parameters()])
    y.float().square().sum().backward()
    store.flush(0)
    for a, b in zip([x.grad, *(param.grad for param in module.parameters())], wanted, strict=True):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
