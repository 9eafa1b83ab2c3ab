"""Models that mix the rows of a batch, and models that only look as if they did; for test_prove_rows.py."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import pycomm.parallel as par

ROWS, LENGTH, DIM = 8, 5, 6


class Made(nn.Module):
    """x (B, T, 6) -> (B, T, 6), with something in between."""

    def __init__(self, between=None):
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.between = between or nn.Identity()

    def forward(self, x):
        return self.last(self.between(torch.tanh(self.first(x))))


def by_sort(x):
    return x.sort(0).values


class Decides(Made):
    def forward(self, x):
        y = super().forward(x)
        return y if x.mean() > 0 else -y


class OwnNorm(nn.Module):
    """Statistics of the batch in training, running ones else."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x):
        if not self.training:
            return x - self.mean.to(x)
        mean = x.mean((0, 1))
        self.mean = 0.9 * self.mean + 0.1 * mean.detach()
        return x - mean


class Kept(nn.Module):
    """The mean of the batch goes by way of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM), persistent=False)

    def forward(self, x):
        self.mean.copy_(x.detach().mean((0, 1)))
        out = x - self.mean.to(x)
        self.mean.zero_()  # alike on all ranks after the step
        return out


class Named(Made):
    """Called with words, one of which holds a dict."""

    def forward(self, x, more):
        return {"out": super().forward(x + more["shift"] - more["shift"].mean(0))}


class Pairs(Made):
    """Of all rows with all rows."""

    def forward(self, x):
        y = super().forward(x).mean(1)
        return y @ y.T


class Recurrent(nn.Module):
    """Positions first inside, and in what it returns."""

    def __init__(self, mixes=False):
        super().__init__()
        self.lstm, self.mixes = nn.LSTM(DIM, DIM), mixes

    def forward(self, x):
        y = x.transpose(0, 1)
        y, _ = self.lstm(y - y.mean(1, keepdim=True) if self.mixes else y)
        return y.flatten(0, 1) if self.mixes is None else y


class _Summed(torch.autograd.Function):
    """Over all ranks, gradients too."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return _Summed.apply(grad)


class Synchronized(Made):
    """A mean over the rows of all ranks, which it computes itself."""

    def forward(self, x):
        y = self.first(x)
        total, count = y.sum((0, 1)), torch.tensor(float(y.shape[0] * y.shape[1]), dtype=y.dtype)
        numbers = torch.cat([total, count[None]])
        if dist.is_initialized():
            numbers = _Summed.apply(numbers)
        return self.last(y - numbers[:-1] / numbers[-1])


class Extra(Made):
    """Gives a result of mixed rows that the loss does not use."""

    def forward(self, x):
        y = super().forward(x)
        return {"out": y, "centered": y - y.mean(0), "pairs": y.mean(1) @ y.mean(1).T}


class Placed(Made):
    """What a row becomes depends on its place among the rows."""

    def forward(self, x):
        return super().forward(x + torch.arange(len(x), dtype=x.dtype).view(-1, 1, 1))


class Counting(Made):
    """Keeps state of all kinds, and gives something else each time it is called."""

    def __init__(self, between=None):
        super().__init__(between)
        self.calls, self.seen, self.table = 0, [], torch.zeros(3)
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.count += 1
        self.table[0] += 1
        self.seen.append(len(x))
        factor = self.calls + self.table[0] + self.count + len(self.seen)
        return super().forward(x) * factor * torch.rand(1, generator=self.generator).to(x)


class Raising(Made):
    """For any other number of rows than that of the first call. It mixes rows."""

    rows = None

    def forward(self, x):
        self.rows = self.rows or len(x)
        if len(x) != self.rows:
            raise RuntimeError("other rows")
        return super().forward(x - x.mean(0))


_generator = torch.Generator().manual_seed(3)


def private(x):
    return x * torch.rand(x.shape, generator=_generator).to(x)


def mixup(x):
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def by_layer(x):
    return x if random.random() < 0.5 else 2 * x


def as_many_as_it_says(x):
    """Draws a number of times that its values give."""
    for row in x:
        torch.rand(1 + int(row.abs().sum() * 7) % 5)
    return x * torch.rand_like(x)


class Experts(nn.Module):
    """With a balance of them."""

    def __init__(self):
        super().__init__()
        self.moe = par.MoE(DIM, lambda: nn.Linear(DIM, DIM), 3)

    def forward(self, x):
        return x + self.moe(x)


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.plain = nn.BatchNorm1d(DIM), nn.BatchNorm1d(DIM, track_running_stats=False)

    def forward(self, x):
        x = x.transpose(1, 2)
        return self.plain(self.norm(x)).transpose(1, 2)


MIXING = {
    "mean": lambda: Made(lambda x: x - x.mean(0)),
    "sum": lambda: Made(lambda x: x + x.sum(0) / 2),
    "softmax": lambda: Made(lambda x: x.softmax(0)),
    "sort": lambda: Made(by_sort),
    "cumsum": lambda: Made(lambda x: x.cumsum(0)),
    "roll": lambda: Made(lambda x: x + x.roll(1, 0)),
    "flip": lambda: Made(lambda x: x + x.flip(0)),
    "functional": lambda: Made(lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).mT),
    "decision": Decides,
    "own norm": lambda: Made(OwnNorm()),
    "buffer": lambda: Made(Kept()),
    "mean, dropout": lambda: Made(lambda x: F.dropout(x - x.mean(0), 0.2)),
    "named": Named,
    "pairs": Pairs,
    "mean in lstm": lambda: Recurrent(mixes=True),
    "place": Placed,
    "raising": Raising,
}
FINE = {
    "plain": Made,
    "norms": lambda: Made(Norms()),
    "dropout": lambda: Made(nn.Dropout(0.5)),
    "random": lambda: Made(lambda x: x + torch.randn_like(x)),
    "private": lambda: Made(private),
    "layers": lambda: Made(by_layer),
    "draws": lambda: Made(as_many_as_it_says),
    "mixup": lambda: Made(mixup),
    "lstm": Recurrent,
    "lstm, flat": lambda: Recurrent(mixes=None),
    "extra": Extra,
    "counting": Counting,
    "experts": lambda: Made(Experts()),
    "spectral": lambda: Made(nn.utils.parametrizations.spectral_norm(nn.Linear(DIM, DIM))),
    "synchronized": Synchronized,
}
