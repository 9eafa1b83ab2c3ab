"""Models and batches as people have them, for real_losses.py."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

ROWS, LENGTH, DIM, CLASSES = 8, 4, 5, 7  # the positions are as many as the rows of a rank


# Models ------------------------------------------------------------------------


class TimeFirst(nn.Module):
    """x (B, T, D) -> (T, B, C), as an LSTM and a transformer have it by default."""

    def __init__(self, layers=2):
        super().__init__()
        self.lstm, self.head = nn.LSTM(DIM, 6, layers), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(x.transpose(0, 1))[0])


class FlatTimeFirst(TimeFirst):
    """(T B, C)"""

    def forward(self, x):
        return super().forward(x).flatten(0, 1)


class WithHidden(TimeFirst):
    """Beside (T, B, C) the last state (layers, B, H), from which a loss reads the last layer."""

    def forward(self, x):
        out, (hidden, _) = self.lstm(x.transpose(0, 1))
        return {"hidden": hidden, "logits": self.head(out), "last": self.head(hidden[-1])}


class ForCtc(TimeFirst):
    def forward(self, x):
        return super().forward(x).log_softmax(-1)


class Vectors(nn.Module):
    """x (B, D) -> (B, C)"""

    def __init__(self, out=CLASSES):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, 9), nn.Tanh(), nn.Linear(9, out))

    def forward(self, x):
        return self.layers(x)


@dataclasses.dataclass
class Result:
    out: torch.Tensor


class InAnObject(Vectors):
    def forward(self, x):
        return Result(super().forward(x))


class RowsLast(Vectors):
    """(C, B)"""

    def forward(self, x):
        return super().forward(x).T


class Tokens(nn.Module):
    """x (B, T, D) -> (B, T, C)"""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, 9), nn.Tanh(), nn.Linear(9, CLASSES))

    def forward(self, x):
        return self.layers(x)


class WithCenters(Vectors):
    """Beside (B, C) a table of centers, as many as a rank has rows, or a multiple."""

    def __init__(self, many):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(many, CLASSES))

    def forward(self, x):
        return super().forward(x), self.centers


class Heads(nn.Module):
    """A dict of several outputs."""

    def __init__(self):
        super().__init__()
        self.trunk, self.kind, self.size = Tokens(), nn.Linear(CLASSES, 3), nn.Linear(CLASSES, 1)

    def forward(self, x):
        y = torch.tanh(self.trunk(x))
        return {"logits": y, "kind": self.kind(y.mean(1)), "size": self.size(y[:, 0])}


class OwnLoss(Vectors):
    """Takes the labels and returns its loss, as it computes it; how: (out, labels) -> number."""

    def __init__(self, how, shape=()):
        super().__init__()
        self.how, self.shape = how, shape

    def forward(self, x, labels):
        out = super().forward(x)
        return self.how(out, labels).view(self.shape), out


class Clip(nn.Module):
    """Two towers; its loss compares all rows with all."""

    def __init__(self, returns_loss):
        super().__init__()
        self.a, self.b, self.returns_loss = Vectors(), Vectors(), returns_loss

    def forward(self, x, z):
        x, z = F.normalize(self.a(x), dim=-1), F.normalize(self.b(z), dim=-1)
        if not self.returns_loss:
            return x, z
        scores = 10 * x @ z.T
        return {"loss": F.cross_entropy(scores, torch.arange(len(x))), "scores": scores}


class Auxiliary(Tokens):
    """Beside the logits a number, or several, from all rows."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        out = super().forward(x)
        return out, self.how(self, out)


class Vae(nn.Module):
    """Without its random numbers."""

    def __init__(self):
        super().__init__()
        self.mean, self.spread, self.back = Vectors(3), Vectors(3), nn.Linear(3, DIM)

    def forward(self, x):
        mean, spread = self.mean(x), self.spread(x)
        return self.back(mean + 0.1 * spread), mean, spread


# Batches -----------------------------------------------------------------------


def _generator(seed):
    return torch.Generator().manual_seed(seed)


def _normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def tokens(seed, length=LENGTH, uneven=False):
    g = _generator(seed)
    x, y = _normal(g, ROWS, length, DIM), torch.randint(1, CLASSES, (ROWS, length), generator=g)
    if uneven:
        for row in range(ROWS):
            y[row, 1 + row % length :] = -100
    return x, y


def uneven(seed):
    return tokens(seed, uneven=True)


def of_length(length):
    return lambda seed: tokens(seed, length)


def classes(seed):
    g = _generator(seed)
    return _normal(g, ROWS, DIM), torch.randint(0, CLASSES, (ROWS,), generator=g)


def holes(seed):
    x, y = classes(seed)
    y[::3] = -100
    return x, y


def ordered(seed):
    """Each microbatch and rank has another class most."""
    x, y = classes(seed)
    return x, y.sort().values


def numbers(*shape):
    def make(seed):
        g = _generator(seed)
        return _normal(g, ROWS, *shape[0]), _normal(g, ROWS, *shape[1])

    return make


def for_ctc(seed, length=12):
    g = _generator(seed)
    y = torch.randint(1, CLASSES, (ROWS, 3), generator=g)
    lengths = torch.randint(8, length + 1, (ROWS,), generator=g)
    return _normal(g, ROWS, length, DIM), (y, lengths, torch.randint(1, 4, (ROWS,), generator=g))


def labelled(batch):
    """With the targets among the inputs, too."""

    def make(seed):
        x, y = batch(seed)
        return (x, y), y

    return make


def pairs(seed):
    g = _generator(seed)
    return (_normal(g, ROWS, DIM), _normal(g, ROWS, DIM)), torch.zeros(ROWS, 1, dtype=torch.float64)


def mixed(seed):
    """Mixup before the step: two targets and a share for each row."""
    x, y = classes(seed)
    share = torch.rand(ROWS, generator=_generator(seed + 9), dtype=torch.float64)
    x = share[:, None] * x + (1 - share[:, None]) * x.flip(0)
    return x, (y, y.flip(0), share)


def masks(seed):
    g = _generator(seed)
    return _normal(g, ROWS, 6, DIM), (torch.rand(ROWS, 6, generator=g) < 0.4).long()


def heads(uneven=False):
    def make(seed):
        x, y = tokens(seed, uneven=uneven)
        g = _generator(seed + 5)
        return x, {"y": y, "kind": torch.randint(0, 3, (ROWS,), generator=g), "size": _normal(g, ROWS, 1)}

    return make


def border(seed):
    """Targets of one row in the middle that loss_fn leaves out."""
    x, y = tokens(seed)
    y[3, 1:] = 255
    return x, y


def weighted(seed):
    """One row in the middle has another weight."""
    x, y = classes(seed)
    weight = torch.ones(ROWS, dtype=torch.float64)
    weight[3] = 5
    return x, (y, weight)


def unknown(seed):
    """Real targets, some of which are none in one row."""
    x, y = numbers((DIM,), (CLASSES,))(seed)
    y[3, 2:] = torch.nan
    return x, y
