"""Losses that are means over something, or are not, and data for them; for test_means*.py."""

import contextlib

import torch
import torch.nn.functional as F

from pycomm.parallel.ground.batch import count_targets

ROWS, LENGTH, CLASSES = 5, 6, 29


def mean(out, y, **options):
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), **options)


def total(out, y):
    return mean(out, y, reduction="sum")


def over_all(out, y):
    """Of ignored targets, too, which give zeros."""
    return mean(out, y, reduction="none").mean()


def shifted(out, y):
    return mean(out[:, :-1], y[:, 1:])


def of_rows(out, y):
    each = mean(out, y, reduction="none").view(y.shape).sum(1)
    return (each / (y != -100).sum(1)).mean()


def padding_ignored(out, y):
    return mean(out, y.clamp(min=0), ignore_index=0)


def contrast(out, y):
    found = out.mean(1) @ out.mean(1).T
    return F.cross_entropy(found, torch.arange(len(found)))


def random(out, y):
    return total(out * torch.rand(()), y)


def by_class(out, y):
    """Has fp32 tensors of its own, and is right."""
    weights = torch.linspace(0.5, 2, CLASSES)
    return mean(out.transpose(1, 2).transpose(1, 2), y, weight=weights, reduction="sum") / (y != -100).sum()


def squares(out, y):
    return F.mse_loss(out, y)


def broadcast(out, y):
    """(rows) with (rows, 1): each with each."""
    return (out[:, 0, 0] - y[:, :1, 0]).square().mean()


def root(out, y):
    return F.mse_loss(out, y).sqrt()


def over_itself(out, y):
    """One, with a gradient that compares rows."""
    loss = F.mse_loss(out, y)
    return loss / loss.detach()


def all_of(y):
    return torch.tensor(y.numel())


def shifted_targets(y):
    return (y[:, 1:] != -100).sum()


def rows_of(y):
    return torch.tensor(len(y))


def data(kind="uneven", seed=0):
    """(output, targets): "uneven" and "even" targets that count, or "numbers"."""
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(ROWS, LENGTH, CLASSES, generator=generator)
    if kind == "numbers":
        return output, torch.randn(ROWS, LENGTH, CLASSES, generator=generator)
    targets = torch.randint(1, CLASSES, (ROWS, LENGTH), generator=generator)
    if kind == "uneven":
        for row in range(ROWS):
            targets[row, 1 : row + 1] = -100
    return output, targets


TARGETS = {"count": count_targets}
WHAT = {shifted: "targets without the first of each row", over_all: "rows"}


@contextlib.contextmanager
def raises_value(words):
    """As pytest.raises, whose own failure no rank can send."""
    try:
        yield
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was raised with {words!r}")
