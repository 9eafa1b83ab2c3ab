"""The parts of par.verify by themselves: what it leaves as it was, whom and what it names, its report."""

import contextlib
import dataclasses
import importlib
import random
from types import SimpleNamespace

import pytest
import torch
from odd_models import Plain, cross, tokens
from torch.nn.functional import mse_loss

import pycomm.parallel as par
from pycomm.parallel.ground.batch import Microbatch
from pycomm.parallel.verification import alone
from pycomm.parallel.verification.pieces import Rows, part_like
from pycomm.parallel.verification.report import (
    Difference,
    Off,
    Verification,
    both,
    first_module,
    first_parameter,
    off,
)

verify = importlib.import_module("pycomm.parallel.verification.verify")
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("fails", [False, True])
def test_random_numbers_are_as_before(fails):
    before = torch.get_rng_state(), random.getstate()

    def run():
        with verify._undisturbed():
            torch.rand(3), random.random()
            if fails:
                raise KeyError

    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        run()
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_a_verification_leaves_the_callers_random_numbers():
    random.seed(3), torch.manual_seed(4)
    expected = random.random(), torch.rand(2).tolist()
    random.seed(3), torch.manual_seed(4)

    def draws():
        random.random(), torch.rand(1)
        torch.manual_seed(9)
        return Plain(layers=2)

    assert par.verify(draws, tokens(0), par.Plan(), cross, show=False)
    assert (random.random(), torch.rand(2).tolist()) == expected


@pytest.mark.parametrize("worst", [0, 1, 2])
def test_the_rank_that_is_farthest_off_is_named(worst):
    """The first, one in the middle, the last; all have compared it. Its scale is the largest of all."""
    told = [{"a": Off(1e-3 * (1 + 4 * (rank == worst)), 1.0 + rank), "b": Off(0.0, 1.0)} for rank in range(3)]
    first, names, _ = first_module(told, ["a", "b"], 1e-6)
    assert (first.name, first.rank, first.absolute, names) == ("a", worst, 5e-3, ("a",))
    assert first.relative == pytest.approx(5e-3 / 3)
    some = [{"b": Off(0.0, 1.0)}, {"a": Off(2.0, 1.0)}, {}]
    assert first_module(some, ["a", "b"], 1e-6).first.rank == 1


@pytest.mark.parametrize(
    ("found", "right", "expected", "is_other"),
    [
        ([1.0, -0.0], [1.0, 0.0], (0.0, 1.0), False),
        ([1.0, NAN], [1.0, 2.0], (INF, 2.0), True),
        ([1.0, 2.0], [1.0, NAN], (INF, 1.0), True),
        ([INF, NAN], [INF, NAN], (0.0, 0.0), False),
        ([-INF, 1.0], [INF, 1.0], (INF, 1.0), True),
        ([1e-310, 0.0], [2e-310, 0.0], (1e-310, 2e-310), True),
        ([1.0, 3.0], [1.0, 3.0 + 2e-6], (2e-6, 3.0 + 2e-6), False),
        ([1.0, 3.0], [1.0, 3.0 + 4e-6], (4e-6, 3.0 + 4e-6), True),
    ],
)
def test_how_far_two_tensors_are_apart(found, right, expected, is_other):
    found, right = (torch.tensor(values, dtype=torch.float64) for values in (found, right))
    apart = off(found, right)
    assert tuple(apart) == pytest.approx(expected, rel=1e-6, abs=0)
    assert apart.differs(1e-6, 0.0) == is_other
    assert both(apart, Off(1.0, 7.0)) == (max(apart.absolute, 1.0), 7.0)


def test_relative_differences():
    assert [Off(*pair).relative for pair in ((1.0, 4.0), (0.0, 0.0), (1.0, 0.0))] == [0.25, 0.0, INF]
    floor = Off(1.5e-6, 1.0)
    assert floor.differs(1e-6, 0.0) and not floor.differs(1e-6, 1.0)


def test_the_largest_of_what_is_equal_is_told():
    """Of modules and of parameters, relative to the scale and the floor; not of what differs."""
    found = {"a": Off(1e-7, 1.0), "b": Off(3e-7, 1.0), "c": Off(9.0, 1.0), "d": Off(0.0, 1.0)}
    for largest in (
        first_module([found], "abcd", 1e-6).largest,
        first_parameter(found, "abcd", 1e-6, "gradient").largest,
    ):
        assert largest == pytest.approx(3e-7, rel=1e-5)
    last = first_parameter(found | {"b": Off(8.0, 1.0)}, "abcd", 1e-6, "gradient")
    assert (last.first.name, last.names, last.first.rank) == ("c", ("b", "c"), None)


def verification(**changes):
    equal = {"equal": True, "loss": 1.25, "loss_alone": 1.25, "module": None, "parameter": None}
    more = {"difference": None, "modules": (), "parameters": (), "compared": (4, 9), "largest": 2e-13}
    return Verification(**{**equal, **more, "notes": (), "plan": "Plan(dp=2)", **changes})


MODULE, PARAMETER = Difference("a.b", "output", 0.5, 0.25, 3), Difference("w", "gradient", 2.0, 1e-3)
REPORTS = [
    ({}, "verify Plan(dp=2): equal to one process. Loss 1.25, 4 modules and 9 parameters compared, largest "
     "relative difference 2e-13"),
    ({"steps": 3, "step": 3}, "equal to one process in 3 steps. Loss 1.25"),
    ({"notes": ("one", "two"), "granted": ("rows", "loss")}, "2e-13\n  taken for granted by the plan, and "
     "compared here by what comes of it: rows, loss\n  note: one\n  note: two"),
    ({"equal": False, "steps": 5, "step": 2}, "NOT equal to one process in step 2 of 5 (4 modules and 9"),
    ({"equal": False, "loss_alone": 1.5}, "  loss      1.25, by one process 1.5\n  forward   all outputs are "
     "equal\n  backward  all gradients are equal"),
    ({"equal": False, "module": MODULE, "modules": ("a.b",)},
     "  forward   output of 'a.b' on rank 3 is off by 5.0e-01 (relative: 2.5e-01)\n"),
    ({"equal": False, "module": MODULE, "modules": ("a.b", "a")}, "2.5e-01); 1 more differs\n"),
    ({"equal": False, "parameter": PARAMETER, "parameters": ("v", "w", "x")},
     "  backward  gradient of 'w' is off by 2.0e+00 (relative: 1.0e-03); 2 more differ"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), REPORTS)
def test_the_report(changes, text):
    found = verification(**changes)
    assert text in str(found) and bool(found) == found.equal
    assert str(Difference("loss", "loss", 1.0, 0.5)) == "loss is off by 1.0e+00 (relative: 5.0e-01)"
    assert str(Difference("", "output", 1.0, 0.5, 0)).startswith("output of 'the model' on rank 0")


def test_the_largest_difference_is_that_of_all_steps(monkeypatch):
    """The steps go on with the values of the one before, and end at the first that differs."""
    plain, largest, losses = verify._found, [3e-9, 1e-9, 2e-9], []

    def found(*args):
        one = plain(*args)
        losses.append((one.loss, one.loss_alone))
        return dataclasses.replace(one, largest=largest[len(losses) - 1], equal=len(losses) < 3)

    monkeypatch.setattr(verify, "_found", found)
    result = par.verify(Plain(layers=2), tokens(0), par.Plan(), cross, steps=5, show=False)
    assert (result.step, result.steps, result.largest, len(losses)) == (3, 5, 3e-9, 3)
    assert all(a == pytest.approx(b, rel=1e-12) for a, b in losses)
    assert losses[0][0] > losses[1][0] > losses[2][0]


@pytest.mark.parametrize(
    ("dtypes", "tolerance"),
    [("64", 1e-6), ("32", 1e-3), ("64 32", 1e-3), ("16 64", 0.05), ("", 0.05)],
)
def test_the_coarsest_dtype_sets_the_tolerance(dtypes, tolerance):
    known = {"64": torch.float64, "32": torch.float32, "16": torch.bfloat16}
    values = {name: torch.ones(2, dtype=known[name]) for name in dtypes.split()}
    assert verify._tolerance(SimpleNamespace(values=values)) == tolerance


@pytest.mark.parametrize(
    ("plan", "aside"),
    [
        ("dp=2,zero=2", []),
        ("dp=2,precision=bf16,compression=fp16", ["precision", "compression"]),
        ("pp=2,schedule=pipedream", ["schedule"]),
        ("pp=2,schedule=zbv", []),
    ],
)
def test_what_is_left_aside(plan, aside):
    exact, notes = verify._exact(par.Plan.parse(plan))
    assert [note.split()[0] for note in notes] == aside
    assert (exact.precision, exact.compression) == (None, None) and exact.schedule != "pipedream"
    assert not aside or str(exact) != plan
    assert exact.world_size == 2 and exact.zero == par.Plan.parse(plan).zero


# --- one process ----------------------------------------------------------------------------------


def microbatch(start, rows):
    x = torch.arange(start, start + rows).double()[:, None].repeat(1, 3)
    return Microbatch(x, x[:, :2])


@pytest.mark.parametrize("by_microbatch", [False, True])
def test_rows_of_each_rank_in_the_batch_of_one_process(by_microbatch):
    """In order of microbatches, then of data ranks: of unlike numbers of rows, and none."""
    sizes = [[2, 1], [3, 0], [1, 2]]  # [data rank][microbatch]
    starts = {(0, 0): 0, (1, 0): 2, (2, 0): 5, (0, 1): 6, (1, 1): 7, (2, 1): 7}
    pieces = [[microbatch(starts[r, m], sizes[r][m]) for m in range(2)] for r in range(3)]
    chunks, rows = alone.chunks_of(pieces, by_microbatch)
    assert [len(chunk.inputs) for chunk in chunks] == ([6, 3] if by_microbatch else [9])
    for m in range(2):
        for r in range(3):
            where = rows[m][r]
            chunk = chunks[where.chunk]
            assert (where.total, where.size) == (len(chunk.inputs), sizes[r][m])
            own = slice(where.start, where.start + where.size)
            assert torch.equal(chunk.inputs[own], pieces[r][m].inputs)
            assert torch.equal(chunk.targets[own], pieces[r][m].targets)


def test_chunks_are_weighted_by_their_targets():
    """Two of unlike counts are as the whole; a tied weight has one gradient, a frozen one none."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()
    model[0].bias.requires_grad_(False)
    whole = alone.run_alone(model, [microbatch(0, 7)], mse_loss, None)
    parts = alone.run_alone(model, [microbatch(0, 5), microbatch(5, 2)], mse_loss, None)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12) and not whole.draws
    assert list(whole.gradients) == ["0.weight", "2.weight", "2.bias"] == list(whole.values)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(parts.gradients[name], gradient, rtol=1e-12, atol=0)
    assert whole.order == ["0", "1", "2", ""] and len(parts.outputs["1"]) == 2
    assert [len(calls) for calls in parts.outputs["1"]] == [1, 1]
    counted = alone.run_alone(model, [microbatch(0, 5), microbatch(5, 2)], mse_loss, lambda y: y[0, 0] + 1)
    losses = [
        alone.run_alone(model, [one], mse_loss, None).loss for one in (microbatch(0, 5), microbatch(5, 2))
    ]
    assert counted.loss == pytest.approx((losses[0] + 6 * losses[1]) / 7, rel=1e-12)
    assert alone.run_alone(torch.nn.Dropout(0.5), [grows()], mse_loss, None).draws
    with pytest.raises(ValueError, match="must return a mean, a tensor without dimensions"):
        alone.run_alone(model, [microbatch(0, 2)], lambda out, y: (out - y).sum(1), None)


def grows():
    x = torch.ones(4, 2, requires_grad=True)
    return Microbatch(x, torch.zeros(4, 2))


@pytest.mark.parametrize(("place", "rows"), [(0, slice(0, 2)), (1, slice(2, 5)), (2, slice(5, 6))])
def test_parts_of_positions_rows_and_columns(place, rows):
    """The first, a middle and the last rank, each with its rows; positions of ring and of tp."""
    own = Rows(0, 6, rows.start, rows.stop - rows.start)
    whole = torch.arange(6 * 8 * 4.0).view(6, 8, 4)
    split = SimpleNamespace(
        length=8, megatron=False, cut=lambda x, dim: x.index_select(dim, torch.tensor([0, 7, 3]))
    )
    right = whole[rows]
    assert torch.equal(part_like(whole, torch.empty(right.shape), own, None, None), right)
    pieces = right[:, [0, 7, 3]]
    assert torch.equal(part_like(whole, torch.empty(pieces.shape), own, split, None), pieces)
    turned = whole.transpose(1, 2)  # positions as dim 2
    assert torch.equal(
        part_like(turned, torch.empty(own.size, 4, 3), own, split, None), pieces.transpose(1, 2)
    )
    flat = whole.flatten(0, 1)
    assert torch.equal(part_like(flat, torch.empty(8 * own.size, 4), own, None, None), right.flatten(0, 1))
    assert part_like(whole, torch.empty(own.size, 5, 4), own, split, None) is None


class Rates(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.attention_dropout, self.p, self.dropped, self.name = config, 0.3, 0.7, True, "drop"
        self.inner = torch.nn.Dropout2d(0.25)


def test_rates_of_dropout_are_zero_in_a_copy_of_the_configuration():
    """Only rates change, not flags, counts or other numbers; shared objects are copied once."""
    config = SimpleNamespace(hidden_dropout_prob=0.2, drop_path=1, dropout_kind=0, layers=3, drop_list=[0.1])
    model = torch.nn.Sequential(Rates(config), torch.nn.Linear(2, 2), Rates(config))
    assert alone.without_dropout(model) == ["0", "0.inner", "2", "2.inner"]
    assert (config.hidden_dropout_prob, config.drop_path, config.drop_list) == (0.2, 1, [0.1])
    for one in (model[0], model[2]):
        assert (one.attention_dropout, one.p, one.dropped, one.inner.p) == (0.0, 0.7, True, 0.0)
        assert (one.config.hidden_dropout_prob, one.config.drop_path, one.config.layers) == (0.0, 0.0, 3)
    assert model[0].config is model[2].config is not config
    assert alone.without_dropout(model) == []
