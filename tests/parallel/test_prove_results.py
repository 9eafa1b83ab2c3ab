"""Models that mix rows of a batch, where it is evaluated or predicted: refused where the batch is cut, in the
mode in which the model is.
"""

import functools

import pytest
import torch
from odd_models import Plain, tokens
from rows_models import DIM, FINE, LENGTH, MIXING, ROWS, Extra, Made
from test_prove_rows import Centered, batch, mean, parallelized
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel import count_traffic

TEXTS = {"dp=1": 2, "dp=2": 1, "dp=2,zero=3": 2}  # plan -> microbatches
# Models that predict refuses for another reason: outputs without rows in front.
OTHERWISE = {"lstm", "lstm, flat"}
KINDS = ["evaluate", "metric", "predict"]


def half(out, y):
    """A metric without a gradient."""
    out = out["out"] if isinstance(out, dict) else out
    return (out > out.new_tensor(0.1)).double().mean()


def plain(out, y):
    """Nothing of the model but its number of rows."""
    return y.square().mean()


def said(model, make, kind, microbatches):
    inputs, targets = batch(make)
    try:
        if kind == "predict":
            par.predict(model, inputs, microbatches=microbatches)
        else:
            metrics = {"half": half} if kind == "metric" else None
            loss_fn = plain if kind == "metric" else mean
            par.evaluate(model, (inputs, targets), loss_fn, microbatches=microbatches, metrics=metrics)
    except ValueError as error:
        return str(error)
    return ""


def results(rank, world_size, text, kind, training):
    """{name: sentence}"""
    found = {}
    for name, make in {**MIXING, **FINE}.items():
        model, _ = parallelized(make, text)
        model.train(training)
        found[name] = said(model, make, kind, TEXTS[text])
    return found


@functools.cache
def outcomes(text, kind, training):
    """Of each rank."""
    return spawn(par.Plan.parse(text).world_size, results, text, kind, training)


@tier(quick=1 / 20, slow=1 / 3)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_rows_that_are_mixed(text, kind, training):
    for rank, found in enumerate(outcomes(text, kind, training)):
        for name in MIXING:
            sentence = found[name]
            if not training and name == "own norm":  # by running averages
                assert sentence == "", name
                continue
            if kind == "predict" and name in ("mean in lstm", "pairs"):
                assert sentence, name
                continue
            assert sentence.startswith(f"[rank {rank}] the model mixes rows of the batch: "), (name, sentence)


@tier(quick=1 / 9)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_rows_that_are_not(text, kind, training):
    for found in outcomes(text, kind, training):
        for name in FINE.keys() - (OTHERWISE if kind == "predict" else set()):
            sentence = found[name]
            mixes = kind == "predict" and name == "extra"  # its other results are results here
            assert ("mixes rows" in sentence) == mixes and bool(sentence) == mixes, (name, sentence)


def calls(rank, world_size):
    """Collectives of calls, one after the other."""
    model, _ = parallelized(Plain, "dp=2")
    x, y = tokens(0)
    counts = {}
    for training in (True, False):
        model.train(training)
        for kind in ("evaluate", "predict"):
            counts[training, kind] = []
            for _ in range(3):
                with count_traffic() as traffic:
                    par.evaluate(model, (x, y)) if kind == "evaluate" else par.predict(model, x)
                counts[training, kind].append(traffic.calls())
    return counts


def test_the_first_call_in_a_mode_has_one_collective_more():
    for counts in spawn(2, calls):
        for first, *others in counts.values():
            assert others == [first - 1] * 2


def in_turn(rank, world_size):
    """A model that mixes rows in eval mode only, and one whose loss uses what is not mixed."""
    found = []
    for make in (lambda: Made(InEval()), Extra):
        model, opt = parallelized(make, "dp=2")
        data = batch(make)
        par.step(model, opt, data, mean)
        par.evaluate(model, data, mean)
        model.eval()
        found += [said(model, make, kind, 1) for kind in ("evaluate", "predict")]
    return found


class InEval(torch.nn.Module):
    def forward(self, x):
        return x if self.training else x - x.mean(0)


def test_each_mode_and_each_kind_of_result_is_tried():
    for rank, (first, second, third, fourth) in enumerate(spawn(2, in_turn)):
        for found in (first, second, fourth):
            assert found.startswith(f"[rank {rank}] the model mixes rows of the batch: its output")
        assert third == "" and "No parameter was changed" in first and "No parameter" not in second


class Counts(Made):
    """Has a buffer, a number and random numbers, and rows of its own."""

    def __init__(self):
        super().__init__(torch.nn.Dropout(0.5))
        self.calls = 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.count += 1
        return super().forward(x) * self.count


def leaves_nothing(rank, world_size):
    model, _ = parallelized(Counts, "dp=2")
    x, y = batch(Counts)
    out = par.predict(model, x)
    model.eval()
    again = par.predict(model, x[:1])  # fewer rows than ranks
    par.evaluate(model, (x, y), mean)
    return out, again, model.calls, model.count.item(), torch.rand(2)


def test_trials_leave_nothing_behind():
    (out, again, called, count, numbers), other = spawn(2, leaves_nothing)
    assert called == count == 3 and torch.equal(numbers, other[4])
    assert torch.equal(out, other[0]) and again.shape == (1, LENGTH, DIM) and len(out) == ROWS


def with_tensors_cut(rank, world_size):
    found = []
    for make in (Centered, Plain):
        model, _ = parallelized(make, "dp=2,tp=2")
        for call, data in ((par.evaluate, tokens(0)), (par.predict, tokens(0)[0])):
            try:
                call(model, data)
                found.append(False)
            except ValueError as error:
                found.append("the model mixes rows" in str(error))
    return found


def test_tensor_parallel():
    assert spawn(4, with_tensors_cut) == [[True, True, False, False]] * 4
