"""Ranks that were given different batches: what changes the mark of a batch, and what a step says of it."""

import itertools

import pytest
import torch
from against_one import sgd
from odd_models import Plain, cross, tokens
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.ground.same_batch import differ, mark_of, powers

NAN, INF = float("nan"), float("inf")


def batch(dtype=torch.float32):
    """Two inputs of one shape, and targets; no two rows are equal."""
    x, y = (torch.randn(5, 3, generator=torch.Generator().manual_seed(n)) for n in range(2))
    return {"x": (x * 8).to(dtype), "y": (y * 8).to(dtype)}, torch.arange(5)


def at(place, value):
    """One element of x is another."""

    def change(inputs, targets):
        x = inputs["x"].clone()
        x.view(-1)[place] = value
        return {**inputs, "x": x}, targets

    return change


CHANGED = {
    "first element": at(0, 50),
    "last element": at(-1, 50),
    "rows of all": lambda inputs, targets: ({k: v.flip(0) for k, v in inputs.items()}, targets.flip(0)),
    "rows of one": lambda inputs, targets: (inputs, targets.roll(1)),
    "columns": lambda inputs, targets: ({k: v.flip(1) for k, v in inputs.items()}, targets),
    "inputs exchanged": lambda inputs, targets: ({"x": inputs["y"], "y": inputs["x"]}, targets),
    "a row of zeros more": lambda inputs, targets: (
        {key: torch.cat([value, torch.zeros_like(value[:1])]) for key, value in inputs.items()},
        torch.cat([targets, targets[:1]]),
    ),
    "an input left out": lambda inputs, targets: ({"x": inputs["x"]}, targets),
    "two elements exchanged": lambda inputs, targets: (
        {**inputs, "x": inputs["x"].flatten()[[0, 2, 1, *range(3, 15)]].view(5, 3)},
        targets,
    ),
    "targets that do not count": lambda inputs, targets: (inputs, targets.where(targets > 0, -100)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_what_differs_has_another_mark(dtype):
    marks = {"as it is": mark_of(batch(dtype))}
    marks |= {name: mark_of(change(*batch(dtype))) for name, change in CHANGED.items()}
    assert len(set(marks.values())) == len(marks), marks
    assert all(0 <= mark < 1 << 20 for mark in marks.values())


def test_marks_are_of_bits():
    """Of the smallest and the least numbers, too, and of nan, which is equal to itself here."""
    values = [0.0, -0.0, NAN, INF, -INF, 1.0, 1 + 2**-23, 1e-45, -1e-45, 0.0]
    for dtype in (torch.float32, torch.complex64):
        for one, other in itertools.pairwise(values):
            marks = [mark_of(torch.tensor([value, 7.0], dtype=dtype)) for value in (one, other, one)]
            assert marks[0] == marks[2] != marks[1], (one, other)
    assert mark_of(torch.tensor([1 + 2j])) != mark_of(torch.tensor([2 + 1j]))
    assert mark_of(torch.tensor([True, False])) != mark_of(torch.tensor([False, True]))
    assert mark_of((torch.empty(0), "text")) == mark_of([torch.empty(0), 3]) == 0


def test_what_is_the_same_has_the_same_mark():
    """However it lies in memory, and whatever the containers are."""
    inputs, targets = batch()
    expected = mark_of((inputs, targets))
    apart = {key: value.t().contiguous().t() for key, value in inputs.items()}
    assert not apart["x"].is_contiguous()
    longer = torch.arange(10)[: len(targets)]
    for same in ((apart, targets.clone()), [[inputs["x"], inputs["y"]], longer]):
        assert mark_of(same) == expected


def test_differ_is_exact():
    """Marks of many ranks, of which one is off by one."""
    for size, mark in itertools.product((1, 2, 3, 64, 1000), (0, 1, 77, (1 << 20) - 2)):
        for other in range(3):
            pairs = [powers(mark + (other if rank == size - 1 else 0)) for rank in range(size)]
            total, squares = (sum(column) for column in zip(*pairs, strict=True))
            if mark + other < 1 << 20:
                assert differ(total, squares, size) == (other > 0 and size > 1), (size, mark, other)


def stepped(rank, world_size, plan, culprit):
    """What is said of each changed batch, and whether the next step is as if nothing had been."""
    torch.manual_seed(0)
    model = Plain().double()
    model, opt = par.parallelize(model, sgd(model), plan)
    x, y = tokens(0)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    wrong = {"rows": (x[order], y[order]), "targets": (x, y[order]), "exchanged": (y.where(y >= 0, 0), x)}
    said = {}
    for name, other in wrong.items():
        try:
            par.step(model, opt, other if rank == culprit else (x, y), cross)
        except ValueError as error:
            said[name] = str(error)
    return said, [par.step(model, opt, (x, y), cross).item() for _ in range(2)]


@pytest.mark.parametrize(("plan", "culprit"), [("dp=3,zero=1", 2), ("pp=2", 0)])
def test_a_permuted_batch_on_one_rank_is_refused(plan, culprit):
    found = spawn(par.Plan.parse(plan).world_size, stepped, plan, culprit)
    for said, losses in found:
        assert losses == found[0][1] and losses[1] < losses[0]
        assert len(said) == 3
        for name, text in said.items():
            assert "the ranks were given different batches" in text, (name, text)
