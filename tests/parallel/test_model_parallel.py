"""pycomm.parallel.pipeline.model_parallel against the same layers in one process."""

import collections

import pytest
import torch
from torch import nn
from torch_ranks import spawn

from pycomm.parallel import count_traffic
from pycomm.parallel.pipeline import ModelParallel

HEADER = 80


class Double(nn.Module):
    """No parameters, and an output that is not contiguous."""

    def forward(self, x):
        return (2 * x).transpose(-1, -2).contiguous().transpose(-1, -2)


def make_layers(dtype=torch.float64):
    torch.manual_seed(3)
    names = collections.OrderedDict(
        embed=nn.Embedding(11, 6),
        up=nn.Linear(6, 16),
        act=nn.GELU(),
        twice=Double(),
        norm=nn.LayerNorm(16),
        head=nn.Linear(16, 11),
    )
    return nn.Sequential(names).to(dtype)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    rows = 3 + step % 2  # the shape changes and comes again
    return torch.randint(0, 11, (2, 2, rows, 3), generator=generator)


def loss_fn(out, target):
    return nn.functional.cross_entropy(out.flatten(0, -2), target.flatten())


def train(model, steps=5):
    """Returns losses, gradients of the last step, parameters. Two microbatches per step, so gradients
    accumulate.
    """
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.03) if parameters else None
    losses = []
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = None
        for x, y in zip(*batch(step).unbind(1), strict=True):
            out = model(x)
            loss = loss_fn(out, y) if out.dim() else out
            loss.backward()
            losses.append(loss.item())
        if optimizer:
            optimizer.step()
    with torch.no_grad():
        out = model(batch(0)[0, 0])
    return losses, {name: p.grad for name, p in model.named_parameters()}, model.state_dict(), out


def body_train(rank, world_size, balance, dtype, broadcast_output):
    with count_traffic() as traffic:
        results = train(ModelParallel(make_layers(dtype), balance=balance, broadcast_output=broadcast_output))
    return (*results, traffic)


CASES = [
    # world size, balance, dtype, broadcast_output, backend
    (1, None, torch.float64, False, "pycomm"),
    (1, None, torch.float64, True, "pycomm"),
    (2, None, torch.float64, False, "pycomm"),
    (2, [5, 1], torch.float64, True, "pycomm"),
    (2, [0, 6], torch.float64, False, "pycomm"),  # tokens, which have no gradient, are sent
    (2, [6, 0], torch.float64, True, "pycomm"),
    (3, [1, 3, 2], torch.float32, False, "pycomm"),
    (3, [2, 0, 4], torch.float64, True, "pycomm"),
    (3, None, torch.float64, True, "gloo"),
    (4, None, torch.float64, False, "pycomm"),
    (4, [1, 1, 2, 2], torch.float64, True, "pycomm"),
    (4, [3, 1, 0, 2], torch.float64, False, "gloo"),
]


@pytest.mark.parametrize("world_size, balance, dtype, broadcast_output, backend", CASES)
def test_equals_single_process(world_size, balance, dtype, broadcast_output, backend):
    losses, grads, state, out = train(
        make_layers(dtype)
    )  # before the ranks fork: torch.optim imports much at its first use
    results = spawn(world_size, body_train, balance, dtype, broadcast_output, backend=backend)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    seen = set()
    for rank, (own_losses, own_grads, own_state, own_out, _) in enumerate(results):
        if broadcast_output or rank == world_size - 1:
            assert own_losses == pytest.approx(losses, rel=tolerance)
            torch.testing.assert_close(own_out, out, rtol=tolerance, atol=tolerance)
        else:
            assert own_losses == [0.0] * len(losses) and own_out.shape == ()
        for name, value in own_state.items():
            assert name not in seen
            seen.add(name)
            original = name.removeprefix("layers.")
            torch.testing.assert_close(value, state[original], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(own_grads[name], grads[original], rtol=tolerance, atol=tolerance)
    assert seen == {"layers." + name for name in state}


def test_traffic():
    """Activations and their gradients once per microbatch; the shape once for each of the two shapes of the
    input.
    """
    results = spawn(3, body_train, [1, 3, 2], torch.float64, True)
    tokens = sum(batch(step).numel() // 2 for step in range(5))  # in all microbatches of 5 steps
    tokens_evaluated = batch(0)[0, 0].numel()
    sizes = [6 * 8, 16 * 8]  # bytes per token over link 0 and link 1
    for rank, traffic in enumerate(result[4] for result in results):
        expected = 0
        if rank < 2:
            expected += sizes[rank] * (tokens + tokens_evaluated) + 2 * HEADER
        if rank > 0:
            expected += sizes[rank - 1] * tokens
        assert traffic.nbytes("send") == expected
        shown = 11 * 8 * (tokens + tokens_evaluated) + 2 * HEADER if rank == 2 else 0
        assert traffic.nbytes("broadcast") == shown and traffic.nbytes() == expected + shown
        assert traffic.nbytes(group="pp") == traffic.nbytes()


def body_graphs(rank, world_size):
    """What needs a gradient differs by rank; the last rank's loss alone counts; several graphs live at once;
    mp.backward.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[0].requires_grad_(False)
    model = ModelParallel(layers, broadcast_output=True)
    x = torch.ones(2, 4)
    first, second = model(x), model(2 * x)
    weights = (1.0, 1.0) if model.is_last else (float("nan"), 7.0)
    (first.sum() * weights[0] + second.square().sum() * weights[1]).backward()
    grads = [p.grad for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    token = ModelParallel(list(layers))  # the same layers, without the broadcast
    out = token(x)
    token.backward(out, torch.ones_like(out))
    return grads, [p.grad for p in model.parameters()], out.requires_grad


def test_graphs():
    results = spawn(3, body_graphs)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    layers[0].requires_grad_(False)
    x = torch.ones(2, 4)
    for number, loss in enumerate(
        [lambda: layers(x).sum() + layers(2 * x).square().sum(), lambda: layers(x).sum()]
    ):
        layers.zero_grad()
        loss().backward()
        for result, layer in zip(results, layers, strict=True):
            assert result[2]
            for actual, parameter in zip(result[number], layer.parameters(), strict=True):
                assert (actual is None) == (parameter.grad is None)
                if actual is not None:
                    torch.testing.assert_close(actual, parameter.grad, rtol=1e-6, atol=1e-6)


class ByValue(nn.Module):
    def forward(self, x):
        return x[: int(x[0, 0])]


def body_errors(rank, world_size):
    for balance in ([3], [1, 1], [4, -1], [1, 1, 1]):
        with pytest.raises(ValueError, match=rf"rank {rank}/2.*balance=.* for 3 layers on 2 ranks"):
            ModelParallel([nn.Linear(2, 2)] * 3, balance=balance)
    tied = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=rf"rank {rank}/2.*'0' \(rank 0\) and '2' \(rank 1\) share"):
        ModelParallel([tied, nn.ReLU(), tied])
    ModelParallel([tied, nn.ReLU(), tied], balance=[3, 0])
    model = ModelParallel([ByValue(), nn.ReLU()])
    x = torch.full((3, 2), 2.0)
    model(x)
    if rank == 0:
        with pytest.raises(ValueError, match=r"rank 0/2.*dims=\(1, 2\).*dims=\(2, 2\).*pad it"):
            model(x - 1)


def test_errors():
    spawn(2, body_errors)
