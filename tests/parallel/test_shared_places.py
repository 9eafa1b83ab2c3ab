"""Places beside modules that their forwards may write to: that a change there is seen, by every way to
them, and undone after a run that is to leave no trace.
"""

import collections
import functools
import types

import pytest
import torch
from models import Block

from pycomm.parallel.models.shared_state import SharedState, keep


class Held:
    """An object of a user's."""

    def __init__(self):
        self.tensor, self.inner = torch.ones(2), {"list": [1, 2]}


def places():
    """One object for each kind of what can be changed."""
    return {
        "tensor": torch.zeros(3),
        "list": [1, torch.zeros(2), [5]],
        "dict": {"a": 1, "b": {"c": torch.zeros(2)}, "t": (torch.zeros(1), 2)},
        "ordered": collections.OrderedDict(x=1, y=2),
        "deque": collections.deque([1, 2]),
        "set": {1, 2},
        "object": Held(),
        "space": types.SimpleNamespace(n=0),
    }


PLACES = places()
CHANGES = {
    "tensor": [lambda held: held["tensor"].add_(1), lambda held: held.update(tensor=torch.zeros(3))],
    "list": [
        lambda held: held["list"].append(2),
        lambda held: held["list"].__setitem__(0, 2),
        lambda held: held["list"][1].mul_(2),
        lambda held: held["list"][2].append(6),
        lambda held: held["list"].reverse(),
        lambda held: held.update(list=[]),
    ],
    "dict": [
        lambda held: held["dict"].update(a=2),
        lambda held: held["dict"]["b"].update(c=None),
        lambda held: held["dict"].pop("a"),
        lambda held: held["dict"]["t"][0].add_(1),
    ],
    "ordered": [lambda held: held["ordered"].move_to_end("x"), lambda held: held["ordered"].clear()],
    "deque": [lambda held: held["deque"].appendleft(7), lambda held: held["deque"].rotate()],
    "set": [lambda held: held["set"].add(3), lambda held: held["set"].remove(2)],
    "object": [
        lambda held: setattr(held["object"], "tensor", 2),
        lambda held: setattr(held["object"], "new", 2),
        lambda held: held["object"].inner.update(x=1),
        lambda held: held["object"].tensor.zero_(),
    ],
    "space": [lambda held: setattr(held["space"], "n", 1), lambda held: delattr(held["space"], "n")],
}
IN_VALUES = {("tensor", 0), ("list", 2), ("dict", 3), ("object", 3)}  # of a tensor, which keep their values


class Reading(Block):
    """Names what stands in PLACES, so that it may be written there."""

    def forward(self, x):
        return super().forward(x) * len(PLACES)


@pytest.mark.parametrize(
    "name, number", [(name, number) for name, changes in CHANGES.items() for number in range(len(changes))]
)
def test_a_change_is_seen_and_undone(name, number):
    class Own(Block):
        held = places()[name]

        def forward(self, x):
            return super().forward(x) * (self.held is not None)

    change, space = CHANGES[name][number], {name: Own.held}
    state = SharedState([Own(16, 2, 20)])
    before, tokens = vars(Own)["held"], state.tokens()
    assert state.changed(tokens) is None
    with pytest.raises(KeyError), state.kept():
        change(space)
        Own.held = space[name]
        assert state.changed(tokens) == "the attribute 'held' of the class Own"
        raise KeyError
    assert Own.held is before
    assert (state.changed(tokens) is None) == ((name, number) not in IN_VALUES)


def test_a_run_on_meta_sees_no_values_and_puts_the_same_tensors_back():
    class Own(Block):
        held = places()["dict"]
        mask, layers = torch.ones(2), collections.deque([torch.ones(1), 3])
        names = {"a", "b"}

        def forward(self, x):
            return x + self.mask + self.held["t"][0] + self.layers[0] + len(self.names)

    inner = Own.held["b"]["c"], Own.held["t"], Own.mask, Own.layers[0]
    state = SharedState([Own(16, 2, 20)])
    for _ in range(2):
        with state.kept(on_meta=True):
            now = Own.held["b"]["c"], Own.held["t"][0], Own.mask, Own.layers[0]
            assert all(each.is_meta for each in now) and now[2].shape == (2,)
            assert Own.held["t"][1] == 2 and Own.held["a"] == 1 and Own.layers[1] == 3
            Own.held["b"]["late"], Own.mask = torch.ones(1, device="meta"), None
            Own.names.add("c")
        assert (Own.held["b"]["c"], Own.held["t"], Own.mask, Own.layers[0]) == inner  # by identity
        assert list(Own.held["b"]) == ["c"] and Own.names == {"a", "b"}
    with state.kept():
        assert not Own.mask.is_meta


def counting():
    count = total = 0

    def note(x):
        nonlocal count
        count += 1
        return x * total

    return note, lambda: count


NOTE, COUNT = counting()


class Ways(Block):
    """By a variable of a closure, a property, and methods of the class."""

    seen, made, kept = 0, 0, 0

    @property
    def next(self):
        Ways.seen += 1
        return Ways.seen

    @staticmethod
    def make():
        Ways.made += 1

    @classmethod
    def keep(cls):
        cls.kept += 1

    def forward(self, x):
        self.make()
        self.keep()
        return NOTE(x) + self.next


def test_ways_to_a_place():
    for wrap in (lambda model: model, wrapped):
        state = SharedState([wrap(Ways(16, 2, 20))])
        tokens = state.tokens()
        for change, word in (
            (lambda: NOTE(1), "the variable 'count' of counting.<locals>.note"),
            (Ways.make, "the attribute 'made' of the class Ways"),
            (Ways.keep, "the attribute 'kept' of the class Ways"),
            (lambda: Ways.__dict__["next"].fget(None), "the attribute 'seen' of the class Ways"),
        ):
            before = COUNT()
            with state.kept():
                change()
                assert state.changed(tokens) == word
            assert state.changed(tokens) is None and before == COUNT()


def wrapped(model):
    """Its forward as a hook of a library leaves it."""
    own = model.forward
    model.forward = functools.partial(functools.wraps(own)(lambda *args: own(*args)))
    return model


def test_what_is_kept_two_levels_deep():
    held = {"a": [1, {2}], "b": Held()}
    restore, inner = keep(held), held["a"]
    held["a"].append(3)
    held["b"].inner, held["c"] = None, 1
    held["a"], held["d"] = 5, 6
    restore()
    assert list(held) == ["a", "b"] and held["a"] is inner == [1, {2}]
    assert held["b"].inner == {"list": [1, 2]}
    keep(3)(), keep("x")(), keep(torch.ones(1))()
    rounds = [{1}]
    rounds.append(rounds)
    restore = keep({"rounds": rounds, "list": [rounds]})  # however deep it lies in itself
    rounds.pop()
    restore()
    assert rounds == [{1}, rounds]


class Holding(Block):
    stats = None

    def forward(self, x):
        return super().forward(x) * self.stats.total


def test_objects_that_several_modules_hold():
    """One of the modules that are looked through is to hold it; not what torch and configurations are."""
    blocks = [Holding(16, 2, 20) for _ in range(3)]
    for block in blocks[1:]:
        block.stats, block.own = types.SimpleNamespace(total=1), types.SimpleNamespace(total=2)
    blocks[0].stats = blocks[1].stats = types.SimpleNamespace(total=0)
    for block in blocks:
        block.config = block.cfg = CONFIG
        block._parameters = blocks[0]._parameters
    for modules, others, seen in (
        (blocks, (), True),
        (blocks[:1], blocks[1:], True),
        (blocks[1:], blocks[:1], True),
        (blocks[2:], blocks[:2], False),
        (blocks[:1], (), False),
    ):
        state, word = SharedState(modules, others), "the object 'stats', which several modules hold"
        assert [place.words for place in state.places.values() if "several" in place.words] == [word] * seen
        before = state.tokens()
        blocks[1].stats.total += 1
        assert state.changed(before) == (word if seen else None)


CONFIG = types.SimpleNamespace(width=16)
