"""Which rows of a batch a rank works on: each row is in one piece of one rank, in order."""

import pytest
import torch

from pycomm.parallel.ground.batch import (
    Microbatch,
    check_microbatches,
    count_targets,
    inputs_and_targets,
    row_of,
    rows_in,
    split_batch,
    stand_in,
)


def batch(rows):
    return {"x": torch.arange(rows * 2).view(rows, 2), "n": 3, "labels": [torch.arange(rows)]}


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12, 13])
def test_every_row_once_and_in_order(rows):
    """First by microbatch, then over the ranks; sizes differ by one at most, the longer ones first."""
    for microbatches, parts in ((1, 1), (1, 3), (2, 2), (3, 4), (7, 2), (20, 1)):
        ranks = [split_batch(batch(rows), microbatches, parts, part) for part in range(parts)]
        count = min(rows, microbatches)
        assert [len(pieces) for pieces in ranks] == [count] * parts
        seen = []
        for number in range(count):
            sizes = []
            for pieces in ranks:
                inputs, (targets,) = pieces[number].inputs, pieces[number].targets
                assert inputs["n"] == 3 and inputs["x"].tolist() == [
                    [2 * row, 2 * row + 1] for row in targets
                ]
                sizes.append(len(targets))
                seen += targets.tolist()
            assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
        assert seen == list(range(rows))
        of_all = [sum(len(pieces[n].targets[0]) for pieces in ranks) for n in range(count)]
        assert of_all == sorted(of_all, reverse=True) and of_all[0] - of_all[-1] <= 1


def test_batches_of_ranks_that_may_have_none():
    for rows, expected in ((0, [0, 0, 0]), (2, [1, 1, 0])):
        pieces = split_batch(batch(rows), 3, 1, 0, takes_none=True)
        assert [len(piece.targets[0]) for piece in pieces] == expected


BAD = [
    ((torch.ones(2, 3), torch.ones(3)), r"differ in rows \(dim 0\): \[2, 3\]"),
    ((torch.ones(2, 3), torch.tensor(1.0)), "one has no dimensions"),
    ((1, "text"), "there is none"),
    ((torch.ones(0, 3), torch.ones(0)), "a batch of 0 rows"),
    ({"x": torch.ones(2), "y": torch.ones(2)}, "needs \"labels\" among its keys; it has 'x', 'y'"),
    (torch.ones(2, 3), "got Tensor"),
    ((torch.ones(2), torch.ones(2), torch.ones(2)), "got tuple"),
]


@pytest.mark.parametrize(("wrong", "words"), BAD, ids=lambda each: each if isinstance(each, str) else "")
def test_what_is_no_batch(wrong, words):
    with pytest.raises(ValueError, match=words):
        split_batch(wrong, 2, 2, 1)


def test_inputs_and_targets():
    x, y = torch.ones(2), torch.zeros(2)
    assert inputs_and_targets([x, y]) == (x, y)
    assert inputs_and_targets({"a": x, "labels": y, "b": 1}) == ({"a": x, "b": 1}, y)
    seen = []
    for inputs in (x, (x, y), [x], {"x": x, "y": y}):
        Microbatch(inputs, y).call(lambda *args, **kwargs: seen.append((len(args), sorted(kwargs))))
    assert seen == [(1, []), (2, []), (1, []), (0, ["x", "y"])]
    piece = Microbatch({"x": x, "n": 2, "m": torch.ones(2, 3, dtype=torch.int8)}, y)
    assert piece.shapes() == (((2,), torch.float32), ((2, 3), torch.int8))
    for wrong in (0, -1, 1.0, "2", None):
        with pytest.raises(ValueError, match="microbatches=.*a whole number, 1 or more"):
            check_microbatches(wrong)
    check_microbatches(1)


def test_targets_that_count():
    whole = torch.tensor([[1, -100, 0], [-100, -1, 7]])
    assert (
        count_targets(whole) == count_targets([whole, torch.ones(9)]) == count_targets(("text", whole)) == 4
    )
    assert count_targets(whole, ignore_index=7) == 5 and count_targets(whole, ignore_index=0) == 5
    real = torch.tensor([-100.0, float("nan"), 0.0])
    assert count_targets(real) == 3 and count_targets({"y": real.half()}) == 3
    assert count_targets(whole[:0]) == count_targets(real[:0]) == 0
    assert count_targets(whole).dtype == count_targets(real).dtype == torch.int64
    with pytest.raises(ValueError, match="hold no tensor"):
        count_targets((1, "text"))


def test_a_row_stands_in_where_there_is_none():
    """The last row of the batch, whatever else is in it; where there are rows nothing changes."""
    assert (
        rows_in({"n": 1, "s": torch.tensor(2), "x": torch.ones(4, 2)}) == 4
        and rows_in((torch.tensor(1),)) == 0
    )
    row = row_of((torch.arange(6).view(3, 2), "text"))
    assert row[0].tolist() == [[4, 5]] and row[1] == "text"
    full = Microbatch(torch.ones(1, 2), torch.ones(1), total=7.0, share=0.5)
    assert stand_in(full, row) is full
    found = stand_in(Microbatch(torch.ones(0, 2), torch.ones(0), 7.0, share=0.5), row)
    assert not found.counts and found.inputs is row[0] and found.targets == "text"
    assert (found.total, found.share, found.count_of) == (7.0, 0.5, count_targets)
