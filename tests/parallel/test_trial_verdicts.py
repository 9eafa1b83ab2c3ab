"""What an experiment says of what its runs have given: runs that nobody made, and ranks that are stubs."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_map

from pycomm.parallel.checks import cut, exchange, positions
from pycomm.parallel.checks.cut import BatchCheck
from pycomm.parallel.checks.exchange import Asking, Exchange
from pycomm.parallel.checks.runs import Ran
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.answers import State
from pycomm.parallel.ground.comm import ALONE

CPU = torch.device("cpu")


# --- few rows --------------------


@pytest.mark.parametrize("other", range(5))
@pytest.mark.parametrize("size", [1, 3])
def test_one_of_the_runs_draws_otherwise(other, size):
    """As many random numbers in the runs of two rows and of the rows exchanged; the fifth has more rows."""
    rans = [Ran(drawn=(torch.zeros(size), 7)) for _ in range(5)]
    rans[other] = Ran(drawn=(torch.arange(1.0 - size, 1.0) + 1, 7))
    one = object.__new__(Exchange)
    one.error, one.measures, one.counters = None, None, ()
    one.asked = Asking(None, (), model=True, loss=False, unweighted=False, alike=False)
    found = one._judged(rans, 2, 0, False, False)
    why = exchange._WHY[found.index(True)] if True in found else None
    assert why == (None if other == 4 else "it draws as many random numbers as its values say")


@pytest.mark.parametrize(
    ("sequence", "pieces"),  # the sequence: (ranks of ring and ulysses, of tp, whether megatron_sp)
    [
        (None, 1),
        *(((1, 4, False), 1), ((3, 1, False), 3), ((3, 4, False), 3), ((1, 4, True), 4), ((3, 4, True), 12)),
    ],
)
@pytest.mark.parametrize(("ranks", "sharded"), [(1, False), (2, False), (2, True)])
def test_few_positions_are_enough_for_all_pieces(sequence, pieces, ranks, sharded, monkeypatch):
    """Of 40 rows of 50 positions: four positions for each piece of the sequence, and one more, so that pieces
    are uneven; and what a rank has in a microbatch is not exceeded.
    """
    asked = []
    monkeypatch.setattr(cut, "window_of", lambda *given: asked.append(given[2:]))
    one, split = object.__new__(BatchCheck), None
    if sequence is not None:
        degree, tp, megatron = sequence
        split = SimpleNamespace(degree=degree, tp=SimpleNamespace(size=tp), megatron=megatron)
    mesh = SimpleNamespace(rows=(ranks, 0))
    one.parts, one.alike, one.scores = SimpleNamespace(split=split, mesh=mesh), False, torch.zeros(40, 1)
    one.cuts = SimpleNamespace(sharded=sharded, microbatches=4)
    x = torch.arange(2000).view(40, 50)
    inputs, targets = one._few(x, x, 2, False)
    assert asked == [((10 if sharded else 10 // ranks) * 50, 4 * pieces + 1)]
    assert inputs.shape == targets.shape == (4, 50) and one._few(x, x, 2, True) is None


# --- positions --------------------


class Rank(positions._Trial):
    """Of two: what this one finds without the axis and with it, then with other random numbers."""

    def __init__(self, found, moved, fails=False):
        self.largest, self.fails = [("the loss", found), ("the loss", moved)], fails
        self.off = self.on = None
        self.most, self.loss_error, self.parts = 0.05, None, None
        self.split = SimpleNamespace(degree=2)

    def _largest(self, one, other):
        return self.largest.pop(0)

    def _returns_piece(self):
        return False

    def run_off(self, number=0):
        return ValueError("it fails") if self.fails else None


UNSURE = "it draws random numbers in eval mode, or chooses by narrow margins"
NOT_SEEN = "it gives no tensor in which its positions are known"


def verdict(own, other):
    """The state that one rank of a pair should find, from (found, moved, fails) of both."""
    pair = own, other
    if not any(found >= 0 for found, _, _ in pair):
        return State.NOT_TRIED, NOT_SEEN
    if not any(found > 0.05 for found, _, _ in pair):
        return State.HELD, ""
    sure = any(found > 0.05 and not found <= 3 * moved for found, moved, _ in pair)
    return (State.NOT_TRIED, UNSURE) if any(fails for *_, fails in pair) or not sure else (State.BROKEN, "")


GIVEN = [
    (found, moved, False) for found in (-1.0, 0.0, 0.04, 0.06, 0.9, math.inf) for moved in (0.0, 0.03, 0.5)
]


@pytest.mark.parametrize("own", [*GIVEN, (0.9, 0.0, True), (math.nan, 0.0, False)], ids=str)
def test_a_difference_counts_if_one_rank_is_sure_of_it(own, monkeypatch):
    """It is sure where the model's own noise does not explain what it finds itself."""
    for other in GIVEN:
        later = [[other[0] > 0.05, other[0] >= 0, False, False]]
        fine = other[0] > 0.05 and not other[0] <= 3 * other[1]
        later.append([fine, other[2]])

        def agreed(parts, *told, error=None, later=later):
            return [mine or theirs for mine, theirs in zip(told, later.pop(0), strict=True)]

        monkeypatch.setattr(positions, "agreed", agreed)
        state, why = verdict(own, other)
        answer = Rank(*own).judged()
        assert answer.state == state, (own, other, answer)
        if state == State.BROKEN:
            assert ("differs by" in answer.why) == (own[0] > 0.05), (own, other, answer)
        else:
            assert answer.why == why, (own, other, answer)


@pytest.mark.parametrize(
    ("off", "on", "expected"),
    [(2.0, 3.0, 0.5), (2.0, 2.0, 0.0), (-4.0, -3.0, 0.25), (None, None, 0.0), (1.0, math.inf, math.inf)],
)
def test_losses_are_summed_over_the_pieces_and_compared(off, on, expected, monkeypatch):
    """Beside outputs that are equal; a rank without the last stage has none."""
    groups = []
    monkeypatch.setattr(comm, "all_reduce", lambda tensor, group: groups.append(group))
    given = torch.ones(2, 5, 3)
    one = object.__new__(positions._Trial)
    one.parts = SimpleNamespace(stages=SimpleNamespace(last=0, mine=[0]), device=CPU)
    one.loss, one.rows = (lambda output, batch: None), 2
    one.split = SimpleNamespace(ring=ALONE, ulysses=ALONE, length=5, megatron=False)
    seen = [positions._Seen((given,), None if loss is None else torch.tensor(loss)) for loss in (off, on)]
    where, found = one._largest(*seen)
    assert found == pytest.approx(expected) and groups == [ALONE, ALONE]
    assert not expected or where == "the loss"
    assert one._largest(seen[0], seen[0])[1] == 0.0
    one.loss = None
    assert one._largest(*seen) == ("what it returns", 0.0)
    other = positions._Seen(tree_map(lambda each: each * 1.5, (given,)), seen[1].loss)
    assert one._largest(seen[0], other) == ("what it returns", pytest.approx(0.5))
