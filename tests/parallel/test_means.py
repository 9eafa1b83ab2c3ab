"""What loss_fn is taken for, a mean over the targets that count, is found out before the first update: in
one process. Under plans: test_means_under_plans.py.
"""

import functools
import operator
import types

import pytest
import torch
import torch.nn.functional as F
from mean_losses import (
    CLASSES,
    LENGTH,
    TARGETS,
    all_of,
    broadcast,
    by_class,
    contrast,
    data,
    mean,
    of_rows,
    over_all,
    over_itself,
    padding_ignored,
    raises_value,
    random,
    root,
    rows_of,
    shifted,
    shifted_targets,
    squares,
    total,
)
from torch import nn

import pycomm.parallel as par
from pycomm.parallel.checks import choice
from pycomm.parallel.ground.batch import count_targets

FINE, SUM, NO_MEAN = None, "It is a sum", "is no mean over the targets that count"
AUTO = None  # the count is found
CASES = [
    (mean, AUTO, "uneven", FINE),
    (functools.partial(mean, label_smoothing=0.1), AUTO, "uneven", FINE),
    (by_class, AUTO, "uneven", FINE),
    (total, AUTO, "uneven", NO_MEAN),
    (total, AUTO, "even", SUM),
    (over_all, AUTO, "uneven", FINE),  # a mean over rows
    (over_all, count_targets, "uneven", NO_MEAN),
    (over_all, count_targets, "even", FINE),
    (over_all, all_of, "uneven", FINE),
    (mean, all_of, "uneven", NO_MEAN),
    (shifted, AUTO, "uneven", FINE),
    (shifted, count_targets, "uneven", NO_MEAN),
    (shifted, count_targets, "even", FINE),
    (shifted, shifted_targets, "uneven", FINE),
    (of_rows, AUTO, "uneven", FINE),
    (of_rows, count_targets, "uneven", NO_MEAN),
    (of_rows, rows_of, "uneven", FINE),
    (padding_ignored, AUTO, "even", FINE),
    (padding_ignored, AUTO, "uneven", FINE),
    (contrast, AUTO, "even", NO_MEAN),
    (contrast, rows_of, "even", NO_MEAN),
    (random, AUTO, "uneven", NO_MEAN),
    (squares, AUTO, "numbers", FINE),
    (broadcast, AUTO, "numbers", NO_MEAN),
    (root, AUTO, "numbers", NO_MEAN),
    (over_itself, AUTO, "numbers", NO_MEAN),
]


class Scaled(nn.Module):
    """Gives what it is given, in a shape of `give`."""

    def __init__(self, give=None):
        super().__init__()
        self.scale, self.give = nn.Parameter(torch.ones(())), give

    def forward(self, x):
        return self.scale * x if self.give is None else self.give(self.scale * x)


def cut(loss_fn, inputs, targets, count=None, give=None, **options):
    """(sentence, or None where the loss is that of the whole; what describe() says of the loss)."""
    model = Scaled(give)
    text, microbatches = options.get("text", ""), options.get("microbatches", 2)
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.0), text)
    try:
        found = par.step(
            model, opt, (inputs, targets), loss_fn, microbatches=microbatches, count=count
        ).item()
    except ValueError as error:
        return str(error), ""
    right = loss_fn(model(inputs), targets).item()
    assert found == pytest.approx(right, rel=1e-5), (found, right)
    return None, str(model._parallel.checks.of["loss"])


@pytest.mark.parametrize("loss_fn, counter, kind, expected", CASES)
@pytest.mark.parametrize("microbatches", [2, 5])
def test_one_loss(loss_fn, counter, kind, expected, microbatches):
    found, _ = cut(loss_fn, *data(kind), counter, microbatches=microbatches)
    assert found is None if expected is None else expected in found


@pytest.mark.parametrize(
    "loss_fn, what",
    [(mean, "targets"), (shifted, "targets without the first of each row"), (of_rows, "rows")],
)
def test_what_counts_is_found_and_shown(loss_fn, what):
    assert cut(loss_fn, *data()) == (None, f"held: a mean over {what}")


def test_padding_that_counts():
    """Zeros are ignored by loss_fn, and only some rows have them."""
    output, targets = data("even")
    targets[3, :4] = 0
    assert NO_MEAN in cut(padding_ignored, output, targets)[0]


@pytest.mark.parametrize("loss_fn, count, expected", [(mean, None, None), (over_all, count_targets, NO_MEAN)])
def test_rows_that_count_nothing(loss_fn, count, expected):
    output, targets = torch.randn(4, CLASSES), torch.tensor([3, -100, 5, -100])
    found, _ = cut(loss_fn, output, targets, count)
    assert found is None if expected is None else expected in found


def test_a_window_of_long_rows(monkeypatch):
    """The rows differ in a few positions at the end."""
    monkeypatch.setattr(choice, "FEW_TOKENS", 16)
    targets = torch.randint(1, CLASSES, (4, 40))
    targets[2, -2:] = -100
    output = torch.randn(4, 40, CLASSES)
    assert cut(mean, output, targets, microbatches=4)[0] is None
    assert NO_MEAN in cut(over_all, output, targets, count_targets, microbatches=4)[0]


def flat_and_scale(x):
    return {"logits": x.flatten(0, 1), "scale": torch.ones(3)}


def kept_in_an_object(x):
    return types.SimpleNamespace(logits=x)


@pytest.mark.parametrize(
    "give, get",
    [(flat_and_scale, operator.itemgetter("logits")), (kept_in_an_object, operator.attrgetter("logits"))],
)
def test_trees_objects_and_flat_outputs(give, get):
    output, targets = data()
    assert cut(lambda out, y: mean(get(out), y), output, targets, give=give)[0] is None
    assert NO_MEAN in cut(lambda out, y: total(get(out), y), output, targets, give=give)[0]


def test_a_measure_that_takes_no_few_rows_is_tried_with_more():
    """One that compares four rows or more with each other."""

    def of_four(out, y):
        if len(out) < 4:
            raise ValueError("four rows, please")
        return contrast(out, y)

    found, _ = cut(of_four, torch.randn(16, LENGTH, CLASSES), torch.randint(1, CLASSES, (16, LENGTH)))
    assert NO_MEAN in found and "par.gather_rows" in found


def test_what_cannot_be_tried_is_told(caplog):
    calls = []

    def once(out, y):
        calls.append(len(out))
        if len(out) != 5:
            raise ValueError("five rows, please")
        return mean(out, y)

    model = Scaled()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.0), par.Plan())
    batch = torch.randn(10, LENGTH, CLASSES), torch.randint(1, CLASSES, (10, LENGTH))
    par.step(model, opt, batch, once, microbatches=2)
    assert calls[-2:] == [5, 5]
    why = "not tried: it, or the loss, raises for few rows of the batch (ValueError: five rows, please)"
    assert {str(answer) for answer in model._parallel.checks.of.values()} == {why}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2 and all("trust=(" in text for text in warnings)


def test_the_user_may_answer():
    output, targets = data("even")
    assert cut(mean, output, targets, text="trust=rows+loss") == (None, "trusted: Plan(trust=...)")
    with pytest.raises(AssertionError):  # what is wrong then is the user's word
        cut(total, output, targets, text="trust=loss")


class Force(Scaled):
    """Its output is a gradient by its input."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
        energy = (self.scale * x).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def test_a_model_that_asks_for_gradients_in_its_forward():
    output, targets = data("numbers")
    model = Force()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.0), par.Plan())
    par.step(model, opt, (output, targets), squares, microbatches=2)
    assert {str(each) for each in model._parallel.checks.of.values()} == {"held", "held: a mean over targets"}


def test_a_sum_of_what_has_dropout():
    output, targets = data()
    for loss_fn in (total, lambda out, y: mean(out, y) * len(out) ** 0.5):
        model = nn.Sequential(Scaled(), nn.Dropout(0.3))
        model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.0), par.Plan())
        with raises_value(NO_MEAN):
            par.step(model, opt, (output, targets), loss_fn, microbatches=2)


def test_a_metric_that_shows_nothing_is_asked_again():
    def precision(out, y):
        found = out.argmax(-1) == 1
        return (found & (y == 1)).sum() / found.sum().clamp(min=1)

    output, targets = data()
    model = Scaled()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.0), par.Plan())
    metrics = {"precision": precision}
    same = output * 0 + torch.arange(CLASSES)
    par.evaluate(model, (same, targets), mean, metrics=metrics, microbatches=2)
    output[..., 1] += 2
    targets[:2] = 1
    with raises_value("the metric 'precision' is no mean"):
        par.evaluate(model, (output, targets), mean, metrics=metrics, microbatches=2)


def noisy(out, y):
    """Draws random numbers."""
    return mean(out + 0.1 * torch.randn_like(out), y)


def half_inside(out, y):
    return mean(out.bfloat16().float(), y).bfloat16().float()


class Ramp:
    """A loss with a constant that it makes at its first call, and a counter."""

    def __init__(self):
        self.weights, self.calls = None, 0

    def __call__(self, out, y):
        self.calls += 1
        if self.weights is None:
            self.weights = torch.linspace(0.5, 1.5, CLASSES).to(out)
        assert self.weights.dtype == out.dtype
        return mean(out * self.weights, y)


def test_losses_that_draw_round_or_keep_something():
    output, targets = data()
    for loss_fn in (noisy, half_inside, Ramp()):
        model = Scaled()
        model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.0), par.Plan())
        par.step(model, opt, (output, targets), loss_fn, microbatches=2)
        assert str(model._parallel.checks.of["loss"]) == "held: a mean over targets", loss_fn
    assert loss_fn.calls == 2


class Trainer:
    def loss(self, out, y):
        return mean(out, y)


def test_a_loss_is_asked_once():
    """Also one that is made anew, and two in turns."""
    output, targets = data()
    model, trainer = Scaled(), Trainer()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.0), par.Plan())
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1) and None)
    counts = []
    for _ in range(3):
        before = len(calls)
        for loss_fn in (trainer.loss, lambda out, y: nn.CrossEntropyLoss()(out.flatten(0, 1), y.flatten())):
            par.step(model, opt, (output, targets), loss_fn, microbatches=2)
        par.evaluate(model, (output, targets), mean, metrics={"a": lambda out, y: mean(out, y)})
        counts.append(model._parallel.checks.batches[True, ("loss_fn",)])
    assert [len(each) for each in model._parallel.checks.asked.values()] == [2]
    assert counts[-1] == counts[0] * 3 and before


def row_sums(out, y):
    return total(out, y) / len(out)


def test_counters_that_equal_rows_do_not_tell_apart():
    """Two calls with rows of other lengths make one update."""
    for loss_fn in (mean, shifted, row_sums):
        generator = torch.Generator().manual_seed(0)
        calls = [
            (torch.randn(4, length, CLASSES, generator=generator), torch.randint(1, CLASSES, (4, length)))
            for length in (3, 9)
        ]
        model = Scaled().double()
        model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 1.0), par.Plan())
        for (inputs, targets), update in zip(calls, (False, True), strict=True):
            par.step(model, opt, (inputs.double(), targets), loss_fn, update=update, microbatches=2)
        right, scale = 0.0, torch.ones((), dtype=torch.float64, requires_grad=True)
        counts = [{mean: y.numel(), shifted: y[:, 1:].numel(), row_sums: len(y)}[loss_fn] for _, y in calls]
        for count, (inputs, targets) in zip(counts, calls, strict=True):
            right = right + count / sum(counts) * loss_fn(scale * inputs.double(), targets)
        (gradient,) = torch.autograd.grad(right, scale)
        assert model.scale.item() == pytest.approx(1.0 - gradient.item(), rel=1e-9), loss_fn


@pytest.mark.parametrize("kind", ["ignored 255", "mask", "zero first"])
def test_a_later_batch_shows_what_the_first_does_not(kind):
    def loss_fn(out, y):
        y, mask = y
        if kind == "mask":
            return (F.mse_loss(out[..., 0], y.double(), reduction="none") * mask).sum() / mask.sum()
        if kind == "zero first":
            return F.mse_loss(out[..., 0], y.double(), reduction="sum") * mask.max()
        return mean(out, y, ignore_index=255)

    def batch(is_first):
        inputs = torch.randn(4, LENGTH, 300, dtype=torch.float64)
        targets, mask = torch.randint(1, CLASSES, (4, LENGTH)), torch.ones(4, LENGTH, dtype=torch.float64)
        if not is_first:
            targets[2, 2:] = 255 if kind == "ignored 255" else targets[2, 2:]
            mask[2, 2:] = 0
        return inputs, (targets, mask * 0 if kind == "zero first" and is_first else mask)

    model = Scaled().double()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.0), par.Plan())
    options = {} if kind == "zero first" else TARGETS
    par.step(model, opt, batch(True), loss_fn, microbatches=2, **options)
    with raises_value("is no mean over the targets that count"):
        par.step(model, opt, batch(False), loss_fn, microbatches=2, **options)
