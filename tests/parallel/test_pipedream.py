"""PipeDream: weight stashing keeps forward and backward of a microbatch on one version; a whole run equals
its rule in one process.
"""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch_ranks import spawn

from pycomm.groups import as_group
from pycomm.parallel.pipeline import DeferWeights, WeightStash, WeightStore, make_schedule, run

WIDTH, RATE = 6, 0.05


def square(x):
    return nn.Parameter(torch.sin(torch.arange(x * x, dtype=torch.float64)).view(x, x))


def vector(x):
    return nn.Parameter(torch.cos(torch.arange(x, dtype=torch.float64)))


INDICES = torch.tensor([0, 1, 1, 3])
USES = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "linear 3d": lambda x, w, b: F.linear(x[None], w, b),
    "matmul": lambda x, w, b: x @ w + b,
    "matmul of a view": lambda x, w, b: x @ w.t() + b,
    "embedding": lambda x, w, b: F.embedding(INDICES, w) * x + b,
    "layer_norm": lambda x, w, b: F.layer_norm(x, (4,), b, b) * w[0],
    "checkpoint": lambda x, w, b: checkpoint(lambda x: torch.tanh(x @ w) * b, x, use_reentrant=False),
}


@pytest.mark.parametrize("use", USES)
def test_backward_sees_the_version_of_its_forward(use):
    w, b = square(4), vector(4)
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    expected = torch.autograd.grad(USES[use](x, w, b).square().sum(), [x, w, b])
    stash = WeightStash([w, b, w])
    with stash.saving(0):
        loss = USES[use](x, w, b).square().sum()
    optimizer = torch.optim.SGD([w, b], lr=1.0, momentum=0.9)
    for _ in range(3):
        stash.detach_from_stash()
        w.grad, b.grad = torch.ones_like(w), torch.ones_like(b)
        optimizer.step()
    assert stash.versions == 2
    optimizer.zero_grad()
    latest = w.detach().clone()
    with stash.using(0):
        loss.backward()
    assert torch.equal(w.detach(), latest)
    stash.drop(0)
    assert stash.versions == 1
    for tensor, grad in zip([x, w, b], expected, strict=True):
        assert torch.equal(tensor.grad, grad)


def test_storage_is_copied_only_when_it_is_needed():
    w = square(3)
    stash, place = WeightStash([w]), w.data_ptr()
    stash.detach_from_stash()
    assert w.data_ptr() == place
    for microbatch in (0, 1):
        with stash.saving(microbatch):
            pass
    assert stash.versions == 1
    stash.detach_from_stash()
    assert w.data_ptr() != place and stash.versions == 2
    place = w.data_ptr()
    stash.detach_from_stash()
    assert w.data_ptr() == place
    with pytest.raises(ValueError, match="stashed already"), stash.saving(1):
        pass
    with pytest.raises(ValueError, match=r"5 is not stashed, only \[0, 1\]"), stash.using(5):
        pass


def make_layer(stage):
    torch.manual_seed(stage)
    return nn.Linear(WIDTH, WIDTH).double()


def apply(stage, weight, bias, x):
    """Every other stage has a matmul instead of a linear."""
    return torch.tanh(F.linear(x, weight, bias) if stage % 2 else x @ weight + bias)


def batch(microbatch):
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(microbatch))


def oracle(schedule):
    """The rule, without any pipeline: version v(s, i) is the number of updates that stage s has had when it
    runs F of microbatch i.
    """
    params = [
        [[p.detach() for p in make_layer(stage).parameters()]] for stage in range(schedule.pp)
    ]  # [stage][version]
    for microbatch in range(schedule.microbatches):
        used, x = [], batch(microbatch)
        for stage, row in enumerate(schedule.actions):
            before = row[: [a[::2] for a in row].index(("F", microbatch))]
            version = sum(action.kind == "U" for action in before)
            used.append([p.clone().requires_grad_() for p in params[stage][version]])
            x = apply(stage, *used[-1], x)
        x.square().sum().backward()
        for stage, tensors in enumerate(used):
            params[stage].append([p - RATE * t.grad for p, t in zip(params[stage][-1], tensors, strict=True)])
    return [versions[-1] for versions in params]


class Stage:
    def __init__(self, stage, pp, split):
        self.layer, self.last = make_layer(stage), stage == pp - 1
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=RATE)
        self.stash, self.store = WeightStash(self.layer.parameters()), WeightStore() if split else None
        self.live, self.peak = {}, 0

    def forward(self, stage, microbatch, x):
        x = batch(microbatch) if stage == 0 else x.requires_grad_()
        with self.stash.saving(microbatch):
            if self.store is None:
                y = apply(stage, *self.layer.parameters(), x)
            else:
                with DeferWeights(self.store, microbatch):
                    y = apply(stage, *self.layer.parameters(), x)
        self.live[microbatch] = x, y.square().sum() if self.last else y
        self.peak = max(self.peak, self.stash.versions)
        return None if self.last else y

    def backward(self, stage, microbatch, dy):
        x, y = self.live.pop(microbatch)
        with self.stash.using(microbatch):
            y.backward(dy)
        return x.grad

    def weight(self, stage, microbatch):
        if self.store is not None:
            self.store.flush(microbatch)
        self.stash.drop(microbatch)

    def update(self, stage, microbatch):
        self.stash.detach_from_stash()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.peak = max(self.peak, self.stash.versions)

    def input_like(self, stage, microbatch):
        return (3, WIDTH), torch.float64, torch.device("cpu")


def train(rank, world_size, split):
    group, results = as_group(name="pp"), []
    for microbatches in (1, 2, 5, 9):
        stage = Stage(rank, world_size, split)
        run(make_schedule("pipedream", world_size, microbatches), rank, group, stage)
        results.append(([p.detach() for p in stage.layer.parameters()], stage.peak))
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_run_equals_the_rule(world_size):
    for split in (False, True):
        results = spawn(world_size, train, split)
        for case, microbatches in enumerate((1, 2, 5, 9)):
            expected = oracle(make_schedule("pipedream", world_size, microbatches))
            for rank in range(world_size):
                params, peak = results[rank][case]
                assert peak <= world_size - rank and (microbatches < 9 or peak == world_size - rank)
                for mine, theirs in zip(params, expected[rank], strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
