"""What loss_fn is taken for, a mean over what counts, in steps of plans: refused on every rank, or found."""

import functools

import pytest
import torch
from mean_losses import (
    TARGETS,
    WHAT,
    data,
    mean,
    over_all,
    raises_value,
    shifted,
    shifted_targets,
    total,
)
from odd_models import Plain, tokens
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par


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
        ("dp=2", over_all, TARGETS, False),  # its first batch is even, and right
        ("dp=2", over_all, TARGETS, True),
        ("dp=2,zero=3", shifted, {**TARGETS, "clip": 1.0}, False),
        ("pp=2", over_all, {**TARGETS, "microbatches": 2}, False),
        ("ring=2", shifted, {}, False),
        ("tp=2", total, {"microbatches": 3}, False),
    ],
)
def test_refused_on_every_rank(text, loss_fn, options, evaluates):
    right = expected(loss_fn is over_all and not evaluates)
    for rank, (found, is_same, loss) in enumerate(spawn(2, step, text, loss_fn, options, evaluates)):
        who = "the metric 'measure'" if evaluates else "loss_fn"
        assert found.startswith(f"[rank {rank}] {who} is no mean over the targets that count: for ")
        assert is_same and abs(loss - right) < 1e-9


def counted(rank, world_size, text, loss_fn):
    """Losses of steps with rows that are even, then not, and what is known of the loss."""
    torch.manual_seed(0)
    model = Plain().double()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), par.Plan.parse(text))
    losses = [
        par.step(model, opt, batch(is_even), loss_fn, microbatches=2).item()
        for is_even in (True, False, False)
    ]
    losses.append(par.evaluate(model, batch(), loss_fn, metrics={"all": over_all, "mean": mean})[1])
    return losses, str(model._parallel.checks.of["loss"])


def counted_alone(loss_fn):
    torch.manual_seed(0)
    model, losses = Plain().double(), []
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for is_even in (True, False, False):
        inputs, targets = batch(is_even)
        opt.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    inputs, targets = batch()
    return losses, [each(model(inputs), targets).item() for each in (over_all, mean)]


@pytest.mark.parametrize("loss_fn", [shifted, over_all])
@pytest.mark.parametrize("text", ["dp=2", "dp=2,zero=3", "pp=2", "tp=2"])
def test_what_counts_is_found_under_plans(text, loss_fn):
    """Of each measure what it counts; the loss is asked again when rows are uneven."""
    right, measures = counted_alone(loss_fn)
    for (*losses, found), said in spawn(2, counted, text, loss_fn):
        assert losses == pytest.approx(right, rel=1e-9)
        assert [found["all"].item(), found["mean"].item()] == pytest.approx(measures, rel=1e-9)
        assert said == f"held: a mean over {WHAT[loss_fn]}"


def of_own_rows(rank, world_size):
    """Rows of a rank count alike, those of the ranks do not."""
    torch.manual_seed(0)
    model = Plain().double()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), par.Plan(dp=2))
    inputs, targets = batch(is_even=True)
    if rank:
        targets[:, :3] = -100
    with raises_value("is no mean over the targets that count"):
        par.step(model, opt, (inputs, targets), over_all, sharded=True, **TARGETS)
    return par.step(model, opt, (inputs, targets), over_all, sharded=True).item()


def test_ranks_with_rows_of_their_own():
    torch.manual_seed(0)
    model = Plain().double()
    inputs, targets = batch(is_even=True)
    holes = targets.clone()
    holes[:, :3] = -100
    right = over_all(model(torch.cat([inputs, inputs])), torch.cat([targets, holes])).item()
    assert spawn(2, of_own_rows) == pytest.approx([right, right], rel=1e-9)


def with_other_counts(rank, world_size):
    """A loss that is right with one count is not known to be with another."""
    torch.manual_seed(0)
    model = Plain().double()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), par.Plan(dp=2))
    par.step(model, opt, batch(), shifted, count=shifted_targets)
    with raises_value("is no mean over the targets that count"):
        par.step(model, opt, batch(), shifted, **TARGETS)


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
    with raises_value("loss_fn uses a number that the model computes from all rows"):
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


CALLS = []  # a check keeps what closures hold, not what is global


def smoothed(out, y, **options):
    CALLS.append(1)
    return mean(out, y, **options)


def make_partial(smoothing):
    return functools.partial(smoothed, label_smoothing=smoothing)


def make_function(smoothing):
    return lambda out, y: smoothed(out, y, label_smoothing=smoothing)


@pytest.mark.parametrize("make", [make_partial, make_function])
def test_a_loss_that_is_made_anew_in_each_step(make):
    """Is known; with another value in it, it is not."""
    torch.manual_seed(0)
    model = Plain().double()
    model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), par.Plan())
    counts, smoothing = [], [0.1, 0.2]
    CALLS.clear()
    for value in (smoothing[0], smoothing[0], smoothing[1], smoothing[1]):
        par.step(model, opt, batch(), make(value), microbatches=2)
        counts.append(len(CALLS))
        CALLS.clear()
    assert counts[1] == counts[3] == 2 < min(counts[0], counts[2]), counts


def by_itself(out, y):
    """Always 1, with the gradient of a logarithm."""
    value = mean(out, y)
    return value / value.detach()


def refused(rank, world_size, texts):
    """(whether refused, whether the parameters are as before) of each."""
    found = []
    for text, microbatches in texts:
        torch.manual_seed(0)
        model = Plain().double()
        model, opt = par.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), text)
        before, said = par.full_state_dict(model), ""
        try:
            par.step(model, opt, tokens(0), by_itself, microbatches=microbatches)
        except ValueError as error:
            said = str(error)
        after = par.full_state_dict(model)
        is_same = all(torch.equal(before[key], after[key]) for key in before)
        found.append(("is no mean over the targets" in said, is_same))
    return found


@tier(quick=1, slow=1)
@pytest.mark.parametrize(
    "texts",
    [
        [("dp=2", 1)],
        pytest.param(
            [("dp=2,zero=3", 1), ("pp=2", 2), ("ring=2", 1), ("tp=2,megatron_sp", 2)], marks=pytest.mark.slow
        ),
        pytest.param([("dp=2,zero=1", 1), ("tp=2", 2), ("ulysses=2", 1)], marks=pytest.mark.deep),
    ],
)
def test_a_loss_divided_by_its_own_value(texts):
    for found in spawn(2, refused, texts):
        assert found == [(True, True)] * len(texts)
