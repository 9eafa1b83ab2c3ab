"""Weights of calls that wait for one update: their sum is the mean over all targets."""

import pytest

from pycomm.parallel.ground.window import Window

COUNTS = [[5], [3, 4], [0, 6], [6, 0], [0, 0], [1e-3, 7.5, 2], [0, 0, 5, 0], [2**30, 1, 3]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_sum_is_the_mean(counts):
    """With the loss of a call that has no targets 0. Twice, as after an update nothing of it is left."""
    window = Window()
    for _ in range(2):
        assert window.is_empty and window.calls == 0
        total, summed = sum(counts), 0.0
        for call, targets in enumerate(counts[:-1]):
            loss = call + 2.0 if targets else 0.0
            summed += window.weight(targets, update=False) * loss
            window.add(targets)
            assert window.calls == call + 1 and not window.is_empty
        last = len(counts) + 1.0 if counts[-1] else 0.0
        summed = (summed + window.weight(counts[-1], update=True) * last) * window.factor(counts[-1])
        expected = (
            sum((call + 2.0) * targets for call, targets in enumerate(counts)) / total if total else 0.0
        )
        assert summed == pytest.approx(expected, rel=1e-12)
        window.discard()


def test_weights_are_near_one_and_relative_to_the_first():
    window = Window()
    assert window.weight(0, update=False) == 0.0 and window.weight(0, update=True) == 1.0
    assert window.weight(7, update=False) == 1.0 and window.factor(7) == 1.0
    window.add(8)
    for update in (True, False):
        assert [window.weight(targets, update) for targets in (0, 4, 8)] == [0.0, 0.5, 1.0]


def test_one_scale_for_all_calls():
    window = Window()
    for first, second in ((64.0, 32.0), (0.5, 1.0)):
        window.weight(3, False, first)
        window.add(3, first)
        window.add(2, first)
        window.weight(3, False, first)
        with pytest.raises(
            ValueError, match=rf"gradients of 2 calls wait.* by {first}, .* scales by {second}"
        ):
            window.weight(3, True, second)
        window.discard()
        assert window.weight(3, False) == 1.0
