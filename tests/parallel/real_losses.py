"""Losses and models as people have them, for test_real_losses.py: each Case trains under a plan as in one
process, or is refused with a sentence that has these words.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

ROWS, LENGTH, DIM, CLASSES = 8, 4, 5, 7  # the positions are as many as the rows of a rank

NO_MEAN, MIXES = "is no mean over the targets that count", "the model mixes rows of the batch"
NO_PARTS = "the loss of a batch cannot be put together from those of its parts"


class Case(NamedTuple):
    """make: () -> model. batch: seed -> (inputs, targets). loss: (output, targets) -> mean."""

    make: Callable
    batch: Callable
    loss: Callable
    refused: str | None = None
    count: Callable | None = None


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


# Losses ------------------------------------------------------------------------


def cross(out, y, **options):
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), **options)


def time_first(out, y):
    return cross(out, y.T)


def flat(out, y):
    return F.cross_entropy(out, y.T.flatten())


def ctc(out, y):
    return F.ctc_loss(out, y[0], y[1], y[2])


def ctc_of_torch(out, y):
    return nn.CTCLoss(zero_infinity=True)(out, *y)


def ctc_sum(out, y):
    return F.ctc_loss(out, y[0], y[1], y[2], reduction="sum")


def square(out, y):
    return out.pow(2).mean()


def square_sum(out, y):
    return out.pow(2).sum()


def broadcast(out, y):
    """(T, B, C) with (B, C)."""
    return (out - y).pow(2).mean()


def contrast_time_first(out, y):
    found = out.mean(0)
    return F.cross_entropy(found @ found.T, torch.arange(len(found)))


def last_state(out, y):
    return cross(out["last"], y[:, 0]) + 0.1 * out["hidden"].square().mean()


def transposed(out, y):
    return F.cross_entropy(out.T, y)


def to_centers(out, y):
    return (out[0] - out[1][y % len(out[1])]).square().mean()


def to_all_centers(out, y):
    return F.cross_entropy(-torch.cdist(*out), y % len(out[1]))


def centers_sum(out, y):
    return (out[0] - out[1][y % len(out[1])]).square().sum()


def by_class(out, y):
    return cross(out, y, weight=torch.linspace(0.5, 2, CLASSES, dtype=out.dtype))


def by_class_and_own_count(out, y):
    weight = torch.linspace(0.5, 2, CLASSES, dtype=out.dtype)
    return cross(out, y, weight=weight, reduction="sum") / (y != -100).sum()


def by_class_by_hand(out, y):
    weight = torch.linspace(0.5, 2, CLASSES, dtype=out.dtype)[y]
    return (F.cross_entropy(out, y, reduction="none") * weight).sum() / weight.sum()


def weight_of(y):
    return torch.linspace(0.5, 2, CLASSES)[y].sum() * 1000


def own_rows(out, y):
    return cross(out, y, reduction="sum") / len(out)


def constant_rows(out, y):
    return cross(out, y, reduction="sum") / ROWS


def focal(out, y):
    each = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def focal_uneven(out, y):
    each = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="none")
    each = (1 - torch.exp(-each)) ** 2 * each
    return each.sum() / (y != -100).sum().clamp(min=1)


def dice(out, y):
    """Of each row."""
    p = out[..., 0].sigmoid()
    return 1 - ((2 * (p * y).sum(1) + 1) / (p.sum(1) + y.sum(1) + 1)).mean()


def dice_of_all(out, y):
    p = out[..., 0].sigmoid()
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


def dice_and_binary(out, y):
    return dice(out, y) + F.binary_cross_entropy_with_logits(out[..., 0], y.to(out))


def mixup(out, y):
    a, b, share = y
    each = share * F.cross_entropy(out, a, reduction="none")
    return (each + (1 - share) * F.cross_entropy(out, b, reduction="none")).mean()


def clip(out, y):
    scores = 10 * out[0] @ out[1].T
    return F.cross_entropy(scores, torch.arange(len(scores)))


def triplet(out, y):
    """The nearest of another class among the rows."""
    distances = torch.cdist(out, out)
    same = y[:, None] == y[None]
    far = distances.masked_fill(~same, 0.0).amax(1)
    near = distances.masked_fill(same, 9.0).amin(1)
    return F.relu(far - near + 1).mean()


def barlow(out, y):
    a, b = ((each - each.mean(0)) / each.std(0) for each in out)
    found = a.T @ b / len(a)
    return (found - torch.eye(len(found), dtype=found.dtype)).square().sum()


def of_heads(out, y):
    return (
        cross(out["logits"], y["y"])
        + 0.3 * F.cross_entropy(out["kind"], y["kind"])
        + 0.2 * F.mse_loss(out["size"], y["size"])
    )


def given(out, y):
    return out[0] if isinstance(out, tuple) else out["loss"]


def given_one(out, y):
    return out[0].mean()


def with_auxiliary(out, y):
    return cross(out[0], y) + 0.1 * out[1].sum()


def with_balance(out, y):
    return cross(out[0], y) + (out[1] * out[1]).sum()


def per_number(out, y):
    return cross(out[0], y, reduction="sum") / out[1]


def vae(out, y):
    back, mean, spread = out
    each = F.mse_loss(back, y, reduction="none").sum(1)
    return (each - 0.5 * (1 + spread - mean**2 - spread.exp()).sum(1)).mean()


def vae_of_two_means(out, y):
    back, mean, spread = out
    return F.mse_loss(back, y) - 0.5 * (1 + spread - mean**2 - spread.exp()).mean()


def root(out, y):
    return F.mse_loss(out, y).sqrt()


def perplexity(out, y):
    return cross(out, y).exp()


def cosine(out, y):
    return 1 - F.cosine_similarity(out, y, dim=-1).mean()


def correlation(out, y):
    """Concordance over the batch."""
    a, b = out - out.mean(), y - y.mean()
    return 1 - 2 * (a * b).mean() / (a.square().mean() + b.square().mean() + (out.mean() - y.mean()) ** 2)


def divergence(out, y):
    return F.kl_div(out.log_softmax(-1), y.softmax(-1), reduction="batchmean")


def divergence_mean(out, y):
    return F.kl_div(out.log_softmax(-1), y.softmax(-1), reduction="mean")


def hinge(out, y):
    return F.multi_margin_loss(out, y)


def confident(out, y):
    """Entropy of the mean prediction: a number of the batch."""
    mean = out.softmax(-1).flatten(0, -2).mean(0)
    return cross(out, y) + (mean * mean.log()).sum()


def in_fp32(out, y):
    return F.cross_entropy(out.float().flatten(0, -2), y.flatten()) - 40


def sum_of(out, labels):
    return F.cross_entropy(out, labels, reduction="sum")


def rows_of(y):
    y = y if isinstance(y, torch.Tensor) else next(iter(y.values() if isinstance(y, dict) else y))
    return torch.tensor(len(y))


def batch_mean(model, out):
    return out.mean((0, 1))


def of_weights(model, out):
    return sum(p.square().sum() for p in model.parameters())


def rows_in(model, out):
    return out.new_tensor(out.shape[0] * out.shape[1])


def rows_and_mean(model, out):
    return out.square().mean()


VECTORS, TWO = numbers((DIM,), (CLASSES,)), numbers((DIM,), (DIM,))
SEQUENCE = numbers((LENGTH, DIM), (CLASSES,))

CASES = {
    # Outputs whose rows are not in front
    "lstm": Case(TimeFirst, tokens, time_first),
    "lstm, 1 position": Case(TimeFirst, of_length(1), time_first),
    "lstm, 3 positions": Case(TimeFirst, of_length(3), time_first),
    "lstm, 6 positions": Case(TimeFirst, of_length(6), time_first),
    "lstm, uneven": Case(TimeFirst, uneven, time_first),
    "lstm, flat": Case(FlatTimeFirst, tokens, flat),
    "lstm, flat, uneven": Case(FlatTimeFirst, uneven, flat),
    "lstm, its state": Case(WithHidden, tokens, last_state),
    "ctc": Case(ForCtc, for_ctc, ctc),
    "ctc of torch": Case(ForCtc, for_ctc, ctc_of_torch),
    "ctc, sum": Case(ForCtc, for_ctc, ctc_sum, NO_MEAN),
    "squares, time first": Case(TimeFirst, tokens, square),
    "sum of squares, time first": Case(TimeFirst, tokens, square_sum, NO_MEAN),
    "contrast, time first": Case(TimeFirst, tokens, contrast_time_first, NO_MEAN),
    "broadcast targets": Case(TimeFirst, SEQUENCE, broadcast),
    "rows last": Case(RowsLast, classes, transposed),
    "centers": Case(lambda: WithCenters(4), classes, to_centers),
    "8 centers": Case(lambda: WithCenters(8), classes, to_all_centers),
    "centers, uneven": Case(lambda: WithCenters(8), holes, lambda o, y: cross(o[0] @ o[1].T[:, :7], y)),
    "centers, sum": Case(lambda: WithCenters(8), classes, centers_sum, NO_MEAN),
    # Means of several kinds
    "label smoothing": Case(Tokens, uneven, lambda o, y: cross(o, y, label_smoothing=0.1)),
    "ignore_index": Case(Tokens, uneven, cross),
    "classes of some rows": Case(Vectors, holes, cross),
    "focal": Case(Tokens, tokens, focal),
    "focal, uneven": Case(Tokens, uneven, focal, NO_MEAN),
    "focal, own count": Case(Tokens, uneven, focal_uneven),
    "class weights": Case(Vectors, ordered, by_class, "weights of classes"),
    "class weights, sum": Case(Tokens, uneven, by_class_and_own_count),
    "class weights by hand": Case(Vectors, ordered, by_class_by_hand, NO_MEAN),
    "class weights, counted": Case(Vectors, ordered, by_class_by_hand, None, weight_of),
    "sum": Case(Vectors, classes, sum_of, NO_MEAN),
    "sum over rows": Case(Vectors, classes, own_rows),
    "sum over rows, uneven": Case(Vectors, holes, own_rows, NO_MEAN),
    "sum over rows, counted": Case(Vectors, holes, own_rows, None, rows_of),
    "sum over a constant": Case(Vectors, classes, constant_rows, NO_MEAN),
    "dice": Case(Tokens, masks, dice),
    "dice of all": Case(Tokens, masks, dice_of_all, NO_MEAN),
    "dice and binary": Case(Tokens, masks, dice_and_binary),
    "mixup": Case(Vectors, mixed, mixup),
    "contrast": Case(lambda: Clip(False), pairs, clip, NO_MEAN),
    "triplet": Case(Vectors, classes, triplet, NO_MEAN),
    "barlow": Case(lambda: Clip(False), pairs, barlow, NO_MEAN),
    "heads": Case(Heads, heads(), of_heads),
    "heads, uneven": Case(Heads, heads(uneven=True), of_heads, NO_MEAN),
    "vae": Case(Vae, TWO, vae),
    "vae, means": Case(Vae, TWO, vae_of_two_means),
    "root": Case(Vectors, VECTORS, root, NO_MEAN),
    "perplexity": Case(Tokens, tokens, perplexity, NO_MEAN),
    "cosine": Case(Vectors, VECTORS, cosine),
    "correlation": Case(Vectors, VECTORS, correlation, NO_MEAN),
    "batchmean": Case(Vectors, VECTORS, divergence),
    "mean of a divergence": Case(Vectors, VECTORS, divergence_mean),
    "hinge": Case(Vectors, classes, hinge),
    "entropy of the mean": Case(Tokens, tokens, confident, NO_MEAN),
    "in fp32": Case(Tokens, tokens, in_fp32),
    # Numbers that the model computes
    "own loss": Case(lambda: OwnLoss(cross), labelled(classes), given),
    "own loss, uneven": Case(lambda: OwnLoss(cross), labelled(holes), given),
    "own loss of one value": Case(lambda: OwnLoss(cross, (1,)), labelled(classes), given_one),
    "own sum": Case(lambda: OwnLoss(sum_of), labelled(classes), given, NO_PARTS),
    "own sum of one value": Case(lambda: OwnLoss(sum_of, (1,)), labelled(classes), given_one, NO_PARTS),
    "own triplet": Case(lambda: OwnLoss(triplet), labelled(classes), given, NO_PARTS),
    "own contrast": Case(lambda: Clip(True), pairs, given, MIXES),
    "penalty on weights": Case(lambda: Auxiliary(of_weights), uneven, with_auxiliary),
    "auxiliary": Case(lambda: Auxiliary(rows_and_mean), tokens, with_auxiliary),
    "balance": Case(lambda: Auxiliary(batch_mean), tokens, with_balance, NO_PARTS),
    "mean of all": Case(lambda: Auxiliary(batch_mean), tokens, with_auxiliary),
    "own number of tokens": Case(lambda: Auxiliary(rows_in), tokens, per_number),
}
