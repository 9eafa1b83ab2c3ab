"""What ranks of a pipeline send each other, without ranks: each message comes, once, with what its receiver
needs, and its memory stays until then.
"""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from late_messages import Mailbox

from pycomm.parallel.pipeline import NAMES, make_schedule, run, simulate
from pycomm.parallel.pipeline.executor import Handed
from pycomm.parallel.pipeline.handover import PLACES, Agreement
from pycomm.parallel.pipeline.ties import Tie, exchange_ties

CPU = torch.device("cpu")


class Counting:
    """Stages that add: what enters stage s for microbatch i is known, and so is what comes back."""

    def __init__(self, schedule):
        self.last, self.updated = schedule.num_stages - 1, []

    def forward(self, stage, microbatch, x):
        if stage:
            hidden, ids, mask = x
            assert hidden.tolist() == [[stage + 10 * microbatch] * 3] * (1 + microbatch % 3)
            assert ids.tolist() == [7 * stage] * 2 and mask.tolist() == [stage % 2 == 1]
        if stage == self.last:
            return None
        hidden = torch.full((3, 1 + microbatch % 3), float(stage + 1 + 10 * microbatch)).t()  # not contiguous
        return hidden, torch.full((2,), 7 * (stage + 1)), torch.tensor([stage % 2 == 0])

    def backward(self, stage, microbatch, dy):
        if stage == self.last:
            assert dy is None
        else:
            gradient, *rest = dy
            assert rest == [None, None] and gradient.flatten()[-1] == -(stage + 1) - 10 * microbatch
        if stage == 0:
            return None
        return torch.full((1 + microbatch % 3, 3), -float(stage) - 10 * microbatch), None, None

    def weight(self, stage, microbatch):
        pass

    def update(self, stage, microbatch):
        self.updated.append((stage, microbatch))

    def input_like(self, stage, microbatch):
        shapes = ((1 + microbatch % 3, 3), torch.float32), ((2,), torch.int64), ((1,), torch.bool)
        return [Handed(*each, CPU) for each in shapes]


@pytest.mark.parametrize("name", NAMES)
def test_every_message_comes_and_is_waited_for(name, monkeypatch):
    box = Mailbox(monkeypatch)
    for pp, microbatches in itertools.product((1, 2, 3, 4), (1, 2, 3, 5)):
        schedule = make_schedule(name, pp, microbatches, 3 if name == "interleaved" and pp < 4 else None)
        stages = [Counting(schedule) for _ in range(pp)]
        box.run(pp, lambda group, s=schedule, o=stages: run(s, group.rank, group, o[group.rank]))
        for rank, ops in enumerate(stages if name == "pipedream" else ()):
            assert ops.updated == [(rank, number) for number in range(microbatches)]


def test_ties_have_the_same_bits_on_all_stages(monkeypatch):
    """The sum is in the order of the stages on every rank; two ties, of which a rank may have two copies."""
    box = Mailbox(monkeypatch)
    own = {(number, stage): torch.tensor([1e8, -1e8, 1.0, 3.0])[stage] + torch.arange(3.0) * number
           for number in range(2) for stage in range(4)}  # fmt: skip
    for placement in ((0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 2, 0)):
        users = {0: (0, 1, 2, 3), 1: (0, 2, 3)}  # tie -> stages
        held = {key: own[key].clone() for key in own}

        def exchange(group, placement=placement, users=users, held=held):
            ties = [
                Tie(
                    number,
                    {
                        stage: SimpleNamespace(gradient=functools.partial(held.get, (number, stage)))
                        for stage in stages
                        if placement[stage] == group.rank
                    },
                    {stage: placement[stage] for stage in stages},
                )
                for number, stages in users.items()
            ]
            exchange_ties([tie for tie in ties if tie.buckets], group)

        box.run(1 + max(placement), exchange)
        for number, stages in users.items():
            total = own[number, 0].clone()
            for stage in stages[1:]:
                total += own[number, stage]
            for stage in stages:
                assert torch.equal(held[number, stage], total), (placement, number, stage)
        assert torch.equal(held[1, 1], own[1, 1])  # has no part in it


def test_stages_tell_once_what_they_need(monkeypatch):
    """For each key of inputs: the stage before hears the places, and not again."""
    box, places = Mailbox(monkeypatch, waits=False), {"a": [3], "b": [0, 2, 5], "c": range(PLACES)}
    for placement in ((0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1)):
        known = [Agreement(placement) for _ in range(1 + max(placement))]
        asked = []

        def tell(group, keys, known=known, asked=asked, placement=placement):
            def find(stage, given):
                assert placement[stage] == group.rank
                asked.append((stage, given))
                return [stage + place for place in places[given]]

            known[group.rank].tell({key: key for key in keys}, find, group, CPU)
            return {
                (stage, key): known[group.rank].places(stage, key)
                for key in keys
                for stage in range(1, len(placement))
                if group.rank in (placement[stage - 1], placement[stage])
            }

        for keys in ("ab", "bac"):
            for found in box.run(len(known), lambda group, keys=keys: tell(group, keys)):
                for (stage, key), mine in found.items():
                    assert mine == tuple(stage + place for place in places[key]), (placement, stage, key)
        assert sorted(asked) == sorted((stage, key) for key in "abc" for stage in range(1, len(placement)))


def test_as_many_tensors_as_the_docs_say(monkeypatch):
    box = Mailbox(monkeypatch)

    def tell(group, number):
        Agreement((0, 1)).tell({0: 0}, lambda *_: range(number), group, CPU)

    with pytest.raises(ValueError, match=f"stage 1 is given {PLACES + 1} tensors .* {PLACES} can be"):
        box.run(2, lambda group: group.rank and tell(group, PLACES + 1))


@pytest.mark.parametrize("name", NAMES)
def test_one_microbatch_takes_what_lies_on_its_way(name):
    """Each stage forward and backward, and a message wherever the next stage is on another rank."""
    for pp in (1, 2, 3, 5):
        schedule = make_schedule(name, pp, 1)
        crossed = sum(a != b for a, b in itertools.pairwise(schedule.placement))
        stages, splits = schedule.num_stages, name in ("zb-h1", "zbv")
        end = max(row[-1].end for row in simulate(schedule, 2.0, 3.0, 5.0, comm=0.5).spans)
        on_way = stages * (2.0 + 3.0) + (5.0 if splits else 5.0 * stages) + 2 * crossed * 0.5
        assert end >= on_way if splits else end == on_way, (name, pp)
        first_f = simulate(schedule, 2.0, 3.0, 5.0, comm=0.5).spans[schedule.placement[-1]]
        (last,) = [span for span in first_f if span.action[:2] == ("F", stages - 1)]
        assert last.end == stages * 2.0 + crossed * 0.5, (name, pp)
