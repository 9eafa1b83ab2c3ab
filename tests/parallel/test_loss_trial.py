"""What loss_fn is taken for, a mean over the targets that count, is found out before the first update: alone,
and in the steps of plans.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from odd_models import Plain
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.ground.batch import count_targets
from pycomm.parallel.run import loss_trial
from pycomm.parallel.run.loss_trial import some_rows, try_loss

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


FINE, SUM, NO_MEAN = None, "It is a sum", "is no mean over the targets that count"
CASES = [
    (mean, count_targets, "uneven", FINE),
    (functools.partial(mean, label_smoothing=0.1), count_targets, "uneven", FINE),
    (by_class, count_targets, "uneven", FINE),
    (total, count_targets, "uneven", SUM),
    (total, count_targets, "even", SUM),
    (over_all, count_targets, "uneven", NO_MEAN),
    (over_all, count_targets, "even", FINE),
    (over_all, all_of, "uneven", FINE),
    (mean, all_of, "uneven", NO_MEAN),
    (shifted, count_targets, "uneven", NO_MEAN),
    (shifted, count_targets, "even", FINE),
    (shifted, shifted_targets, "uneven", FINE),
    (of_rows, count_targets, "uneven", NO_MEAN),
    (of_rows, rows_of, "uneven", FINE),
    (padding_ignored, count_targets, "even", FINE),
    (padding_ignored, count_targets, "uneven", FINE),
    (contrast, rows_of, "even", NO_MEAN),
    (random, count_targets, "uneven", FINE),
    (squares, count_targets, "numbers", FINE),
    (broadcast, count_targets, "numbers", NO_MEAN),
]


@pytest.mark.parametrize("loss_fn, counter, kind, expected", CASES)
@pytest.mark.parametrize("here", [1, 3])  # rows of the microbatch
def test_one_loss(loss_fn, counter, kind, expected, here):
    output, targets = data(kind)
    found = try_loss(loss_fn, some_rows(output[:here], targets[:here]), targets, counter)
    assert found.fault is None if expected is None else expected in found.fault


def test_padding_that_counts():
    """Zeros are ignored by loss_fn, and only some rows have them."""
    output, targets = data("even")
    targets[3, :4] = 0
    found = try_loss(padding_ignored, some_rows(output[:2], targets[:2]), targets, count_targets)
    assert NO_MEAN in found.fault


@pytest.mark.parametrize("loss_fn, is_fine", [(mean, True), (over_all, False)])
def test_rows_that_count_nothing(loss_fn, is_fine):
    output, targets = torch.randn(4, CLASSES), torch.tensor([3, -100, 5, -100])
    found = try_loss(loss_fn, some_rows(output, targets), targets, count_targets)
    assert (found.fault is None) == is_fine and found.uneven


@pytest.mark.parametrize("loss_fn, is_fine", [(mean, True), (shifted, False), (total, False)])
def test_positions_that_are_cut(loss_fn, is_fine):
    output, targets = data("even")
    found = try_loss(loss_fn, some_rows(output[:, :3], targets[:, :3], True), targets, count_targets)
    assert (found.fault is None) == is_fine


@pytest.mark.parametrize("loss_fn, is_fine", [(mean, True), (over_all, False)])
def test_a_window_of_long_rows(loss_fn, is_fine, monkeypatch):
    monkeypatch.setattr(loss_trial, "LARGEST", 5 * CLASSES)
    output, targets = data("even")
    targets[2, -2:] = -100
    found = try_loss(loss_fn, some_rows(output, targets), targets, count_targets)
    assert (found.fault is None) == is_fine and found.uneven


@pytest.mark.parametrize("flat", [False, True])
def test_trees_and_flat_outputs(flat):
    output, targets = data()
    tree = {"logits": output.flatten(0, 1) if flat else output, "scale": torch.ones(3)}
    for loss_fn, is_fine in [(mean, True), (total, False)]:

        def of_tree(out, y, loss_fn=loss_fn):
            return loss_fn(out["logits"], y)

        assert (try_loss(of_tree, some_rows(tree, targets), targets, count_targets).fault is None) == is_fine


@pytest.mark.parametrize(
    "own, kind, is_fine",
    [
        (mean, "uneven", True),
        (shifted, "uneven", False),
        (shifted, "even", True),
        (over_all, "uneven", False),
    ],
)
def test_a_loss_that_the_model_computed(own, kind, is_fine):
    output, targets = data(kind)
    rows = some_rows((output, own(output, targets)), targets)
    found = try_loss(lambda out, y: out[1], rows, targets, count_targets)
    assert (found.fault is None) == is_fine
    assert is_fine or "that the model has computed" in found.fault


# Under plans -------------------------------------------------------------------


def batch(is_even=False):
    _, targets = data("even" if is_even else "uneven")
    return targets.roll(1, 0).clamp(min=0), targets


def step(rank, world_size, text, loss_fn, options, evaluates):
    """(sentence, whether the parameters are as before, loss of a step with the mean after that)."""
    torch.manual_seed(0)
    model = Plain().double()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    model, opt = par.parallelize(model, opt, par.Plan.parse(text))
    before = par.full_state_dict(model)
    found = None
    try:
        if evaluates:
            par.evaluate(model, batch(), mean, metrics={"measure": loss_fn}, **options)
        else:
            if loss_fn is over_all:
                par.step(model, opt, batch(is_even=True), loss_fn, **options)
                before = par.full_state_dict(model)
            par.step(model, opt, batch(), loss_fn, **options)
    except ValueError as error:
        found = str(error)
    after = par.full_state_dict(model)
    is_same = all(torch.equal(before[key], after[key]) for key in before)
    return found, is_same, par.step(model, opt, batch(), mean, microbatches=2).item()


def expected(with_even_step):
    torch.manual_seed(0)
    model = Plain().double()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    if with_even_step:
        inputs, targets = batch(is_even=True)
        over_all(model(inputs), targets).backward()
        opt.step()
    inputs, targets = batch()
    return mean(model(inputs), targets).item()


@pytest.mark.parametrize(
    "text, loss_fn, options, evaluates",
    [
        ("dp=2", total, {}, False),
        ("dp=2", over_all, {}, False),  # its first batch is even, and right
        ("dp=2", over_all, {}, True),
        ("dp=2,zero=3", shifted, {"clip": 1.0}, False),
        ("pp=2", over_all, {"microbatches": 2}, False),
        ("ring=2", shifted, {}, False),
        ("tp=2", total, {"microbatches": 3}, False),
    ],
)
def test_refused_on_every_rank(text, loss_fn, options, evaluates):
    right = expected(loss_fn is over_all and not evaluates)
    for rank, (found, is_same, loss) in enumerate(spawn(2, step, text, loss_fn, options, evaluates)):
        who = "the metric 'measure'" if evaluates else "loss_fn"
        assert found.startswith(f"[rank {rank}] {who} is no mean over the targets that count. For ")
        assert is_same and abs(loss - right) < 1e-9


def of_own_rows(rank, world_size):
    """Rows of a rank count alike, those of the ranks do not."""
    torch.manual_seed(0)
    model = Plain().double()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    model, opt = par.parallelize(model, opt, par.Plan(dp=2))
    inputs, targets = batch(is_even=True)
    if rank:
        targets[:, :3] = -100
    with pytest.raises(ValueError, match="is no mean over the targets that count"):
        par.step(model, opt, (inputs, targets), over_all, sharded=True)
    return par.step(model, opt, (inputs, targets), mean, sharded=True).item()


def test_ranks_with_rows_of_their_own():
    first, second = spawn(2, of_own_rows)
    assert first == second


def with_other_counts(rank, world_size):
    """A loss that is right with one count is not known to be with another."""
    torch.manual_seed(0)
    model = Plain().double()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), par.Plan(dp=2))
    par.step(model, opt, batch(), shifted, count=shifted_targets)
    with pytest.raises(ValueError, match="is no mean over the targets that count"):
        par.step(model, opt, batch(), shifted)


def test_the_same_loss_with_another_count():
    spawn(2, with_other_counts)


class Penalized(Plain):
    """A penalty on weights beside the logits: the same for all parts. Or one on what it computes, which is
    not.
    """

    def __init__(self, of_weights):
        super().__init__()
        self.of_weights = of_weights

    def forward(self, inputs):
        out = super().forward(inputs)
        return out, sum(p.square().sum() for p in self.parameters()) if self.of_weights else out.mean()


def with_penalty(out, y):
    return mean(out[0], y) + out[1]


def penalized(rank, world_size, of_weights):
    torch.manual_seed(0)
    model = Penalized(of_weights).double()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    right = with_penalty(model(batch()[0]), batch()[1]).item()
    model, opt = par.parallelize(model, opt, par.Plan(dp=2))
    if of_weights:
        assert abs(par.evaluate(model, batch(), with_penalty).item() - right) < 1e-9 * right
        assert abs(par.step(model, opt, batch(), with_penalty, microbatches=2).item() - right) < 1e-9 * right
        return
    with pytest.raises(ValueError, match="loss_fn returns a loss that the model has computed"):
        par.step(model, opt, batch(), with_penalty, microbatches=2)


@pytest.mark.parametrize("of_weights", [True, False])
def test_a_number_that_the_model_adds(of_weights):
    spawn(2, penalized, of_weights)


def test_one_part_may_have_any_loss():
    torch.manual_seed(0)
    model = Plain().double()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    inputs, targets = batch()
    right = total(model(inputs), targets).item()
    model, opt = par.parallelize(model, opt, par.Plan())
    assert abs(par.step(model, opt, (inputs, targets), total).item() - right) < 1e-9 * right


def smoothed(calls, out, y, **options):
    calls.append(1)
    return mean(out, y, **options)


def make_partial(calls, smoothing):
    return functools.partial(smoothed, calls, label_smoothing=smoothing)


def make_function(calls, smoothing):
    return lambda out, y: smoothed(calls, out, y, label_smoothing=smoothing)


@pytest.mark.parametrize("make", [make_partial, make_function])
def test_a_loss_that_is_made_anew_in_each_step(make):
    """Is known; with another value in it, it is not."""
    torch.manual_seed(0)
    model = Plain().double()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), par.Plan())
    calls, counts, smoothing = [], [], [0.1, 0.2]
    for value in (smoothing[0], smoothing[0], smoothing[1], smoothing[1]):
        par.step(model, opt, batch(), make(calls, value), microbatches=2)
        counts.append(len(calls))
        calls.clear()
    assert counts[1] == counts[3] == 2 < min(counts[0], counts[2]), counts
