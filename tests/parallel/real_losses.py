"""Losses and models as people have them, for test_real_losses.py: each Case trains under a plan as in one
process, or is refused with a sentence that has these words.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from real_models import (
    CLASSES,
    DIM,
    LENGTH,
    ROWS,
    Auxiliary,
    Clip,
    FlatTimeFirst,
    ForCtc,
    Heads,
    InAnObject,
    OwnLoss,
    RowsLast,
    TimeFirst,
    Tokens,
    Vae,
    Vectors,
    WithCenters,
    WithHidden,
    border,
    classes,
    for_ctc,
    heads,
    holes,
    labelled,
    masks,
    mixed,
    numbers,
    of_length,
    ordered,
    pairs,
    tokens,
    uneven,
    unknown,
    weighted,
)
from torch import nn

NO_MEAN, MIXES = "is no mean over the targets that count", "the model mixes rows of the batch"
NO_PARTS = "the loss of a batch cannot be put together from those of its parts"


class Case(NamedTuple):
    """make: () -> model. batch: seed -> (inputs, targets). loss: (output, targets) -> mean."""

    make: Callable
    batch: Callable
    loss: Callable
    refused: str | None = None
    count: Callable | None = None


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


def hard(out, y):
    """The half of all rows whose loss is the largest."""
    return F.cross_entropy(out, y, reduction="none").topk(len(y) // 2 + 1).values.mean()


def but_255(out, y):
    return cross(out, y, ignore_index=255)


def with_own_weights(out, y):
    y, weight = y
    return (F.cross_entropy(out, y, reduction="none") * weight).sum() / weight.sum()


def own_weight(y):
    return y[1].sum()


def where_known(out, y):
    known = ~y.isnan()
    return (out[known] - y[known]).square().mean()


def known_in(y):
    return (~y.isnan()).sum()


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
    "in an object": Case(InAnObject, VECTORS, lambda o, y: F.mse_loss(o.out, y)),
    "centers": Case(lambda: WithCenters(4), classes, to_centers),
    "8 centers": Case(lambda: WithCenters(8), classes, to_all_centers),
    "centers, uneven": Case(lambda: WithCenters(8), holes, lambda o, y: cross(o[0] @ o[1].T[:, :7], y)),
    "centers, sum": Case(lambda: WithCenters(8), classes, centers_sum, NO_MEAN),
    # Means of several kinds
    "label smoothing": Case(Tokens, uneven, lambda o, y: cross(o, y, label_smoothing=0.1)),
    "ignore_index": Case(Tokens, uneven, cross),
    "classes of some rows": Case(Vectors, holes, cross),
    "focal": Case(Tokens, tokens, focal),
    "focal, uneven": Case(Tokens, uneven, focal),
    "focal, own count": Case(Tokens, uneven, focal_uneven),
    "class weights": Case(Vectors, ordered, by_class, "weights of classes"),
    "class weights, their sum": Case(Vectors, ordered, by_class, None, lambda y: weight_of(y) / 1000),
    "class weights, sum": Case(Tokens, uneven, by_class_and_own_count),
    "class weights by hand": Case(Vectors, ordered, by_class_by_hand, NO_MEAN),
    "class weights, counted": Case(Vectors, ordered, by_class_by_hand, None, weight_of),
    "sum": Case(Vectors, classes, sum_of, NO_MEAN),
    "sum over rows": Case(Vectors, classes, own_rows),
    "sum over rows, uneven": Case(Vectors, holes, own_rows),
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
    "hard rows": Case(Vectors, classes, hard, NO_MEAN),
    "ignored 255 in one row": Case(Tokens, border, but_255, NO_MEAN),
    "ignored 255, counted": Case(Tokens, border, but_255, None, lambda y: (y != 255).sum()),
    "weights of rows": Case(Vectors, weighted, with_own_weights, NO_MEAN),
    "weights of rows, counted": Case(Vectors, weighted, with_own_weights, None, own_weight),
    "weights of rows, fractions": Case(Vectors, weighted, with_own_weights, None, lambda y: y[1].sum() / 50),
    "class weights, fractions": Case(Vectors, ordered, by_class_by_hand, None, lambda y: weight_of(y) / 1000),
    "unknown targets": Case(Vectors, unknown, where_known, NO_MEAN),
    "unknown targets, counted": Case(Vectors, unknown, where_known, None, known_in),
    # Numbers that the model computes
    "own loss": Case(lambda: OwnLoss(cross), labelled(classes), given),
    "own loss, uneven": Case(lambda: OwnLoss(cross), labelled(holes), given),
    "own loss of one value": Case(lambda: OwnLoss(cross, (1,)), labelled(classes), given_one),
    "own sum": Case(lambda: OwnLoss(sum_of), labelled(classes), given, NO_PARTS),
    "own sum of one value": Case(lambda: OwnLoss(sum_of, (1,)), labelled(classes), given_one, NO_PARTS),
    "own triplet": Case(lambda: OwnLoss(triplet), labelled(classes), given, NO_PARTS),
    "own contrast": Case(lambda: Clip(True), pairs, given, NO_PARTS),
    "penalty on weights": Case(lambda: Auxiliary(of_weights), uneven, with_auxiliary),
    "auxiliary": Case(lambda: Auxiliary(rows_and_mean), tokens, with_auxiliary),
    "balance": Case(lambda: Auxiliary(batch_mean), tokens, with_balance, NO_PARTS),
    "mean of all": Case(lambda: Auxiliary(batch_mean), tokens, with_auxiliary),
    "own number of tokens": Case(lambda: Auxiliary(rows_in), tokens, per_number),
}
